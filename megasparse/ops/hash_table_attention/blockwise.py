"""YOSO attention over hash tables: linear memory, forward and backward, deterministic on a CPU.

One hash at a time, each key adds its value to the table's row of its code, each query reads the row of its own code:
Σ_j [same code] v_j without a pair in sight. Causal attention goes chunk by chunk: a chunk's queries read the tables of
all earlier chunks, then its keys are added; inside the chunk collisions are counted pair by pair.

The backward (Eq. 10 and 12) is the same sum with other values. With B for the collision matrix and g for the
gradient of the output,
    ∇v = Bᵀg,   ∇q_i = τ/2 Σ_j B_ij (g_i·v_j) k_j = τ/2 Σ_l g_il Σ_j B_ij v_jl k_j,   ∇k likewise:
B applied to v_l·k for every column l of v (`tables`, cost L·m·D²), or summed over the pairs that collide (`pairs`).
It uses the very codes of its forward.

B batch, H heads, L length, D head dim, m hashes, τ code bits, G rows (a batch element's head) at a time, T buckets,
C chunk, X columns.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megasparse.ops.autocast import Function, without_autocast
from megasparse.ops.blocks import at_most
from megasparse.ops.hash_table_attention.layout import Buckets, buckets, groups, row_slices
from megasparse.ops.hash_table_attention.pairs import pair_gradients
from megasparse.ops.hash_table_attention.specification import HashTableAttentionSpec

_ROW_ELEMENTS = 1 << 22  # numbers of a row group
_TABLE_ELEMENTS = 1 << 18  # numbers in the tables of several hashes: 1 MB of fp32; more only where one hash has more
_PAIR_COST = 2  # of a colliding pair, per number, over that of a number that goes through the tables: measured on a CPU


@without_autocast
def hash_table_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_codes: Tensor,
    k_codes: Tensor,
    spec: HashTableAttentionSpec,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `operator.hash_table_attention` in blocks of rows."""
    group = groups(q, k, query_mask, key_mask, segments)
    return _HashTableAttention.apply(q, k, v, q_codes, k_codes, group, spec)


class _HashTableAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor,
        group: tuple[Tensor, Tensor] | None, spec: HashTableAttentionSpec,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype = torch.promote_types(v.dtype, torch.float32)
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
        total = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
        for place in _places(q, k, q_codes, spec):
            meet = _buckets(q_codes, k_codes, group, place, spec)
            values = v.flatten(0, 1)[place].to(dtype)
            # One more column, of ones, counts the collisions.
            values = torch.cat([values, torch.ones_like(values[..., :1])], dim=-1)
            both = _through_tables(meet.keys, meet.queries, meet.tables, values, spec.causal_chunk)
            for piece, count in _chunks(meet, spec.causal_chunk, dtype):
                both[:, piece] += count @ values[:, piece]
            both /= q_codes.shape[2]
            out.flatten(0, 1)[place], total.flatten(0, 1)[place] = both[..., :-1], both[..., -1]
        ctx.spec, ctx.group = spec, group
        ctx.save_for_backward(q, k, v, q_codes, k_codes, total)
        ctx.mark_non_differentiable(total)
        return out, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, q_codes, k_codes, total = ctx.saved_tensors
        spec: HashTableAttentionSpec = ctx.spec
        dtype, hashes = total.dtype, q_codes.shape[2]
        dq, dk, dv = (torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
        for place in _places(q, k, q_codes, spec):
            meet = _buckets(q_codes, k_codes, ctx.group, place, spec)
            rows_q, rows_k, rows_v, g = (x.flatten(0, 1)[place].to(dtype) for x in (q, k, v, grads[0]))
            into_v = _through_tables(meet.queries, meet.keys, meet.tables, g, spec.causal_chunk, reverse=True)
            for piece, count in _chunks(meet, spec.causal_chunk, dtype):
                into_v[:, piece] += count.transpose(1, 2) @ g[:, piece]
            collisions = total.flatten(0, 1)[place].sum() * hashes
            if _prefers_pairs(spec, collisions, meet, q.shape[3]):
                into_q, into_k = pair_gradients(rows_q, rows_k, rows_v, g, meet, causal=spec.causal)
            else:
                into_q, into_k = _table_gradients(rows_q, rows_k, rows_v, g, meet, spec.causal_chunk)
            factor = spec.code_bits / (2 * hashes)
            dq.flatten(0, 1)[place], dk.flatten(0, 1)[place] = into_q.mul_(factor), into_k.mul_(factor)
            dv.flatten(0, 1)[place] = into_v.div_(hashes)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _places(q: Tensor, k: Tensor, codes: Tensor, spec: HashTableAttentionSpec) -> Iterator[slice]:
    each = (q.shape[2] + k.shape[2]) * (q.shape[3] + codes.shape[2]) + (spec.causal_chunk or 0) ** 2
    return row_slices(q.shape[0] * q.shape[1], _ROW_ELEMENTS, each)


def _buckets(
    q_codes: Tensor, k_codes: Tensor, group: tuple[Tensor, Tensor] | None, place: slice, spec: HashTableAttentionSpec
) -> Buckets:
    mine = None if group is None else (group[0][place], group[1][place])
    return buckets(q_codes.flatten(0, 1)[place], k_codes.flatten(0, 1)[place], mine, spec.code_bits)


def _prefers_pairs(spec: HashTableAttentionSpec, collisions: Tensor, meet: Buckets, head_dim: int) -> bool:
    """The paper's min(L·m·D², nnz·(m + D)), with every collision for one of the nnz pairs."""
    if spec.backward != "auto":
        return spec.backward == "pairs"
    rows, hashes, length = meet.queries.shape
    over_tables = rows * hashes * (length + meet.keys.shape[2]) * head_dim**2
    return collisions.item() * _PAIR_COST * (hashes + head_dim) < over_tables


def _through_tables(
    source: Tensor, target: Tensor, tables: int, values: Tensor, chunk: int | None, reverse: bool = False
) -> Tensor:
    """Σ_h Σ_j [same bucket in hash h] values_j over all sources j, or over those in earlier (later) chunks.

    source: (G, m, Ls), target: (G, m, Lt) buckets < tables. values: (G, Ls, X). Returns (G, Lt, X).
    """
    rows, hashes, length = target.shape
    width = values.shape[2]
    out = values.new_zeros(rows, length, width)
    whole = slice(0, None)
    pieces = [whole] if chunk is None else [slice(i, min(i + chunk, length)) for i in range(0, length, chunk)]
    for some in row_slices(hashes, _TABLE_ELEMENTS, rows * width * max(tables, length, source.shape[2])):
        into, out_of = source[:, some], target[:, some]  # (G, m', L)
        first = torch.arange(rows * into.shape[1], device=values.device).view(rows, -1, 1) * tables
        into, out_of = into + first, out_of + first
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
    every = values[:, None].expand(-1, into.shape[1], -1, -1)  # (G, m', L, X)
    table.index_add_(0, into.flatten(), every.flatten(0, 2))


def _chunks(meet: Buckets, chunk: int | None, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Every chunk with its collision counts (G, C, C), zero where the key is later than the query."""
    if chunk is None:
        return
    rows, hashes, length = meet.queries.shape
    for start in range(0, length, chunk):
        piece = slice(start, min(start + chunk, length))
        size = piece.stop - start
        count = torch.zeros(rows, size, size, dtype=dtype, device=meet.keys.device)
        for some in row_slices(hashes, _TABLE_ELEMENTS, count.numel()):
            count += (meet.queries[:, some, piece, None] == meet.keys[:, some, None, piece]).sum(1)
        yield piece, count.tril_()


def _table_gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, meet: Buckets, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """Σ_j c_ij (g_i·v_j) k_j for each query and Σ_i c_ij (g_i·v_j) q_i for each key, c_ij: hashes they collide in."""
    into_q, into_k = torch.zeros_like(q), torch.zeros_like(k)
    tallest = max(meet.tables, q.shape[1], k.shape[1])
    slab = max(1, at_most(_ROW_ELEMENTS) // (2 * len(q) * tallest * q.shape[2]))
    for start in range(0, v.shape[2], slab):
        columns = slice(start, start + slab)
        outer = (v[..., columns, None] * k[..., None, :]).flatten(2)  # (G, Lk, slab·D)
        read = _through_tables(meet.keys, meet.queries, meet.tables, outer, chunk)
        into_q += (g[..., columns, None] * read.unflatten(-1, (-1, k.shape[2]))).sum(2)
        outer = (g[..., columns, None] * q[..., None, :]).flatten(2)  # (G, Lq, slab·D)
        read = _through_tables(meet.queries, meet.keys, meet.tables, outer, chunk, reverse=True)
        into_k += (v[..., columns, None] * read.unflatten(-1, (-1, q.shape[2]))).sum(2)
    for piece, count in _chunks(meet, chunk, q.dtype):
        weight = count * (g[:, piece] @ v[:, piece].transpose(1, 2))
        into_q[:, piece] += weight @ k[:, piece]
        into_k[:, piece] += weight.transpose(1, 2) @ q[:, piece]
    return into_q, into_k
