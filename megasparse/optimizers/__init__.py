"""The optimizers that `optimizer.name` can choose. A new one subclasses OptimizerSpec, with an entry here."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Adafactor, AdamW, Optimizer

from megasparse.optimizers.partitioned_adafactor import PartitionedAdafactor


class Settings(Protocol):
    """The keys of the configuration's section `optimizer` that an optimizer may read beside its learning rate."""

    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...


class OptimizerSpec(ABC):
    """An optimizer: how it is built, its initial state, and the memory it takes."""

    bytes_per_weight: int
    """Bytes of state that a weight of a matrix adds; 0 where the state is far smaller than the matrix."""
    state_per_number: bool = True
    """A weight's state has a number for each of its numbers, so that ZeRO 1 to 3 divide it among ranks as they divide
    the weights. False: each rank holds all of it."""

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], settings: Settings) -> Optimizer:
        """Build the optimizer over parameter groups, each with its weight decay, at learning rate 0."""

    def build_partitioned(self, groups: list[dict[str, Any]], settings: Settings) -> Optimizer:
        """Build the optimizer for vectors that hold pieces of the weights, which are all that ZeRO 1 to 3 give it.

        One that treats every number alike is what `build` builds.
        """
        return self.build(groups, settings)

    @abstractmethod
    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        """The state that the optimizer would create for `weight` at its first step, before that step.

        It has the counter "step"; every other tensor is kept in checkpoints under its name.
        """

    def state_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of state for a weight of this shape, without its counter."""
        return self.bytes_per_weight * math.prod(shape)

    def scratch_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of temporaries while a weight of this shape is updated."""
        return 0


class AdamWSpec(OptimizerSpec):
    """AdamW (Loshchilov and Hutter 2017) with two fp32 moments a weight."""

    bytes_per_weight = 8

    def build(self, groups: list[dict[str, Any]], settings: Settings) -> Optimizer:
        # fused: one pass over memory and no temporaries as large as the weights, on the CPU as on a GPU
        return AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        first, second = (torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) for _ in range(2))
        step = torch.zeros((), dtype=torch.float32, device=weight.device)
        return {"step": step, "exp_avg": first, "exp_avg_sq": second}


class AdafactorSpec(OptimizerSpec):
    """Adafactor (Shazeer and Stern 2018): its second moment is a row and a column of each matrix, scaled by its RMS."""

    bytes_per_weight = 0
    state_per_number = False

    def build(self, groups: list[dict[str, Any]], settings: Settings) -> Optimizer:
        return Adafactor(groups, lr=0.0)

    def build_partitioned(self, groups: list[dict[str, Any]], settings: Settings) -> Optimizer:
        return PartitionedAdafactor(groups)

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.zeros(())}
        for name, shape in _state_shapes(weight.shape).items():
            state[name] = torch.zeros(shape, dtype=torch.float32, device=weight.device)
        return state

    def state_bytes(self, shape: Sequence[int]) -> int:
        return 4 * sum(math.prod(part) for part in _state_shapes(shape).values())

    def scratch_bytes(self, shape: Sequence[int]) -> int:
        return 4 * math.prod(shape)  # the update, of one weight at a time


def _state_shapes(shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    if len(shape) < 2:
        return {"variance": tuple(shape)}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


OPTIMIZERS: dict[str, OptimizerSpec] = {"adamw": AdamWSpec(), "adafactor": AdafactorSpec()}
