"""Linear attention, whose weights are products of positive random features (Performer), and these features.

out_i = Σ_f φ_f(q_i) S_f / Σ_f φ_f(q_i) n_f with S_f = Σ_j φ_f(k_j) v_j and n_f = Σ_j φ_f(k_j) over the visible keys, by
running sums over tiles of the sequence. Features can exceed the range of floats, so sums of feature f are stored
relative to its largest exponent c_f so far, and a query divides by its largest exponent over f, including c_f. The
largest term of every denominator is then 1. Factors common to numerator and denominator (1/√F, exp(−|q|²/2)) are
omitted. F features, T tokens per tile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.ops.operator import Function, at_least_fp32, without_autocast
from megasparse.ops.random import Key, normal, subkey
from megasparse.ops.tiled import tiled

_TILE = 1024  # largest T
_TILE_ELEMENTS = 1 << 22  # exponents per tile


def orthogonal_projections(key: Key, heads: range, features: int, head_dim: int, device: torch.device) -> Tensor:
    """Return (H, F, D) fp32: rows ω, each a standard normal vector, in blocks of D mutually orthogonal rows.

    A function of (key, global head index, row), drawn on the CPU for every device.
    """
    blocks = -(-features // head_dim)
    head = torch.arange(heads.start, heads.stop).unsqueeze(1) * (1 << 16)
    rows = head + torch.arange(blocks)  # (H, blocks)
    shape = (len(heads), blocks, head_dim, head_dim)
    directions, lengths = (normal(subkey(key, part), rows, head_dim**2).view(shape) for part in ("rows", "lengths"))
    orthogonal, upper = torch.linalg.qr(directions.double())
    # A factor with a positive diagonal is unique and makes the directions uniformly distributed.
    orthogonal = orthogonal * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    projection = orthogonal.transpose(-1, -2) * lengths.double().norm(dim=-1, keepdim=True)
    return projection.flatten(1, 2)[:, :features].float().to(device)


class State(NamedTuple):
    """Sums over the keys so far. total: (B, H, F, D + 1), Σ_j exp(e_jf − c_f)·[v_j, 1]. level: (B, H, 1, F), c_f."""

    total: Tensor
    level: Tensor

    @staticmethod
    def empty(batch: int, projection: Tensor, dtype: torch.dtype) -> "State":
        """Return the state before any key. projection: (H, F, D)."""
        heads, features, head_dim = projection.shape
        like = at_least_fp32(projection.new_empty(0, dtype=dtype))
        level = like.new_full((batch, heads, 1, features), torch.finfo(like.dtype).min)
        return State(like.new_zeros(batch, heads, features, head_dim + 1), level)


@without_autocast
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, projection: Tensor, *, scale: float, key_mask: Tensor | None = None
) -> Tensor:
    """Compute out_i = Σ_j A_ij v_j / Σ_j A_ij over all real keys, A_ij = φ(√scale·q_i)·φ(√scale·k_j) (Performer,
    Eq. 4–5).

    q: (B, H, Lq, D). k, v: (B, H, Lk, D). projection: (H, F, D), rows ω of positive random features. key_mask: (B, Lk)
    bool, true for real tokens. Returns (B, H, Lq, D) in q's dtype; 0 without a real key. Sums in fp32 or wider.
    """

    def absorb(state: State, k: Tensor, v: Tensor, real: Tensor) -> tuple[State, Tensor]:
        e = _key_exponents(k, real, projection, scale)
        level = torch.maximum(e.detach().amax(2, keepdim=True), state.level)
        return _add(state, e, _with_one(v, e.dtype), level), v[..., :0]

    def read(q: Tensor, total: Tensor, level: Tensor) -> Tensor:
        e = _query_exponents(q.transpose(1, 2), projection, scale) + level  # (B, H, T, F)
        return _divided(torch.exp(e - e.detach().amax(-1, keepdim=True)) @ total).to(q.dtype).transpose(1, 2)

    empty = State.empty(q.shape[0], projection, q.dtype)
    _, total, level = _Scan.apply(absorb, _TILE, 3, k, v, _column(k, key_mask), *empty)
    return tiled(read, [q.transpose(1, 2)], [total, level], -(-q.shape[2] // _TILE)).transpose(1, 2)


@without_autocast
def causal_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, projection: Tensor, *, scale: float, chunk: int, key_mask: Tensor | None = None,
    state: State | None = None,
) -> tuple[Tensor, State]:  # fmt: skip
    """Compute `linear_attention` over the keys at or before i; q, k, v: (B, H, L, D).

    state: state after the previous tokens, or None. chunk: pairs within this distance are scored one by one, others
    through sums; affects only speed. Returns out and the state after these tokens.
    """

    def step(state: State, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> tuple[State, Tensor]:
        length = q.shape[2]
        missing = (1 << (length - 1).bit_length()) - length  # padding to a power of two
        q, k, v, real = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v, real))
        query = _query_exponents(q, projection, scale)
        key = _key_exponents(k, real, projection, scale)
        with torch.no_grad():
            levels = torch.maximum(key.cummax(dim=2).values, state.level)  # (B, H, T, F), c at each token
            top = (query + levels).amax(-1, keepdim=True)  # (B, H, T, 1)
        values = _with_one(v, key.dtype)
        out = torch.exp(query + state.level - top) @ state.total + _within(query, key, values, top, chunk)
        out = _divided(out)[:, :, :length].to(q.dtype)
        return _add(state, key, values, levels[:, :, -1:]), out

    state = State.empty(q.shape[0], projection, q.dtype) if state is None else state
    tile = min(_TILE, _TILE_ELEMENTS // (q.shape[0] * projection.shape[:2].numel()))
    out, *after = _Scan.apply(step, max(tile, chunk), 4, q, k, v, _column(k, key_mask), *state)
    return out, State(*after)


class _Scan(Function):
    """Scan (state, out) = step(state, *pieces) over pieces of the inputs; the backward recomputes each piece."""

    @staticmethod
    def forward(
        ctx: Any, step: Callable[..., tuple[State, Tensor]], tile: int, count: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = tensors[:count]
        state = State(*tensors[count:])
        starts: list[Tensor] = []
        outs = []
        for pieces in _pieces(inputs, tile):
            starts += state
            state, out = step(state, *pieces)
            outs.append(out)
        ctx.step = step
        ctx.tile = tile
        ctx.count = count
        ctx.save_for_backward(*inputs, *starts)
        ctx.mark_non_differentiable(state.level)
        return torch.cat(outs, dim=2), *state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_out, grad_total, _ = grads
        inputs = ctx.saved_tensors[: ctx.count]
        starts = ctx.saved_tensors[ctx.count :]
        grad_inputs = [torch.empty_like(x) if x.is_floating_point() else None for x in inputs]
        targets = [x.split(ctx.tile, dim=2) for x in grad_inputs if x is not None]
        outputs = grad_out.split(ctx.tile, dim=2)
        for i, pieces in reversed(list(enumerate(_pieces(inputs, ctx.tile)))):
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in pieces]
                total = starts[2 * i].detach().requires_grad_()
                state, out = ctx.step(State(total, starts[2 * i + 1]), *leaves)
            wanted_inputs = [total, *(x for x in leaves if x.requires_grad)]
            grad_total, *piece_grads = torch.autograd.grad([state.total, out], wanted_inputs, [grad_total, outputs[i]])
            for target, grad in zip(targets, piece_grads, strict=True):
                target[i].copy_(grad)
        return None, None, None, *grad_inputs, grad_total, None


def _pieces(inputs: tuple[Tensor, ...], tile: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(x.split(tile, dim=2) for x in inputs), strict=True))


def _column(k: Tensor, key_mask: Tensor | None) -> Tensor:
    mask = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask
    return mask[:, None, :, None]


def _within(query: Tensor, key: Tensor, values: Tensor, top: Tensor, chunk: int) -> Tensor:
    """Return Σ_{j <= i} Σ_f exp(query_if + key_jf − top_i)·values_j inside a tile of a power of two tokens.

    In every block of 2, 4, 8, … tokens the later half attends to the earlier half, so the largest exponent of a
    square's keys precedes all of its queries.
    """
    out = torch.exp(query + key - top).sum(-1, keepdim=True) * values
    half = 1
    while half < query.shape[2]:
        blocks = [x.unflatten(2, (-1, 2, half)) for x in (query, top, key, values, out)]  # (B, H, n, 2, half, …)
        later, tops, target = (blocks[n][:, :, :, 1] for n in (0, 1, 4))
        earlier, earlier_values = (blocks[n][:, :, :, 0] for n in (2, 3))
        level = earlier.detach().amax(-2, keepdim=True).clamp_min(torch.finfo(key.dtype).min)
        left = torch.exp(later + level - tops)
        right = torch.exp(earlier - level).transpose(-1, -2)
        target += (left @ right) @ earlier_values if half < chunk else left @ (right @ earlier_values)
        half *= 2
    return out


def _add(state: State, key: Tensor, values: Tensor, level: Tensor) -> State:
    """Return the state with more keys, relative to the new maximum `level`."""
    shrunk = torch.exp(state.level - level).transpose(-1, -2) * state.total  # (B, H, F, D + 1)
    return State(shrunk + torch.exp(key - level).transpose(-1, -2) @ values, level)


def _query_exponents(q: Tensor, projection: Tensor, scale: float) -> Tensor:
    x = at_least_fp32(q) * scale**0.5
    return x @ projection.to(x.dtype).transpose(1, 2)  # (B, H, L, F)


def _key_exponents(k: Tensor, real: Tensor, projection: Tensor, scale: float) -> Tensor:
    """Return φ's exponents ωx − |x|²/2 of real keys, −∞ for padding: (B, H, L, F)."""
    x = at_least_fp32(k) * scale**0.5
    exponents = x @ projection.to(x.dtype).transpose(1, 2) - (x * x).sum(-1, keepdim=True) / 2
    return exponents.masked_fill(~real, -torch.inf)


def _with_one(v: Tensor, dtype: torch.dtype) -> Tensor:
    return F.pad(v.to(dtype), (0, 1), value=1.0)  # (B, H, L, D + 1)


def _divided(sums: Tensor) -> Tensor:
    """Divide numerators by the denominator in the last column; 0 if no key was visible."""
    total = sums[..., -1:]
    return sums[..., :-1] / torch.where(total > 0, total, 1.0)
