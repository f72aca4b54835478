"""Sequences that several ranks share, as DeepSpeed's Ulysses does (Jacobs et al. 2023): every rank has some tokens of
all heads, but inside attention all tokens of some heads, so that hashing, sorting and windows see whole sequences.
Where there are more ranks than heads to share out, several have the same ones.

B batch, H heads, L length, D head dim, S ranks that share a sequence, W ways in which they share heads out, C = S/W
ranks that have the same heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.autograd.function import once_differentiable

_all_gather = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)
"""Its name from torch 2.13 on, where the old one warns."""


@dataclass(frozen=True)
class SequencePart:
    """This rank's part of every sequence: the tokens [rank·L/S, (rank + 1)·L/S) of all heads; inside attention a W-th
    of each mechanism's heads, with all tokens, which C neighbouring ranks have alike. S = 1: everything, and nothing
    is exchanged.

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
    copies: int = 1
    """C, inside attention (`of_heads`): ranks that have the same heads."""
    divided: bool = True
    """True if these share out the pairs of queries and keys, where a mechanism can; else each does all."""

    @classmethod
    def of(cls, group: torch.distributed.ProcessGroup | None) -> "SequencePart":
        if group is None:
            return WHOLE
        return cls(group, torch.distributed.get_rank(group), torch.distributed.get_world_size(group))

    def of_heads(self, heads: int) -> "SequencePart":
        """The part of so many heads, or groups of heads that stay together: W is the most ways in which the ranks can
        share them out evenly.
        """
        return replace(self, copies=self.size // gcd(self.size, heads))

    @property
    def ways(self) -> int:
        """W."""
        return self.size // self.copies

    @property
    def way(self) -> int:
        """The number of this rank's heads among the W."""
        return self.rank // self.copies

    @property
    def answers(self) -> list[bool]:
        """Of each rank whether this one answers for its tokens, among the C that have the same heads: for its own, and
        those of W ranks. To and fro, so that each has as many early tokens as late ones, which see more keys.
        """
        numbers = [rank % (2 * self.copies) for rank in range(self.size)]
        copies = [min(number, 2 * self.copies - 1 - number) for number in numbers]
        return [copy == copies[self.rank] for copy in copies]

    def answered(self, length: int, device: torch.device) -> Tensor:
        """Return which tokens this rank answers for: (L,) bool."""
        return torch.tensor(self.answers, device=device).repeat_interleave(length // self.size)

    @property
    def share(self) -> tuple[int, int] | None:
        """What each of the C ranks does of the pairs that they share out: the g-th of C parts; None for all."""
        return (self.rank % self.copies, self.copies) if self.divided and self.copies > 1 else None

    @property
    def shares(self) -> int:
        """The number of parts that a mechanism's heads are in."""
        return self.groups * self.ways

    def local_part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of what all have whole: of heads, for a part `of_heads`, a W-th of this group's; of tokens,
        for any other, an S-th.
        """
        if self.shares == 1:
            return x
        width = x.shape[dim] // self.shares
        return x.narrow(dim, (self.number * self.ways + self.way) * width, width)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The tensors x of all ranks one after another along `dim`, on every rank."""
        if self.size == 1:
            return x
        wide = x.to(torch.uint8) if x.dtype == torch.bool else x
        return _Gather.apply(wide, self.group).movedim(0, dim).flatten(dim, dim + 1).to(x.dtype)

    def gather_heads(self, x: Tensor) -> Tensor:
        """(B, H/W, ...) of each rank's heads to (B, H, ...) of all, on every rank."""
        return SequencePart.gather(self, x, 1).unflatten(1, (self.ways, self.copies, -1))[:, :, 0].flatten(1, 2)

    def sum(self, x: Tensor) -> Tensor:
        """Elementwise over the ranks; without gradient."""
        return x if self.size == 1 else self.gather(x.detach().unsqueeze(0), 0).sum(0)

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """(B, H, L/S, D) each, of all heads, to (B, H/W, L, D) each, of this rank's heads. One message."""
        return self.start_to_heads(*tensors)()

    def start_to_heads(self, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Start `to_heads`. Returns a function that waits for its result."""
        if self.size == 1:
            return lambda: tensors
        by_way = [x.transpose(1, 2).unflatten(2, (self.ways, 1, -1)).movedim((2, 3, 1), (0, 1, 2)) for x in tensors]
        sent = torch.stack([x.expand(-1, self.copies, *x.shape[2:]) for x in by_way], dim=3).flatten(0, 1)
        # (S, L/S, n, B, H/W, D): tokens before heads, so that all tokens are a view of what arrives
        works: list[Any] = []
        received = _Exchange.apply(sent, self.group, None, works).flatten(0, 1)

        def arrive() -> tuple[Tensor, ...]:
            works.pop().wait()
            return tuple(x.permute(1, 2, 0, 3) for x in received.unbind(1))

        return arrive

    def to_tokens(self, x: Tensor) -> Tensor:
        """Back: (B, H/W, L, D), which C ranks have alike, to (B, H, L/S, D). Each token comes from one of them."""
        if self.size == 1:
            return x
        pieces = zip(x.chunk(self.size, dim=2), self.answers, strict=True)
        sent = torch.stack([piece for piece, answered in pieces if answered])  # (W, B, H/W, L/S, D)
        return _Exchange.apply(sent, self.group, self.answers).movedim(0, 1).flatten(1, 2)

    def parts_to_tokens(self, out: Tensor, lse: Tensor) -> list[tuple[Tensor, Tensor]]:
        """`to_tokens` of what C ranks have found for all tokens, out (B, H/W, L, D) and lse (B, H/W, L): C of each."""
        exchanged = []
        for x in (out, lse):
            by_rank = x.unflatten(2, (self.size, -1)).movedim(2, 0)  # (S, B, H/W, L/S, ...)
            parts = _Exchange.apply(by_rank, self.group).unflatten(0, (self.ways, self.copies))
            exchanged.append(parts.movedim(0, 2).flatten(2, 3).unbind(0))  # (B, H, L/S, ...) each
        return list(zip(*exchanged, strict=True))


@dataclass(frozen=True)
class DecodingPart(SequencePart):
    """A rank's part of sequences whose tokens all ranks have: of each mechanism a W-th of the heads, as in training,
    whose caches no other rank has, or C − 1 others. All that is exchanged are the heads' outputs. Without gradient.
    """

    divided: bool = False

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """x itself: of tokens, which are all here."""
        return x

    def start_to_heads(self, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """(B, H, n, D) each, of all heads, to (B, H/W, n, D) each, of this rank's heads."""
        return lambda: tuple(self.local_part(x, 1) for x in tensors)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Back: (B, H/W, n, D) of each rank to (B, H, n, D), on every rank."""
        return self.gather_heads(x)


class _Exchange(torch.autograd.Function):
    """Exchange of pieces x (n, ...), one for each rank, or for each of those that are given: the first piece goes to
    the first of them, and what came from it is the first piece. Its own adjoint.

    works: a list that gets the handle to wait for; without one the forward waits, as the backward does.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: torch.distributed.ProcessGroup, ranks: list[bool] | None = None,
        works: list[Any] | None = None,
    ) -> Tensor:  # fmt: skip
        ctx.group, ctx.ranks = group, ranks
        return _exchanged(x, group, ranks, works)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grads[0], ctx.group, ctx.ranks), None, None, None


class _Gather(torch.autograd.Function):
    """All-gather x (...) of S ranks to (S, ...).

    The backward is an all-to-all and a sum in the order of the ranks. It sends as many bytes as a reduce-scatter, whose
    order of summation depends on the backend and which rounds after each addition.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        _all_gather(out, x.contiguous(), group=group)
        return out.unflatten(0, (-1, x.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grads[0], ctx.group, None).sum(0), None


def _exchanged(
    x: Tensor, group: torch.distributed.ProcessGroup, ranks: list[bool] | None, works: list[Any] | None = None
) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    sizes = None if ranks is None or all(ranks) else [int(counts) for counts in ranks]
    work = torch.distributed.all_to_all_single(out, x, sizes, sizes, group=group, async_op=works is not None)
    if works is not None:
        works.append(work)
    return out


WHOLE = SequencePart()
