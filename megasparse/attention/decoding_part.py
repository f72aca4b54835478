"""Cached decoding on several ranks, each with the caches of its part of the heads.

B batch, H heads, n tokens, D head dim, S ranks that share out the heads in W ways, C = S/W of them have the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megasparse.attention.sequence_part import WHOLE, SequencePart


@dataclass(frozen=True)
class DecodingPart(SequencePart):
    """A rank's part of sequences whose tokens all ranks have: of each mechanism a W-th of the heads, as in training,
    whose caches no other rank has, or C − 1 others. All that is exchanged are the heads' outputs. Without gradient.
    """

    divided: bool = False

    @staticmethod
    def of(group: torch.distributed.ProcessGroup | None) -> SequencePart:
        if group is None:
            return WHOLE
        return DecodingPart(group, torch.distributed.get_rank(group), torch.distributed.get_world_size(group))

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """x itself: of tokens, which are all here."""
        return x

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """(B, H, n, D) each, of all heads, to (B, H/W, n, D) each, of this rank's heads."""
        return tuple(self.own(x, 1) for x in tensors)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Back: (B, H/W, n, D) of each rank to (B, H, n, D), on every rank."""
        return self.gather_heads(x)
