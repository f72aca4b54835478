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
    needs_whole_weights: bool = False
    """The update depends on a weight's shape, so it is wrong on the flat partitions that ZeRO 1 to 3 and DeepSpeed's
    fp32 master weights of bf16 consist of."""

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], settings: Settings) -> "Optimizer":
        """Build the optimizer over parameter groups, each with its weight decay, at learning rate 0."""

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
