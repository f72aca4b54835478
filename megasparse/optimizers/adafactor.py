"""Adafactor (Shazeer and Stern 2018)."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megasparse.optimizers.spec import OptimizerSpec, Settings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class AdafactorSpec(OptimizerSpec):
    """Adafactor with its second moment as a row and a column of each matrix, scaled by the matrix's RMS."""

    bytes_per_weight = 0
    state_per_number = False

    def build(self, groups: list[dict[str, Any]], settings: Settings) -> "Optimizer":
        from torch.optim import Adafactor

        return Adafactor(groups, lr=0.0)

    def build_partitioned(self, groups: list[dict[str, Any]], settings: Settings) -> "Optimizer":
        from megasparse.optimizers.partitioned_adafactor import PartitionedAdafactor

        return PartitionedAdafactor(groups)

    def initial_state(self, weight: "Tensor") -> dict[str, "Tensor"]:
        import torch

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
