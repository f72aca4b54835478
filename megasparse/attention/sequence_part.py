"""Sequences that several ranks share, as DeepSpeed's Ulysses does (Jacobs et al. 2023): every rank has some tokens of
all heads, but inside attention all tokens of some heads, so that hashing, sorting and windows see whole sequences.

B batch, H heads, L length, D head dim, S ranks that share a sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class SequencePart:
    """This rank's part of every sequence: the tokens [rank·L/S, (rank + 1)·L/S) of all heads; inside attention the
    same S-th of each mechanism's heads, with all tokens. S = 1: everything, and nothing is exchanged.

    What is exchanged has its exact adjoint as gradient: where each rank's objective is such that their mean is the
    objective, the mean of the ranks' gradients is its gradient.
    """

    group: torch.distributed.ProcessGroup | None = None
    """The ranks that share the sequences, in the order of their ranks."""
    rank: int = 0
    size: int = 1
    groups: int = 1
    """Groups of heads that attend one after another, of which the heads that are here are the one with this number."""
    number: int = 0

    @staticmethod
    def of(group: torch.distributed.ProcessGroup | None) -> "SequencePart":
        if group is None:
            return WHOLE
        return SequencePart(group, torch.distributed.get_rank(group), torch.distributed.get_world_size(group))

    @property
    def shares(self) -> int:
        """The number of parts that a mechanism's heads are in."""
        return self.groups * self.size

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's S-th of what all have whole: of tokens or of heads; of heads in groups, of this group's."""
        if self.shares == 1:
            return x
        width = x.shape[dim] // self.shares
        return x.narrow(dim, (self.number * self.size + self.rank) * width, width)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The tensors x of all ranks one after another along `dim`, on every rank."""
        if self.size == 1:
            return x
        wide = x.to(torch.uint8) if x.dtype == torch.bool else x
        pieces = _Exchange.apply(wide.expand(self.size, *x.shape), self.group)
        return torch.cat(pieces.unbind(0), dim).to(x.dtype)

    def sum(self, x: Tensor) -> Tensor:
        """Elementwise over the ranks; without gradient."""
        return x if self.size == 1 else self.gather(x.detach().unsqueeze(0), 0).sum(0)

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """(B, H, L/S, D) each, of all heads, to (B, H/S, L, D) each, of this rank's heads. One message."""
        if self.size == 1:
            return tensors
        by_rank = [x.unflatten(1, (self.size, -1)).movedim(1, 0) for x in tensors]  # (S, B, H/S, L/S, D)
        received = _Exchange.apply(torch.stack(by_rank, dim=1), self.group)
        return received.movedim(0, 3).flatten(3, 4).unbind(0)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Back: (B, H/S, L, D) to (B, H, L/S, D)."""
        if self.size == 1:
            return x
        by_rank = x.unflatten(2, (self.size, -1)).movedim(2, 0)  # (S, B, H/S, L/S, D)
        return _Exchange.apply(by_rank, self.group).movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """Exchange of x (S, ...): piece s goes to rank s, and what came from rank s is piece s. Its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grads[0], ctx.group), None


def _exchanged(x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.distributed.all_to_all_single(out, x.contiguous(), group=group)
    return out


WHOLE = SequencePart()
