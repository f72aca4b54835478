"""Cluster attention by kernels: every place of a list is worked out by itself, then tokens add up their own places.

A token's places are found by sorting the lists; their results are added in the order of the clusters, so that two runs
are the same to the last bit. A pair that several clusters hold counts in the first of them alone: the same as log N off
in each, as that is what their weights add up to. Which pairs those are is worked out once, as bits.

B batch, H heads, L length, D head dim, W clusters, M places of a cluster, T of them in a program.

Cost, with e bytes a number and n = B·H·W. Forward: 4D·n·Mq·Mk FLOPs; gathered n·Mq·D·e + n·⌈Mq/T⌉·Mk·(2D·e + 4) bytes,
mostly from the L2 cache (a row's keys and values take 2·Lk·D·e); parts of n·Mq·(4D + 4) bytes written and read;
B·H·Lq·(D·e + 4) written. Backward: 14D·n·Mq·Mk FLOPs (scores are made twice); for dq n·Mq·2D·e + n·⌈Mq/T⌉·Mk·2D·e
bytes gathered and 4D·n·Mq of parts, for dk and dv n·Mk·2D·e + n·⌈Mk/T⌉·Mq·2D·e and 8D·n·Mk, parts written and read
once; 2·B·H·Lq·D·e to multiply outputs with gradients, and dq, dk, dv. A row of lists: two counting sorts of W·M tokens.
Counting, of a row of lists: W·Mq·Mk·W/64 integer operations, (Lq + Lk)·W/8 bytes while it lasts, W·Mq·Mk/8 bytes kept.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasparse.ops.autocast import Function
from megasparse.ops.cluster_attention import kernels
from megasparse.ops.cluster_attention.specification import ClusterAttentionSpec
from megasparse.ops.counting_sort import counting_sort
from megasparse.ops.kernels import block, launch, precision, steps_of_lists, strides, whole_vectors

_TOKEN_NUMBERS = 1024  # numbers of the tokens that a warp adds up for


def cluster_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_index: Tensor,
    key_index: Tensor,
    spec: ClusterAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `operator.cluster_attention` by kernels. Tensors are copied only where the head dim is strided."""
    out, lse = _ClusterAttention.apply(q, k, v, query_index, key_index, spec, key_mask, segments)
    return out, lse


class _Lists(NamedTuple):
    """Lists of clusters' tokens (B|1, H|1, W, M) int32. order, starts: see kernels.py. length: of their sequence."""

    tokens: Tensor
    order: Tensor
    starts: Tensor
    length: int

    @property
    def entries(self) -> int:
        return self.tokens.shape[2] * self.tokens.shape[3]


class _Tiles(NamedTuple):
    """Sizes of tiles. own: places of a list that a program works for. others: those that it looks at, at a time."""

    own: int
    others: int
    num_warps: int
    num_stages: int


def _tiles(head_dim: int, dtype: torch.dtype, backward: bool) -> _Tiles:
    """Tiles as large as registers allow; the backward has more sums and products at once."""
    width = block(head_dim)
    if dtype == torch.float32:  # products without tensor cores keep whole rows in registers
        if width > 64:
            return _Tiles(16, 16, 4, 3)
        return _Tiles(32, 16 if backward and width == 64 else 32, 4, 3)
    if width < 128:
        return _Tiles(64, 32 if backward else 64, 4, 2 if width < 64 else 3)
    if width == 128:
        return _Tiles(64, 64, 8, 3)
    return _Tiles(32, 16 if backward else 32, 4, 3)


class _ClusterAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, query_index: Tensor, key_index: Tensor, spec: ClusterAttentionSpec,
        key_mask: Tensor | None, segments: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, v = (whole_vectors(x) for x in (q, k, v))
        key_mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
        segments = None if segments is None else segments.contiguous()
        queries = _lists(query_index, q.shape[2])
        keys = _lists(key_index, k.shape[2])
        met = _meetings(queries, keys) if spec.count_clusters and query_index.shape[2] > 1 else None
        (batch, heads, _, head_dim), (clusters, places) = q.shape, queries.tokens.shape[2:]
        parts = torch.empty(batch, heads, queries.entries, head_dim, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(parts.shape[:3], dtype=torch.float32, device=q.device)
        lists = (queries.tokens, keys.tokens, met, key_mask, segments)
        tiles = _tiles(head_dim, q.dtype, backward=False)
        blocks = -(-places // tiles.own)
        numbers = (*_numbers(q, queries, keys, met, blocks), *strides(q, k, v))
        grid = (batch * heads * clusters * blocks,)
        fixed = _fixed(q, tiles.own, tiles.others, tiles, spec)
        launch(kernels.attend, grid, q, k, v, *lists, parts, part_lse, spec.scale, *numbers, **fixed)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        grid, sizes, fixed = _by_token(q, queries)
        launch(kernels.merge, grid, parts, part_lse, queries.order, queries.starts, out, lse, *sizes, **fixed)
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        ctx.save_for_backward(q, k, v, *lists, queries.order, queries.starts, keys.order, keys.starts, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, *lists, query_order, query_starts, key_order, key_starts, out, lse = ctx.saved_tensors
        queries = _Lists(lists[0], query_order, query_starts, q.shape[2])
        keys = _Lists(lists[1], key_order, key_starts, k.shape[2])
        grad = torch.zeros_like(q) if grads[0] is None else whole_vectors(grads[0])
        delta = _output_products(out, grad, grads[1])
        (batch, heads, _, head_dim), clusters = q.shape, queries.tokens.shape[2]
        tiles = _tiles(head_dim, q.dtype, backward=True)
        steps = strides(q, k, v, grad)

        def parts(of: _Lists) -> Tensor:
            return torch.empty(batch, heads, of.entries, head_dim, dtype=torch.float32, device=q.device)

        blocks = -(-queries.tokens.shape[3] // tiles.own)
        numbers = (ctx.spec.scale, *_numbers(q, queries, keys, lists[2], blocks), *steps)
        grid, query_parts = (batch * heads * clusters * blocks,), parts(queries)
        arguments = (q, k, v, *lists, grad, lse, delta, query_parts, *numbers)
        launch(kernels.query_gradients, grid, *arguments, **_fixed(q, tiles.own, tiles.others, tiles, ctx.spec))
        dq = _added_up(query_parts, queries, q, ctx.spec.scale)
        del query_parts  # before those of the keys
        blocks = -(-keys.tokens.shape[3] // tiles.own)
        numbers = (ctx.spec.scale, *_numbers(q, queries, keys, lists[2], blocks), *steps)
        grid, key_parts, value_parts = (batch * heads * clusters * blocks,), parts(keys), parts(keys)
        arguments = (q, k, v, *lists, grad, lse, delta, key_parts, value_parts, *numbers)
        launch(kernels.key_gradients, grid, *arguments, **_fixed(q, tiles.others, tiles.own, tiles, ctx.spec))
        dk, dv = _added_up(key_parts, keys, k, ctx.spec.scale), _added_up(value_parts, keys, v, 1.0)
        return dq, dk, dv, None, None, None, None, None


def _lists(index: Tensor, length: int) -> _Lists:
    tokens = index.to(torch.int32).contiguous()
    entries = tokens.shape[2] * tokens.shape[3]
    flat = tokens.view(-1, entries)
    order = counting_sort(torch.where(flat < 0, length, flat), length.bit_length())
    starts = torch.empty(len(flat), length + 1, dtype=torch.int32, device=index.device)
    count = 128
    blocks = -(-(length + 1) // count)
    sizes = (entries, length, blocks, entries.bit_length())
    launch(kernels.find_starts, (len(flat) * blocks,), flat, order, starts, *sizes, TOKENS=count, num_warps=4)
    return _Lists(tokens, order, starts, length)


def _membership(lists: _Lists) -> Tensor:
    """The clusters of each token as bits: (lists' rows, L, W/32) int32, a multiple of 4 words."""
    clusters, places = lists.tokens.shape[2:]
    words = -(-clusters // 128) * 4
    out = torch.empty(len(lists.order), lists.length, words, dtype=torch.int32, device=lists.order.device)
    fixed = {"TOKENS": 32, "WORDS": min(32, block(words))}
    blocks, word_blocks = -(-lists.length // fixed["TOKENS"]), -(-words // fixed["WORDS"])
    sizes = (lists.entries, places, lists.length, words, blocks, word_blocks)
    grid = (len(lists.order) * blocks * word_blocks,)
    launch(kernels.membership, grid, lists.order, lists.starts, out, *sizes, **fixed, num_warps=1)
    return out


def _meetings(queries: _Lists, keys: _Lists) -> Tensor:
    """Pairs of a cluster that meet in an earlier one, as bits: (B|1, H|1, W, Mq, Mk/32), a multiple of 4 words."""
    batch, heads = (max(sizes) for sizes in zip(queries.tokens.shape[:2], keys.tokens.shape[:2], strict=True))
    (clusters, places), key_places = queries.tokens.shape[2:], keys.tokens.shape[3]
    held = _membership(queries), _membership(keys)
    fixed = {"QUERIES": 32, "KEYS": 128}
    tiles = -(-key_places // fixed["KEYS"])
    out = torch.empty(batch, heads, clusters, places, 4 * tiles, dtype=torch.int32, device=held[0].device)
    blocks = -(-places // fixed["QUERIES"]) * tiles
    sizes = (heads, clusters, places, key_places, queries.length, keys.length, held[0].shape[2], 4 * tiles, blocks)
    steps = (*steps_of_lists(queries.tokens), *steps_of_lists(keys.tokens))
    arguments = (queries.tokens, keys.tokens, *held, out, *sizes, *steps)
    launch(kernels.meetings, (batch * heads * clusters * blocks,), *arguments, **fixed, num_warps=8)
    return out


def _output_products(out: Tensor, grad: Tensor, grad_lse: Tensor | None) -> Tensor:
    delta = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    (batch, heads, length, head_dim), width = out.shape, block(out.shape[3])
    count = _TOKEN_NUMBERS // width
    blocks = -(-length // count)
    arguments = (out, grad, None if grad_lse is None else grad_lse.contiguous(), delta, heads, length, blocks)
    fixed = {"D": head_dim, "TOKENS": count, "WIDTH": width, "num_warps": 1}
    launch(kernels.output_products, (batch * heads * blocks,), *arguments, *strides(grad), **fixed)
    return delta


def _added_up(parts: Tensor, lists: _Lists, like: Tensor, factor: float) -> Tensor:
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    grid, sizes, fixed = _by_token(like, lists)
    launch(kernels.add_up, grid, parts, lists.order, lists.starts, out, *sizes, factor, **fixed)
    return out


def _by_token(x: Tensor, lists: _Lists) -> tuple[tuple[int], tuple[int, ...], dict[str, Any]]:
    """Grid, sizes and settings of the kernels that some tokens of x are a program of."""
    (batch, heads, length, head_dim), width = x.shape, block(x.shape[3])
    count = _TOKEN_NUMBERS // width
    blocks = -(-length // count)
    fixed = {"D": head_dim, "TOKENS": count, "WIDTH": width, "num_warps": 1}
    return (batch * heads * blocks,), (heads, lists.entries, length, blocks, *steps_of_lists(lists.tokens)), fixed


def _numbers(q: Tensor, queries: _Lists, keys: _Lists, met: Tensor | None, blocks: int) -> tuple[int, ...]:
    """The sizes that the kernels of clusters take, in their order."""
    clusters, places = queries.tokens.shape[2:]
    sizes = (q.shape[1], clusters, places, keys.tokens.shape[3], queries.length, keys.length)
    words, steps = (0, (0, 0)) if met is None else (met.shape[4], steps_of_lists(met))
    return *sizes, words, blocks, *steps_of_lists(queries.tokens), *steps_of_lists(keys.tokens), *steps


def _fixed(q: Tensor, queries: int, keys: int, tiles: _Tiles, spec: ClusterAttentionSpec) -> dict[str, Any]:
    sizes = {"D": q.shape[3], "QUERIES": queries, "KEYS": keys, "WIDTH": block(q.shape[3])}
    started = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return {**sizes, "CAUSAL": spec.causal, "PRECISION": precision(), **started}
