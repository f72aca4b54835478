"""Kernels of exact attention inside intervals of sorted keys, gathered by index; see gpu.py for the visibility.

A program processes a block of sorted queries, or of sorted keys, of one row in one round. A round continues the
previous one: its softmax starts from the previous output and log-sum-exp. Logarithms are in base 2; lse2 is log2 Σ
exp(score) over all rounds so far, −∞ without a visible key. A tile has m queries and n keys.
"""

import triton
import triton.language as tl

from megasparse.ops.kernels import dot

NOWHERE = tl.constexpr(1 << 30)  # as in gpu.py
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def row_of(x, row, heads, batch_stride, head_stride):
    """Return the address of row `row` of B·H in x (B, H, L, D)."""
    return x + (row // heads).to(tl.int64) * batch_stride + (row % heads).to(tl.int64) * head_stride


@triton.jit
def cells(token, stride, mask, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return offsets and mask of the vectors of tokens."""
    d = tl.arange(0, BLOCK_D)
    offset = token.to(tl.int64)[:, None] * stride + d[None, :]
    inside = mask[:, None]
    if HEAD_DIM < BLOCK_D:
        inside &= (d < HEAD_DIM)[None, :]
    return offset, inside


@triton.jit
def gather(x, token, stride, mask, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    offset, inside = cells(token, stride, mask, HEAD_DIM, BLOCK_D)
    return tl.load(x + offset, mask=inside, other=0.0)


@triton.jit
def keep(x, sums, result, token, stride, mask, LAST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store vectors in fp32 sums, with the strides of the result, or after the last round in the result."""
    offset, inside = cells(token, stride, mask, HEAD_DIM, BLOCK_D)
    if LAST:
        tl.store(result + offset, x.to(result.dtype.element_ty), mask=inside)
    else:
        tl.store(sums + offset, x, mask=inside)


@triton.jit
def token_at(order, origin, index, mask):
    token = index
    if order is not None:
        token = tl.load(order + origin + index, mask=mask, other=0)
    return token


@triton.jit
def within(low, high, index, KEYS_FIRST: tl.constexpr):
    """Return True if sorted key indices are in the windows of queries: (m, n), or (n, m)."""
    if KEYS_FIRST:
        shown = (index[:, None] >= low[None, :]) & (index[:, None] < high[None, :])
    else:
        shown = (index[None, :] >= low[:, None]) & (index[None, :] < high[:, None])
    return shown


@triton.jit
def visible(low, high, index, query, key, RULE: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Return True if a key is `within` the query's window, with positions that satisfy RULE."""
    shown = within(low, high, index, KEYS_FIRST)
    if KEYS_FIRST:
        query = query[None, :]
        key = key[:, None]
    else:
        query = query[:, None]
        key = key[None, :]
    if RULE == "others":
        shown &= key != query
    elif RULE == "earlier":
        shown &= key < query
    elif RULE == "not later":
        shown &= key <= query
    return shown


@triton.jit
def shown_first(
    shown, past_low, past_high, past_index, query, key, real, inside, length, EARLIER: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return `shown` without pairs that one of the EARLIER rounds before this one includes. past_low, past_high,
    past_index: bounds of queries and indices of keys in these rounds, by token.
    """
    for earlier in tl.static_range(EARLIER):
        low = tl.load(past_low + earlier * length + query, mask=real, other=NOWHERE)
        high = tl.load(past_high + earlier * length + query, mask=real, other=0)
        index = tl.load(past_index + earlier * length + key, mask=inside, other=0)
        shown &= within(low, high, index, KEYS_FIRST) == 0
    return shown


@triton.jit
def group_at(keys, origin, index, inside, SHIFT: tl.constexpr):
    """Return the group at sorted indices: the key without its SHIFT low bits; one group if keys is None."""
    group = tl.zeros_like(index)
    if keys is not None:
        group = tl.load(keys + origin + index, mask=inside, other=0) >> SHIFT
    return group


@triton.jit
def bounds(
    keys, order, low, high, token_low, token_high, token_index, length, chunk, offset, steps, PADDING: tl.constexpr,
    SHIFT: tl.constexpr, KIND: tl.constexpr, AHEAD: tl.constexpr, IN_ORDER: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute the bounds of windows (G·R, L): for each sorted index, nearby indices of the same group, as set by KIND.

    keys: sorted. IN_ORDER: the window ends `offset` indices after the query's own. AHEAD: a chunk's window includes the
    next chunk. PADDING: keys from this value on are padding and get empty windows. token_low, token_high, token_index:
    the same by token, or None. steps: bisection steps, for at most 2^steps indices.
    """
    blocks = tl.cdiv(length, TOKENS)
    origin = (tl.program_id(0) // blocks).to(tl.int64) * length
    index = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    inside = index < length
    group = group_at(keys, origin, index, inside, SHIFT)
    if KIND == "band":
        nearest = index - (chunk - 1)
        furthest = index + chunk
    else:
        nearest = index // chunk * chunk - chunk
        furthest = nearest + chunk * (3 if AHEAD else 2)
    left = tl.maximum(nearest, 0)
    right = index
    for _ in range(steps):
        middle = (left + right) // 2
        same = group_at(keys, origin, middle, inside, SHIFT) == group
        left = tl.where(same, left, middle + 1)
        right = tl.where(same, middle, right)
    first = right
    if IN_ORDER:
        end = index + offset
    else:
        left = tl.minimum(index + 1, length)
        right = tl.minimum(furthest, length)
        for _ in range(steps):
            middle = (left + right) // 2
            same = group_at(keys, origin, middle, inside & (middle < length), SHIFT) == group
            open_ = left < right
            left = tl.where(open_ & same, middle + 1, left)
            right = tl.where(open_ & (same == 0), middle, right)
        end = left
    if PADDING is not None:
        padding = tl.load(keys + origin + index, mask=inside, other=0) >= PADDING
        first = tl.where(padding, NOWHERE, first)
        end = tl.where(padding, NOWHERE, end)
    tl.store(low + origin + index, first, mask=inside)
    tl.store(high + origin + index, end, mask=inside)
    if token_low is not None:
        token = tl.load(order + origin + index, mask=inside, other=0)
        tl.store(token_low + origin + token, first, mask=inside)
        tl.store(token_high + origin + token, end, mask=inside)
        tl.store(token_index + origin + token, index, mask=inside)


@triton.jit
def not_above(values, origin, length, bound, steps):
    """Return how many of the ascending values [origin, origin + length) are at most `bound`."""
    left = tl.zeros_like(bound)
    right = tl.zeros_like(bound) + length
    for _ in range(steps):
        middle = (left + right) // 2
        below = tl.load(values + origin + middle, mask=middle < length, other=0) <= bound
        open_ = left < right
        left = tl.where(open_ & below, middle + 1, left)
        right = tl.where(open_ & (below == 0), middle, right)
    return left


@triton.jit
def meeting(lows, highs, first, end, length, count, steps, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Compute first, end (G·R, count): each block of BLOCK keys can be visible only to sorted queries [first, end)."""
    parts = tl.cdiv(count, BLOCKS)
    row = (tl.program_id(0) // parts).to(tl.int64)
    block = tl.program_id(0) % parts * BLOCKS + tl.arange(0, BLOCKS)
    start = block * BLOCK
    last = tl.minimum(start + (BLOCK - 1), length - 1)
    tl.store(first + row * count + block, not_above(highs, row * length, length, start, steps), mask=block < count)
    tl.store(end + row * count + block, not_above(lows, row * length, length, last, steps), mask=block < count)


@triton.jit(do_not_specialize=["length", "steps"])
def runs(keys, starts, widths, sums, slot_key, length, steps, KEYS: tl.constexpr, TOKENS: tl.constexpr):
    """Store the start of the run of equal keys for each sorted key, and at that start the run's number of slots (0
    elsewhere); the sum of these per block; and −1 in all slots. See `slots`.
    """
    blocks = tl.cdiv(length, TOKENS)
    origin = (tl.program_id(0) // blocks).to(tl.int64) * length
    index = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    inside = index < length
    for quarter in tl.static_range(4):
        tl.store(slot_key + 4 * origin + quarter * length + index, -1, mask=inside)
    key = tl.load(keys + origin + index, mask=inside, other=0)
    start = tl.zeros_like(index)
    stop = index
    left = index + 1
    right = tl.zeros_like(index) + length
    for _ in range(steps):
        middle = (start + stop) // 2
        same = tl.load(keys + origin + middle, mask=inside, other=0) == key
        start = tl.where(same, start, middle + 1)
        stop = tl.where(same, middle, stop)
        middle = (left + right) // 2
        same = tl.load(keys + origin + middle, mask=inside & (middle < length), other=0) == key
        open_ = left < right
        left = tl.where(open_ & same, middle + 1, left)
        right = tl.where(open_ & (same == 0), middle, right)
    size = left - stop
    power = size - 1  # set all lower bits: the next power of two minus 1
    for shift in tl.static_range(5):
        power |= power >> (1 << shift)
    width = tl.where(size > KEYS, tl.cdiv(size, KEYS) * KEYS, power + 1)
    tl.store(starts + origin + index, stop, mask=inside)
    width = tl.where(inside & (index == stop), width, 0)
    tl.store(widths + origin + index, width, mask=inside)
    tl.store(sums + tl.program_id(0), tl.sum(width))


@triton.jit(do_not_specialize=["length"])
def slots(starts, widths, sums, order, key_slot, slot_key, length, KEYS: tl.constexpr, TOKENS: tl.constexpr):
    """Store the slot of each sorted key, and the token in each slot.

    A run of w slots starts at a multiple of w, or of KEYS if w is larger, inside the 2·w slots that start at twice the
    sum of earlier widths and belong to no other run.
    """
    blocks = tl.cdiv(length, TOKENS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    origin = row * length
    index = block * TOKENS + tl.arange(0, TOKENS)
    inside = index < length
    total = tl.zeros([TOKENS], tl.int32)
    for first in range(0, block, TOKENS):
        earlier = first + tl.arange(0, TOKENS)
        total += tl.load(sums + row * blocks + earlier, mask=earlier < block, other=0)
    start = tl.load(starts + origin + index, mask=inside, other=0)
    width = tl.load(widths + origin + start, mask=inside, other=1)
    last = tl.sum(total) + tl.cumsum(tl.load(widths + origin + index, mask=inside, other=0), 0)
    unit = tl.minimum(width, KEYS)
    slot = tl.cdiv(2 * (last - width), unit) * unit + index - start
    tl.store(key_slot + origin + index, slot, mask=inside)
    token = tl.load(order + origin + index, mask=inside, other=0)
    tl.store(slot_key + row * 4 * length + slot, token, mask=inside)


@triton.jit
def block_of(order, sharing, length, ROUND: tl.constexpr, ROUNDS: tl.constexpr, SIZE: tl.constexpr):
    """Return a program's row, the origins of its layout and of this round's, and its sorted indices, with a mask of
    those inside, and their tokens.
    """
    blocks = tl.cdiv(length, SIZE)
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    layout = (row // sharing).to(tl.int64) * ROUNDS * length
    origin = layout + ROUND * length
    index = block * SIZE + tl.arange(0, SIZE)
    inside = index < length
    return row, layout, origin, index, inside, token_at(order, origin, index, inside)


@triton.jit
def after(start, low, high):
    """Return the first index from `start` on that is visible to some query, NOWHERE if there is none."""
    return tl.min(tl.where(high > tl.maximum(low, start), tl.maximum(low, start), NOWHERE))


@triton.jit
def jumps(start, low, high, KEYS: tl.constexpr, ALIGN: tl.constexpr):
    """Return the number of tiles from the one at `start` on, if each starts `after` the last, at a multiple of ALIGN.
    Loops count tiles first, because Triton loads ahead in `for` loops only.
    """
    count = 0
    while start < NOWHERE:
        count += 1
        start = after(start + KEYS, low, high) // ALIGN * ALIGN
    return count


@triton.jit
def forward(
    q, k, v, partial, out, lse2, lse, query_order, key_order, lows, highs, key_slot, slot_key, past_low, past_high,
    past_index, q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch, v_head, v_stride, out_batch, out_head,
    out_stride, heads, sharing, length, scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, ROUND: tl.constexpr, ROUNDS: tl.constexpr, EARLIER: tl.constexpr, RULE: tl.constexpr,
    JUMP: tl.constexpr, SELF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out, lse2 and (after the last round) lse of a block of queries.

    partial: out in fp32 between rounds, None if there is one round. sharing: rows that share a layout. JUMP: windows of
    neighbouring queries can be far apart. SELF: a real query without a visible key in any round gets its own value, and
    its own score as lse; its lse2 stays −∞, and padding gets ∞.
    """
    row, layout, origin, index, inside, query = block_of(query_order, sharing, length, ROUND, ROUNDS, QUERIES)
    low = tl.load(lows + origin + index, mask=inside, other=NOWHERE)
    real = low < NOWHERE
    high = tl.where(real, tl.load(highs + origin + index, mask=inside, other=0), 0)
    k_row = row_of(k, row, heads, k_batch, k_head)
    v_row = row_of(v, row, heads, v_batch, v_head)
    q_tile = gather(row_of(q, row, heads, q_batch, q_head), query, q_stride, real, HEAD_DIM, BLOCK_D)
    if EARLIER:
        past_low = past_low + layout
        past_high = past_high + layout
        past_index = past_index + layout
    statistic = row.to(tl.int64) * length + query
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    result = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    if ROUNDS > 1:
        partial = row_of(partial, row, heads, out_batch, out_head)
        if ROUND > 0:
            top = tl.load(lse2 + statistic, mask=inside, other=-float("inf"))
            result = gather(partial, query, out_stride, inside, HEAD_DIM, BLOCK_D)
    total = tl.where(top != -float("inf"), 1.0, 0.0)
    if slot_key is not None:
        seeing = low < high
        slot = tl.load(key_slot + origin + low, mask=seeing, other=0)
        high = tl.where(seeing, slot + high - low, 0)
        low = slot
    if JUMP:
        start = after(0, low, high) // KEYS * KEYS
        count = jumps(start, low, high, KEYS, KEYS)
    else:
        start = tl.min(low)
        count = tl.cdiv(tl.max(high) - start, KEYS)
    for _ in range(count):
        key_index = start + tl.arange(0, KEYS)
        if slot_key is None:
            key_inside = key_index < length
            key = token_at(key_order, origin, key_index, key_inside)
        else:
            key = tl.load(slot_key + 4 * origin + key_index, mask=key_index < 4 * length, other=-1)
            key_inside = key >= 0
        k_tile = gather(k_row, key, k_stride, key_inside, HEAD_DIM, BLOCK_D)
        score = dot(q_tile, tl.trans(k_tile), PRECISION) * (scale * LOG2E)
        shown = visible(low, high, key_index, query, key, RULE, False)
        shown = shown_first(
            shown, past_low, past_high, past_index, query, key, real, key_inside, length, EARLIER, False,
        )  # fmt: skip
        score = tl.where(shown, score, -float("inf"))
        highest = tl.maximum(top, tl.max(score, 1))
        base = tl.where(highest == -float("inf"), 0.0, highest)
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(top - base)
        v_tile = gather(v_row, key, v_stride, key_inside, HEAD_DIM, BLOCK_D)
        result = result * fade[:, None] + dot(weight.to(v_tile.dtype), v_tile, PRECISION)
        total = total * fade + tl.sum(weight, 1)
        top = highest
        if JUMP:
            start = after(start + KEYS, low, high) // KEYS * KEYS
        else:
            start += KEYS
    query = token_at(query_order, origin, index, inside)  # reloaded to save registers
    statistic = row.to(tl.int64) * length + query
    nonzero = total != 0  # NaN too
    total = tl.where(nonzero, total, 1.0)
    result = result / total[:, None]
    end = tl.where(nonzero, top + tl.log2(total), -float("inf"))
    natural = end * LN2
    if SELF and ROUND == ROUNDS - 1:
        self_only = inside & real & (end == -float("inf"))
        own_q = gather(row_of(q, row, heads, q_batch, q_head), query, q_stride, self_only, HEAD_DIM, BLOCK_D)
        own_k = gather(k_row, query, k_stride, self_only, HEAD_DIM, BLOCK_D)
        score = tl.sum(own_q.to(tl.float32) * own_k.to(tl.float32), 1) * scale
        natural = tl.where(self_only, score, natural)
        own_v = gather(v_row, query, v_stride, self_only, HEAD_DIM, BLOCK_D)
        result = tl.where(self_only[:, None], own_v.to(tl.float32), result)
        end = tl.where(real, end, float("inf"))
    tl.store(lse2 + statistic, end, mask=inside)
    if ROUND == ROUNDS - 1:
        tl.store(lse + statistic, natural, mask=inside)
    out_row = row_of(out, row, heads, out_batch, out_head)
    keep(result, partial, out_row, query, out_stride, inside, ROUND == ROUNDS - 1, HEAD_DIM, BLOCK_D)


@triton.jit
def score_gradient(a, b, c, d, lse2, delta, shown, scale, PRECISION: tl.constexpr):
    """Return weights and score gradients of pairs, with scores scale·a·bᵀ and weight gradients c·dᵀ."""
    score = dot(a, tl.trans(b), PRECISION) * (scale * LOG2E)
    # Clamp: weights are at most 1, but fp32 scores of 1e8 are exact only to 8, which could give exp(8).
    weight = tl.where(shown, tl.exp2(tl.minimum(score - lse2, 0.0)), 0.0)
    return weight, weight * (dot(c, tl.trans(d), PRECISION) - delta)


@triton.jit
def query_gradient(
    q, k, v, out, grad, grad_lse, lse2, delta, sorted_level, sorted_delta, partial, dq, query_order, key_order, lows,
    highs, past_low, past_high, past_index, q_batch, q_head, q_stride, k_batch, k_head, k_stride, v_batch, v_head,
    v_stride, out_batch, out_head, out_stride, grad_batch, grad_head, grad_stride, dq_batch, dq_head, dq_stride, heads,
    sharing, length, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, ROUND: tl.constexpr,
    ROUNDS: tl.constexpr, EARLIER: tl.constexpr, RULE: tl.constexpr, JUMP: tl.constexpr, SELF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of queries. Arguments as in `forward`; partial: dq in fp32 between rounds. sorted_level and
    sorted_delta: lse2 and delta in this round's order, for `key_gradient`; None if that is the order of tokens. The
    first round computes delta = Σ out·grad − grad_lse, common to the gradients of a query's scores; 0 without a visible
    key.
    """
    row, layout, origin, index, inside, query = block_of(query_order, sharing, length, ROUND, ROUNDS, QUERIES)
    low = tl.load(lows + origin + index, mask=inside, other=NOWHERE)
    real = low < NOWHERE
    high = tl.where(real, tl.load(highs + origin + index, mask=inside, other=0), 0)
    k_row = row_of(k, row, heads, k_batch, k_head)
    v_row = row_of(v, row, heads, v_batch, v_head)
    q_tile = gather(row_of(q, row, heads, q_batch, q_head), query, q_stride, real, HEAD_DIM, BLOCK_D)
    grad_tile = gather(row_of(grad, row, heads, grad_batch, grad_head), query, grad_stride, real, HEAD_DIM, BLOCK_D)
    statistic = row.to(tl.int64) * length + query
    end = tl.load(lse2 + statistic, mask=real, other=0.0)
    if ROUND == 0:
        seeing = real & (tl.abs(end) != float("inf"))
        out_row = row_of(out, row, heads, out_batch, out_head)
        common = gather(out_row, query, out_stride, seeing, HEAD_DIM, BLOCK_D).to(tl.float32)
        common = tl.sum(common * grad_tile.to(tl.float32), 1) - tl.load(grad_lse + statistic, mask=seeing, other=0.0)
        common = tl.where(seeing, common, 0.0)
        tl.store(delta + statistic, common, mask=inside)
    else:
        common = tl.load(delta + statistic, mask=real, other=0.0)
    if sorted_level is not None:
        tl.store(sorted_level + row.to(tl.int64) * length + index, end, mask=inside)
        tl.store(sorted_delta + row.to(tl.int64) * length + index, common, mask=inside)
    if EARLIER:
        past_low = past_low + layout
        past_high = past_high + layout
        past_index = past_index + layout
    result = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    if JUMP:
        start = after(0, low, high)
        count = jumps(start, low, high, KEYS, 1)
    else:
        start = tl.min(low)
        count = tl.cdiv(tl.max(high) - start, KEYS)
    for _ in range(count):
        key_index = start + tl.arange(0, KEYS)
        key_inside = key_index < length
        key = token_at(key_order, origin, key_index, key_inside)
        k_tile = gather(k_row, key, k_stride, key_inside, HEAD_DIM, BLOCK_D)
        v_tile = gather(v_row, key, v_stride, key_inside, HEAD_DIM, BLOCK_D)
        shown = visible(low, high, key_index, query, key, RULE, False)
        shown = shown_first(
            shown, past_low, past_high, past_index, query, key, real, key_inside, length, EARLIER, False,
        )  # fmt: skip
        _, slope = score_gradient(
            q_tile, k_tile, grad_tile, v_tile, end[:, None], common[:, None], shown, scale, PRECISION,
        )  # fmt: skip
        result += dot(slope.to(k_tile.dtype), k_tile, PRECISION)
        if JUMP:
            start = after(start + KEYS, low, high)
        else:
            start += KEYS
    result *= scale
    query = token_at(query_order, origin, index, inside)  # reloaded to save registers
    if ROUNDS > 1:
        partial = row_of(partial, row, heads, dq_batch, dq_head)
        if ROUND > 0:
            result += gather(partial, query, dq_stride, inside, HEAD_DIM, BLOCK_D)
    if SELF and ROUND == ROUNDS - 1:
        statistic = row.to(tl.int64) * length + query
        self_only = tl.load(lse2 + statistic, mask=inside, other=0.0) == -float("inf")
        slope = tl.load(grad_lse + statistic, mask=self_only, other=0.0) * scale
        own_k = gather(k_row, query, k_stride, self_only, HEAD_DIM, BLOCK_D)
        result += slope[:, None] * own_k.to(tl.float32)
    dq_row = row_of(dq, row, heads, dq_batch, dq_head)
    keep(result, partial, dq_row, query, dq_stride, inside, ROUND == ROUNDS - 1, HEAD_DIM, BLOCK_D)


@triton.jit
def key_gradient(
    q, k, v, grad, grad_lse, token_level, lse2, delta, partial_k, partial_v, dk, dv, query_order, key_order, lows,
    highs, past_low, past_high, past_index, first_query, end_query, q_batch, q_head, q_stride, k_batch, k_head,
    k_stride, v_batch, v_head, v_stride, grad_batch, grad_head, grad_stride, dk_batch, dk_head, dk_stride, heads,
    sharing, length, scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    ROUND: tl.constexpr, ROUNDS: tl.constexpr, EARLIER: tl.constexpr, RULE: tl.constexpr, JUMP: tl.constexpr,
    SELF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a block of keys, with equal strides. Arguments as in `forward`; lse2, delta: in this round's
    order; token_level: lse2 by token. partial_k, partial_v: dk and dv in fp32 between rounds. first_query, end_query:
    see `Intervals.meeting`.
    """
    row, layout, origin, index, inside, key = block_of(key_order, sharing, length, ROUND, ROUNDS, KEYS)
    q_row = row_of(q, row, heads, q_batch, q_head)
    grad_row = row_of(grad, row, heads, grad_batch, grad_head)
    k_tile = gather(row_of(k, row, heads, k_batch, k_head), key, k_stride, inside, HEAD_DIM, BLOCK_D)
    v_tile = gather(row_of(v, row, heads, v_batch, v_head), key, v_stride, inside, HEAD_DIM, BLOCK_D)
    statistics = row.to(tl.int64) * length
    if EARLIER:
        past_low = past_low + layout
        past_high = past_high + layout
        past_index = past_index + layout
    blocks = tl.cdiv(length, KEYS)
    meeting = ((row // sharing) * ROUNDS + ROUND) * blocks + tl.program_id(0) % blocks
    to_k = tl.zeros([KEYS, BLOCK_D], tl.float32)
    to_v = tl.zeros([KEYS, BLOCK_D], tl.float32)
    for start in range(tl.load(first_query + meeting), tl.load(end_query + meeting), QUERIES):
        level = lse2 + statistics
        delta_row = delta + statistics
        query_index = start + tl.arange(0, QUERIES)
        query_inside = query_index < length
        query = token_at(query_order, origin, query_index, query_inside)
        low = tl.load(lows + origin + query_index, mask=query_inside, other=NOWHERE)
        real = low < NOWHERE
        high = tl.load(highs + origin + query_index, mask=real, other=0)
        q_tile = gather(q_row, query, q_stride, real, HEAD_DIM, BLOCK_D)
        grad_tile = gather(grad_row, query, grad_stride, real, HEAD_DIM, BLOCK_D)
        end = tl.load(level + query_index, mask=real, other=0.0)
        common = tl.load(delta_row + query_index, mask=real, other=0.0)
        shown = visible(low, high, index, query, key, RULE, True)
        shown = shown_first(shown, past_low, past_high, past_index, query, key, real, inside, length, EARLIER, True)
        weight, slope = score_gradient(
            k_tile, q_tile, v_tile, grad_tile, end[None, :], common[None, :], shown, scale, PRECISION,
        )  # fmt: skip
        to_v += dot(weight.to(grad_tile.dtype), grad_tile, PRECISION)
        to_k += dot(slope.to(q_tile.dtype), q_tile, PRECISION)
    to_k *= scale
    key = token_at(key_order, origin, index, inside)  # reloaded to save registers
    if ROUNDS > 1:
        partial_k = row_of(partial_k, row, heads, dk_batch, dk_head)
        partial_v = row_of(partial_v, row, heads, dk_batch, dk_head)
        if ROUND > 0:
            to_k += gather(partial_k, key, dk_stride, inside, HEAD_DIM, BLOCK_D)
            to_v += gather(partial_v, key, dk_stride, inside, HEAD_DIM, BLOCK_D)
    if SELF and ROUND == ROUNDS - 1:
        self_only = tl.load(token_level + statistics + key, mask=inside, other=0.0) == -float("inf")
        slope = tl.load(grad_lse + statistics + key, mask=self_only, other=0.0) * scale
        own_q = gather(q_row, key, q_stride, self_only, HEAD_DIM, BLOCK_D)
        to_k += slope[:, None] * own_q.to(tl.float32)
        to_v += gather(grad_row, key, grad_stride, self_only, HEAD_DIM, BLOCK_D).to(tl.float32)
    dk_row = row_of(dk, row, heads, dk_batch, dk_head)
    dv_row = row_of(dv, row, heads, dk_batch, dk_head)
    keep(to_k, partial_k, dk_row, key, dk_stride, inside, ROUND == ROUNDS - 1, HEAD_DIM, BLOCK_D)
    keep(to_v, partial_v, dv_row, key, dk_stride, inside, ROUND == ROUNDS - 1, HEAD_DIM, BLOCK_D)
