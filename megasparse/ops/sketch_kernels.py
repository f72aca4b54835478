"""The sketch as Triton kernels, in fp32 for every input dtype. Memory O(L·(d + H·K)).

A program processes a few rows, and its lanes columns: loops contain neither reductions nor shared memory. A sketch is
too narrow for matrix instructions. Vectors are stored as (B, d, L) fp32, queries multiplied by d^-½.

A program that chooses keys is one warp with a few rows of one head, which processes keys in order of position: a key
must exceed the worst stored one, which few do after the first tiles.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megasparse.ops.kernels import launch, mix
from megasparse.ops.operator import Function
from megasparse.ops.random_kernels import key_halves, row_seed
from megasparse.ops.sketch import KEYS, KeyChoiceSpec, Noise

PADDING = tl.constexpr(-(1 << 31))
"""Document number of padding, which is excluded as query and key."""


@triton.jit
def vectors(x, slots, length, WIDTH: tl.constexpr):
    """Return the coordinates of x (d, L) at `slots`, a tuple of d; 0 beyond the length."""
    coordinates = ()
    for i in tl.static_range(WIDTH):
        coordinates += (tl.load(x + i * length + slots, mask=(slots >= 0) & (slots < length), other=0.0),)  # type: ignore[assignment]
    return coordinates


@triton.jit
def product(rows, columns, WIDTH: tl.constexpr):
    """Return Σ_i rows_i·columns_i, always in this order, so that equal vectors have equal products at any position."""
    total = rows[0][:, None] * columns[0][None, :]
    for i in tl.static_range(1, WIDTH):
        total += rows[i][:, None] * columns[i][None, :]
    return total


@triton.jit
def document_of(slots, documents, length):
    if documents is None:
        document = tl.zeros_like(slots)
    else:
        document = tl.load(documents + slots, mask=slots < length, other=PADDING)
    return document


@triton.jit
def sight(slots, documents, length, CAUSAL: tl.constexpr):
    """Return the last key visible to each query, −1 if there is none, and the query's document."""
    last = tl.where(slots < length, slots if CAUSAL else length - 1, -1)
    document = document_of(slots, documents, length)
    return tl.where(document == PADDING, -1, last), document


@triton.jit
def visible_pairs(keys, last, document, documents, length):
    """Return the visibility of keys (C) to the queries of `sight`, (ROWS, C)."""
    visible = keys[None, :] <= last[:, None]
    return visible & (document[:, None] == document_of(keys, documents, length)[None, :])


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
def store(x, slots, length, sums, factor, WIDTH: tl.constexpr):
    """Write the lanes' sums times `factor` to rows `slots` of x (L, d)."""
    for i in tl.static_range(WIDTH):
        tl.store(x + slots * WIDTH + i, tl.sum(sums[i], 1) * factor, mask=slots < length)


@triton.jit
def attend(
    q, k, v, documents, h, lse, length,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute h (B, L, d) and lse (B, L) of a program's queries in two passes: the largest score, then the sums. A
    running maximum would cost a second exponential per pair.
    """
    batch = tl.program_id(1).to(tl.int64)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # causal rows with most visible keys start first
    queries = first + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    q = q + batch * WIDTH * length
    k = k + batch * WIDTH * length
    v = v + batch * WIDTH * length
    if documents is not None:
        documents += batch * length
    query = vectors(q, queries, length, WIDTH)
    last, document = sight(queries, documents, length, CAUSAL)
    end = tl.minimum(first + ROWS, length) if CAUSAL else length
    highest = tl.full((ROWS, COLUMNS), -float("inf"), tl.float32)
    for start in range(0, end, COLUMNS):
        keys = start + columns
        score = product(query, vectors(k, keys, length, WIDTH), WIDTH)
        visible = visible_pairs(keys, last, document, documents, length)
        highest = tl.maximum(highest, tl.where(visible, score, -float("inf")))
    top = tl.max(highest, 1)
    top = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    sums = nothing(WIDTH, ROWS, COLUMNS)
    for start in range(0, end, COLUMNS):
        keys = start + columns
        score = product(query, vectors(k, keys, length, WIDTH), WIDTH)
        visible = visible_pairs(keys, last, document, documents, length)
        weight = tl.where(visible, tl.exp(score - top[:, None]), 0.0)
        total += weight
        sums = add(sums, weight, vectors(v, keys, length, WIDTH), WIDTH)
    norm = tl.sum(total, 1)  # 0 without a visible key, else at least 1
    store(h + batch * length * WIDTH, queries, length, sums, 1.0 / tl.maximum(norm, 1.0), WIDTH)
    row_lse = tl.where(norm > 0.0, top + tl.log(tl.maximum(norm, 1.0)), -float("inf"))
    tl.store(lse + batch * length + queries, row_lse, mask=queries < length)


@triton.jit
def slopes(score, visible, lse, grad_weight, shift):
    """Return α and the gradient of the score, α(∂α − shift), of a tile."""
    weight = tl.where(visible, tl.exp(score - lse), 0.0)
    return weight, weight * (grad_weight - shift)


@triton.jit
def grad_queries(
    q, k, v, documents, lse, grad_h, shift, grad_q, scale, length,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute ∂q (B, L, d) of a program's queries. grad_h: (B, d, L). shift: h·∂h − ∂lse, (B, L)."""
    batch = tl.program_id(1).to(tl.int64)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    queries = first + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    k = k + batch * WIDTH * length
    v = v + batch * WIDTH * length
    if documents is not None:
        documents += batch * length
    query = vectors(q + batch * WIDTH * length, queries, length, WIDTH)
    grad = vectors(grad_h + batch * WIDTH * length, queries, length, WIDTH)
    row_lse = tl.load(lse + batch * length + queries, mask=queries < length, other=0.0)
    offset = tl.load(shift + batch * length + queries, mask=queries < length, other=0.0)
    last, document = sight(queries, documents, length, CAUSAL)
    end = tl.minimum(first + ROWS, length) if CAUSAL else length
    sums = nothing(WIDTH, ROWS, COLUMNS)
    for start in range(0, end, COLUMNS):
        keys = start + columns
        key = vectors(k, keys, length, WIDTH)
        visible = visible_pairs(keys, last, document, documents, length)
        grad_weight = product(grad, vectors(v, keys, length, WIDTH), WIDTH)
        _, slope = slopes(product(query, key, WIDTH), visible, row_lse[:, None], grad_weight, offset[:, None])
        sums = add(sums, slope, key, WIDTH)
    store(grad_q + batch * length * WIDTH, queries, length, sums, scale, WIDTH)


@triton.jit
def grad_keys(
    q, k, v, documents, lse, grad_h, shift, grad_k, grad_v, length,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute ∂k and ∂v (B, L, d) of a program's keys; see `grad_queries`."""
    batch = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    keys = first + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    q = q + batch * WIDTH * length
    grad_h = grad_h + batch * WIDTH * length
    if documents is not None:
        documents += batch * length
    key = vectors(k + batch * WIDTH * length, keys, length, WIDTH)
    value = vectors(v + batch * WIDTH * length, keys, length, WIDTH)
    key_document = document_of(keys, documents, length)
    key_sums = nothing(WIDTH, ROWS, COLUMNS)
    value_sums = nothing(WIDTH, ROWS, COLUMNS)
    for start in range(first if CAUSAL else 0, length, COLUMNS):
        queries = start + columns
        query = vectors(q, queries, length, WIDTH)
        grad = vectors(grad_h, queries, length, WIDTH)
        row_lse = tl.load(lse + batch * length + queries, mask=queries < length, other=0.0)
        offset = tl.load(shift + batch * length + queries, mask=queries < length, other=0.0)
        last, document = sight(queries, documents, length, CAUSAL)
        visible = (keys[:, None] <= last[None, :]) & (key_document[:, None] == document[None, :])
        grad_weight = product(value, grad, WIDTH)
        weight, slope = slopes(product(key, query, WIDTH), visible, row_lse[None, :], grad_weight, offset[None, :])
        key_sums = add(key_sums, slope, query, WIDTH)
        value_sums = add(value_sums, weight, grad, WIDTH)
    store(grad_k + batch * length * WIDTH, keys, length, key_sums, 1.0, WIDTH)
    store(grad_v + batch * length * WIDTH, keys, length, value_sums, 1.0, WIDTH)


@triton.jit(do_not_specialize=["count"])
def project(x, weight, out, count, width_in, width, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute out (N, d) = x (N, E)·weightᵀ, weight (d, E), in float64, each row in the same order."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = tl.arange(0, WIDTH)
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


@triton.jit(do_not_specialize=["candidates"])
def multiply(q, k, index, out, candidates, width, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute out (T, C) = q (T, d)·k[index] (T, C, d) in float64, each pair in the same order."""
    row = tl.program_id(0).to(tl.int64)
    coordinate = tl.arange(0, WIDTH)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < candidates
    pair = row * candidates + column
    a = tl.load(q + row * width + coordinate, mask=coordinate < width, other=0).to(tl.float64)
    key = tl.load(index + pair, mask=valid, other=0)
    inside = valid[:, None] & (coordinate < width)[None, :]
    b = tl.load(k + key[:, None] * width + coordinate[None, :], mask=inside, other=0).to(tl.float64)
    tl.store(out + pair, tl.sum(a[None, :] * b, 1), mask=valid)


_STEPS = tl.constexpr(256.0)
_HALVES = tl.constexpr(12582912.0)  # 1.5·2^23: adding it rounds to integers
_LAST = tl.constexpr((1 << 31) - 1)
_TAKEN = tl.constexpr(-(1 << 31))  # below every rank


@triton.jit
def rounded(score):
    """Return the nearest multiple of 1/256, ties to even; from 2^14 on, fp32 itself is that coarse."""
    steps = score * _STEPS
    return tl.where(tl.abs(steps) < 4194304.0, (steps + _HALVES) - _HALVES, steps)


@triton.jit
def likelihood(score, lse, SAMPLING: tl.constexpr):
    """Return p, or for "raw" its logarithm, whose range is larger."""
    if SAMPLING == "raw":
        p = score
    elif SAMPLING == "random":
        p = tl.full(score.shape, 1.0, tl.float32)
    else:
        root = tl.rsqrt(tl.maximum(lse - score, 0.0))  # negative only by rounding; a root is faster than 1/x
        p = root * root
        if SAMPLING == "inverse_log_squared":
            p = p * p
    return p


@triton.jit
def ranked(score, SIGNED: tl.constexpr):
    """Return int32 numbers in the order of the scores, whose maximum a warp finds in one instruction. Not SIGNED: all
    scores are nonnegative or −∞."""
    if SIGNED:
        bits = (score + 0.0).to(tl.int32, bitcast=True)  # −0 becomes 0
        rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        rank = score.to(tl.int32, bitcast=True)
    return rank


@triton.jit
def uniform(seeds, number, column):
    """Return `ops.random.random_bits` as one of the 2^23 numbers (n + ½)/2^23, exactly. seeds: the key's halves."""
    low, high = key_halves(tl.load(seeds), tl.load(seeds + 1))
    bits = mix(row_seed(number, low, high)[:, None] + mix(column.to(tl.uint32) + high)[None, :])
    above_one = ((bits >> 9) ^ 0x400000) | 0x3F800000  # 1 + n/2^23; flips the top bit because random_bits is signed
    return above_one.to(tl.float32, bitcast=True) - 0.99999994039535522


@triton.jit
def insert(rank, keys, best, index, worst):
    """Replace each row's worst stored rank by the row's highest rank (ROWS, COLUMNS) if that is higher, and remove it
    from `rank`. Of equal highest ranks the first is stored, of equal worst ranks the last replaced.
    """
    highest = tl.max(rank, 1)
    beats = highest > worst
    key = tl.min(tl.where(rank == highest[:, None], keys[None, :], _LAST), 1)
    out = tl.max(tl.where(best == worst[:, None], index, -_LAST), 1)
    replaced = (index == out[:, None]) & beats[:, None]
    best = tl.where(replaced, highest[:, None], best)
    index = tl.where(replaced, key[:, None], index)
    rank = tl.where((keys[None, :] == key[:, None]) & beats[:, None], _TAKEN, rank)
    return rank, best, index, tl.min(best, 1)


@triton.jit
def write(out, rows, queries, best, index, COUNT: tl.constexpr):
    """Write rows of `out` (Lq, K), best first, ties by smaller key; −1 in empty slots."""
    for slot in range(COUNT):
        highest = tl.max(best, 1)
        key = tl.min(tl.where(best == highest[:, None], index, _LAST), 1)
        tl.store(out + rows.to(tl.int64) * COUNT + slot, tl.maximum(key, -1), mask=rows < queries)
        written = index == key[:, None]
        best = tl.where(written, _TAKEN, best)
        index = tl.where(written, _LAST, index)


@triton.jit(do_not_specialize=["queries", "first_query"])  # decoding changes them at every token
def choose(
    q, k, lse, documents, numbers, seeds, out, queries, length, first_query,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr, COUNT: tl.constexpr, SAMPLING: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Compute out (B, H, Lq, K) int32 of a program's rows. numbers: (B, Lq) int64, row numbers. seeds: (H, tiles, 2)
    int32, the halves of the keys of every head and tile of TILE keys; None without draws. PLACES: K rounded up to a
    power of two. Avoid loops nested in branches: some assemblers miscompile them.
    """
    tl.static_assert(TILE % COLUMNS == 0)
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # causal rows with most visible keys start first
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    slots = tl.arange(0, PLACES)
    inside = rows < queries
    if documents is not None:
        documents += batch * length
    k += batch * WIDTH * length
    query = vectors(q + batch * WIDTH * queries, rows, queries, WIDTH)
    last, document = sight(rows + first_query, documents, length, CAUSAL)
    last = tl.where(inside, last, -1)
    if lse is not None:
        row_lse = tl.load(lse + batch * queries + rows, mask=inside, other=0.0)
    else:
        row_lse = tl.zeros((ROWS,), tl.float32)
    SIGNED: tl.constexpr = seeds is None or SAMPLING == "raw"
    worst = ranked(tl.full((ROWS,), -float("inf"), tl.float32), SIGNED)
    # Empty slots count down from −1, so that they differ; slots beyond K are never the worst.
    index = tl.zeros((ROWS, 1), tl.int32) - 1 - slots[None, :]
    best = tl.where(index >= -COUNT, worst[:, None], _LAST)
    end = tl.max(last, 0) + 1
    if seeds is not None:
        number = tl.load(numbers + batch * queries + rows, mask=inside, other=0)
        seeds += head * ((length + TILE - 1) // TILE) * 2
    for start in range(0, end, COLUMNS):
        keys = start + columns
        score = product(query, vectors(k, keys, length, WIDTH), WIDTH)
        score = rounded(score) if seeds is None else likelihood(score, row_lse[:, None], SAMPLING)
        visible = visible_pairs(keys, last, document, documents, length)
        score = tl.where(visible, score, -float("inf"))
        rank = ranked(score, SIGNED)
        promising = tl.max((rank > worst[:, None]).to(tl.int32))
        if seeds is not None:  # noqa: SIM102  (a compile-time branch in Triton)
            if promising > 0:  # otherwise no draw could win, because u < 1
                u = uniform(seeds + start // TILE * 2, number, keys % TILE)
                rank = ranked(score + tl.log(u) if SAMPLING == "raw" else score * u, SIGNED)
                promising = tl.max((rank > worst[:, None]).to(tl.int32))
        while promising > 0:
            rank, best, index, worst = insert(rank, keys, best, index, worst)
            promising = tl.max((rank > worst[:, None]).to(tl.int32))
    best = tl.where(slots[None, :] < COUNT, best, _TAKEN)
    index = tl.where(slots[None, :] < COUNT, index, _LAST)
    write(out + tl.program_id(1).to(tl.int64) * queries * COUNT, rows, queries, best, index, COUNT)


_LANES = 32  # lanes of a warp, one column each
_WARPS = 4
_CHOOSING = 4  # rows per program of `choose`


def sketched_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None = None, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `sketch.sketched_attention`. Any strides."""
    return _Attention.apply(q, k, v, causal, _documents(key_mask, segments))


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        batch, length, width = q.shape
        ctx.dtypes = [x.dtype for x in (q, k, v)]
        ctx.causal = causal
        q = _coordinates(q, width**-0.5)
        k = _coordinates(k)
        v = _coordinates(v)
        h = q.new_empty(batch, length, width)
        lse = q.new_empty(batch, length)
        _launch(attend, 8, q=q, k=k, v=v, documents=documents, h=h, lse=lse, CAUSAL=causal)
        ctx.save_for_backward(q, k, v, documents, h, lse)
        return h, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, documents, h, lse = ctx.saved_tensors
        grad_h, grad_lse = grads
        shift = (h * grad_h).sum(-1) - grad_lse
        shared = {"q": q, "k": k, "v": v, "documents": documents, "lse": lse, "shift": shift, "CAUSAL": ctx.causal}
        shared["grad_h"] = _coordinates(grad_h)
        grad_q, grad_k, grad_v = (torch.empty_like(h) for _ in range(3))
        _launch(grad_queries, 4, **shared, grad_q=grad_q, scale=q.shape[1] ** -0.5)
        _launch(grad_keys, 4, **shared, grad_k=grad_k, grad_v=grad_v)
        return *(x.to(d) for x, d in zip((grad_q, grad_k, grad_v), ctx.dtypes, strict=True)), None, None


def _launch(kernel: Any, most: int, q: Tensor, **values: Any) -> None:
    """Launch a kernel. most: rows per thread for d <= 4; larger d leaves registers for fewer."""
    batch, width, length = q.shape
    rows = _WARPS * max(1, min(most, 1 << (4 * most // width).bit_length() - 1))
    launch(
        kernel, (-(-length // rows), batch), q=q, **values, length=length, WIDTH=width, ROWS=rows, COLUMNS=_LANES,
        num_warps=_WARPS,
    )  # fmt: skip


@torch.no_grad()
def chosen_keys(
    q: Tensor, k: Tensor, spec: KeyChoiceSpec, noise: Noise | None, lse: Tensor | None = None,
    key_mask: Tensor | None = None, segments: Tensor | None = None, first_query: int = 0,
) -> Tensor:  # fmt: skip
    """Compute `sketch.chosen_keys` in fp32, for each pair by the same operations in the same order."""
    batch, queries, width = q.shape
    length = k.shape[1]
    heads = 1 if noise is None else len(noise.heads)
    out = q.new_empty(batch, heads, queries, spec.count, dtype=torch.int32)
    drawn = spec.sampling if noise is None or spec.sampling != "top_k" else "raw"
    needs_lse = noise is not None and spec.sampling.startswith("inverse_log")
    launch(
        choose, (-(-queries // _CHOOSING), batch * heads),
        q=_coordinates(q, width**-0.5), k=_coordinates(k),
        lse=lse.float().contiguous() if needs_lse and lse is not None else None,
        documents=_documents(key_mask, segments),
        numbers=None if noise is None else noise.rows.contiguous(),
        seeds=None if noise is None else noise.tiles(length),
        out=out, queries=queries, length=length, first_query=first_query,
        WIDTH=width, CAUSAL=spec.causal, HEADS=heads, COUNT=spec.count, SAMPLING=drawn, TILE=KEYS,
        ROWS=_CHOOSING, COLUMNS=64, PLACES=max(_LANES, triton.next_power_of_2(spec.count)), num_warps=1,
    )  # fmt: skip
    return out


def _coordinates(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return x (B, L, d) as (B, d, L) fp32, times `scale`."""
    return x.float().mul(scale).transpose(1, 2).contiguous()


def _documents(key_mask: Tensor | None, segments: Tensor | None) -> Tensor | None:
    """Return the document of every token, (B, L) int32, `PADDING` for padding; None if there is only one document."""
    if key_mask is None:
        return None if segments is None else segments.to(torch.int32).contiguous()
    inside = torch.zeros_like(key_mask, dtype=torch.int32) if segments is None else segments.to(torch.int32)
    return torch.where(key_mask, inside, PADDING.value).contiguous()


def exact_projection(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `sketch.exact_projection` in one launch."""
    rows = x.reshape(-1, x.shape[2])
    width = len(weight)
    out = x.new_empty(len(rows), width, dtype=torch.float64)
    wide = triton.next_power_of_2(width)
    launch(
        project, (-(-len(rows) * wide // 64),), x=rows, weight=weight.contiguous(), out=out, count=len(rows),
        width_in=rows.shape[1], width=width, WIDTH=wide, ROWS=64 // wide, COLUMNS=64, num_warps=_WARPS,
    )  # fmt: skip
    return out.view(*x.shape[:2], width)


def gathered_products(q: Tensor, k: Tensor, index: Tensor) -> Tensor:
    """Compute `sketch.gathered_products` without storing the gathered rows."""
    candidates = index.shape[1]
    width = q.shape[1]
    out = q.new_empty(index.shape, dtype=torch.float64)
    launch(
        multiply, (len(q), -(-candidates // 64)), q=q.contiguous(), k=k.contiguous(), index=index.contiguous(),
        out=out, candidates=candidates, width=width, WIDTH=triton.next_power_of_2(width), COLUMNS=64,
    )  # fmt: skip
    return out
