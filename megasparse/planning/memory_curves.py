"""How the memory of a model's passes grows with their length.

A pass is followed from one weight's gradient to the next: between two of them, the largest number of live bytes is
measured at a few short lengths, and continued to the run's own length by a line, or by a parabola where attention sees
all pairs. B batch, L length.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from megasparse.planning.live_bytes import AllocatedBytes, LiveBytes


@dataclass(frozen=True)
class Phases:
    """The phases of one pass: the weight whose gradient ends each (none in the last one), the bytes of gradients that
    exist then, and the most live bytes beside them.
    """

    ends: list[str]
    gradients: np.ndarray
    beside: np.ndarray


@dataclass(frozen=True)
class Curve:
    """Live bytes of a pass of B sequences of L tokens, in each of its phases: constant + B·(linear·L + square·L²)."""

    ends: list[str]
    """The weight whose gradient ends each phase."""
    gradients: np.ndarray
    """Bytes of weights' gradients that exist at the phase's end, (phases,); not part of the others."""
    constant: np.ndarray
    linear: np.ndarray
    square: np.ndarray

    def bytes(self, batch: int, length: float, gradients: int | None = None, hashed: bool = False) -> int:
        """The largest of all phases, with the gradients of this pass, or with so many bytes of them from the start.
        hashed: without what grows with the square of the length.
        """
        held = self.gradients if gradients is None else gradients
        return int((held + self._beside(batch, length, hashed)).max())

    def _beside(self, batch: int, length: float, hashed: bool) -> np.ndarray:
        square = 0.0 if hashed else self.square * length**2
        return np.asarray(self.constant + batch * (self.linear * length + square))

    def shared_among(self, ranks: int, copies: int = 1) -> "Curve":
        """The curve of one of several ranks that share a sequence: a rank has one part of it, of all heads, outside
        attention, and all of it, of its part of the heads, inside. That is as many numbers, or, where several (copies)
        have the same heads, so many times as many: of what a phase of attention has beside what every phase has. L
        becomes the part's length.
        """
        inside = np.array(["attention" in name for name in self.ends]) * (self.linear - self.linear.min())
        return replace(self, linear=self.linear + (copies - 1) * inside, square=self.square * ranks * copies)

    def by_part(self, batch: int, length: float, part: Callable[[str], str]) -> dict[str, int]:
        """The most bytes beside gradients while each part of the model is at work. part: by the name of a weight."""
        found: dict[str, int] = {}
        for name, size in zip(self.ends, self._beside(batch, length, False), strict=True):
            found[part(name)] = max(found.get(part(name), 0), int(size))
        return found


def phases(model: nn.Module, forward: Callable[[], Tensor], device: torch.device, learns: bool) -> Phases:
    """Measure one pass of `forward`, which returns the objective, with its backward where `learns`. The model is left
    without gradients. A phase ends with a weight's gradient. On torch's meta device nothing is computed, and what a GPU
    would allocate is counted.
    """
    names = {id(weight): name for name, weight in model.named_parameters()}
    meter: Any = AllocatedBytes(device) if device.type == "cuda" else LiveBytes()
    made: list[int] = [0]
    peaks: list[float] = []
    ends: list[str] = []

    def note(weight: Tensor) -> None:
        if names[id(weight)] not in ends:
            ends.append(names[id(weight)])
            peaks.append(meter.mark())
            made.append(weight.numel() * weight.element_size())

    trained = [weight for weight in model.parameters() if learns and weight.requires_grad]
    hooks = [weight.register_post_accumulate_grad_hook(note) for weight in trained]
    try:
        with meter, torch.set_grad_enabled(learns):
            objective = forward()
            if learns:
                run_backward(objective)
            peaks.append(meter.mark())
    finally:
        for hook in hooks:
            hook.remove()
        for weight in model.parameters():
            weight.grad = None
    gradients = np.array(list(itertools.accumulate(made)), dtype=np.float64)
    # A phase's peak includes the gradient that ends it, which is being made.
    return Phases([*ends, ""], gradients, np.maximum(0.0, np.array(peaks) - gradients))


def run_backward(objective: Tensor) -> None:
    """Tensor.backward, and what it recomputes, inside the function modes that are on: torch hands its own backward to
    these, and runs it without them.
    """
    gradient = torch.ones_like(objective)
    _engine_run_backward((objective,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def of_one_length(one: Phases, two: Phases, length: int) -> Curve:
    """The curve from passes of one sequence of this length, and of two."""
    linear = np.maximum(two.beside - one.beside, 0) / length
    return Curve(one.ends, one.gradients, one.beside - linear * length, linear, np.zeros_like(linear))


def continued(lengths: Sequence[int], found: Sequence[Phases], all_pairs: bool) -> Curve:
    """The curve from passes of two lengths, ascending, or of three where some memory grows with L² (all_pairs)."""
    last, long, middle = found[-1], found[-1].beside, found[-2].beside
    square = np.zeros_like(long)
    if all_pairs:
        steep = (long - middle) / (lengths[-1] - lengths[-2])
        flat = (middle - found[-3].beside) / (lengths[-2] - lengths[-3])
        square = np.maximum(0.0, (steep - flat) / (lengths[-1] - lengths[-3]))
    long, middle = long - square * lengths[-1] ** 2, middle - square * lengths[-2] ** 2
    linear = np.maximum(0.0, (long - middle) / (lengths[-1] - lengths[-2]))
    return Curve(last.ends, last.gradients, long - linear * lengths[-1], linear, square)
