"""Counter-based randomness: every draw is a pure function of what it is for, never of what was drawn before.

A draw's key comes from (run seed, step, layer, purpose); rotations add round and global head, dropout adds global
sample and position. So a resumed run, another number of ranks, a recomputed layer and cached decoding all see the
same draws, and none is ever stored. The micro-step is left out on purpose: it changes with the number of ranks, and
the draws must not.

B batch, L length, H heads, R rounds, E width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megasparse.ops.backend import implementation
from megasparse.ops.blocks import at_most
from megasparse.ops.custom import custom
from megasparse.ops.keys import DeviceStep, Halves, Key, LateKey, derive, halves

_CPU_BLOCK_ELEMENTS = 1 << 20  # elements of dropout at a time: 4 MB of bits
_GPU_BLOCK_ELEMENTS = 1 << 26

EVALUATION_STEP = -1  # evaluation and generation draw as if at this step, whatever the training step is


@dataclass(frozen=True)
class RngContext:
    """Everything that the random draws of one forward pass depend on.

    seed: of the run. step: optimizer step, a DeviceStep where a CUDA graph is captured, a tensor of one number in a
    context made inside torch.compile. samples: (B,) int64, global
    number of each sequence. training: dropout is on. rounds: hash rounds in place of the configured ones, or None.
    first: position of the first token that is here, where ranks share sequences.
    """

    seed: int
    step: int | DeviceStep | Tensor
    samples: Tensor
    training: bool
    rounds: int | None = None
    first: int = 0
    _rows: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _step: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        own = self.step.number if isinstance(self.step, DeviceStep) else torch.as_tensor(self.step, device="cpu")
        object.__setattr__(self, "_step", own)

    @staticmethod
    def evaluation(seed: int, batch_size: int, rounds: int | None = None) -> "RngContext":
        """The draws of evaluation and generation: the step is fixed, dropout is off."""
        return RngContext(seed, EVALUATION_STEP, torch.arange(batch_size), training=False, rounds=rounds)

    def at(self, first: int) -> "RngContext":
        """The same draws, of tokens that begin at position `first`."""
        return self if first == self.first else self._with(first=first)

    def of(self, part: str) -> "RngContext":
        """The draws of a part of a model that numbers its layers from 0, such as an encoder–decoder's encoder."""
        return self._with(seed=derive(self.seed, part))

    def _with(self, **changes: Any) -> "RngContext":
        """A copy with changes. In that of a compiled graph the step is a tensor, no constant of the graph."""
        return replace(self, step=self._step if torch.compiler.is_compiling() else self.step, **changes)

    def key(self, layer: int, purpose: str) -> Key:
        """A key of this step. Inside torch.compile the step is a tensor, so that no step compiles anew."""
        path = ((self.seed, layer, purpose),)
        if torch.compiler.is_compiling():
            return LateKey(self._step, path)
        if not isinstance(self.step, int):
            return LateKey(self.step, path)
        return derive(self.seed, self.step, layer, purpose)

    def rows(self, length: int, device: torch.device) -> Tensor:
        """(B, L) int64: a number for every (global sample, position), for draws that differ by token."""
        found = self._rows.get((length, device))
        if found is None:  # every layer asks for the same ones
            positions = torch.arange(self.first, self.first + length, device=device)
            found = self.samples.to(device).unsqueeze(1) * (1 << 32) + positions
            self._rows[length, device] = found
        return found


def random_bits(key: Key | Halves, rows: Tensor, columns: int) -> Tensor:
    """(*rows.shape, columns) int32, uniform over all 2^32 values: a hash of (key, row number, column number).

    rows: int64, any shape. Built of an integer mixer whose every input bit reaches every output bit.
    """
    return _random_bits(halves(key, rows.device), rows, columns)


@custom(lambda key, rows, columns: rows.new_empty(*rows.shape, columns, dtype=torch.int32))
def _random_bits(key: Halves, rows: Tensor, columns: int) -> Tensor:
    if implementation(rows, dtypes=(torch.int64,), largest_width=None) == "triton":
        from megasparse.ops.random_kernels import bits

        return bits(key, rows, columns)
    row, column = _seeds(key, rows, columns)
    return _mix_(row.unsqueeze(-1) + column)


def _seeds(key: Halves, rows: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Mixed numbers of the rows and of the columns, int32; mixing their sum gives the bits."""
    low, high = key
    # Conversions keep the low 32 bits.
    row = _mix_(rows.to(torch.int32) + low) ^ _mix_((rows >> 32).to(torch.int32) + high)
    column = torch.arange(columns, dtype=torch.int32, device=rows.device) + high
    return _mix_(row), _mix_(column)


def dropout(x: Tensor, rate: float, key: Key, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Zeroes elements of x (B, L, E) with probability `rate` and scales the rest by 1/(1 − rate).

    rows: (B, L), see `RngContext.rows`. The mask is a function of (key, row, element), so the backward draws it again
    and nothing is kept. dtype: of the result, by default that of x; computed in the wider of the two.
    """
    dtype = dtype or x.dtype
    return x.to(dtype) if rate == 0.0 else _dropped(x, dtype, rate, halves(key, x.device), rows)


@custom(lambda x, dtype, rate, key, rows: torch.empty_like(x, dtype=dtype))
def _dropped(x: Tensor, dtype: torch.dtype, rate: float, key: Halves, rows: Tensor) -> Tensor:
    found: Tensor = _Dropout.apply(x, dtype, partial(_drop, rate=rate, key=key, rows=rows))
    return found


def add_dropout(stream: Tensor, x: Tensor, rate: float, key: Key, rows: Tensor, sign: int = 1) -> Tensor:
    """Compute stream + sign·dropout(x), summed in fp32 at least, in the dtype of the stream (B, L, E); on a GPU in one
    pass. sign: 1 or −1."""
    if implementation(x, largest_width=None) != "triton":
        dropped = dropout(x, rate, key, rows, _wide(stream))
        return (stream + dropped if sign == 1 else stream - dropped).to(stream.dtype)
    return _add_dropped(stream, x, rate, halves(key, x.device), rows, sign)


def add_dropout_(stream: Tensor, x: Tensor, rate: float, key: Key, rows: Tensor, sign: int = 1) -> None:
    """`add_dropout` in place, without gradients."""
    kernel = implementation(x, largest_width=None) == "triton" and not torch.compiler.is_compiling()
    if kernel and stream.is_contiguous():
        _drop(x, stream.dtype, rate, halves(key, x.device), rows, to=(stream, sign), in_place=True)
    else:
        stream.add_(dropout(x, rate, key, rows, _wide(stream)), alpha=sign)


def _wide(stream: Tensor) -> torch.dtype:
    """The dtype of sums with a stream, before they are rounded to its own."""
    return torch.promote_types(stream.dtype, torch.float32)


@custom(lambda stream, x, rate, key, rows, sign: torch.empty_like(stream))
def _add_dropped(stream: Tensor, x: Tensor, rate: float, key: Halves, rows: Tensor, sign: int) -> Tensor:
    found: Tensor = _AddDropout.apply(stream, x, sign, partial(_drop, rate=rate, key=key, rows=rows))
    return found


def relu_dropout(x: Tensor, rate: float, key: Key, rows: Tensor) -> Tensor:
    """Compute dropout(relu(x)), on a GPU in one pass each way: where the result is 0, so is its gradient."""
    if rate == 0.0 or implementation(x, largest_width=None) != "triton":
        return dropout(torch.relu(x), rate, key, rows)
    return _relu_dropped(x, rate, halves(key, x.device), rows)


@custom(lambda x, rate, key, rows: torch.empty_like(x))
def _relu_dropped(x: Tensor, rate: float, key: Halves, rows: Tensor) -> Tensor:
    found: Tensor = _ReluDropout.apply(x, rate, partial(_drop, rate=rate, key=key, rows=rows, relu=True))
    return found


class _Dropout(torch.autograd.Function):
    """Dropout, which does to the gradient of its output what it does to x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, drop: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor:
        ctx.drop, ctx.dtype = drop, x.dtype
        return drop(x, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.drop(grads[0], ctx.dtype), None, None


class _AddDropout(torch.autograd.Function):
    """A stream and the dropout of x, by kernels."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, x: Tensor, sign: int, drop: Callable[..., Tensor]) -> Tensor:
        ctx.drop, ctx.dtype, ctx.sign = drop, x.dtype, sign
        return drop(x, stream.dtype, to=(stream, sign))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gradient = ctx.drop(grads[0], ctx.dtype)
        return grads[0], gradient if ctx.sign == 1 else -gradient, None, None


class _ReluDropout(torch.autograd.Function):
    """Dropout of relu by kernels. The gradient goes where the result is above 0, which needs no draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, drop: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor:
        out = drop(x, x.dtype)
        ctx.rate = rate
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from megasparse.ops.random_kernels import relu_gradient

        (out,) = ctx.saved_tensors
        return relu_gradient(grads[0], out, 1.0 / (1.0 - ctx.rate)), None, None


def _drop(
    x: Tensor,
    dtype: torch.dtype,
    rate: float,
    key: Halves,
    rows: Tensor,
    relu: bool = False,
    to: tuple[Tensor, int] | None = None,
    in_place: bool = False,
) -> Tensor:
    """Drops numbers in blocks that stay in a CPU's cache: drawn whole, bits cost more than a wide product. By kernels
    alone: relu, dropout of relu(x); to, a tensor that it is added to, and the sign that it is added with, in_place or
    not.
    """
    threshold = round(rate * 2**32) - 2**31
    if implementation(x, largest_width=None) == "triton":
        from megasparse.ops.random_kernels import drop

        return drop(x, dtype, rate, key, threshold, rows, relu, to, in_place)
    x = x.to(torch.promote_types(x.dtype, dtype))
    flat = x.flatten(0, 1)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    row, column = _seeds(key, rows.flatten(), x.shape[2])
    step = max(1, at_most(_CPU_BLOCK_ELEMENTS if x.device.type == "cpu" else _GPU_BLOCK_ELEMENTS) // x.shape[2])
    space = torch.empty(2, min(step, flat.shape[0]), x.shape[2], dtype=torch.int32, device=x.device)
    for start in range(0, flat.shape[0], step):
        block = slice(start, start + step)
        bits, spare = space[:, : flat[block].shape[0]]
        _mix_(torch.add(row[block].unsqueeze(-1), column, out=bits), spare)
        torch.mul(flat[block], 1.0 / (1.0 - rate), out=out[block])
        out[block] *= (bits >= threshold).to(x.dtype)
    return out.view(x.shape).to(dtype)


@dataclass(frozen=True)
class PairDropout:
    """Dropout of attention probabilities: the mask is a function of (key, global sample, global head, query, key), so
    a pair has the same one in every round, block, recomputation and implementation, and nothing is kept.

    queries: (B, H, Lq) int32, a mixed number of each query. shift: the key at place j is number (j + shift) mod Lk.
    """

    rate: float
    key: Halves
    queries: Tensor
    shift: int = 0

    @staticmethod
    def of(rate: float, key: Key, rows: Tensor, heads: range) -> "PairDropout":
        """Draw for the queries `rows` (B, L), see `RngContext.rows`, of the global head numbers `heads`."""
        own = halves(key, rows.device)
        return PairDropout(rate, own, _pair_queries(own, rows, heads))

    def keys(self, count: int) -> Tensor:
        """The mixed numbers of the keys, (Lk,) int32."""
        number = (torch.arange(count, device=self.queries.device) + self.shift) % count
        return _mix_(number.to(torch.int32) + self.key[1])

    def factors(self, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """The factors of probabilities, 0 or 1/(1 − rate), of pairs of mixed numbers, which broadcast."""
        kept = _mix_(queries + keys) >= round(self.rate * 2**32) - 2**31
        return kept.to(dtype).mul_(1.0 / (1.0 - self.rate))

    def dense(self, count: int, dtype: torch.dtype) -> Tensor:
        """The factors of all pairs of queries and `count` keys, (B, H, Lq, Lk)."""
        return self.factors(self.queries.unsqueeze(-1), self.keys(count), dtype)


@custom(lambda key, rows, heads: rows.new_empty(len(rows), len(heads), rows.shape[1], dtype=torch.int32))
def _pair_queries(key: Halves, rows: Tensor, heads: range) -> Tensor:
    head = torch.arange(heads.start, heads.stop, dtype=torch.int32, device=rows.device) + key[0]
    return _mix_(_seeds(key, rows, 0)[0].unsqueeze(1) + _mix_(head).unsqueeze(1))


def normal(key: Key, rows: Tensor, columns: int) -> Tensor:
    """(*rows.shape, columns) fp32 standard normal numbers, each a function of (key, row number, column number).

    Box–Muller in float64 from two 32-bit draws.
    """
    return _normal(*_radius_and_angle(key, rows.device), rows, columns)


def _radius_and_angle(key: Key, device: torch.device) -> tuple[Halves, Halves]:
    """The keys of both draws of a normal number."""
    return halves(derive(key, "radius"), device), halves(derive(key, "angle"), device)


def _normal(of_radius: Halves, of_angle: Halves, rows: Tensor, columns: int) -> Tensor:
    radius, angle = _random_bits(of_radius, rows, columns), _random_bits(of_angle, rows, columns)
    uniform = (radius.double() + (2**31 + 0.5)) / 2**32  # in (0, 1)
    return (torch.sqrt(-2.0 * torch.log(uniform)) * torch.cos(angle.double() * (2 * math.pi / 2**32))).float()


def rotations(key: Key, heads: range, rounds: int, head_dim: int, factors: list[int], device: torch.device) -> Tensor:
    """Gaussian projections of angular LSH, (H, R, D, Σ n_f/2), for the global head numbers `heads`.

    Each head and round has its own, whatever other heads and rounds are drawn: more rounds keep the first ones.
    """
    width = sum(factor // 2 for factor in factors)
    return normal_by_head(key, heads, rounds, head_dim * width, device).view(len(heads), rounds, head_dim, width)


def _by_head(dtype: torch.dtype) -> Callable[..., Tensor]:
    def like(*arguments: Any) -> Tensor:
        heads, count, columns, device = arguments[-4:]
        return torch.empty(len(heads), count, columns, dtype=dtype, device=device)

    return like


def normal_by_head(key: Key, heads: range, count: int, columns: int, device: torch.device) -> Tensor:
    """`count` vectors of normal numbers for each global head number, (H, count, columns) fp32.

    A head's vectors are the same whatever other heads there are, and more vectors keep the first ones.
    """
    return _normal_by_head(*_radius_and_angle(key, device), heads, count, columns, device)


@custom(_by_head(torch.float32))
def _normal_by_head(
    radius: Halves, angle: Halves, heads: range, count: int, columns: int, device: torch.device
) -> Tensor:
    if implementation(torch.empty(0, device=device), (torch.get_default_dtype(),), largest_width=None) == "triton":
        from megasparse.ops.random_kernels import normals

        return normals(radius, angle, heads, count, columns, device)
    return _normal(radius, angle, rows_by_head(heads, count, device), columns)


def bits_by_head(key: Key | Tensor, heads: range, count: int, columns: int, device: torch.device) -> Tensor:
    """(H, count, columns) int32: `random_bits` of the rows of `rows_by_head`."""
    return _bits_by_head(halves(key, device), heads, count, columns, device)


@custom(_by_head(torch.int32))
def _bits_by_head(key: Halves, heads: range, count: int, columns: int, device: torch.device) -> Tensor:
    if implementation(torch.empty(0, device=device), (torch.get_default_dtype(),), largest_width=None) == "triton":
        from megasparse.ops.random_kernels import bits_by_head as by_head

        return by_head(key, heads, count, columns, device)
    return _random_bits(key, rows_by_head(heads, count, device), columns)


def rows_by_head(heads: range, count: int, device: torch.device) -> Tensor:
    """(H, count) int64: numbers of the draws of global heads, for draws that differ by head."""
    head = torch.arange(heads.start, heads.stop, device=device).unsqueeze(1) * (1 << 16)
    return head + torch.arange(count, device=device)


def _mix_(x: Tensor, spare: Tensor | None = None) -> Tensor:
    """A bijection of 32-bit integers, in place (C. Wellons' lowbias32), wrapping around. spare: space like x."""
    shifted = torch.empty_like(x) if spare is None else spare
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        x ^= shifted.bitwise_and_((1 << (32 - shift)) - 1)  # what a signed shift copies of the sign is cut off
        x *= factor
    return x
