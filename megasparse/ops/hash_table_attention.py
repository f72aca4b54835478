"""Attention by Bernoulli sampling (YOSO): values are summed in hash tables, which queries read by their codes.

The blockwise form is deterministic on a CPU. In each hash, a key adds its value to the table row of its code, and a
query reads the row of its code: Σ_j [same code] v_j without enumerating pairs. Causal attention proceeds by chunks: a
chunk's queries read the tables of all earlier chunks, then its keys are added; collisions inside the chunk are counted
pair by pair.

The backward (Eq. 10 and 12) is the same sum with other values. With the collision matrix B and the gradient g of the
output, ∇v = Bᵀg, ∇q_i = τ/2 Σ_j B_ij (g_i·v_j) k_j = τ/2 Σ_l g_il Σ_j B_ij v_jl k_j, ∇k likewise: either B applied to
v_l·k for every column l of v (`tables`, cost L·m·D²), or a sum over colliding pairs (`pairs`, Eq. 22, cost nnz·(m +
D)).

m hashes, τ code bits, G rows (heads of batch elements) at a time, T buckets, C chunk, X columns.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasparse.ops.operator import Function, operator, wide_dtype, without_autocast

_ROW_ELEMENTS = 1 << 22  # numbers per row group
_TABLE_ELEMENTS = 1 << 18  # numbers in the tables of several hashes, at least one hash: 1 MB of fp32
_PAIR_COST = 2  # cost per number of a colliding pair relative to a number in the tables, measured on a CPU
_BLOCK_PAIRS = 1 << 15  # collisions per block, at least one query
_QUERIES = 64  # queries per tile of expected weights
_TILE_ELEMENTS = 1 << 18  # weights per tile: 1 MB of fp32


@dataclass(frozen=True)
class HashTableAttentionSpec:
    """Settings of YOSO attention. code_bits: τ. chunk: causal positions per chunk; affects only the speed on a CPU."""

    code_bits: int
    causal: bool
    chunk: int = 128

    @property
    def causal_chunk(self) -> int | None:
        """The chunk, None if attention is bidirectional."""
        return self.chunk if self.causal else None


@operator(decides=2)
def hash_table_attention(
    q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor, spec: HashTableAttentionSpec,
    key_mask: Tensor | None = None, segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute out_i = Σ_j B_ij v_j, B_ij = 1/m Σ_h [code_h(q_i) = code_h(k_j)] over the keys visible to i (YOSO Eq. 5
    and 9).

    Args:
        q, k: (B, H, Lq, D) and (B, H, Lk, D), unit vectors, used only for the gradient: ∂B_ij/∂(q_i·k_j) is defined as
            τ/2·B_ij, the lower bound of the paper.
        v: (B, H, Lk, D).
        q_codes, k_codes: (B, H, m, Lq) and (B, H, m, Lk), integers below 2^code_bits.
        spec: Code bits and causality.
        key_mask: (B, L) bool, true for real tokens, with Lq = Lk. Padding is excluded as query (output 0) and as key.
        segments: (B, L) document numbers >= 0; documents never attend to each other.

    Returns:
        out (B, H, Lq, D) and B's row sums (B, H, Lq), the mean number of keys per hash that collide with a query (not
        differentiable); both in fp32 or wider.
    """
    return _HashTableAttention.apply(q, k, v, q_codes, k_codes, groups(q, k, key_mask, segments), spec)


def groups(q: Tensor, k: Tensor, key_mask: Tensor | None, segments: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return numbers (B·H, Lq) and (B·H, Lk) that are equal for exactly the visible query-key pairs; None if all pairs
    are visible. A real token's number is its document (>= 0).
    """
    if key_mask is None and segments is None:
        return None
    numbers = []
    for x, masked in ((q, -1), (k, -2)):
        number = torch.zeros(x.shape[0], x.shape[2], dtype=torch.int64, device=x.device)
        if segments is not None:
            number = segments.to(torch.int64)
        if key_mask is not None:
            number = number.masked_fill(~key_mask, masked)
        numbers.append(number[:, None].expand(-1, x.shape[1], -1).flatten(0, 1))
    return numbers[0], numbers[1]


def row_slices(rows: int, elements: int, size: int) -> Iterator[slice]:
    """Yield slices of all rows, of at most `elements` numbers, `size` per row (at least one row)."""
    step = max(1, elements // max(1, size))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class HashCodes(NamedTuple):
    """Hash codes of queries (G, m, Lq) and keys (G, m, Lk), in [0, tables)."""

    queries: Tensor
    keys: Tensor
    tables: int


def _buckets(
    q_codes: Tensor, k_codes: Tensor, group: tuple[Tensor, Tensor] | None, part: slice, code_bits: int
) -> HashCodes:
    """Return the codes of some rows if 2^τ <= Lq + Lk and all pairs are visible, else dense indices of (group, code)
    per row.
    """
    q_codes, k_codes = (codes.flatten(0, 1)[part] for codes in (q_codes, k_codes))  # (G, m, Lq) and (G, m, Lk)
    length = q_codes.shape[2]
    most = length + k_codes.shape[2]
    if group is None and 1 << code_bits <= most:
        return HashCodes(q_codes, k_codes, 1 << code_bits)
    dense = q_codes.new_empty(*q_codes.shape[:2], most, dtype=torch.int32)
    first = None if group is None else torch.cat([number[part] for number in group], dim=-1) << code_bits
    for hash_ in range(q_codes.shape[1]):
        both = torch.cat([q_codes[:, hash_], k_codes[:, hash_]], dim=-1).to(torch.int64)  # (G, Lq + Lk)
        ordered, order = torch.sort(both if first is None else both + first, dim=-1)
        number = torch.zeros_like(ordered)
        number[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(-1)
        dense[:, hash_].scatter_(-1, order, number.to(torch.int32))
    return HashCodes(dense[..., :length], dense[..., length:], most)


class _HashTableAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor,
        group: tuple[Tensor, Tensor] | None, spec: HashTableAttentionSpec,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype = wide_dtype(v)
        out = q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)
        total = q.new_empty(q.shape[:3], dtype=dtype)
        for part in _parts(q, k, q_codes, spec):
            codes = _buckets(q_codes, k_codes, group, part, spec.code_bits)
            values = v.flatten(0, 1)[part].to(dtype)  # (G, Lk, D)
            # An extra column of ones counts the collisions.
            values = torch.cat([values, torch.ones_like(values[..., :1])], dim=-1)  # (G, Lk, D + 1)
            both = _through_tables(codes.keys, codes.queries, codes.tables, values, spec.causal_chunk)
            for piece, count in _chunks(codes, spec.causal_chunk, dtype):
                both[:, piece] += count @ values[:, piece]
            both /= q_codes.shape[2]
            out.flatten(0, 1)[part] = both[..., :-1]
            total.flatten(0, 1)[part] = both[..., -1]
        ctx.spec = spec
        ctx.group = group
        ctx.save_for_backward(q, k, v, q_codes, k_codes, total)
        ctx.mark_non_differentiable(total)
        return out, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, q_codes, k_codes, total = ctx.saved_tensors
        spec: HashTableAttentionSpec = ctx.spec
        dtype = total.dtype
        hashes = q_codes.shape[2]
        dq, dk, dv = (torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
        for part in _parts(q, k, q_codes, spec):
            codes = _buckets(q_codes, k_codes, ctx.group, part, spec.code_bits)
            rows_q, rows_k, rows_v, g = (x.flatten(0, 1)[part].to(dtype) for x in (q, k, v, grads[0]))
            into_v = _through_tables(codes.queries, codes.keys, codes.tables, g, spec.causal_chunk, reverse=True)
            for piece, count in _chunks(codes, spec.causal_chunk, dtype):
                into_v[:, piece] += count.transpose(1, 2) @ g[:, piece]
            # The costs of the paper's min(L·m·D², nnz·(m + D))
            over_tables = len(rows_q) * hashes * (q.shape[2] + k.shape[2]) * q.shape[3] ** 2
            collisions = total.flatten(0, 1)[part].sum() * hashes
            if collisions.item() * _PAIR_COST * (hashes + q.shape[3]) < over_tables:
                into_q, into_k = _pair_gradients(rows_q, rows_k, rows_v, g, codes, causal=spec.causal)
            else:
                into_q, into_k = _table_gradients(rows_q, rows_k, rows_v, g, codes, spec.causal_chunk)
            factor = spec.code_bits / (2 * hashes)
            dq.flatten(0, 1)[part] = into_q.mul_(factor)
            dk.flatten(0, 1)[part] = into_k.mul_(factor)
            dv.flatten(0, 1)[part] = into_v.div_(hashes)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _parts(q: Tensor, k: Tensor, codes: Tensor, spec: HashTableAttentionSpec) -> Iterator[slice]:
    size = (q.shape[2] + k.shape[2]) * (q.shape[3] + codes.shape[2]) + (spec.causal_chunk or 0) ** 2
    return row_slices(q.shape[0] * q.shape[1], _ROW_ELEMENTS, size)


def _through_tables(
    source: Tensor, target: Tensor, tables: int, values: Tensor, chunk: int | None, reverse: bool = False
) -> Tensor:
    """Return Σ_h Σ_j [same bucket in hash h] values_j over all sources j, or those in earlier (later) chunks.

    source: (G, m, Ls), target: (G, m, Lt) buckets < tables. values: (G, Ls, X). Returns (G, Lt, X).
    """
    rows, hashes, length = target.shape
    width = values.shape[2]
    out = values.new_zeros(rows, length, width)
    whole = slice(0, None)
    pieces = [whole] if chunk is None else [slice(i, min(i + chunk, length)) for i in range(0, length, chunk)]
    for subset in row_slices(hashes, _TABLE_ELEMENTS, rows * width * max(tables, length, source.shape[2])):
        into = source[:, subset]  # (G, m', L)
        out_of = target[:, subset]
        first = torch.arange(rows * into.shape[1], device=values.device).view(rows, -1, 1) * tables
        into = into + first
        out_of = out_of + first
        table = values.new_zeros(first.numel() * tables, width)
        if chunk is None:
            _add(table, into, values)
        for piece in reversed(pieces) if reverse else pieces:
            out[:, piece] += table[out_of[..., piece]].sum(1)
            if chunk is not None:
                _add(table, into[..., piece], values[:, piece])
    return out


def _add(table: Tensor, into: Tensor, values: Tensor) -> None:
    """Add values (G, L, X) into rows `into` (G, m', L) of the table."""
    repeated = values[:, None].expand(-1, into.shape[1], -1, -1)  # (G, m', L, X)
    table.index_add_(0, into.flatten(), repeated.flatten(0, 2))


def _chunks(codes: HashCodes, chunk: int | None, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield every chunk with its collision counts (G, C, C), zero if the key is later than the query."""
    if chunk is None:
        return
    rows, hashes, length = codes.queries.shape
    for start in range(0, length, chunk):
        piece = slice(start, min(start + chunk, length))
        size = piece.stop - start
        count = torch.zeros(rows, size, size, dtype=dtype, device=codes.keys.device)
        for subset in row_slices(hashes, _TABLE_ELEMENTS, count.numel()):
            count += (codes.queries[:, subset, piece, None] == codes.keys[:, subset, None, piece]).sum(1)
        yield piece, count.tril_()


def _table_gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, codes: HashCodes, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """Return Σ_j c_ij (g_i·v_j) k_j for each query and Σ_i c_ij (g_i·v_j) q_i for each key, of c_ij collisions."""
    into_q = torch.zeros_like(q)
    into_k = torch.zeros_like(k)
    slab = max(1, _ROW_ELEMENTS // (2 * len(q) * max(codes.tables, q.shape[1], k.shape[1]) * q.shape[2]))
    for start in range(0, v.shape[2], slab):
        columns = slice(start, start + slab)
        outer = (v[..., columns, None] * k[..., None, :]).flatten(2)  # (G, Lk, slab·D)
        read = _through_tables(codes.keys, codes.queries, codes.tables, outer, chunk)
        into_q += (g[..., columns, None] * read.unflatten(-1, (-1, k.shape[2]))).sum(2)
        outer = (g[..., columns, None] * q[..., None, :]).flatten(2)  # (G, Lq, slab·D)
        read = _through_tables(codes.queries, codes.keys, codes.tables, outer, chunk, reverse=True)
        into_k += (v[..., columns, None] * read.unflatten(-1, (-1, q.shape[2]))).sum(2)
    for piece, count in _chunks(codes, chunk, q.dtype):
        weight = count * (g[:, piece] @ v[:, piece].transpose(1, 2))
        into_q[:, piece] += weight @ k[:, piece]
        into_k[:, piece] += weight.transpose(1, 2) @ q[:, piece]
    return into_q, into_k


def _pair_gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, codes: HashCodes, causal: bool
) -> tuple[Tensor, Tensor]:
    """Compute `_table_gradients` by pairs. q, g: (G, Lq, D). k, v: (G, Lk, D)."""
    order, starts, sizes = _key_runs(codes, causal)
    # Contiguous for any strides of q and k, because `flatten` of the targets must not copy
    into_q, into_k = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k))
    sources = [x.flatten(0, 1) for x in (q, k, v, g)]  # (G·L, D)
    targets = [x.flatten(0, 1) for x in (into_q, into_k)]  # (G·L, D)
    for first, last in _query_ranges(sizes):
        start, size = (x[first:last].flatten().to(torch.int64) for x in (starts, sizes))
        query, key, count = _colliding(order, start, size, first, q.shape[1])
        # Split further, because a single query can exceed a block
        for i, j, c in zip(*(x.split(_BLOCK_PAIRS) for x in (query, key, count)), strict=True):
            weight = ((sources[3][i] * sources[2][j]).sum(-1) * c)[:, None]
            targets[0].index_add_(0, i, sources[1][j] * weight)
            targets[1].index_add_(0, j, sources[0][i] * weight)
    return into_q, into_k


def _key_runs(codes: HashCodes, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return key numbers (G, m, Lk), and the start and size, (G·Lq, m), of each query's run of colliding ones."""
    rows, hashes, length = codes.queries.shape
    keys = codes.keys.shape[2]
    position = torch.arange(keys, device=codes.keys.device)
    latest = torch.arange(length, device=position.device) if causal else keys - 1
    order = position.new_empty(rows, hashes, keys, dtype=torch.int32)
    start = position.new_empty(rows, length, hashes, dtype=torch.int32)
    size = torch.empty_like(start)
    for hash_ in range(hashes):
        # Sorted by (bucket, position), a bucket's keys up to a position are a run.
        ordered, order[:, hash_] = torch.sort(codes.keys[:, hash_].to(torch.int64) * keys + position, dim=-1)
        lowest = codes.queries[:, hash_].to(torch.int64) * keys
        begin = torch.searchsorted(ordered, lowest)
        start[..., hash_] = begin
        size[..., hash_] = torch.searchsorted(ordered, lowest + latest, right=True) - begin
    return order, start.flatten(0, 1), size.flatten(0, 1)


def _query_ranges(size: Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of queries with about one block of collisions each."""
    through = size.sum(1, dtype=torch.int64).cumsum(0)  # cumulative number of collisions
    first = finished = 0
    while first < len(size):
        last = int(torch.searchsorted(through, finished + _BLOCK_PAIRS, right=True))
        last = max(last, first + 1)
        finished = int(through[last - 1])
        yield first, last
        first = last


def _colliding(order: Tensor, start: Tensor, size: Tensor, first: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct pairs of queries from `first` of G·Lq on: query, key of G·Lk, and number of collisions."""
    hashes, keys = order.shape[1:]
    run = torch.repeat_interleave(torch.arange(len(size), device=size.device), size)  # run of each collision
    within = torch.arange(len(run), device=size.device) - (size.cumsum(0) - size)[run]
    query = run // hashes  # counted from `first`
    row = (query + first) // length
    key = order.flatten()[(row * hashes + run % hashes) * keys + start[run] + within]
    pair, count = torch.unique(query * keys + key, return_counts=True)
    query = pair // keys + first
    return query, pair % keys + query // length * keys, count


@without_autocast
def expected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: HashTableAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute out_i = Σ_j W_ij v_j, W_ij = (1 − acos(q_i·k_j)/π)^τ over the keys visible to i (YOSO Eq. 4).

    This is the limit of `hash_table_attention` for infinitely many hashes, with the same masks. The cosine is clamped
    to [−1, 1]; ∂W_ij/∂(q_i·k_j) is the paper's lower bound τ/2·W_ij (Eq. 19), which is finite everywhere. Returns out
    (B, H, Lq, D) and W's row sums (B, H, Lq), in fp32 or wider.
    """
    assert not spec.causal or q.shape[2] == k.shape[2]
    return _ExpectedAttention.apply(q, k, v, groups(q, k, key_mask, segments), spec)


def _tiles(
    q: Tensor, k: Tensor, group: tuple[Tensor, Tensor] | None, spec: HashTableAttentionSpec
) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Yield the tiles of all pairs: rows, queries, keys that may be visible to them, and the weights (G, T, Lk)."""
    height = min(_QUERIES, q.shape[1])
    for rows in row_slices(len(q), _TILE_ELEMENTS, height * k.shape[1]):
        for start in range(0, q.shape[1], height):
            queries = slice(start, min(start + height, q.shape[1]))
            keys = slice(0, queries.stop if spec.causal else k.shape[1])
            weight = torch.bmm(q[rows, queries], k[rows, keys].transpose(1, 2)).clamp_(-1.0, 1.0)
            weight = _power(weight.acos_().mul_(-1 / math.pi).add_(1.0).clamp_min_(0.0), spec.code_bits)
            if spec.causal:
                weight = weight.tril_(start)
            if group is not None:
                weight = weight.mul_(group[0][rows, queries, None] == group[1][rows, None, keys])
            yield rows, queries, keys, weight


def _power(x: Tensor, n: int) -> Tensor:
    """Return x^n, n >= 1, by repeated squaring, ten times as fast as torch.pow. Overwrites x."""
    result = x if n & (n - 1) == 0 else x.clone()
    for bit in bin(n)[3:]:
        result.square_()
        if bit == "1":
            result *= x
    return result


class _ExpectedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: tuple[Tensor, Tensor] | None, spec: HashTableAttentionSpec,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.group = group
        ctx.spec = spec
        ctx.save_for_backward(q, k, v)
        dtype = wide_dtype(v)
        flat_q, flat_k, flat_v = (x.flatten(0, 1).to(dtype) for x in (q, k, v))  # (G, L, D)
        out = v.new_empty(*flat_q.shape[:2], v.shape[3], dtype=dtype)
        total = v.new_empty(flat_q.shape[:2], dtype=dtype)
        for rows, queries, keys, weight in _tiles(flat_q, flat_k, group, spec):
            out[rows, queries] = torch.bmm(weight, flat_v[rows, keys])
            total[rows, queries] = weight.sum(-1)
        out = out.view(*q.shape[:3], -1)  # (B, H, Lq, D)
        total = total.view(q.shape[:3])  # (B, H, Lq)
        ctx.mark_non_differentiable(total)
        return out, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        dtype = grads[0].dtype
        q, k, v, g = (x.flatten(0, 1).to(dtype) for x in (*saved, grads[0]))  # (G, L, D)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for rows, queries, keys, weight in _tiles(q, k, ctx.group, ctx.spec):
            dv[rows, keys] += torch.bmm(weight.transpose(1, 2), g[rows, queries])
            weight *= torch.bmm(g[rows, queries], v[rows, keys].transpose(1, 2))
            torch.bmm(weight, k[rows, keys], out=dq[rows, queries])
            dk[rows, keys] += torch.bmm(weight.transpose(1, 2), q[rows, queries])
        dq.mul_(ctx.spec.code_bits / 2)
        dk.mul_(ctx.spec.code_bits / 2)
        return *(x.view_as(y).to(y.dtype) for x, y in zip((dq, dk, dv), saved, strict=True)), None, None
