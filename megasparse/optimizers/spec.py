"""What training, checkpoints, configuration checks and the memory planner need to know of an optimizer.

No torch at the top of these files: configurations are checked before torch is imported.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


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
    the weights. False: each rank holds all of it, and it is not moved to NVMe."""

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], settings: Settings) -> "Optimizer":
        """Build the optimizer over parameter groups, each with its weight decay, at learning rate 0."""

    def build_partitioned(self, groups: list[dict[str, Any]], settings: Settings) -> "Optimizer":
        """Build the optimizer for vectors that hold pieces of the weights, which are all that ZeRO 1 to 3 give it.

        One that treats every number alike is what `build` builds.
        """
        return self.build(groups, settings)

    @abstractmethod
    def initial_state(self, weight: "Tensor") -> dict[str, "Tensor"]:
        """The state that the optimizer would create for `weight` at its first step, before that step.

        It has the counter "step"; every other tensor is kept in checkpoints under its name.
        """

    def state_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of state for a weight of this shape, without its counter."""
        return self.bytes_per_weight * math.prod(shape)

    def scratch_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of temporaries while a weight of this shape is updated."""
        return 0
