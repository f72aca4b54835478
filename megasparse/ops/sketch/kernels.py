"""Device code of the sketch's attention; that of the choice is in choice_kernels.py.

A program owns a few rows, its lanes own columns: every sum over columns stays in its lane until the end, so the loops
hold neither a reduction nor shared memory. A sketch is too narrow for matrix instructions: its products are sums of d
multiplications, of coordinates kept apart. Vectors come as (B, d, L) fp32, queries times d^-½.

B batch, L length, d width of the sketch.
"""

import triton
import triton.language as tl

PADDING = tl.constexpr(-(1 << 31))
"""The document number of padding, which nothing sees and which sees nothing."""


@triton.jit
def vectors(x, places, length, WIDTH: tl.constexpr):
    """The coordinates of x (d, L) at `places`, a tuple of d; 0 beyond the length."""
    found = ()
    for i in tl.static_range(WIDTH):
        found += (tl.load(x + i * length + places, mask=(places >= 0) & (places < length), other=0.0),)  # type: ignore[assignment]
    return found


@triton.jit
def product(rows, columns, WIDTH: tl.constexpr):
    """Σ_i rows_i·columns_i, always in this order: equal vectors have the same product wherever they stand."""
    total = rows[0][:, None] * columns[0][None, :]
    for i in tl.static_range(1, WIDTH):
        total += rows[i][:, None] * columns[i][None, :]
    return total


@triton.jit
def document_of(places, documents, length):
    if documents is None:
        found = tl.zeros_like(places)
    else:
        found = tl.load(documents + places, mask=places < length, other=PADDING)
    return found


@triton.jit
def sight(places, documents, length, CAUSAL: tl.constexpr):
    """The last key that each query may see, −1 where there is none, and the query's document."""
    last = tl.where(places < length, places if CAUSAL else length - 1, -1)
    document = document_of(places, documents, length)
    return tl.where(document == PADDING, -1, last), document


@triton.jit
def nothing(WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    sums = ()
    for _ in tl.static_range(WIDTH):
        sums += (tl.zeros((ROWS, COLUMNS), tl.float32),)  # type: ignore[assignment]
    return sums


@triton.jit
def add(sums, weight, columns, WIDTH: tl.constexpr):
    """Return sums_i + weight·columns_i."""
    after = ()
    for i in tl.static_range(WIDTH):
        after += (sums[i] + weight * columns[i][None, :],)  # type: ignore[assignment]
    return after


@triton.jit
def store(x, places, length, sums, factor, WIDTH: tl.constexpr):
    """Writes the lanes' sums times `factor` to rows `places` of x (L, d)."""
    for i in tl.static_range(WIDTH):
        tl.store(x + places * WIDTH + i, tl.sum(sums[i], 1) * factor, mask=places < length)


@triton.jit
def attend(
    q, k, v, documents, h, lse, length,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute h (B, L, d) and lse (B, L) of a program's queries, in two passes: the largest score, then the sums. (A
    running largest would cost a second exponential a pair, more than computing the scores again.)"""
    batch = tl.program_id(1).to(tl.int64)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # causal rows that see most start first
    queries, columns = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    q, k, v = q + batch * WIDTH * length, k + batch * WIDTH * length, v + batch * WIDTH * length
    if documents is not None:
        documents += batch * length
    query = vectors(q, queries, length, WIDTH)
    last, document = sight(queries, documents, length, CAUSAL)
    end = tl.minimum(first + ROWS, length) if CAUSAL else length
    highest = tl.full((ROWS, COLUMNS), -float("inf"), tl.float32)
    for start in range(0, end, COLUMNS):
        keys = start + columns
        score = product(query, vectors(k, keys, length, WIDTH), WIDTH)
        seen = keys[None, :] <= last[:, None]
        seen &= document[:, None] == document_of(keys, documents, length)[None, :]
        highest = tl.maximum(highest, tl.where(seen, score, -float("inf")))
    top = tl.max(highest, 1)
    top = tl.where(top == -float("inf"), 0.0, top)
    total, sums = tl.zeros((ROWS, COLUMNS), tl.float32), nothing(WIDTH, ROWS, COLUMNS)
    for start in range(0, end, COLUMNS):
        keys = start + columns
        score = product(query, vectors(k, keys, length, WIDTH), WIDTH)
        seen = keys[None, :] <= last[:, None]
        seen &= document[:, None] == document_of(keys, documents, length)[None, :]
        weight = tl.where(seen, tl.exp(score - top[:, None]), 0.0)
        total += weight
        sums = add(sums, weight, vectors(v, keys, length, WIDTH), WIDTH)
    norm = tl.sum(total, 1)  # 0 where nothing is seen, else at least 1
    store(h + batch * length * WIDTH, queries, length, sums, 1.0 / tl.maximum(norm, 1.0), WIDTH)
    own_lse = tl.where(norm > 0.0, top + tl.log(tl.maximum(norm, 1.0)), -float("inf"))
    tl.store(lse + batch * length + queries, own_lse, mask=queries < length)


@triton.jit
def slopes(score, seen, lse, grad_weight, shift):
    """Return α and the gradient of the score, α(∂α − shift), of a tile."""
    weight = tl.where(seen, tl.exp(score - lse), 0.0)
    return weight, weight * (grad_weight - shift)


@triton.jit
def grad_queries(
    q, k, v, documents, lse, grad_h, shift, grad_q, scale, length,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """∂q (B, L, d) of a program's queries. grad_h: (B, d, L). shift: h·∂h − ∂lse, (B, L)."""
    batch = tl.program_id(1).to(tl.int64)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    queries, columns = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    k, v = k + batch * WIDTH * length, v + batch * WIDTH * length
    if documents is not None:
        documents += batch * length
    query = vectors(q + batch * WIDTH * length, queries, length, WIDTH)
    grad = vectors(grad_h + batch * WIDTH * length, queries, length, WIDTH)
    own_lse = tl.load(lse + batch * length + queries, mask=queries < length, other=0.0)
    offset = tl.load(shift + batch * length + queries, mask=queries < length, other=0.0)
    last, document = sight(queries, documents, length, CAUSAL)
    end = tl.minimum(first + ROWS, length) if CAUSAL else length
    sums = nothing(WIDTH, ROWS, COLUMNS)
    for start in range(0, end, COLUMNS):
        keys = start + columns
        key = vectors(k, keys, length, WIDTH)
        seen = keys[None, :] <= last[:, None]
        seen &= document[:, None] == document_of(keys, documents, length)[None, :]
        grad_weight = product(grad, vectors(v, keys, length, WIDTH), WIDTH)
        _, slope = slopes(product(query, key, WIDTH), seen, own_lse[:, None], grad_weight, offset[:, None])
        sums = add(sums, slope, key, WIDTH)
    store(grad_q + batch * length * WIDTH, queries, length, sums, scale, WIDTH)


@triton.jit
def grad_keys(
    q, k, v, documents, lse, grad_h, shift, grad_k, grad_v, length,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """∂k and ∂v (B, L, d) of a program's keys; see `grad_queries`."""
    batch = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    keys, columns = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    q, grad_h = q + batch * WIDTH * length, grad_h + batch * WIDTH * length
    if documents is not None:
        documents += batch * length
    key = vectors(k + batch * WIDTH * length, keys, length, WIDTH)
    value = vectors(v + batch * WIDTH * length, keys, length, WIDTH)
    key_document = document_of(keys, documents, length)
    key_sums, value_sums = nothing(WIDTH, ROWS, COLUMNS), nothing(WIDTH, ROWS, COLUMNS)
    for start in range(first if CAUSAL else 0, length, COLUMNS):
        queries = start + columns
        query, grad = vectors(q, queries, length, WIDTH), vectors(grad_h, queries, length, WIDTH)
        own_lse = tl.load(lse + batch * length + queries, mask=queries < length, other=0.0)
        offset = tl.load(shift + batch * length + queries, mask=queries < length, other=0.0)
        last, document = sight(queries, documents, length, CAUSAL)
        seen = (keys[:, None] <= last[None, :]) & (key_document[:, None] == document[None, :])
        grad_weight = product(value, grad, WIDTH)
        weight, slope = slopes(product(key, query, WIDTH), seen, own_lse[None, :], grad_weight, offset[None, :])
        key_sums, value_sums = add(key_sums, slope, query, WIDTH), add(value_sums, weight, grad, WIDTH)
    store(grad_k + batch * length * WIDTH, keys, length, key_sums, 1.0, WIDTH)
    store(grad_v + batch * length * WIDTH, keys, length, value_sums, 1.0, WIDTH)


@triton.jit
def project(x, weight, out, count, width_in, width, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute out (N, d) = x (N, E)·weightᵀ, weight (d, E), in float64. Every row is summed alike."""
    row, output = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, WIDTH)
    total = tl.zeros([ROWS, WIDTH], tl.float64)
    for first in range(0, width_in, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        valid = (row < count)[:, None] & (column < width_in)[None, :]
        a = tl.load(x + row[:, None] * width_in + column[None, :], mask=valid, other=0).to(tl.float64)
        valid = (output < width)[:, None] & (column < width_in)[None, :]
        b = tl.load(weight + output[:, None] * width_in + column[None, :], mask=valid, other=0).to(tl.float64)
        total += tl.sum(a[:, None, :] * b[None, :, :], 2)
    valid = (row < count)[:, None] & (output < width)[None, :]
    tl.store(out + row[:, None] * width + output[None, :], total, mask=valid)
