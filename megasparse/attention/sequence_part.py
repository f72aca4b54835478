"""Sequence parallelism as in DeepSpeed Ulysses (Jacobs et al. 2023): outside attention every rank stores some tokens of
all heads; inside attention all tokens of some heads, so that hashing, sorting and windows cover whole sequences.

S ranks that share a sequence, W parts into which the heads are divided, C = S/W ranks with the same heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

Edges = tuple[GradientEdge, ...]


@dataclass(frozen=True)
class SequencePart:
    """This rank's part of every sequence: the tokens [rank·L/S, (rank + 1)·L/S) of all heads; inside attention, all
    tokens of 1/W of each mechanism's heads, the same heads on C neighbouring ranks. S = 1: everything, without
    communication.

    The gradient of each exchange is its exact adjoint: the mean of the ranks' gradients belongs to the mean objective.
    """

    group: torch.distributed.ProcessGroup | None = None
    """The ranks that share the sequences, in rank order."""
    rank: int = 0
    size: int = 1
    head_groups: int = 1
    """Number of head groups that attend one after another; this part covers the group `head_group`."""
    head_group: int = 0
    replicas: int = 1
    """C, inside attention (`of_heads`): number of ranks with the same heads."""
    divides_pairs: bool = True
    """True if these C ranks divide the query-key pairs, in mechanisms that support it; if False, each computes all."""

    @classmethod
    def of(cls, group: torch.distributed.ProcessGroup | None) -> "SequencePart":
        if group is None:
            return WHOLE
        return cls(group, torch.distributed.get_rank(group), torch.distributed.get_world_size(group))

    def of_heads(self, heads: int) -> "SequencePart":
        """Return the part for `heads` heads, or indivisible groups of heads, with the largest W."""
        return replace(self, replicas=self.size // gcd(self.size, heads))

    @property
    def head_ranks(self) -> int:
        """W, the number of parts into which the heads are divided."""
        return self.size // self.replicas

    @property
    def head_rank(self) -> int:
        """Index of this rank's heads among the W parts."""
        return self.rank // self.replicas

    @property
    def owned_ranks(self) -> list[bool]:
        """True for each rank whose tokens this rank owns, among the C ranks with the same heads: W ranks, in zigzag
        order, because queries of late tokens attend to more keys.
        """
        positions = [rank % (2 * self.replicas) for rank in range(self.size)]
        # The replica that owns the tokens of each rank.
        owners = [min(position, 2 * self.replicas - 1 - position) for position in positions]
        return [owner == owners[self.rank] for owner in owners]

    def owned_tokens(self, length: int, device: torch.device) -> Tensor:
        """Return a mask of the tokens that this rank owns: (L,) bool."""
        return torch.tensor(self.owned_ranks, device=device).repeat_interleave(length // self.size)

    @property
    def pair_shard(self) -> tuple[int, int] | None:
        """(index, C) of this rank's part of the query-key pairs, or None if it computes all pairs."""
        return (self.rank % self.replicas, self.replicas) if self.divides_pairs and self.replicas > 1 else None

    @property
    def head_shards(self) -> int:
        """Number of parts into which a mechanism's heads are divided."""
        return self.head_groups * self.head_ranks

    def local_part(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of a tensor: for a part `of_heads`, 1/W of this group's heads; for any other part,
        1/S of the tokens.
        """
        if self.head_shards == 1:
            return x
        width = x.shape[dim] // self.head_shards
        return x.narrow(dim, (self.head_group * self.head_ranks + self.head_rank) * width, width)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """All-gather x and concatenate along `dim`, on every rank."""
        if self.size == 1:
            return x
        wide = x.to(torch.uint8) if x.dtype == torch.bool else x
        return _Gather.apply(wide, self.group).movedim(0, dim).flatten(dim, dim + 1).to(x.dtype)

    def gather_heads(self, x: Tensor) -> Tensor:
        """All-gather (B, H/W, ...) of each rank's heads to (B, H, ...), on every rank."""
        return SequencePart.gather(self, x, 1).unflatten(1, (self.head_ranks, self.replicas, -1))[:, :, 0].flatten(1, 2)

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce x with a sum, without gradient."""
        return x if self.size == 1 else self.gather(x.detach().unsqueeze(0), 0).sum(0)

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Exchange (B, H, L/S, D) of all heads for (B, H/W, L, D) of this rank's heads, per tensor. One message."""
        return self.start_to_heads(*tensors)[1]()

    def start_to_heads(self, *tensors: Tensor) -> tuple[Edges, Callable[[], tuple[Tensor, ...]]]:
        """Start `to_heads`. Returns the edge of the message in autograd's graph, if any, and a function that
        waits for the result. A backward to the edge starts to exchange the gradient, a backward from it waits for it.
        """
        if self.size == 1:
            return (), lambda: tensors
        pieces = []
        for x in tensors:
            x = x.transpose(1, 2).unflatten(2, (self.head_ranks, 1, -1))  # (B, L/S, W, 1, H/W, D)
            x = x.movedim((2, 3, 1), (0, 1, 2))  # (W, 1, L/S, B, H/W, D)
            pieces.append(x.expand(-1, self.replicas, *x.shape[2:]))  # (W, C, L/S, B, H/W, D)
        # (S, L/S, n, B, H/W, D): tokens before heads, so that all tokens are a view of the received tensor
        payload = torch.stack(pieces, dim=3).flatten(0, 1)
        edges, receive = self._start(payload)
        return edges, lambda: tuple(x.permute(1, 2, 0, 3) for x in receive().flatten(0, 1).unbind(1))

    def start_to_tokens(self, x: Tensor) -> Callable[[], Tensor]:
        """Start the inverse of `to_heads`, with each token from one of the C ranks."""
        if self.size == 1:
            return lambda: x
        pieces = zip(x.chunk(self.size, dim=2), self.owned_ranks, strict=True)
        payload = torch.stack([piece for piece, owned in pieces if owned])  # (W, B, H/W, L/S, D)
        receive = self._start(payload, self.owned_ranks)[1]
        return lambda: receive().movedim(0, 1).flatten(1, 2)

    def _start(self, payload: Tensor, ranks: list[bool] | None = None) -> tuple[Edges, Callable[[], Tensor]]:
        works: list[Any] = []
        message = payload.view_as(payload)
        received = _Exchange.apply(message, self.group, ranks, works)

        def receive() -> Tensor:
            works.pop().wait()
            return received

        if not message.requires_grad:
            return (), receive
        payload.register_hook(lambda _: works.pop().wait() and None)  # a hook that returns None changes nothing
        return (get_gradient_edge(message),), receive

    def parts_to_tokens(self, out: Tensor, lse: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Exchange partial results of C ranks likewise, out (B, H/W, L, D) and lse (B, H/W, L): C pairs."""
        exchanged = []
        for x in (out, lse):
            by_rank = x.unflatten(2, (self.size, -1)).movedim(2, 0)  # (S, B, H/W, L/S, ...)
            parts = _Exchange.apply(by_rank, self.group).unflatten(0, (self.head_ranks, self.replicas))
            exchanged.append(parts.movedim(0, 2).flatten(2, 3).unbind(0))  # (B, H, L/S, ...) each
        return list(zip(*exchanged, strict=True))


@dataclass(frozen=True)
class DecodingPart(SequencePart):
    """Part of sequences whose tokens all ranks store: as in training, 1/W of each mechanism's heads. Only head outputs
    are exchanged. Without gradient.
    """

    divides_pairs: bool = False

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return x itself, because every rank stores all tokens."""
        return x

    def start_to_heads(self, *tensors: Tensor) -> tuple[Edges, Callable[[], tuple[Tensor, ...]]]:
        """Slice (B, H, n, D) of all heads to (B, H/W, n, D) of this rank's heads, per tensor."""
        return (), lambda: tuple(self.local_part(x, 1) for x in tensors)

    def start_to_tokens(self, x: Tensor) -> Callable[[], Tensor]:
        """All-gather (B, H/W, n, D) of each rank to (B, H, n, D), on every rank."""
        return lambda: self.gather_heads(x)


class _Exchange(torch.autograd.Function):
    """All-to-all of pieces x (n, ...), one per rank or one per rank selected by `ranks`, the i-th to and from the i-th
    of these. Its own adjoint. works: receives the handle to wait for, in both passes; if None, both wait.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: torch.distributed.ProcessGroup, ranks: list[bool] | None = None,
        works: list[Any] | None = None,
    ) -> Tensor:  # fmt: skip
        ctx.group = group
        ctx.ranks = ranks
        ctx.works = works
        return _exchanged(x, group, ranks, works)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grads[0], ctx.group, ctx.ranks, ctx.works), None, None, None


class _Gather(torch.autograd.Function):
    """All-gather x (...) of S ranks to (S, ...). The backward is an all-to-all and a sum in rank order, because a
    reduce-scatter's order depends on the backend, and it rounds after each addition.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        name = "all_gather_single" if hasattr(torch.distributed, "all_gather_single") else "all_gather_into_tensor"
        getattr(torch.distributed, name)(out, x.contiguous(), group=group)  # the name before torch 2.13
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
