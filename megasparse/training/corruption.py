"""Silent corruption: numbers that change in memory, or arithmetic that errs, without an error of the machine.

In a step in which the check is due, each rank computes the loss of its first micro-batch twice, which must agree to
the bit. And it computes a checksum of each weight that it holds, before the step and between the last backward and the
update: nothing may write to a weight in between, and ranks that hold the same weight must have the same checksum. What
a single rank holds is compared with itself only (parts of weights under ZeRO 3), or not at all (optimizer state).
"""

import hashlib
import json
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from megasparse.config.schema import RunSettings
from megasparse.data.batches import Batch
from megasparse.errors import ConfigError, SilentCorruption
from megasparse.training.checkpoints.identity import differences
from megasparse.training.engines.contract import Engine

TILE = 1 << 22
"""Numbers that a checksum takes at a time."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAMED = 4
"""Weights named in a message, at most."""

Checksums = dict[str, int]


def checksums(weights: Iterable[tuple[str, Tensor]]) -> Checksums:
    """For each weight Σᵢ (2i + 1)·wᵢ mod 2⁶⁴ over its numbers' bits wᵢ, read as integers. Any one bit that changes
    changes it: by ±2ᵏ times an odd number, which is no multiple of 2⁶⁴.
    """
    names, sums = [], []
    for name, weight in weights:
        words = weight.detach().reshape(-1).view(WORDS[weight.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        for number, tile in enumerate(words.split(TILE)):
            first = 2 * TILE * number + 1
            odd = torch.arange(first, first + 2 * len(tile), 2, device=words.device)
            total += (tile * odd).sum()
        names.append(name)
        sums.append(total.cpu())
    return dict(zip(names, torch.stack(sums).tolist() if sums else [], strict=True))


class CorruptionCheck:
    """The check of every `run.corruption_check_every`-th step of a run.

    Raises ConfigError on a GPU whose kernels may differ from pass to pass.
    """

    def __init__(self, engine: Engine, config: RunSettings, start: int):
        self.every = config.run.corruption_check_every
        self.right = start
        """The last step after which all was right, as far as is known."""
        self.seconds: float | None = None
        """What the check of the last step took; None where it was not due."""
        self._engine, self._ranks = engine, engine.ranks
        if self.every and engine.ranks.device.type == "cuda" and not config.run.deterministic:
            problem = "the loss of two passes differs where kernels are not deterministic"
            raise ConfigError("run.corruption_check_every", problem, "Set run.deterministic=true, or this to 0")

    def begin(self, step: int, micro_batch: Batch) -> Callable[[], None]:
        """Begin the check of a step, where it is due. Returns what ends it, to be called by all ranks together before
        the update; that raises SilentCorruption on every rank where some rank has found any.
        """
        self.seconds = None
        if not self.every or step % self.every:
            return lambda: None
        began = time.perf_counter()
        before = checksums(self._engine.weights())
        losses = self._engine.recomputed(micro_batch, step)
        return partial(self._end, step, before, losses, time.perf_counter() - began)

    def _end(self, step: int, before: Checksums, losses: tuple[float, float], seconds: float) -> None:
        began = time.perf_counter()
        now = checksums(self._engine.weights())
        found = [f"{name} changed between two updates" for name in now if now[name] != before[name]]
        if losses[0].hex() != losses[1].hex():
            found.append(f"the loss of one micro-batch was {losses[0]!r}, and computed again {losses[1]!r}")
        shared = now if self._engine.whole_weights else {}
        digest = hashlib.sha256(json.dumps(shared).encode()).hexdigest()
        report = {"found": found, "digest": digest, "host": socket.gethostname()}
        reports = self._ranks.gather(report)
        problems = [
            f"on rank {rank} ({each['host']}) {_some(each['found'])}"
            for rank, each in enumerate(reports)
            if each["found"]
        ]
        if len({each["digest"] for each in reports}) > 1:
            problems.append(f"the replicas differ: {_some(differences(self._ranks.gather(shared)).split('; '))}")
        if problems:
            raise SilentCorruption(
                f"step {step}: {'; '.join(problems)}. Examine that machine, and go on from a checkpoint of step "
                f"{self.right} or before, when all was right (--resume PATH)"
            )
        self.right = step - 1  # the update that follows is checked the next time
        self.seconds = seconds + time.perf_counter() - began


def _some(found: list[str]) -> str:
    return ", ".join(found[:NAMED]) + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")
