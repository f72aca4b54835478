"""A sketch of attention for each group of heads, of the heads' own queries and keys.

B batch, H heads, L length, D head dim, G heads of a group, d width of the sketch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.sequence_part import SequencePart
from megasparse.ops.sketch import exact_projection


class HeadProjection(nn.Module):
    """A linear map of G neighbouring heads' queries or keys, side by side, to d numbers, for each group of heads."""

    def __init__(self, groups: int, width_in: int, width_out: int):
        super().__init__()
        self.groups, self.width_in = groups, width_in
        self.weight = nn.Parameter(torch.empty(groups * width_out, width_in))

    def forward(self, x: Tensor, part: SequencePart, exactly: bool = False) -> list[Tensor]:
        """Project heads x (B, H, L, D), those that are here, to (B, L, d) of each group; see `exact_projection`."""
        weights = part.own(self.weight, 0).chunk(self.groups // part.shares)
        grouped = [heads.transpose(1, 2).flatten(2) for heads in x.split(self.width_in // x.shape[3], dim=1)]
        project = exact_projection if exactly else _project
        return [project(own, weight) for own, weight in zip(grouped, weights, strict=True)]


def _project(x: Tensor, weight: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), weight.to(dtype))
