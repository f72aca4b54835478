"""Cluster attention on the device: each place of a list gets its own result, then each token adds up those of its own.

B batch, H heads, L length, D head dim, W clusters, M places of a cluster. A row is one head of one sequence. An entry
is one place of a row's lists, number cluster·M + place; `order` (lists' rows, W·M) holds the entries by token and then
by number, and `starts` (lists' rows, L + 1) where each token's begin in it.
"""

import triton
import triton.language as tl

from megasparse.ops.kernels import dot, load_rows, store_rows


@triton.jit
def _where(heads, clusters, blocks):
    """A program's row, sequence, head, cluster, and block of the cluster's list."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks // clusters
    cluster = (program // blocks % clusters).to(tl.int32)
    return row, row // heads, row % heads, cluster, (program % blocks).to(tl.int32)


@triton.jit
def _tokens(lists, first, places, COUNT: tl.constexpr):
    """COUNT tokens of a list from place `first` on, −1 past its end."""
    place = first + tl.arange(0, COUNT)
    return tl.load(lists + place, mask=place < places, other=-1)


@triton.jit
def _met_place(met_words, first, places, COUNT: tl.constexpr):
    """Offsets of the words of COUNT queries of a cluster; past the list's end, those of its last one."""
    return tl.minimum(first + tl.arange(0, COUNT), places - 1).to(tl.int64) * met_words


@triton.jit
def _seen(query, key, key_mask, segments, met, first, lanes, KEYS: tl.constexpr, CAUSAL: tl.constexpr):
    """Pairs of tokens, (n, 1) and (1, m) or the other way round, that count in this cluster: those that may see each
    other and do not meet in an earlier one. met: where the queries' words of `meetings` begin, or None; the keys are
    those of `lanes` (0 to KEYS) from place `first` on.
    """
    seen = (query >= 0) & (key >= 0)
    if CAUSAL:
        seen = seen & (key <= query)
    if key_mask is not None:
        seen = seen & (tl.load(key_mask + tl.maximum(key, 0)) != 0)
    if segments is not None:
        seen = seen & (tl.load(segments + tl.maximum(query, 0)) == tl.load(segments + tl.maximum(key, 0)))
    if met is not None:
        bits = tl.load(met + first // 32) >> ((first + lanes) % 32)
        if KEYS > 32:
            bits = tl.where(lanes < 32, bits, tl.load(met + first // 32 + 1) >> (lanes % 32))
        seen = seen & (bits & 1 == 0)
    return seen


@triton.jit
def find_starts(lists, order, starts, entries, length, blocks, steps, TOKENS: tl.constexpr):
    """Binary search; an empty place, of token −1, sorts after all tokens."""
    program = tl.program_id(0).to(tl.int64)
    row, block = program // blocks, (program % blocks).to(tl.int32)
    token = block * TOKENS + tl.arange(0, TOKENS)
    low = tl.zeros([TOKENS], tl.int32)
    high = tl.zeros([TOKENS], tl.int32) + entries
    for _ in range(0, steps):
        middle = (low + high) // 2
        open_ = low < high
        entry = tl.load(order + row * entries + middle, mask=open_, other=0)
        found = tl.load(lists + row * entries + entry, mask=open_, other=0)
        below = (found >= 0) & (found < token)
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & ~below, middle, high)
    tl.store(starts + row * (length + 1) + token, low, mask=token <= length)


@triton.jit
def _own_entries(order, starts, token, real, step):
    """The entry of each token's list that comes `step` places after its first, and whether it has that many."""
    place = tl.load(starts + token, mask=real, other=0) + step
    has = place < tl.load(starts + token + 1, mask=real, other=0)
    return tl.load(order + place, mask=has, other=0), has


@triton.jit
def _most_entries(starts, token, real):
    first = tl.load(starts + token, mask=real, other=0)
    return tl.max(tl.load(starts + token + 1, mask=real, other=0) - first)


@triton.jit
def membership(
    order, starts, out, entries, places, length, words, blocks, word_blocks, TOKENS: tl.constexpr, WORDS: tl.constexpr
):
    """Compute out (lists' rows, L, words): bit c of a token's words says whether cluster c holds it."""
    program = tl.program_id(0).to(tl.int64)
    row = program // word_blocks // blocks
    token = (program // word_blocks % blocks).to(tl.int32) * TOKENS + tl.arange(0, TOKENS)
    word = (program % word_blocks).to(tl.int32) * WORDS + tl.arange(0, WORDS)[None, :]
    real = token < length
    order, starts = order + row * entries, starts + row * (length + 1)
    bits = tl.zeros([TOKENS, WORDS], tl.int32)
    for step in range(0, _most_entries(starts, token, real)):
        entry, has = _own_entries(order, starts, token, real, step)
        cluster = (entry // places)[:, None]
        bits |= tl.where(has[:, None] & (cluster // 32 == word), 1 << (cluster % 32), 0)
    tl.store(out + (row * length + token)[:, None] * words + word, bits, mask=real[:, None] & (word < words))


@triton.jit
def meetings(
    query_lists, key_lists, query_words, key_words, out, heads, clusters, query_places, key_places,
    query_length, key_length, words, out_words, blocks, q_lists_batch, q_lists_head, k_lists_batch, k_lists_head,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute out (rows, W, Mq, Mk/32): bit j % 32 of word j // 32 says whether an earlier cluster, too, holds the
    query and the key of place j: whether the words of both have a common bit below the cluster's own.
    """
    row, batch, head, cluster, block = _where(heads, clusters, blocks)
    q_list, k_list = batch * q_lists_batch + head * q_lists_head, batch * k_lists_batch + head * k_lists_head
    first_query, first_key = block // (out_words * 32 // KEYS) * QUERIES, block % (out_words * 32 // KEYS) * KEYS
    query = _tokens(query_lists + (q_list * clusters + cluster) * query_places, first_query, query_places, QUERIES)
    key = _tokens(key_lists + (k_list * clusters + cluster) * key_places, first_key, key_places, KEYS)
    query_words += (q_list * query_length + tl.maximum(query, 0)) * words
    key_words += (k_list * key_length + tl.maximum(key, 0)) * words
    common = tl.zeros([QUERIES, KEYS], tl.int32)
    for first in range(0, cluster // 32 + 1, 4):  # four words in flight
        for more in tl.static_range(4):
            left = cluster - (first + more) * 32
            earlier = tl.where(left >= 32, -1, tl.where(left > 0, ~(-1 << (left & 31)), 0))
            held = tl.load(query_words + first + more) & earlier
            common |= held[:, None] & tl.load(key_words + first + more)[None, :]
    bits = tl.where(common != 0, 1 << (tl.arange(0, KEYS) % 32)[None, :], 0)
    bits = tl.sum(tl.reshape(bits, [QUERIES, KEYS // 32, 32]), 2)
    place = first_query + tl.arange(0, QUERIES)
    word = first_key // 32 + tl.arange(0, KEYS // 32)[None, :]
    entry = (row * clusters + cluster) * query_places + place
    tl.store(out + entry[:, None] * out_words + word, bits, mask=(place < query_places)[:, None])


@triton.jit
def attend(
    q, k, v, query_lists, key_lists, met, key_mask, segments, parts, part_lse, scale,
    heads, clusters, query_places, key_places, query_length, key_length, met_words, blocks,
    q_lists_batch, q_lists_head, k_lists_batch, k_lists_head, met_batch, met_head,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of QUERIES places of a cluster to its keys: parts (B·H, W·Mq, D), and log-sums (B·H, W·Mq)."""
    row, batch, head, cluster, block = _where(heads, clusters, blocks)
    q_list, k_list = batch * q_lists_batch + head * q_lists_head, batch * k_lists_batch + head * k_lists_head
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    if key_mask is not None:
        key_mask += batch * key_length
    if segments is not None:
        segments += batch * key_length
    key_lists += (k_list * clusters + cluster) * key_places
    if met is not None:
        met += ((batch * met_batch + head * met_head) * clusters + cluster) * query_places * met_words
        met += _met_place(met_words, block * QUERIES, query_places, QUERIES)[:, None]
    query = _tokens(query_lists + (q_list * clusters + cluster) * query_places, block * QUERIES, query_places, QUERIES)
    query_rows = load_rows(q, query, query >= 0, q_token, D, WIDTH)
    highest = tl.full([QUERIES], -1e38, tl.float32)  # −∞ less −∞ would be NaN
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(0, key_places, KEYS):
        key = _tokens(key_lists, first, key_places, KEYS)
        key_rows = load_rows(k, key, key >= 0, k_token, D, WIDTH)
        value_rows = load_rows(v, key, key >= 0, v_token, D, WIDTH)
        score = dot(query_rows, tl.trans(key_rows), PRECISION) * scale
        lanes = tl.arange(0, KEYS)[None, :]
        seen = _seen(query[:, None], key[None, :], key_mask, segments, met, first, lanes, KEYS, CAUSAL)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        shrink = tl.exp(highest - higher)
        weight = tl.exp(score - higher[:, None])
        total = total * shrink + tl.sum(weight, 1)
        sums = sums * shrink[:, None] + dot(weight.to(value_rows.dtype), value_rows, PRECISION)
        highest = higher
    divisor = tl.where(total > 0, total, 1.0)
    place = block * QUERIES + tl.arange(0, QUERIES)
    inside = place < query_places
    entry = (row * clusters + cluster) * query_places + place
    store_rows(parts, entry, sums / divisor[:, None], inside, D, D, WIDTH)
    tl.store(part_lse + entry, tl.where(total > 0, highest + tl.log(divisor), float("-inf")), mask=inside)


@triton.jit
def merge(
    parts, part_lse, order, starts, out, lse, heads, entries, length, blocks, lists_batch, lists_head,
    D: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute out and lse of TOKENS queries from those of their entries, in the order of the clusters."""
    program = tl.program_id(0).to(tl.int64)
    row, block = program // blocks, (program % blocks).to(tl.int32)
    lists = row // heads * lists_batch + row % heads * lists_head
    order, starts = order + lists * entries, starts + lists * (length + 1)
    token = block * TOKENS + tl.arange(0, TOKENS)
    real = token < length
    highest = tl.full([TOKENS], -1e38, tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    sums = tl.zeros([TOKENS, WIDTH], tl.float32)
    for step in range(0, _most_entries(starts, token, real)):
        entry, has = _own_entries(order, starts, token, real, step)
        place = row * entries + entry
        own_lse = tl.load(part_lse + place, mask=has, other=float("-inf"))
        higher = tl.maximum(highest, own_lse)
        shrink, weight = tl.exp(highest - higher), tl.exp(own_lse - higher)
        total = total * shrink + weight
        sums = sums * shrink[:, None] + weight[:, None] * load_rows(parts, place, has, D, D, WIDTH)
        highest = higher
    divisor = tl.where(total > 0, total, 1.0)
    store_rows(out, row * length + token, sums / divisor[:, None], real, D, D, WIDTH)
    tl.store(lse + row * length + token, tl.where(total > 0, highest + tl.log(divisor), float("-inf")), mask=real)


@triton.jit
def add_up(
    parts, order, starts, out, heads, entries, length, blocks, lists_batch, lists_head, factor,
    D: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute out of TOKENS tokens: factor times the sum over their entries, in the order of the clusters."""
    program = tl.program_id(0).to(tl.int64)
    row, block = program // blocks, (program % blocks).to(tl.int32)
    lists = row // heads * lists_batch + row % heads * lists_head
    order, starts = order + lists * entries, starts + lists * (length + 1)
    token = block * TOKENS + tl.arange(0, TOKENS)
    real = token < length
    sums = tl.zeros([TOKENS, WIDTH], tl.float32)
    for step in range(0, _most_entries(starts, token, real)):
        entry, has = _own_entries(order, starts, token, real, step)
        sums += load_rows(parts, row * entries + entry, has, D, D, WIDTH)
    store_rows(out, row * length + token, sums * factor, real, D, D, WIDTH)


@triton.jit
def output_products(
    out, grad, grad_lse, delta, heads, length, blocks, grad_batch, grad_head, grad_token,
    D: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute delta of TOKENS queries: their outputs' products with their gradients, less the gradient of lse."""
    program = tl.program_id(0).to(tl.int64)
    row, block = program // blocks, (program % blocks).to(tl.int32)
    token = block * TOKENS + tl.arange(0, TOKENS)
    real = token < length
    grad += row // heads * grad_batch + row % heads * grad_head
    grads = load_rows(grad, token, real, grad_token, D, WIDTH).to(tl.float32)
    found = tl.sum(grads * load_rows(out, row * length + token, real, D, D, WIDTH).to(tl.float32), 1)
    if grad_lse is not None:
        found -= tl.load(grad_lse + row * length + token, mask=real, other=0.0)
    tl.store(delta + row * length + token, found, mask=real)


@triton.jit
def _weights(score, lse, seen):
    """Return exp(score − lse), 0 where not seen. No score is above its query's log-sum; but a huge one, added up in
    another order than in the forward, may be by rounding, and exp of that would be ∞.
    """
    return tl.exp(tl.where(seen, tl.minimum(score - lse, 0.0), float("-inf")))


@triton.jit
def query_gradients(
    q, k, v, query_lists, key_lists, met, key_mask, segments, grad, lse, delta, parts, scale,
    heads, clusters, query_places, key_places, query_length, key_length, met_words, blocks,
    q_lists_batch, q_lists_head, k_lists_batch, k_lists_head, met_batch, met_head,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, grad_batch, grad_head, grad_token,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients that QUERIES places of a cluster add to dq, without the scale: parts (B·H, W·Mq, D)."""
    row, batch, head, cluster, block = _where(heads, clusters, blocks)
    q_list, k_list = batch * q_lists_batch + head * q_lists_head, batch * k_lists_batch + head * k_lists_head
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    if key_mask is not None:
        key_mask += batch * key_length
    if segments is not None:
        segments += batch * key_length
    key_lists += (k_list * clusters + cluster) * key_places
    if met is not None:
        met += ((batch * met_batch + head * met_head) * clusters + cluster) * query_places * met_words
        met += _met_place(met_words, block * QUERIES, query_places, QUERIES)[:, None]
    query = _tokens(query_lists + (q_list * clusters + cluster) * query_places, block * QUERIES, query_places, QUERIES)
    query_rows = load_rows(q, query, query >= 0, q_token, D, WIDTH)
    grads = load_rows(grad + batch * grad_batch + head * grad_head, query, query >= 0, grad_token, D, WIDTH)
    number = row * query_length + query
    own_lse = tl.load(lse + number, mask=query >= 0, other=0.0)
    product = tl.load(delta + number, mask=query >= 0, other=0.0)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(0, key_places, KEYS):
        key = _tokens(key_lists, first, key_places, KEYS)
        key_rows = load_rows(k, key, key >= 0, k_token, D, WIDTH)
        value_rows = load_rows(v, key, key >= 0, v_token, D, WIDTH)
        score = dot(query_rows, tl.trans(key_rows), PRECISION) * scale
        lanes = tl.arange(0, KEYS)[None, :]
        seen = _seen(query[:, None], key[None, :], key_mask, segments, met, first, lanes, KEYS, CAUSAL)
        weight = _weights(score, own_lse[:, None], seen)
        score_grad = weight * (dot(grads, tl.trans(value_rows), PRECISION) - product[:, None])
        sums += dot(tl.where(seen, score_grad, 0.0).to(key_rows.dtype), key_rows, PRECISION)
    place = block * QUERIES + tl.arange(0, QUERIES)
    entry = (row * clusters + cluster) * query_places + place
    store_rows(parts, entry, sums, place < query_places, D, D, WIDTH)


@triton.jit
def key_gradients(
    q, k, v, query_lists, key_lists, met, key_mask, segments, grad, lse, delta, key_parts, value_parts,
    scale, heads, clusters, query_places, key_places, query_length, key_length, met_words, blocks,
    q_lists_batch, q_lists_head, k_lists_batch, k_lists_head, met_batch, met_head,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, grad_batch, grad_head, grad_token,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients that KEYS places of a cluster add to dk, without the scale, and dv: (B·H, W·Mk, D) each. Scores have
    keys in rows, as the products that add up over queries take them.
    """
    row, batch, head, cluster, block = _where(heads, clusters, blocks)
    q_list, k_list = batch * q_lists_batch + head * q_lists_head, batch * k_lists_batch + head * k_lists_head
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    grad += batch * grad_batch + head * grad_head
    if key_mask is not None:
        key_mask += batch * key_length
    if segments is not None:
        segments += batch * key_length
    if met is not None:
        met += ((batch * met_batch + head * met_head) * clusters + cluster) * query_places * met_words
    query_lists += (q_list * clusters + cluster) * query_places
    key = _tokens(key_lists + (k_list * clusters + cluster) * key_places, block * KEYS, key_places, KEYS)
    key_rows = load_rows(k, key, key >= 0, k_token, D, WIDTH)
    value_rows = load_rows(v, key, key >= 0, v_token, D, WIDTH)
    key_sums = tl.zeros([KEYS, WIDTH], tl.float32)
    value_sums = tl.zeros([KEYS, WIDTH], tl.float32)
    for first in range(0, query_places, QUERIES):
        query = _tokens(query_lists, first, query_places, QUERIES)
        number = row * query_length + query
        own_lse = tl.load(lse + number, mask=query >= 0, other=0.0)
        product = tl.load(delta + number, mask=query >= 0, other=0.0)
        query_rows = load_rows(q, query, query >= 0, q_token, D, WIDTH)
        grads = load_rows(grad, query, query >= 0, grad_token, D, WIDTH)
        score = dot(key_rows, tl.trans(query_rows), PRECISION) * scale
        own_met = None
        if met is not None:
            own_met = met + _met_place(met_words, first, query_places, QUERIES)[None, :]
        lanes = tl.arange(0, KEYS)[:, None]
        seen = _seen(query[None, :], key[:, None], key_mask, segments, own_met, block * KEYS, lanes, KEYS, CAUSAL)
        weight = _weights(score, own_lse[None, :], seen)
        value_sums += dot(weight.to(grads.dtype), grads, PRECISION)
        score_grad = weight * (dot(value_rows, tl.trans(grads), PRECISION) - product[None, :])
        key_sums += dot(tl.where(seen, score_grad, 0.0).to(query_rows.dtype), query_rows, PRECISION)
    place = block * KEYS + tl.arange(0, KEYS)
    entry = (row * clusters + cluster) * key_places + place
    store_rows(key_parts, entry, key_sums, place < key_places, D, D, WIDTH)
    store_rows(value_parts, entry, value_sums, place < key_places, D, D, WIDTH)
