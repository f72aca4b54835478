"""Counter-based random numbers: every draw is a pure function of its purpose, never of earlier draws.

A draw's key is derived from (run seed, step, layer, purpose); rotations add round and global head, dropout adds global
sample and position. Resumed runs, other numbers of ranks, recomputed layers and cached decoding use the same draws. E
width.
"""

import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megasparse.ops.operator import implementation, wide_dtype

_CPU_BLOCK_ELEMENTS = 1 << 20  # elements per block of dropout: 4 MB of bits
_GPU_BLOCK_ELEMENTS = 1 << 26
_MOST_KEYS = 1 << 14

EVALUATION_STEP = -1  # step of evaluation and generation, independent of training


def drawn_step() -> int:
    """Draw the step of a training pass outside of our runs from torch's generator, whose state Trainer saves."""
    return int(torch.randint(1 << 62, (), device="cpu"))


def derive(*parts: int | str) -> int:
    """Derive a 64-bit key from numbers and words."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


Parts = tuple[tuple[int | str, ...], ...]
"""Seed, layer and purpose of a random key, then the parts of derived keys."""


class KeyTable:
    """Random keys in device memory, for a pass in a CUDA graph: the host writes a step's keys before each replay."""

    def __init__(self, device: torch.device):
        self.complete = False
        """True raises an error for another key, whose first value a CUDA graph would keep."""
        self._step = 0
        self._rows: dict[Parts, int] = {}
        self._table = torch.zeros(_MOST_KEYS, 2, dtype=torch.int32, device=device)

    def fill(self, step: int) -> None:
        """Write the keys of an optimizer step."""
        self._step = step
        pinned = self._table.is_cuda  # asynchronous copy
        values = torch.tensor([halves(self._key(*parts)) for parts in self._rows], dtype=torch.int32, pin_memory=pinned)
        self._table[: len(values)].copy_(values.view(len(values), 2), non_blocking=True)

    def row(self, parts: Parts) -> Tensor:
        """Return both halves, (2,) int32 on the device."""
        if parts not in self._rows:
            if self.complete:
                raise RuntimeError(f"the pass of a CUDA graph draws from {parts}, its first pass did not")
            self._rows[parts] = len(self._rows)
            self.fill(self._step)
        return self._table[self._rows[parts]]

    def _key(self, first: tuple[int | str, ...], *further: tuple[int | str, ...]) -> int:
        seed, *purpose = first
        return reduce(lambda key, parts: derive(key, *parts), further, derive(seed, self._step, *purpose))


@dataclass(frozen=True, eq=False)
class DeviceKey:
    """Random key in device memory. Two are never equal, because draws from it change with the step."""

    table: KeyTable
    parts: Parts


Key = int | DeviceKey


def subkey(key: Key, *parts: int | str) -> Key:
    """Derive another key from `key`."""
    return DeviceKey(key.table, (*key.parts, parts)) if isinstance(key, DeviceKey) else derive(key, *parts)


def halves(key: Key) -> tuple[int, int] | tuple[Tensor, Tensor]:
    """Return the low and the high 32 bits of `key`, as signed integers, or as scalars in device memory."""
    if isinstance(key, DeviceKey):
        low, high = key.table.row(key.parts)
        return low, high
    return ((key & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000, ((key >> 32 & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


@dataclass(frozen=True)
class RngContext:
    """State of the random draws of one forward pass.

    Args:
        seed: Seed of the run.
        step: Optimizer step.
        samples: (B,) int64, global number of each sequence.
        training: True enables dropout.
        rounds: Hash rounds instead of the configured ones, or None.
        first: Position of this rank's first token, with sequence parallelism.
        table: Memory of the keys of a pass in a CUDA graph.
    """

    seed: int
    step: int
    samples: Tensor
    training: bool
    rounds: int | None = None
    first: int = 0
    table: KeyTable | None = None
    _rows: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def evaluation(seed: int, batch_size: int, rounds: int | None = None) -> "RngContext":
        """Return the context of evaluation and generation: fixed step, no dropout."""
        return RngContext(seed, EVALUATION_STEP, torch.arange(batch_size), training=False, rounds=rounds)

    def at(self, first: int) -> "RngContext":
        """Return the same draws for tokens that start at position `first`."""
        return self if first == self.first else replace(self, first=first)

    def of(self, part: str) -> "RngContext":
        """Return the draws of a submodel that numbers its layers from 0, such as an encoder."""
        return replace(self, seed=derive(self.seed, part))

    def key(self, layer: int, purpose: str) -> Key:
        """Derive a key for this step."""
        if self.table is not None:
            return DeviceKey(self.table, ((self.seed, layer, purpose),))
        return derive(self.seed, self.step, layer, purpose)

    def rows(self, length: int, device: torch.device) -> Tensor:
        """Return (B, L) int64, a unique number per (global sample, position), for draws that differ by token."""
        rows = self._rows.get((length, device))
        if rows is None:  # shared by all layers
            positions = torch.arange(self.first, self.first + length, device=device)
            rows = self.samples.to(device).unsqueeze(1) * (1 << 32) + positions
            self._rows[length, device] = rows
        return rows


def random_bits(key: Key | list[int], rows: Tensor, columns: int) -> Tensor:
    """Draw (*rows.shape, columns) int32, uniform over all 2^32 values: a hash of (key, row number, column number).

    key: or one for each index of the first dimension of rows. rows: int64, any shape.
    """
    if implementation(rows, dtypes=(torch.int64,), largest_width=None) == "triton":
        from megasparse.ops.random_kernels import bits

        if isinstance(key, list):
            return torch.stack([bits(one, part, columns) for one, part in zip(key, rows, strict=True)])
        return bits(key, rows, columns)
    row, column = _seeds(key, rows, columns)
    return _mix_(row.unsqueeze(-1) + column)


def _seeds(key: Key | list[int], rows: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return mixed row and column numbers, int32; mixing their sum gives the bits."""
    low: Any
    high: Any
    if not isinstance(key, list):
        low, high = halves(key)
        of_column = high
    else:
        numbers = torch.tensor([halves(one) for one in key], dtype=torch.int32, device=rows.device)
        low, high = numbers.view(-1, 2, *[1] * (rows.ndim - 1)).unbind(1)  # (N, 1, …)
        of_column = high.unsqueeze(-1)
    # Conversions keep the low 32 bits.
    row = _mix_(rows.to(torch.int32) + low) ^ _mix_((rows >> 32).to(torch.int32) + high)
    column = torch.arange(columns, dtype=torch.int32, device=rows.device) + of_column
    return _mix_(row), _mix_(column)


def dropout(x: Tensor, rate: float, key: Key, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zero elements of x (B, L, E) with probability `rate` and scale the rest by 1/(1 − rate).

    rows: (B, L), see `RngContext.rows`. The mask is a function of (key, row, element). dtype: of the result, by default
    the dtype of x; computed in the wider of the two.
    """
    dtype = dtype or x.dtype
    return x.to(dtype) if rate == 0.0 else _Dropout.apply(x, None, rate, key, rows, dtype, 1, False)


def add_dropout(stream: Tensor, x: Tensor, rate: float, key: Key, rows: Tensor, sign: int = 1) -> Tensor:
    """Compute stream + sign·dropout(x), summed in fp32 or wider, in the dtype of the stream (B, L, E). sign: ±1."""
    if implementation(x, largest_width=None) != "triton":
        dropped = dropout(x, rate, key, rows, wide_dtype(stream))
        return (stream + dropped if sign == 1 else stream - dropped).to(stream.dtype)
    return _Dropout.apply(x, stream, rate, key, rows, stream.dtype, sign, False)


def add_dropout_(stream: Tensor, x: Tensor, rate: float, key: Key, rows: Tensor, sign: int = 1) -> None:
    """Compute `add_dropout` in place, without gradients."""
    if implementation(x, largest_width=None) == "triton" and stream.is_contiguous():
        from megasparse.ops.random_kernels import drop

        drop(x, stream.dtype, rate, key, rows, stream=stream, sign=sign, in_place=True)
    else:
        stream.add_(dropout(x, rate, key, rows, wide_dtype(stream)), alpha=sign)


def relu_dropout(x: Tensor, rate: float, key: Key, rows: Tensor) -> Tensor:
    """Compute dropout(relu(x)). Zero results have zero gradients."""
    if rate == 0.0 or implementation(x, largest_width=None) != "triton":
        return dropout(torch.relu(x), rate, key, rows)
    return _Dropout.apply(x, None, rate, key, rows, x.dtype, 1, True)


class _Dropout(torch.autograd.Function):
    """Compute dropout(x); with kernels also stream + sign·dropout(x) and dropout(relu(x))."""

    @staticmethod
    def forward(  # noqa: PLR0913  (autograd takes no structures of tensors)
        ctx: Any, x: Tensor, stream: Tensor | None, rate: float, key: Key, rows: Tensor, dtype: torch.dtype, sign: int,
        relu: bool,
    ) -> Tensor:  # fmt: skip
        ctx.rate = rate
        ctx.key = key
        ctx.rows = rows
        ctx.dtype = x.dtype
        ctx.sign = sign
        ctx.relu = relu
        ctx.added = stream is not None
        out = _dropped(x, dtype, rate, key, rows, relu, stream, sign)
        if relu:
            ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if ctx.relu:  # positive results identify the kept elements, without draws
            from megasparse.ops.random_kernels import relu_gradient

            (out,) = ctx.saved_tensors
            dx = relu_gradient(grad, out, 1.0 / (1.0 - ctx.rate))
        else:
            dx = _dropped(grad, ctx.dtype, ctx.rate, ctx.key, ctx.rows)
        return dx if ctx.sign == 1 else -dx, grad if ctx.added else None, None, None, None, None, None, None


def least_kept(rate: float) -> int:
    """Return the smallest random value, int32, for which dropout keeps an element."""
    return round(rate * 2**32) - 2**31


def _dropped(x: Tensor, dtype: torch.dtype, rate: float, key: Key, rows: Tensor, *fused: Any) -> Tensor:
    """Apply dropout, with `fused` operations by a kernel, or in blocks that fit in a CPU's cache."""
    if implementation(x, largest_width=None) == "triton":
        from megasparse.ops.random_kernels import drop

        return drop(x, dtype, rate, key, rows, *fused)
    x = x.to(torch.promote_types(x.dtype, dtype))
    flat = x.flatten(0, 1)  # (B·L, E)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    row, column = _seeds(key, rows.flatten(), x.shape[2])
    step = max(1, (_CPU_BLOCK_ELEMENTS if x.device.type == "cpu" else _GPU_BLOCK_ELEMENTS) // x.shape[2])
    space = x.new_empty(2, min(step, flat.shape[0]), x.shape[2], dtype=torch.int32)
    for start in range(0, flat.shape[0], step):
        block = slice(start, start + step)
        bits, spare = space[:, : flat[block].shape[0]]
        _mix_(torch.add(row[block].unsqueeze(-1), column, out=bits), spare)
        torch.mul(flat[block], 1.0 / (1.0 - rate), out=out[block])
        out[block] *= (bits >= least_kept(rate)).to(x.dtype)
    return out.view(x.shape).to(dtype)


@dataclass(frozen=True)
class PairDropout:
    """Dropout of attention probabilities, a function of (key, global sample, global head, query, key).

    queries: (B, H, Lq) int32, a mixed number per query. shift: the key at index j is key number (j + shift) mod Lk.
    """

    rate: float
    key: Key
    queries: Tensor
    shift: int = 0

    @staticmethod
    def of(rate: float, key: Key, rows: Tensor, heads: range) -> "PairDropout":
        """Create the dropout of queries `rows` (B, L), see `RngContext.rows`, for global head indices `heads`."""
        low, _ = halves(key)
        head = _mix_(torch.arange(heads.start, heads.stop, dtype=torch.int32, device=rows.device) + low)
        return PairDropout(rate, key, _mix_(_seeds(key, rows, 0)[0].unsqueeze(1) + head.unsqueeze(1)))

    def keys(self, count: int) -> Tensor:
        """Return the mixed numbers of the keys, (Lk,) int32."""
        number = (torch.arange(count, device=self.queries.device) + self.shift) % count
        return _mix_(number.to(torch.int32) + halves(self.key)[1])

    def factors(self, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Return probability factors, 0 or 1/(1 − rate), for broadcasting mixed numbers of queries and keys."""
        is_kept = _mix_(queries + keys) >= least_kept(self.rate)
        return is_kept.to(dtype).mul_(1.0 / (1.0 - self.rate))


def normal(key: Key, rows: Tensor, columns: int) -> Tensor:
    """Draw (*rows.shape, columns) fp32 standard normal numbers, each a function of (key, row number, column number), by
    Box–Muller in float64.
    """
    radius = random_bits(subkey(key, "radius"), rows, columns)
    angle = random_bits(subkey(key, "angle"), rows, columns)
    uniform = (radius.double() + (2**31 + 0.5)) / 2**32  # in (0, 1)
    return (torch.sqrt(-2.0 * torch.log(uniform)) * torch.cos(angle.double() * (2 * math.pi / 2**32))).float()


def rotations(key: Key, heads: range, rounds: int, head_dim: int, factors: list[int], device: torch.device) -> Tensor:
    """Draw Gaussian projections of angular LSH, (H, R, D, Σ n_f/2), for global head indices `heads`, independent per
    head and round.
    """
    width = sum(factor // 2 for factor in factors)
    return normal_by_head(key, heads, rounds, head_dim * width, device).view(len(heads), rounds, head_dim, width)


def normal_by_head(key: Key, heads: range, count: int, columns: int, device: torch.device) -> Tensor:
    """Draw `count` normal vectors per global head index, (H, count, columns) fp32: additional ones do not change the
    first.
    """
    if _by_kernels(device):
        from megasparse.ops.random_kernels import normals

        return normals(key, heads, count, columns, device)
    return normal(key, rows_by_head(heads, count, device), columns)


def bits_by_head(key: Key, heads: range, count: int, columns: int, device: torch.device) -> Tensor:
    """Draw (H, count, columns) int32: `random_bits` for the rows of `rows_by_head`."""
    if _by_kernels(device):
        from megasparse.ops.random_kernels import bits_by_head as by_head

        return by_head(key, heads, count, columns, device)
    return random_bits(key, rows_by_head(heads, count, device), columns)


def _by_kernels(device: torch.device) -> bool:
    return implementation(torch.empty(0, dtype=torch.float32, device=device), largest_width=None) == "triton"


def rows_by_head(heads: range, count: int, device: torch.device) -> Tensor:
    """Return (H, count) int64, a unique row number per global head and draw."""
    head = torch.arange(heads.start, heads.stop, device=device).unsqueeze(1) * (1 << 16)
    return head + torch.arange(count, device=device)


def _mix_(x: Tensor, spare: Tensor | None = None) -> Tensor:
    """Apply a bijection of 32-bit integers in place (C. Wellons' lowbias32). spare: buffer like x."""
    shifted = torch.empty_like(x) if spare is None else spare
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x ^= shifted.bitwise_and_((1 << (32 - shift)) - 1)  # make the shift logical
        x *= factor
    return x
