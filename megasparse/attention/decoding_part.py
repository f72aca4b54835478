"""Cached decoding on several ranks, each with the caches of its part of the heads.

B batch, H heads, n tokens, D head dim, S ranks that share out the heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megasparse.attention.sequence_part import WHOLE, SequencePart


@dataclass(frozen=True)
class DecodingPart(SequencePart):
    """A rank's part of sequences whose tokens all ranks have: of each mechanism an S-th of the heads, as in training,
    whose caches are nowhere else. All that is exchanged are the heads' outputs. Without gradient.
    """

    @staticmethod
    def of(group: torch.distributed.ProcessGroup | None) -> SequencePart:
        if group is None:
            return WHOLE
        return DecodingPart(group, torch.distributed.get_rank(group), torch.distributed.get_world_size(group))

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """x itself: of tokens, which are all here."""
        return x

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """(B, H, n, D) each, of all heads, to (B, H/S, n, D) each, of this rank's heads."""
        return tuple(self.own(x, 1) for x in tensors)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Back: (B, H/S, n, D) of each rank to (B, H, n, D), on every rank."""
        return super().gather(x, 1)
