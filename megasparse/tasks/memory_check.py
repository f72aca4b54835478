"""Prediction of whether a fine-tuning run fits into memory, before its first step: states are counted, activations
measured in short passes (see pass_memory.py).
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megasparse.config.finetuning import FinetuneConfig, FinetuneTrainingConfig
from megasparse.config.lora import LoRAConfig
from megasparse.errors import ConfigError, UserError
from megasparse.optimizers import OPTIMIZERS
from megasparse.planning.planner import Hint, hints, longest_multiple, training_changes, with_changes, zero_change
from megasparse.planning.states import States, Zero, memory
from megasparse.tasks.backbones import HuggingFaceBody, adapter_size, count_layers
from megasparse.tasks.batches import MULTIPLE
from megasparse.tasks.pass_memory import TaskPassMemory
from megasparse.tasks.run import TaskRun
from megasparse.training.ranks import Ranks
from megasparse.training.reporting.memory import available_bytes

ERROR = 0.15
"""Share by which a prediction may be too high: a run is refused only where it does not fit even so."""


@dataclass(frozen=True)
class MemoryPool:
    """One kind of memory: what the run will hold there at its peak, in bytes by what it is, and what is available."""

    name: str
    parts: dict[str, int]
    available: int

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """The predicted memory of a run. `hints`: what to change, with the largest peak after it; none where it fits."""

    config: FinetuneConfig
    trained: int
    frozen: int
    length: int
    pools: list[MemoryPool]
    device: str
    hints: list[Hint] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return max(pool.peak for pool in self.pools)

    @property
    def fits(self) -> bool:
        return all(pool.peak <= pool.available for pool in self.pools)

    @property
    def cannot(self) -> bool:
        """Whether the run does not fit even if the prediction is too high by `ERROR`."""
        return any(pool.peak * (1 - ERROR) > pool.available for pool in self.pools)

    def lines(self) -> str:
        """The report that --dry-run prints."""
        training, length = self.config.training, f"{self.length:,}"
        at_once = _at_once(training, self.length)
        found = [
            f"parameters       {self.trained:,} trained, {self.frozen:,} frozen",
            f"micro-batch      {at_once} × {length} tokens in {training.precision} on {self.device}",
        ]
        for pool in self.pools:
            found += [f"{name:16} {_gigabytes(size)}" for name, size in pool.parts.items() if size]
            short = " (does not fit)" if pool.peak > pool.available else ""
            title = f"peak of {pool.name}"
            found.append(f"{title:16} {_gigabytes(pool.peak)}, available {_gigabytes(pool.available)}{short}")
        found.append("fits" if self.fits else "DOES NOT FIT" if self.cannot else "MAY NOT FIT: too near to the limit")
        if self.hints:
            found += ["what to change, and the peak after it:"]
            found += [f"  {_gigabytes(hint.peak):10} {hint.change}" for hint in self.hints]
        return "\n".join(found)


def require_fit(run: TaskRun, ranks: Ranks, say: Callable[[str], None]) -> MemoryEstimate:
    """Predict, and raise UserError on every rank where some rank cannot take its first step, naming what to change.
    say: prints a warning where a run may just not fit.
    """
    found = predict(run, ranks)
    refused = ranks.any(found.cannot)
    if found.fits and not refused:
        return found
    if found.fits:
        raise UserError("this run cannot fit on another rank, whose own message says why")
    pool = max(found.pools, key=lambda each: each.peak - each.available)
    problem = f"a step takes about {_gigabytes(pool.peak)} of {pool.name}, {_gigabytes(pool.available)} are available"
    best = "; ".join(f"{hint.change}: {_gigabytes(hint.peak)}" for hint in found.hints[:4])
    hint = f"What helps, with the peak after it: {best or 'a smaller model'}"
    if refused:
        raise UserError(f"this run cannot fit: {problem}. {hint}")
    say(f"this run may not fit: {problem}. {hint}")
    return found


def predict(run: TaskRun, ranks: Ranks) -> MemoryEstimate:
    """The peak memory of a run's steps and validations, from a few short passes of its model, which is left as it was,
    on the ranks' device. Raises UserError where not even those fit.
    """
    return _Predictor(run, ranks).predict()


class _Predictor:
    def __init__(self, run: TaskRun, ranks: Ranks):
        self.run, self.ranks, self.model = run, ranks, run.model.to(ranks.device)
        weights = list(self.model.parameters())
        self.trained = sum(p.numel() for p in weights if p.requires_grad)
        self.largest = max(p.numel() for p in weights if p.requires_grad)
        self.frozen = sum(p.numel() for p in weights) - self.trained
        self.held = sum(p.nbytes for p in weights)
        longest = max(example.length for example in run.train)
        self.length = min(run.config.task.max_length, -(-max(longest, 1) // MULTIPLE) * MULTIPLE)
        self.passes = TaskPassMemory(run, ranks, self.length, self.activations)

    @property
    def activations(self) -> str:
        config = self.run.config
        if config.model is not None:
            return config.model.activations
        own = getattr(self.model.body, "stack", None)
        return config.start.activations or (own.config.activations if own is not None else "stored")

    def predict(self) -> MemoryEstimate:
        found = self._fit(self.run.config)
        if found.fits:
            return found
        changes = ((text, lambda changed=changed: changed().peak) for text, changed in self._changes())
        return replace(found, hints=hints(found.peak, changes))

    def _changes(self) -> Iterator[tuple[str, Callable[[], MemoryEstimate]]]:
        """What can be changed, each with the prediction for it."""
        config, section = self.run.config, "start" if self.run.config.model is None else "model"
        training, gpu = config.training, self.ranks.device.type == "cuda"
        configs = list(training_changes(config))
        if training.batch_unit == "tokens" and (half := training.micro_batch // 2) >= self.length:
            configs.append((f"training.micro_batch={half}", with_changes(config, "training", micro_batch=half)))
        if config.evaluation.batch > 1:
            configs.append(("evaluation.batch=1", with_changes(config, "evaluation", batch=1)))
        if gpu:
            configs += [zero_change(config, 2, "optimizer"), zero_change(config, 3, "optimizer", "param")]
        for text, changed in configs:
            yield text, partial(self._fit, changed)
        kinds = {"stored": ["checkpoint", "checkpoint_cpu"], "checkpoint": ["checkpoint_cpu"]}
        for kind in kinds.get(self.activations, []):
            if gpu or kind == "checkpoint":
                yield f'{section}.activations="{kind}"', partial(self._fit, config, activations=kind)
        if config.lora is None and (adapters := _adapters(self.model)):
            yield 'lora={"rank": 8}', partial(self._fit, config, trained=adapters)
        if shorter := longest_multiple(lambda length: self._fit(config, length=length).fits, 64, self.length // 64):
            yield f"task.max_length={shorter}", partial(self._fit, config, length=shorter)
        grows = self.passes.curve(self.activations, training.precision).square.any()
        if grows and isinstance(self.model.body, HuggingFaceBody):
            text = 'start.attention={"pattern": ["lha"]} or another hashed one'
            yield text, partial(self._fit, config, hashed=True)

    def _fit(
        self,
        config: FinetuneConfig,
        *,
        activations: str | None = None,
        length: int | None = None,
        trained: int | None = None,
        hashed: bool = False,
    ) -> MemoryEstimate:
        """The prediction for a configuration. trained: weights of adapters, all others frozen."""
        length, kind = length or self.length, activations or self.activations
        training, world = config.training, self.ranks.world_size
        number = self.trained if trained is None else trained
        frozen = self.frozen + (0 if trained is None else self.trained)
        rounded = training.precision == "bf16"
        size = 2 if rounded else 4
        curve = self.passes.curve(kind, training.precision)
        if trained is not None:
            curve = replace(curve, gradients=np.full_like(curve.gradients, number * size))
        at_once = _at_once(training, length)
        moments = OPTIMIZERS[config.optimizer.name].bytes_per_weight * number
        needed = memory(
            States(number, frozen, self.largest, moments, rounded),
            Zero.of(config.run.engine, config.deepspeed, world > 1 and self.ranks.device.type == "cuda"),
            world,
            passing=curve.bytes(at_once, length, hashed=hashed),
            again=curve.bytes(at_once, length, gradients=0, hashed=hashed),
            accumulated=training.global_batch > training.micro_batch * world,
            other=self.passes.curve("scored", training.precision).bytes(config.evaluation.batch, length, 0, hashed),
            on_gpu=self.ranks.device.type == "cuda",
        )
        device, host = needed.device, dict(needed.host)
        cuda = self.ranks.device.type == "cuda"
        if cuda and kind == "checkpoint_cpu":
            states = at_once * length * self.model.body.width * size
            host["offloaded activations"] = states * count_layers(self.model.body)
        own = available_bytes(self.ranks.device)
        if cuda:
            pools = [MemoryPool("GPU memory", device, own + self.held)]
            if any(host.values()):
                pools.append(MemoryPool("CPU memory", host, available_bytes(torch.device("cpu")) // ranks_here(world)))
        else:
            parts = device | {name: size for name, size in host.items() if size}
            pools = [MemoryPool("memory", parts, own // ranks_here(world) + self.held)]
        return MemoryEstimate(config, number, frozen, length, pools, str(self.ranks.device))


def ranks_here(world: int) -> int:
    """Ranks on this machine, which share its memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world)))


def _adapters(model: Any) -> int | None:
    """Weights that would be trained with adapters; None where the default ones match no layer."""
    try:
        size = adapter_size(model.body, LoRAConfig())
    except ConfigError:
        return None
    return size + sum(weight.numel() for name, weight in model.named_parameters() if not name.startswith("body."))


def _at_once(training: FinetuneTrainingConfig, length: int) -> int:
    """Examples of a micro-batch whose inputs have this length."""
    return training.micro_batch if training.batch_unit == "examples" else max(1, training.micro_batch // length)


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
