"""Local attention with relative positions as Triton kernels: any chunk, tokens gathered by index, deterministic.

Tokens are addressed by sorted index, in tiles of T over the whole sequence: a chunk need not be a multiple of T. Query
slot i = t·T + a and key slot j = n·T + b use row 2C − 1 − (i − j) of r, which is 2C − 1 + (n − t)·T + b − a. This row
is in block n − t of r (whose first row is 2C − 1 + (n − t)·T) if b >= a, else in the previous block. The relative term
is therefore a product with whole blocks of r, joined along the diagonal and rotated by a; the gradient of the term,
rotated back, gives the gradients of q and r. Kernels that sum over queries use the transposes of all these.

Tensors indexed by slot (documents, order, u·k, lse2, delta) are padded to whole tiles, and r to whole blocks, so that
their loads need no mask and share an address. A tile's keys are within `reach` tiles on either side.

Cost, with N = B·H·L, b bytes per element, K = 1.5·C + T/2 keys in the tiles of a query (3·C if not causal; at least T/2
+ C), for C >= T:
forward: 6·N·K·D FLOPs; from memory 5·N·D·b + 12·N bytes, and 3·N·(K/T)·D·b through the L2 cache.
backward: 34·N·K·D FLOPs (10 for dq, 12 for dk and dv, 12 for dr); from memory 16·N·D·b + 40·N bytes, and
11·N·(K/T)·D·b through the L2 cache; the parts of dr are at most about 1024·2·T·D·4 bytes, written and read once.

B batch, H heads, L length, D head dim, BD its block, C chunk, S chunks of keys per chunk of queries, T tile, E
distances.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from megasparse.ops.kernels import block, dot, launch, load_rows, precision, store_rows, strides, whole_vectors
from megasparse.ops.local_attention import LocalAttentionSpec, RelativeVectors, by_document
from megasparse.ops.operator import Function

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e38)  # initial maximum, finite so that differences are not NaN


@triton.jit
def _tokens(tile, order, length, T: tl.constexpr):
    """Return the rows of a tile's tokens, and a mask of those that exist."""
    slot = tile * T + tl.arange(0, T)
    row = slot if order is None else tl.load(order + tile * T + tl.arange(0, T))
    return row.to(tl.int64), slot < length


@triton.jit
def _block(r, number, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr):
    """Return block `number` of r, (T, BD); r points to block 0."""
    a, depth = tl.arange(0, T), tl.arange(0, BD)
    return tl.load(r + number * T * D + a[:, None] * D + depth[None, :], mask=(depth < D)[None, :], other=0.0)


@triton.jit
def _by_distance(
    queries, r, r_bias, number, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr
):
    """Return (q + w)·r for block `number` of r, (T, T)."""
    bias = tl.load(r_bias + number * T + tl.arange(0, T))
    return dot(queries, tl.trans(_block(r, number, D, BD, T)), PRECISION) + bias[None, :]


@triton.jit
def _vector(x, D: tl.constexpr, BD: tl.constexpr):
    """Return a head's bias, (BD,) in fp32."""
    depth = tl.arange(0, BD)
    return tl.load(x + depth, mask=depth < D, other=0.0).to(tl.float32)


@triton.jit
def _keys_of(tile, document, length, chunk, CAUSAL: tl.constexpr, T: tl.constexpr):
    """Return the first and last key slot visible to each query of a tile, ignoring documents, and their documents."""
    slot = tile * T + tl.arange(0, T)
    first = slot // chunk * chunk - chunk
    last = slot if CAUSAL else tl.minimum(first + 3 * chunk, length) - 1
    doc = slot if document is None else tl.load(document + tile * T + tl.arange(0, T))
    return first, last if document is None else tl.where(doc < 0, -1, last), doc


@triton.jit
def _queries_of(tile, document, length, chunk, CAUSAL: tl.constexpr, T: tl.constexpr):
    """Return the first and last query slot that can attend to each key of a tile, ignoring documents, and documents."""
    slot = tile * T + tl.arange(0, T)
    first = slot // chunk * chunk - chunk
    last = tl.where(slot < length, tl.minimum(first + 3 * chunk, length) - 1, -1)
    doc = slot if document is None else tl.load(document + tile * T + tl.arange(0, T))
    return slot if CAUSAL else first, last if document is None else tl.where(doc < 0, -1, last), doc


@triton.jit
def _seen(first, last, doc, tile, document, T: tl.constexpr):
    """Return a mask of a tile's slots (columns) that are in the windows of other slots (rows)."""
    other = tl.arange(0, T)[None, :]
    visible = (other >= (first - tile * T)[:, None]) & (other <= (last - tile * T)[:, None])
    if document is not None:
        visible = visible & (doc[:, None] == tl.load(document + tile * T + tl.arange(0, T))[None, :])
    return visible


@triton.jit
def _first_tile(tile, chunk, T: tl.constexpr):
    """Return the first tile in the chunk before the chunk of the tile's first slot."""
    return tl.maximum(tile * T // chunk * chunk - chunk, 0) // T


@triton.jit
def _last_tile(tile, length, chunk, T: tl.constexpr):
    """Return the last tile in the chunk after the chunk of the tile's last slot."""
    return (tl.minimum((tile * T + T - 1) // chunk * chunk + 2 * chunk, length) - 1) // T


@triton.jit(do_not_specialize=["heads", "length"])
def local_keys_bias(
    k, u, order, keys_bias, k_batch, k_head, k_token, heads, length,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Compute u·k of a tile of keys, by slot, in fp32."""
    tile, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    padded = tl.num_programs(0) * T
    row, inside = _tokens(tile, None if order is None else order + batch * padded, length, T)
    keys = load_rows(k + batch * k_batch + head * k_head, row, inside, k_token, D, BD).to(tl.float32)
    line = keys_bias + pair * padded + tile * T
    tl.store(line + tl.arange(0, T), tl.sum(keys * _vector(u + head * D, D, BD)[None, :], 1))


@triton.jit(do_not_specialize=["heads", "length", "reach", "blocks"])
def local_forward(
    q, k, v, r, keys_bias, r_bias, order, document, out, lse2,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    heads, length, chunk, reach, blocks, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out of a tile of queries, and lse2, the log-sum-exp in base 2, by slot.

    keys_bias: u·k by slot. r: (H, blocks, T, D), starting with block −reach − 1. r_bias: (H, blocks, T), w·r. With
    these biases, u and w are not added to q, which would round.
    """
    tile, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    k, v = k + batch * k_batch + head * k_head, v + batch * v_batch + head * v_head
    zero = (head * blocks + reach + 1) * T
    r, r_bias, padded = r + zero * D, r_bias + zero, tl.num_programs(0) * T
    line = pair * padded
    if order is not None:
        order, document = order + batch * padded, document + batch * padded
    row, inside = _tokens(tile, order, length, T)
    first, last, doc = _keys_of(tile, document, length, chunk, CAUSAL, T)
    queries = load_rows(q + batch * q_batch + head * q_head, row, inside, q_token, D, BD)
    a, b = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]

    start, end = _first_tile(tile, chunk, T), (tile if CAUSAL else _last_tile(tile, length, chunk, T)) + 1
    block_before = _by_distance(queries, r, r_bias, start - 1 - tile, D, BD, T, PRECISION)
    highest, total = tl.full((T,), LOWEST, tl.float32), tl.zeros((T,), tl.float32)
    sums = tl.zeros((T, BD), tl.float32)
    for n in range(start, end):
        key_row, key_inside = _tokens(n, order, length, T)
        keys = load_rows(k, key_row, key_inside, k_token, D, BD)
        block_n = _by_distance(queries, r, r_bias, n - tile, D, BD, T, PRECISION)
        relative = tl.gather(tl.where(a + b < T, block_n, block_before), (b - a) & (T - 1), 1)
        block_before = block_n
        of_keys = tl.load(keys_bias + line + n * T + tl.arange(0, T))
        score = (dot(queries, tl.trans(keys), PRECISION) + of_keys[None, :] + relative) * (scale * LOG2E)
        score = tl.where(_seen(first, last, doc, n, document, T), score, -float("inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        weight, shrink = tl.exp2(score - higher[:, None]), tl.exp2(highest - higher)
        values = load_rows(v, key_row, key_inside, v_token, D, BD)
        sums = sums * shrink[:, None] + dot(weight.to(values.dtype), values, PRECISION)
        highest, total = higher, total * shrink + tl.sum(weight, 1)

    no_visible_key = total == 0.0
    total = tl.where(no_visible_key, 1.0, total)
    of_head = out + (batch * length * heads + head) * D
    store_rows(of_head, row, sums / total[:, None], inside, heads * D, D, BD)
    tl.store(lse2 + line + tile * T + tl.arange(0, T), tl.where(no_visible_key, 0.0, highest + tl.log2(total)))


@triton.jit(do_not_specialize=["heads", "length", "reach", "blocks"])
def local_backward_queries(
    q, k, v, r, keys_bias, r_bias, order, document, grad, out, lse2, delta, dq,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, grad_batch, grad_head, grad_token,
    heads, length, chunk, reach, blocks, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq of a tile of queries, and delta, the sum of grad·out, by slot."""
    tile, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    k, v = k + batch * k_batch + head * k_head, v + batch * v_batch + head * v_head
    zero = (head * blocks + reach + 1) * T
    r, r_bias, padded = r + zero * D, r_bias + zero, tl.num_programs(0) * T
    line, token_major = pair * padded, (batch * length * heads + head) * D
    if order is not None:
        order, document = order + batch * padded, document + batch * padded
    row, inside = _tokens(tile, order, length, T)
    first, last, doc = _keys_of(tile, document, length, chunk, CAUSAL, T)
    queries = load_rows(q + batch * q_batch + head * q_head, row, inside, q_token, D, BD)
    grads = load_rows(grad + batch * grad_batch + head * grad_head, row, inside, grad_token, D, BD)
    result = load_rows(out + token_major, row, inside, heads * D, D, BD)
    of_query = tl.sum(grads.to(tl.float32) * result.to(tl.float32), 1)
    slot = line + tile * T + tl.arange(0, T)
    tl.store(delta + slot, of_query)
    total = tl.load(lse2 + slot)
    a, b = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]

    start, end = _first_tile(tile, chunk, T), (tile if CAUSAL else _last_tile(tile, length, chunk, T)) + 1
    block_before = _by_distance(queries, r, r_bias, start - 1 - tile, D, BD, T, PRECISION)
    rotated = tl.zeros((T, T), grads.dtype)
    sums = tl.zeros((T, BD), tl.float32)
    for n in range(start, end):
        key_row, key_inside = _tokens(n, order, length, T)
        keys = load_rows(k, key_row, key_inside, k_token, D, BD)
        block_n = _by_distance(queries, r, r_bias, n - tile, D, BD, T, PRECISION)
        relative = tl.gather(tl.where(a + b < T, block_n, block_before), (b - a) & (T - 1), 1)
        block_before = block_n
        of_keys = tl.load(keys_bias + line + n * T + tl.arange(0, T))
        score = (dot(queries, tl.trans(keys), PRECISION) + of_keys[None, :] + relative) * (scale * LOG2E)
        weight = tl.exp2(tl.minimum(score - total[:, None], 0.0))
        weight = tl.where(_seen(first, last, doc, n, document, T), weight, 0.0)
        values = load_rows(v, key_row, key_inside, v_token, D, BD)
        slope = (weight * (dot(grads, tl.trans(values), PRECISION) - of_query[:, None]) * scale).to(keys.dtype)
        sums += dot(slope, keys, PRECISION)
        # The previous block is now complete: the previous tile contributed its far part.
        rotated_slope = tl.gather(slope, (b + a) & (T - 1), 1)
        block = _block(r, n - 1 - tile, D, BD, T)
        sums += dot(tl.where(a + b < T, rotated, rotated_slope), block, PRECISION)
        rotated = rotated_slope
    sums += dot(tl.where(a + b < T, rotated, 0.0).to(queries.dtype), _block(r, end - 1 - tile, D, BD, T), PRECISION)
    store_rows(dq + token_major, row, sums, inside, heads * D, D, BD)


@triton.jit
def _transposed(
    keys, values, queries, grads, block_n, block_before, keys_bias, bias_n, bias_before, lse2, delta, visible, scale,
    T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return weights and the gradient of the scores, both (T keys, T queries)."""
    b, a = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    across = tl.trans(queries)
    near = dot(block_n, across, PRECISION) + bias_n[:, None]
    far = dot(block_before, across, PRECISION) + bias_before[:, None]
    relative = tl.gather(tl.where(a + b < T, near, far), (b - a) & (T - 1), 0)
    score = (dot(keys, across, PRECISION) + keys_bias[:, None] + relative) * (scale * LOG2E)
    weight = tl.where(visible, tl.exp2(tl.minimum(score - lse2[None, :], 0.0)), 0.0)
    return weight, weight * (dot(values, tl.trans(grads), PRECISION) - delta[None, :]) * scale


@triton.jit(do_not_specialize=["heads", "length", "reach", "blocks"])
def local_backward_keys(
    q, k, v, r, u, keys_bias, r_bias, order, document, grad, lse2, delta, dk, dv, du,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, grad_batch, grad_head, grad_token,
    heads, length, chunk, reach, blocks, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a tile of keys; du (tiles, B·H, D), the tile's contribution."""
    tile, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    q, grad = q + batch * q_batch + head * q_head, grad + batch * grad_batch + head * grad_head
    zero = (head * blocks + reach + 1) * T
    r, r_bias, padded = r + zero * D, r_bias + zero, tl.num_programs(0) * T
    line, token_major = pair * padded, (batch * length * heads + head) * D
    if order is not None:
        order, document = order + batch * padded, document + batch * padded
    row, inside = _tokens(tile, order, length, T)
    first, last, doc = _queries_of(tile, document, length, chunk, CAUSAL, T)
    keys = load_rows(k + batch * k_batch + head * k_head, row, inside, k_token, D, BD)
    values = load_rows(v + batch * v_batch + head * v_head, row, inside, v_token, D, BD)
    slots = tl.arange(0, T)
    of_keys = tl.load(keys_bias + line + tile * T + slots)

    columns = tl.zeros((T,), tl.float32)
    key_sums, value_sums = tl.zeros((T, BD), tl.float32), tl.zeros((T, BD), tl.float32)
    for t in range(tile if CAUSAL else _first_tile(tile, chunk, T), _last_tile(tile, length, chunk, T) + 1):
        query_row, key_inside = _tokens(t, order, length, T)
        queries, grads = (
            load_rows(q, query_row, key_inside, q_token, D, BD),
            load_rows(grad, query_row, key_inside, grad_token, D, BD),
        )
        bias, of_queries = r_bias + (tile - t) * T + slots, line + t * T + slots
        weight, slope = _transposed(
            keys, values, queries, grads, _block(r, tile - t, D, BD, T), _block(r, tile - t - 1, D, BD, T),
            of_keys, tl.load(bias), tl.load(bias - T), tl.load(lse2 + of_queries), tl.load(delta + of_queries),
            _seen(first, last, doc, t, document, T), scale, T, PRECISION,
        )  # fmt: skip
        value_sums += dot(weight.to(grads.dtype), grads, PRECISION)
        key_sums += dot(slope.to(queries.dtype), queries, PRECISION)
        columns += tl.sum(slope, 1)
    key_sums += columns[:, None] * _vector(u + head * D, D, BD)[None, :]
    store_rows(dv + token_major, row, value_sums, inside, heads * D, D, BD)
    store_rows(dk + token_major, row, key_sums, inside, heads * D, D, BD)
    depth = tl.arange(0, BD)
    part = du + (tile * tl.num_programs(1) + pair) * D
    tl.store(part + depth, tl.sum(columns[:, None] * keys.to(tl.float32), 0), mask=depth < D)


@triton.jit(do_not_specialize=["heads", "length", "reach", "blocks", "tiles", "total", "per_group"])
def local_backward_distances(
    q, k, v, r, w, keys_bias, r_bias, order, document, grad, lse2, delta, dr, dw,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, grad_batch, grad_head, grad_token,
    heads, length, chunk, reach, blocks, tiles, total, per_group, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one difference of tiles, n − t = program 0 − reach, of one head, over the query tiles [per_group·g,
    per_group·(g + 1)) of the `total` tiles of all sequences, where g is program 2. Outputs parts dr (groups, H,
    differences, 2T, D), for the previous block and the block itself, and dw (groups, H, differences, D).
    """
    difference, head, group = tl.program_id(0) - reach, tl.program_id(1).to(tl.int64), tl.program_id(2)
    zero, padded, slots = (head * blocks + reach + 1) * T, tiles * T, tl.arange(0, T)
    block_n, block_before = _block(r + zero * D, difference, D, BD, T), _block(r + zero * D, difference - 1, D, BD, T)
    bias = r_bias + zero + difference * T + slots
    bias_n, bias_before = tl.load(bias), tl.load(bias - T)
    b, a = slots[:, None], slots[None, :]

    near, far = tl.zeros((T, BD), tl.float32), tl.zeros((T, BD), tl.float32)
    near_columns, far_columns = tl.zeros((T,), tl.float32), tl.zeros((T,), tl.float32)
    for item in range(group * per_group, tl.minimum(group * per_group + per_group, total)):
        t, batch = item % tiles, (item // tiles).to(tl.int64)
        n, line = t + difference, (batch * heads + head) * padded
        if (n >= _first_tile(t, chunk, T)) & (n <= _last_tile(t, length, chunk, T)):
            of_batch = None if order is None else order + batch * padded
            documents = None if document is None else document + batch * padded
            row, inside = _tokens(t, of_batch, length, T)
            key_row, key_inside = _tokens(n, of_batch, length, T)
            first, last, doc = _queries_of(n, documents, length, chunk, CAUSAL, T)
            queries = load_rows(q + batch * q_batch + head * q_head, row, inside, q_token, D, BD)
            of_queries = line + t * T + slots
            _, slope = _transposed(
                load_rows(k + batch * k_batch + head * k_head, key_row, key_inside, k_token, D, BD),
                load_rows(v + batch * v_batch + head * v_head, key_row, key_inside, v_token, D, BD),
                queries, load_rows(grad + batch * grad_batch + head * grad_head, row, inside, grad_token, D, BD),
                block_n, block_before, tl.load(keys_bias + line + n * T + slots), bias_n, bias_before,
                tl.load(lse2 + of_queries), tl.load(delta + of_queries),
                _seen(first, last, doc, t, documents, T), scale, T, PRECISION,
            )  # fmt: skip
            rotated_slope = tl.gather(slope, (b + a) & (T - 1), 0)
            near_part, far_part = tl.where(a + b < T, rotated_slope, 0.0), tl.where(a + b < T, 0.0, rotated_slope)
            near += dot(near_part.to(queries.dtype), queries, PRECISION)
            far += dot(far_part.to(queries.dtype), queries, PRECISION)
            near_columns += tl.sum(near_part, 1)
            far_columns += tl.sum(far_part, 1)

    vector = _vector(w + head * D, D, BD)[None, :]
    part = (group * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
    line, everywhere = part * 2 * T + slots, slots >= 0
    store_rows(dr, line, far + far_columns[:, None] * vector, everywhere, D, D, BD)
    store_rows(dr, line + T, near + near_columns[:, None] * vector, everywhere, D, D, BD)
    depth = tl.arange(0, BD)
    dw_sum = far_columns[:, None] * block_before.to(tl.float32) + near_columns[:, None] * block_n.to(tl.float32)
    tl.store(dw + part * D + depth, tl.sum(dw_sum, 0), mask=depth < D)


_PARTS = 1024  # programs that compute partial gradients of r: some tens of megabytes at most
_REGISTERS = 255  # the maximum per thread; without it the assembler stops at 96 and spills two
_STAGES = 2  # pipeline stages of tile loads


def relative_local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    relative: RelativeVectors,
    spec: LocalAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Compute `local_attention.relative_local_attention` in fp32, bf16 or fp16; r is cast to q's dtype for products."""
    order, document = by_document(q, key_mask, segments)
    order = None if order is None else order.to(torch.int32)
    return _RelativeLocalAttention.apply(q, k, v, *relative, order, document, spec)


def _tile(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return slots per tile and warps per program that fit in registers. Larger tiles spill, and rotating a tile with
    32 columns, as many as a warp has lanes, takes half the shuffles.
    """
    if dtype == torch.float32:
        return (32, 8) if head_dim <= 64 else (16, 8)
    return (32, 4) if head_dim <= 128 else (32, 8)


def _token_major(like: Tensor) -> Tensor:
    """Return an empty (B, H, L, D) tensor in token-major memory order, in which heads are joined."""
    batch, heads, length, width = like.shape
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def _whole(x: Tensor | None, size: int) -> Tensor | None:
    """Pad x (B, L) with zeros to `size` slots; causal bounds exclude them as keys."""
    return x if x is None else F.pad(x, (0, size - x.shape[1]))


@dataclass(frozen=True)
class _Shape:
    """Sizes of a launch. tile, warps: see `_tile`. reach: largest distance between a query's tile and its keys' tiles.
    first: row of r at which the first of `blocks` blocks of `tile` rows starts.
    """

    tile: int
    warps: int
    tiles: int
    reach: int
    blocks: int
    first: int

    @classmethod
    def of(cls, q: Tensor, spec: LocalAttentionSpec) -> "_Shape":
        tile, warps = _tile(q.shape[-1], q.dtype)
        reach = -(-(2 * spec.chunk - math.gcd(spec.chunk, tile)) // tile)
        blocks = reach + 2 if spec.causal else 2 * reach + 2
        return cls(tile, warps, -(-q.shape[2] // tile), reach, blocks, 2 * spec.chunk - 1 - (reach + 1) * tile)

    def pad(self, r: Tensor) -> Tensor:
        """Pad r (H, E, D) to whole blocks, (H, blocks·T, D)."""
        return F.pad(r, (0, 0, -self.first, self.blocks * self.tile + self.first - r.shape[1]))

    def join(self, parts: Tensor, count: int) -> Tensor:
        """Sum parts (H, blocks − 1, 2, T, D) of each tile difference, for the previous block and the block itself, over
        neighbouring differences. Returns (H, E, D).
        """
        previous, current = parts.unbind(2)
        rows = (F.pad(previous, (0, 0, 0, 0, 0, 1)) + F.pad(current, (0, 0, 0, 0, 1, 0))).flatten(1, 2)
        return F.pad(rows, (0, 0, self.first, count - self.first - rows.shape[1]))


class _RelativeLocalAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor,
        order: Tensor | None, document: Tensor | None, spec: LocalAttentionSpec,
    ) -> Tensor:  # fmt: skip
        q, k, v = (whole_vectors(x) for x in (q, k, v))
        batch, heads, length, width = q.shape
        shape = _Shape.of(q, spec)
        padded = shape.tiles * shape.tile
        order, document = _whole(order, padded), _whole(document, padded)
        blocks = shape.pad(r.to(q.dtype)).contiguous()
        r_bias = (blocks.float() * w.float()[:, None]).sum(-1)
        keys_bias, lse2 = (q.new_empty(batch * heads, padded, dtype=torch.float32) for _ in range(2))
        out, u, w = _token_major(q), u.contiguous(), w.contiguous()
        grid, wide = (shape.tiles, batch * heads), dict(D=width, BD=block(width), T=shape.tile, num_warps=shape.warps)
        launch(local_keys_bias, grid, k, u, order, keys_bias, *strides(k), heads, length, **wide)
        launch(
            local_forward, grid, q, k, v, blocks, keys_bias, r_bias, order, document, out, lse2,
            *strides(q, k, v), heads, length, spec.chunk, shape.reach, shape.blocks, spec.scale,
            CAUSAL=spec.causal, PRECISION=precision(), num_stages=_STAGES, **wide,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, blocks, u, w, order, document, out, lse2, keys_bias, r_bias)
        ctx.spec, ctx.like = spec, (r.new_empty(0), r.shape[1])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, r, u, w, order, document, out, lse2, keys_bias, r_bias = ctx.saved_tensors
        spec, (of_r, count) = ctx.spec, ctx.like
        grad, shape = whole_vectors(grad), _Shape.of(q, spec)
        batch, heads, length, width = q.shape
        dq, dk, dv = (_token_major(x) for x in (q, k, v))
        delta, total = torch.empty_like(lse2), shape.tiles * batch
        du = lse2.new_empty(shape.tiles, batch, heads, width)
        grid, tensors = (shape.tiles, batch * heads), (q, k, v, r)
        shared = (keys_bias, r_bias, order, document, grad)
        numbers = (*strides(q, k, v, grad), heads, length, spec.chunk, shape.reach, shape.blocks)
        settings = dict(CAUSAL=spec.causal, D=width, BD=block(width), T=shape.tile, PRECISION=precision())
        settings |= dict(num_warps=shape.warps, num_stages=_STAGES)
        arguments = (*tensors, *shared, out, lse2, delta, dq, *numbers, spec.scale)
        launch(local_backward_queries, grid, *arguments, **settings)
        arguments = (*tensors, u, *shared, lse2, delta, dk, dv, du, *numbers, spec.scale)
        launch(local_backward_keys, grid, *arguments, **settings)
        differences = shape.blocks - 1
        per_group = -(-total // max(1, _PARTS // (heads * differences)))
        groups = -(-total // per_group)
        dr = lse2.new_empty(groups, heads, differences, 2, shape.tile, width)
        dw = lse2.new_empty(groups, heads, differences, width)
        launch(
            local_backward_distances, (differences, heads, groups), *tensors, w, *shared, lse2, delta, dr, dw,
            *numbers, shape.tiles, total, per_group, spec.scale, **settings, maxnreg=_REGISTERS,
        )  # fmt: skip
        relative = shape.join(dr.sum(0), count).to(of_r.dtype), du.sum((0, 1)).to(u.dtype), dw.sum((0, 2)).to(w.dtype)
        return dq, dk, dv, *relative, None, None, None
