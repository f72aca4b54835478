"""How the memory of a fine-tuning run's passes grows with their length.

A pass is followed from one weight's gradient to the next: between two of them, the largest number of live bytes is
measured at a few short lengths, and continued to the run's own length by a line, or by a parabola where attention sees
all pairs. B batch, L length.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megasparse.attention.full import FullAttention
from megasparse.attention.routing import RoutingAttention
from megasparse.errors import UserError
from megasparse.ops.random import EVALUATION_STEP, Draws
from megasparse.planning.live_bytes import AllocatedBytes, LiveBytes
from megasparse.tasks.activations import set_activations
from megasparse.tasks.bodies import HuggingFaceBody
from megasparse.tasks.run import TaskRun
from megasparse.training.ranks import Ranks

LONGEST_TRIAL = 1024
"""Tokens; longer runs are predicted from passes of this length, a half and a quarter of it."""


@dataclass(frozen=True)
class Curve:
    """Live bytes of a pass of B sequences of L tokens, in each of its phases: constant + B·(linear·L + square·L²)."""

    gradients: np.ndarray
    """Bytes of weights' gradients that exist at the phase's end, (phases,); not part of the others."""
    constant: np.ndarray
    linear: np.ndarray
    square: np.ndarray

    def bytes(self, batch: int, length: int, gradients: int | None = None, hashed: bool = False) -> int:
        """The largest of all phases, with the gradients of this pass, or with so many bytes of them from the start.
        hashed: without what grows with the square of the length.
        """
        square = 0.0 if hashed else self.square * length**2
        held = self.gradients if gradients is None else gradients
        return int((held + self.constant + batch * (self.linear * length + square)).max())


class Curves:
    """Of a run's model, which is left as it was; each is measured once."""

    def __init__(self, run: TaskRun, ranks: Ranks, length: int, activations: str):
        """length: of the run's longest input. activations: what its backward reads, as `model.activations` has it."""
        self.run, self.ranks, self.model = run, ranks, run.model
        self.length, self.activations = length, activations
        self.measured: dict[tuple[str, str], Curve] = {}

    def of(self, activations: str, precision: str) -> Curve:
        """activations: "scored" of a pass without gradients. Raises UserError where not even the shortest one fits."""
        key = (activations, precision)
        if key not in self.measured:
            with _untouched(self.model, precision):
                if activations != "scored":
                    set_activations(self.model.body, activations)
                try:
                    self.measured[key] = self._measured(activations != "scored")
                except torch.OutOfMemoryError:
                    tokens = min(self.length, LONGEST_TRIAL)
                    problem = f"this run cannot fit: not even one sequence of {tokens} tokens does"
                    raise UserError(f"{problem}. Choose a smaller model, or lower task.max_length") from None
                finally:
                    set_activations(self.model.body, self.activations)
        return self.measured[key]

    def _measured(self, learns: bool) -> Curve:
        if self.length <= LONGEST_TRIAL:  # no need to continue: one sequence, and two
            (gradients, one), (_, two) = (self._phases(batch, self.length, learns) for batch in (1, 2))
            linear = np.maximum(two - one, 0) / self.length
            return Curve(gradients, one - linear * self.length, linear, np.zeros_like(linear))
        lengths = [LONGEST_TRIAL // 4, LONGEST_TRIAL // 2, LONGEST_TRIAL]
        found = [self._phases(1, length, learns) for length in lengths]
        gradients, (short, middle, long) = found[-1][0], (values for _, values in found)
        square = np.zeros_like(long)
        if _sees_all_pairs(self.model):
            steep, flat = (long - middle) / (lengths[2] - lengths[1]), (middle - short) / (lengths[1] - lengths[0])
            square = np.maximum(0.0, (steep - flat) / (lengths[2] - lengths[0]))
        long, middle = long - square * lengths[2] ** 2, middle - square * lengths[1] ** 2
        linear = np.maximum(0.0, (long - middle) / (lengths[2] - lengths[1]))
        return Curve(gradients, long - linear * lengths[2], linear, square)

    def _phases(self, batch: int, length: int, learns: bool) -> tuple[np.ndarray, np.ndarray]:
        """Of one pass: bytes of gradients that exist at the end of each phase, and the largest number of live bytes
        beside them. A phase ends with a weight's gradient.
        """
        device = self.ranks.device
        inputs = self.run.form.made_up(self.model.body, batch, length).to(device)
        step = 0 if learns else EVALUATION_STEP
        draws = Draws(self.run.config.run.seed, step, torch.arange(batch, device=device), training=learns)
        meter: Any = AllocatedBytes(device) if device.type == "cuda" else LiveBytes()
        made: list[int] = [0]
        peaks: list[float] = []

        def note(weight: torch.nn.Parameter) -> None:
            if id(weight) not in seen:
                seen.add(id(weight))
                peaks.append(meter.mark())
                made.append(weight.numel() * weight.element_size())

        seen: set[int] = set()
        trained = [weight for weight in self.model.parameters() if learns and weight.requires_grad]
        hooks = [weight.register_post_accumulate_grad_hook(note) for weight in trained]
        try:
            with meter, torch.set_grad_enabled(learns):
                objective = self.model.train(learns)(inputs, draws)[0]
                if learns:
                    objective.backward()
                peaks.append(meter.mark())
        finally:
            for hook in hooks:
                hook.remove()
            for weight in self.model.parameters():
                weight.grad = None
        gradients = np.array(list(itertools.accumulate(made)), dtype=np.float64)
        # A phase's peak includes the gradient that ends it, which is being made.
        return gradients, np.maximum(0.0, np.array(peaks) - gradients)


def _sees_all_pairs(model: Any) -> bool:
    body = model.body
    unreplaced = isinstance(body, HuggingFaceBody) and not body.replaced
    return unreplaced or any(isinstance(module, FullAttention) for module in body.modules())


@contextmanager
def _untouched(model: Any, precision: str) -> Iterator[None]:
    """Afterwards weights, random generators and the mechanisms' sums are what they were; inside, weights are of the
    precision.
    """
    cuda = [weight.device for weight in model.parameters() if weight.device.type == "cuda"][:1]
    kept, training = {weight: weight.data for weight in model.parameters()}, model.training
    with torch.random.fork_rng(cuda):
        try:
            if precision == "bf16":
                for weight in kept:
                    weight.data = weight.data.bfloat16()
            yield
        finally:
            for weight, data in kept.items():
                weight.data = data
            model.train(training)
            for module in model.modules():
                if isinstance(module, RoutingAttention):
                    module.after_step(False, lambda sums: sums)
