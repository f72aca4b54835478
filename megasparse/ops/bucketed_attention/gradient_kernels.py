"""Gradients of `kernels.forward`: a program owns a block of sorted queries, or of sorted keys, of one row in one round.

Letters and logarithms are those of `kernels`.
"""

import triton
import triton.language as tl

from megasparse.ops.bucketed_attention.kernels import (
    LOG2E,
    NOWHERE,
    after,
    gather,
    keep,
    row_of,
    share,
    token_at,
    visible,
)
from megasparse.ops.kernels import dot


@triton.jit
def products(
    out, grad, grad_lse, lse2, delta, out_batch, out_head, out_stride, grad_batch, grad_head, grad_stride, heads,
    length, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute delta = Σ out·grad − grad_lse, common to the gradients of a query's scores; 0 where it saw nothing."""
    blocks = tl.cdiv(length, TOKENS)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    token = block * TOKENS + tl.arange(0, TOKENS)
    inside = token < length
    statistic = row.to(tl.int64) * length + token
    seeing = tl.abs(tl.load(lse2 + statistic, mask=inside, other=float("inf"))) != float("inf")
    out_row, grad_row = row_of(out, row, heads, out_batch, out_head), row_of(grad, row, heads, grad_batch, grad_head)
    product = gather(out_row, token, out_stride, seeing, HEAD_DIM, BLOCK_D).to(tl.float32)
    product *= gather(grad_row, token, grad_stride, seeing, HEAD_DIM, BLOCK_D).to(tl.float32)
    result = tl.sum(product, 1) - tl.load(grad_lse + statistic, mask=seeing, other=0.0)
    tl.store(delta + statistic, result, mask=inside)


@triton.jit
def score_gradient(
    a, b, c, d, lse2, delta, seen, part, scale, COUNT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights of pairs and the gradients of their scores: scores are scale·a·bᵀ, gradients of weights c·dᵀ. COUNT:
    0, 1, or 2 in a share of the pairs.
    """
    score = dot(a, tl.trans(b), PRECISION) * (scale * LOG2E)
    # Nothing weighs more than 1: were it not for this, scores of 1e8, known to 8, could give exp(8).
    if COUNT == 2:  # before it is divided a pair may, where others have its other rounds
        weight = tl.minimum(tl.where(seen, tl.exp2(score - lse2) * part, 0.0), 1.0)
    else:
        weight = tl.where(seen, tl.exp2(tl.minimum(score - lse2, 0.0)), 0.0)
        if COUNT:
            weight *= part
    return weight, weight * (dot(c, tl.trans(d), PRECISION) - delta)


@triton.jit
def query_step(
    dq, q, grad, lse2, delta, start, low, high, query_place, query, k, v, key_order, other_low, other_high,
    other_place, here, k_stride, v_stride, length, scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr, ROUNDS: tl.constexpr, COUNT: tl.constexpr, RULE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return dq / scale with what the keys at places `start` and after add."""
    place = start + tl.arange(0, KEYS)
    inside = place < length
    key = token_at(key_order, here, place, inside)
    k_tile = gather(k, key, k_stride, inside, HEAD_DIM, BLOCK_D)
    v_tile = gather(v, key, v_stride, inside, HEAD_DIM, BLOCK_D)
    seen = visible(low, high, place, query, key, RULE, False)
    part = 1.0
    if COUNT:
        part = share(other_low, other_high, other_place, query_place, place, length, ROUNDS, False)
    _, slope = score_gradient(
        q, k_tile, grad, v_tile, lse2[:, None], delta[:, None], seen, part, scale, COUNT, PRECISION,
    )  # fmt: skip
    return dq + dot(slope.to(k_tile.dtype), k_tile, PRECISION)


@triton.jit(do_not_specialize=["round_"])
def query_gradient(
    q, k, v, grad, grad_lse, lse2, delta, sorted_level, sorted_delta, partial, dq, query_order, key_order, lows, highs,
    other_low, other_high, other_place, q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch, v_head, v_stride,
    grad_batch, grad_head, grad_stride, dq_batch, dq_head, dq_stride, heads, sharing, length, round_, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, ROUNDS: tl.constexpr,
    COUNT: tl.constexpr, RULE: tl.constexpr, JUMP: tl.constexpr, SELF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries. Arguments as in `forward`; partial: dq in fp32 between rounds. sorted_level and
    sorted_delta: lse2 and delta in this round's order, for `key_gradient`; None where that is the tokens' order.
    """
    blocks = tl.cdiv(length, QUERIES)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    layout = (row // sharing).to(tl.int64) * ROUNDS * length
    here = layout + round_ * length
    place = block * QUERIES + tl.arange(0, QUERIES)
    inside = place < length
    query = token_at(query_order, here, place, inside)
    low = tl.load(lows + here + place, mask=inside, other=NOWHERE)
    real = low < NOWHERE
    high = tl.where(real, tl.load(highs + here + place, mask=inside, other=0), 0)
    k_row, v_row = row_of(k, row, heads, k_batch, k_head), row_of(v, row, heads, v_batch, v_head)
    q_tile = gather(row_of(q, row, heads, q_batch, q_head), query, q_stride, real, HEAD_DIM, BLOCK_D)
    grad_tile = gather(row_of(grad, row, heads, grad_batch, grad_head), query, grad_stride, real, HEAD_DIM, BLOCK_D)
    statistic = row.to(tl.int64) * length + query
    end = tl.load(lse2 + statistic, mask=real, other=0.0)
    common = tl.load(delta + statistic, mask=real, other=0.0)
    if sorted_level is not None:
        tl.store(sorted_level + row.to(tl.int64) * length + place, end, mask=inside)
        tl.store(sorted_delta + row.to(tl.int64) * length + place, common, mask=inside)
    if COUNT:
        others = (row // sharing).to(tl.int64) * (ROUNDS - 1) * length
        other_low, other_high, other_place = other_low + others, other_high + others, other_place + others
    result = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    if JUMP:
        start = after(0, low, high)
        while start < length:
            result = query_step(
                result, q_tile, grad_tile, end, common, start, low, high, place, query, k_row, v_row, key_order,
                other_low, other_high, other_place, here, k_stride, v_stride, length, scale, HEAD_DIM, BLOCK_D, KEYS,
                ROUNDS, COUNT, RULE, PRECISION,
            )  # fmt: skip
            start = after(start + KEYS, low, high)
    else:
        for start in range(tl.min(low), tl.max(high), KEYS):
            result = query_step(
                result, q_tile, grad_tile, end, common, start, low, high, place, query, k_row, v_row, key_order,
                other_low, other_high, other_place, here, k_stride, v_stride, length, scale, HEAD_DIM, BLOCK_D, KEYS,
                ROUNDS, COUNT, RULE, PRECISION,
            )  # fmt: skip
    result *= scale
    query = token_at(query_order, here, place, inside)  # again: kept, it would cost registers
    if ROUNDS > 1:
        partial = row_of(partial, row, heads, dq_batch, dq_head)
        if round_ > 0:
            result += gather(partial, query, dq_stride, inside, HEAD_DIM, BLOCK_D)
    if SELF and round_ == ROUNDS - 1:
        statistic = row.to(tl.int64) * length + query
        lonely = tl.load(lse2 + statistic, mask=inside, other=0.0) == -float("inf")
        slope = tl.load(grad_lse + statistic, mask=lonely, other=0.0) * scale
        own_k = gather(k_row, query, k_stride, lonely, HEAD_DIM, BLOCK_D)
        result += slope[:, None] * own_k.to(tl.float32)
    dq_row = row_of(dq, row, heads, dq_batch, dq_head)
    keep(result, partial, dq_row, query, dq_stride, inside, round_, ROUNDS, HEAD_DIM, BLOCK_D)


@triton.jit
def key_step(
    dk, dv, k, v, key_place, key, start, q, grad, lse2, delta, query_order, lows, highs, other_low, other_high,
    other_place, here, q_stride, grad_stride, length, scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr, ROUNDS: tl.constexpr, COUNT: tl.constexpr, RULE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return dk / scale and dv with what the queries at places `start` and after add."""
    place = start + tl.arange(0, QUERIES)
    inside = place < length
    query = token_at(query_order, here, place, inside)
    low = tl.load(lows + here + place, mask=inside, other=NOWHERE)
    real = low < NOWHERE
    high = tl.load(highs + here + place, mask=real, other=0)
    q_tile = gather(q, query, q_stride, real, HEAD_DIM, BLOCK_D)
    grad_tile = gather(grad, query, grad_stride, real, HEAD_DIM, BLOCK_D)
    end = tl.load(lse2 + place, mask=real, other=0.0)
    common = tl.load(delta + place, mask=real, other=0.0)
    seen = visible(low, high, key_place, query, key, RULE, True)
    part = 1.0
    if COUNT:
        part = share(other_low, other_high, other_place, place, key_place, length, ROUNDS, True)
    weight, slope = score_gradient(
        k, q_tile, v, grad_tile, end[None, :], common[None, :], seen, part, scale, COUNT, PRECISION,
    )  # fmt: skip
    dv += dot(weight.to(grad_tile.dtype), grad_tile, PRECISION)
    return dk + dot(slope.to(q_tile.dtype), q_tile, PRECISION), dv


@triton.jit(do_not_specialize=["round_"])
def key_gradient(
    q, k, v, grad, grad_lse, token_level, lse2, delta, partial_k, partial_v, dk, dv, query_order, key_order, lows,
    highs, other_low, other_high, other_place, first_query, end_query, q_batch, q_head, q_stride, k_batch, k_head,
    k_stride, v_batch, v_head, v_stride, grad_batch, grad_head, grad_stride, dk_batch, dk_head, dk_stride, heads,
    sharing, length, round_, scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, ROUNDS: tl.constexpr, COUNT: tl.constexpr, RULE: tl.constexpr, JUMP: tl.constexpr,
    SELF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a block of keys, which lie alike. Arguments as in `forward`; lse2, delta: in this round's
    order; token_level: lse2 by token.
    partial_k, partial_v: dk and dv in fp32 between rounds. first_query, end_query: see `Intervals.meeting`.
    """
    blocks = tl.cdiv(length, KEYS)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    layout = (row // sharing).to(tl.int64) * ROUNDS * length
    here = layout + round_ * length
    place = block * KEYS + tl.arange(0, KEYS)
    inside = place < length
    key = token_at(key_order, here, place, inside)
    q_row = row_of(q, row, heads, q_batch, q_head)
    grad_row = row_of(grad, row, heads, grad_batch, grad_head)
    k_tile = gather(row_of(k, row, heads, k_batch, k_head), key, k_stride, inside, HEAD_DIM, BLOCK_D)
    v_tile = gather(row_of(v, row, heads, v_batch, v_head), key, v_stride, inside, HEAD_DIM, BLOCK_D)
    statistics = row.to(tl.int64) * length
    if COUNT:
        others = (row // sharing).to(tl.int64) * (ROUNDS - 1) * length
        other_low, other_high, other_place = other_low + others, other_high + others, other_place + others
    meeting = ((row // sharing) * ROUNDS + round_) * blocks + block
    to_k = tl.zeros([KEYS, BLOCK_D], tl.float32)
    to_v = tl.zeros([KEYS, BLOCK_D], tl.float32)
    for start in range(tl.load(first_query + meeting), tl.load(end_query + meeting), QUERIES):
        to_k, to_v = key_step(
            to_k, to_v, k_tile, v_tile, place, key, start, q_row, grad_row, lse2 + statistics, delta + statistics,
            query_order, lows, highs, other_low, other_high, other_place, here, q_stride, grad_stride, length, scale,
            HEAD_DIM, BLOCK_D, QUERIES, ROUNDS, COUNT, RULE, PRECISION,
        )  # fmt: skip
    to_k *= scale
    key = token_at(key_order, here, place, inside)  # again: kept, it would cost registers
    if ROUNDS > 1:
        partial_k = row_of(partial_k, row, heads, dk_batch, dk_head)
        partial_v = row_of(partial_v, row, heads, dk_batch, dk_head)
        if round_ > 0:
            to_k += gather(partial_k, key, dk_stride, inside, HEAD_DIM, BLOCK_D)
            to_v += gather(partial_v, key, dk_stride, inside, HEAD_DIM, BLOCK_D)
    if SELF and round_ == ROUNDS - 1:
        lonely = tl.load(token_level + statistics + key, mask=inside, other=0.0) == -float("inf")
        slope = tl.load(grad_lse + statistics + key, mask=lonely, other=0.0) * scale
        own_q = gather(q_row, key, q_stride, lonely, HEAD_DIM, BLOCK_D)
        to_k += slope[:, None] * own_q.to(tl.float32)
        to_v += gather(grad_row, key, grad_stride, lonely, HEAD_DIM, BLOCK_D).to(tl.float32)
    dk_row, dv_row = row_of(dk, row, heads, dk_batch, dk_head), row_of(dv, row, heads, dk_batch, dk_head)
    keep(to_k, partial_k, dk_row, key, dk_stride, inside, round_, ROUNDS, HEAD_DIM, BLOCK_D)
    keep(to_v, partial_v, dv_row, key, dk_stride, inside, round_, ROUNDS, HEAD_DIM, BLOCK_D)
