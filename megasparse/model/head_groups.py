"""Attention of a few heads at a time, forward and backward: no tensor contains queries, keys or values of all heads.

This is Arctic's UPipe (long-sequence training), for every mechanism and inside reversible layers. For each group,
queries, keys and values are projected tile by tile from the stream; its heads attend; its output is projected tile by
tile and added. The backward recomputes one group after another. Results are the same as for all heads at once, up to
the order in which the groups' outputs and gradients are summed.

B batch, L length, E d_model, D head dim, n heads of a group.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import AttentionContext, AttentionInputs
from megasparse.attention.heads import MultiHeadAttention, merge_heads, split_heads, start_exchange, start_to_tokens
from megasparse.attention.sequence_part import Edges
from megasparse.model.branch import Branch, Pass, cut, inside
from megasparse.ops.operator import Function, at_least_fp32, autocast_off, remember_autocast
from megasparse.ops.tiled import GradientSums

READING = ("norm", "query", "key", "value", "query_norm", "key_norm")
"""Submodules of a branch that read the stream."""
Weights = dict[str, Tensor]
Item = TypeVar("Item")
Exchange = tuple["HeadGroup", tuple[Tensor, ...], Edges, Callable[[], tuple[AttentionInputs, AttentionContext]]]
"""A group, its q, k, v, and the results of `start_exchange`."""
Write = Callable[[int, Tensor], None]
"""Function of a tile's number and a group's output (B, T, E) on it."""


class HeadGroup(NamedTuple):
    """Neighbouring heads of a mechanism in a layer. first: first head; first_key: first head among those with keys."""

    kind: str
    number: int
    first: int
    first_key: int
    heads: int


class HeadGroups:
    """Heads of a branch's attention in groups, on tiles of its input stream."""

    def __init__(self, branch: Branch, layer: MultiHeadAttention, run: Pass, tiles: list[Tensor]):
        self.branch, self.layer, self.run, self.tiles = branch, layer, run, tiles
        self.weights = group_weights(branch)
        self.ahead = int(run.padding.part.size > 1)  # groups that are sent while one attends

    def forward(self, write: Write) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Attend. Returns the auxiliary loss and the statistics, averaged over the groups."""
        total: Tensor | None = None
        statistics: dict[str, Tensor] = {}
        started = delayed(map(self._start, self._groups()), self.ahead)
        for group, receive, auxiliary, means in delayed(map(self._attend, started), self.ahead):
            weights = self._weights(group, self._piece)
            for number, tile in enumerate(receive().tensor_split(len(self.tiles), dim=2)):
                write(number, _output(tile, weights))
            del receive, tile
            if auxiliary is not None:
                auxiliary = auxiliary / self.layer.groups
                total = auxiliary if total is None else total + auxiliary
            for name, value in means.items():
                name, mean = f"{group.kind}/{name}", value / self.layer.groups
                statistics[name] = statistics[name] + mean if name in statistics else mean
        return total, statistics

    def backward(
        self, write: Write | None, grad: Callable[[int], Tensor], dx: list[Tensor], d_auxiliary: Tensor | None
    ) -> GradientSums:
        """Recompute attention, write its output, add to the gradients dx of the tiles, and return the weights'. grad:
        returns the gradient of the output on a tile.
        """
        sums = GradientSums(self.weights)
        waiting: list[tuple[HeadGroup, tuple[Tensor, ...], Edges, tuple[Any, ...]]] = []

        def finish() -> None:
            while waiting:
                group, leaves, edges, d_heads = waiting.pop()
                if edges:
                    d_heads = torch.autograd.grad(edges, leaves, d_heads, allow_unused=True)
                del leaves
                self._project_again(d_heads, group, sums, dx)

        for exchange in delayed((self._start(group, leaves=True) for group in self._groups()), self.ahead):
            group, leaves, edges, _ = exchange
            with torch.enable_grad():
                _, receive, auxiliary, _ = self._attend(exchange)
            finish()  # the previous group, whose gradients were sent while this one attended
            with torch.enable_grad():
                out = receive()
            d_out = self._output_again(out.detach(), group, sums, write, grad)
            outputs, grads = [out], [d_out]
            if auxiliary is not None and d_auxiliary is not None and auxiliary.requires_grad:
                outputs, grads = [out, auxiliary], [d_out, d_auxiliary / self.layer.groups]
            for name in sums.weights:
                if name.startswith(f"attention.mechanisms.{group.kind}."):
                    sums.itself(name)
            waiting.append((group, leaves, edges, sums.take(outputs, grads, edges or leaves)))
            del out, d_out, outputs, grads, auxiliary, leaves, exchange, receive, _
            if not self.ahead:
                finish()
        finish()
        return sums

    def _output_again(
        self, out: Tensor, group: HeadGroup, sums: GradientSums, write: Write | None, grad: Callable[[int], Tensor]
    ) -> Tensor:
        """Return the gradient of a group's output (B, n, L, D)."""
        d_out = torch.empty_like(out)
        count = len(self.tiles)
        tiles = zip(out.tensor_split(count, dim=2), d_out.tensor_split(count, dim=2), strict=True)
        for number, (tile, d_tile) in enumerate(tiles):
            leaf = tile.detach().requires_grad_()
            with torch.enable_grad():
                projected = _output(leaf, self._weights(group, sums.leaf, ("output",)))
            (d_leaf,) = sums.take([projected], [grad(number)], [leaf])
            d_tile.copy_(d_leaf)
            if write is not None:
                write(number, projected.detach())
        return d_out

    def _project_again(self, d_heads: tuple[Any, ...], group: HeadGroup, sums: GradientSums, dx: list[Tensor]) -> None:
        split = [None if d is None else d.tensor_split(len(self.tiles), dim=2) for d in d_heads]
        for number, (position, x) in enumerate(self._positions()):
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                heads = self._project(leaf, position, self._weights(group, sums.leaf, READING))
            pairs = [(y, d[number]) for y, d in zip(heads, split, strict=True) if d is not None and y.requires_grad]
            (d_leaf,) = sums.take([y for y, _ in pairs], [d for _, d in pairs], [leaf])
            dx[number].add_(d_leaf)

    def _groups(self) -> Iterator[HeadGroup]:
        first = first_key = 0
        for kind, heads in self.layer.split.items():
            size = heads // self.layer.groups
            for number in range(self.layer.groups):
                yield HeadGroup(kind, number, first + number * size, first_key + number * size, size)
            first += heads
            first_key += 0 if self.layer.mechanism(kind).shared_qk else heads

    def _weights(
        self, group: HeadGroup, piece: Callable[..., Tensor], parts: tuple[str, ...] = (*READING, "output")
    ) -> Weights:
        """Return the group's rows and columns of the branch's weights, by name. piece: maps a name, or a name,
        dimension, start and length, to a weight or a slice of it.
        """
        dim, shared = self.layer.head_dim, self.layer.group
        keyed = not self.layer.mechanism(group.kind).shared_qk
        keys = max(1, group.heads // shared) * dim  # a group is whole sets of heads that share keys, or part of one
        cuts = {
            "query": (0, group.first * dim, group.heads * dim),
            "key": (0, group.first_key // shared * dim, keys if keyed else 0),
            "value": (0, group.first // shared * dim, keys),
            "output": (1, group.first * dim, group.heads * dim),
        }
        pieces: Weights = {}
        for name in self.weights:
            part, _, kind = name.removeprefix("attention.").partition(".")
            output_bias = (part, kind) == ("output", "bias")
            if part not in parts or (part in ("key", "key_norm") and not keyed) or (output_bias and group.first):
                continue
            pieces[f"{part}.{kind}"] = piece(name, *(() if output_bias else cuts.get(part, ())))
        return pieces

    def _piece(self, name: str, *cut_out: int) -> Tensor:
        weight = self.weights[name].detach()
        return weight.narrow(*cut_out) if cut_out else weight

    def _positions(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the tiles with the position of their first token."""
        position = self.run.rng.first
        for x in self.tiles:
            yield position, x
            position += x.shape[1]

    def _project(self, x: Tensor, position: int, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a tile; k has 0 heads if the queries are the keys."""
        x = self.branch.read(x, weights)
        q, v = (split_heads(_linear(x, weights, name), self.layer.head_dim) for name in ("query", "value"))
        k = split_heads(_linear(x, weights, "key"), self.layer.head_dim) if "key.weight" in weights else q[:, :0]
        if self.layer.query_norm is not None:
            q = self.layer.query_norm.by(inside("query_norm", weights), q)
        if self.layer.key_norm is not None and k.shape[1]:
            k = self.layer.key_norm.by(inside("key_norm", weights), k)
        return self.layer.repeat(self.layer.rotate(q, position), self.layer.rotate(k, position), v)

    def _project_all(self, weights: Weights) -> tuple[Tensor, ...]:
        whole: tuple[Tensor, ...] = ()
        start = 0
        length = sum(x.shape[1] for x in self.tiles)
        for position, x in self._positions():
            heads = self._project(x, position, weights)
            whole = whole or tuple(y.new_empty(*y.shape[:2], length, y.shape[3]) for y in heads)
            for joined, y in zip(whole, heads, strict=True):
                joined.narrow(2, start, x.shape[1]).copy_(y)
            start += x.shape[1]
        return whole

    def _start(self, group: HeadGroup, leaves: bool = False) -> Exchange:
        """Start sending q, k, v of a group to other ranks. leaves: make them leaves of the graph."""
        layer, run = self.layer, self.run
        part = replace(run.padding.part, head_groups=layer.groups, head_group=group.number)
        decisions = run.recompute["attention", self.branch.layer]
        context = AttentionContext(self.branch.layer, run.rng, group.first, decisions, run.targets, tokens=run.tokens)
        q, k, v = (x.requires_grad_(leaves) for x in self._project_all(self._weights(group, self._piece)))
        with torch.set_grad_enabled(leaves):
            return group, (q, k, v), *start_exchange(
                layer.mechanism(group.kind), (q, k, v), replace(run.padding, part=part), layer.causal, context,
                run.rng.first,
            )  # fmt: skip

    def _attend(self, exchange: Exchange) -> tuple[HeadGroup, Callable[[], Tensor], Tensor | None, dict[str, Tensor]]:
        """Return a group, a function that waits for its output (B, n, L, D), auxiliary loss and statistics."""
        group, inputs, local = exchange[0], *exchange[3]()
        with autocast_off(inputs.q):
            output = self.layer.mechanism(group.kind)(self.tiles[0], inputs, local)
        return group, start_to_tokens(output, local.part), output.auxiliary_loss, output.statistics


def delayed(items: Iterator[Item], count: int) -> Iterator[Item]:
    """Yield the items, each when the `count` items after it exist. No reference to a yielded item remains."""
    waiting: list[Item] = []
    for item in items:
        waiting.append(item)
        del item
        if len(waiting) > count:
            yield waiting.pop(0)
    while waiting:  # `yield from` would keep the last item's tensors alive
        yield waiting.pop(0)


def group_weights(branch: Branch) -> dict[str, nn.Parameter]:
    """Return the weights of a branch that attention in groups reads, by name."""
    norm_after = branch.post_norm  # it normalises the sum of stream and branch
    return {n: w for n, w in branch.named_parameters() if not (norm_after and n.startswith("norm."))}


class InGroups(Function):
    """The branch of an ordinary layer. `apply` returns its output, (B, L, E) fp32 or wider, and its auxiliary loss."""

    @staticmethod
    def forward(
        ctx: Any, branch: Branch, layer: MultiHeadAttention, run: Pass, x: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        remember_autocast(ctx, x)
        ctx.branch, ctx.layer, ctx.run = branch, layer, run.undecided()
        ctx.save_for_backward(x)
        out = at_least_fp32(torch.zeros_like(x))
        tiles = cut(out, branch.tiles)

        def write(number: int, tile: Tensor) -> None:
            tiles[number].add_(tile)

        auxiliary, statistics = HeadGroups(branch, layer, ctx.run, cut(x, branch.tiles)).forward(write)
        run.note(branch.layer, statistics)
        return out, auxiliary

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_out, d_auxiliary = grads
        assert d_out is not None
        (x,) = ctx.saved_tensors
        branch, dx, tiles = ctx.branch, torch.zeros_like(x), cut(d_out, ctx.branch.tiles)
        groups = HeadGroups(branch, ctx.layer, ctx.run.replay(), cut(x, branch.tiles))
        gradients = groups.backward(None, tiles.__getitem__, cut(dx, branch.tiles), d_auxiliary).gradients()
        return None, None, None, dx, *(gradients.get(name) for name in group_weights(branch))


def _linear(x: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _output(out: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    return _linear(merge_heads(out), weights, "output")
