"""Counter-based randomness: every draw is a pure function of what it is for, never of what was drawn before.

A draw's key comes from (run seed, step, layer, purpose); rotations add round and global head, dropout adds global
sample and position. So a resumed run, another number of ranks, a recomputed layer and cached decoding all see the
same draws, and none is ever stored. The micro-step is left out on purpose: it changes with the number of ranks, and
the draws must not.

B batch, L length, H heads, R rounds, E width.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

EVALUATION_STEP = -1  # evaluation and generation draw as if at this step, whatever the training step is


def derive(*parts: int | str) -> int:
    """A 64-bit key from numbers and words: equal parts, equal key, on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Draws:
    """What the random draws of one forward pass depend on.

    seed: of the run. step: optimizer step. samples: (B,) int64, global number of each sequence. training: dropout is
    on. rounds: hash rounds in place of the configured ones, or None.
    """

    seed: int
    step: int
    samples: Tensor
    training: bool
    rounds: int | None = None

    @staticmethod
    def evaluation(seed: int, batch_size: int, rounds: int | None = None) -> "Draws":
        """The draws of evaluation and generation: the step is fixed, dropout is off."""
        return Draws(seed, EVALUATION_STEP, torch.arange(batch_size), training=False, rounds=rounds)

    def key(self, layer: int, purpose: str) -> int:
        return derive(self.seed, self.step, layer, purpose)

    def rows(self, length: int, device: torch.device) -> Tensor:
        """(B, L) int64: a number for every (global sample, position), for draws that differ by token."""
        return self.samples.to(device).unsqueeze(1) * (1 << 32) + torch.arange(length, device=device)


def random_bits(key: int, rows: Tensor, columns: int) -> Tensor:
    """(*rows.shape, columns) int32, uniform over all 2^32 values: a hash of (key, row number, column number).

    rows: int64, any shape. Built of an integer mixer whose every input bit reaches every output bit.
    """
    low, high = _signed(key), _signed(key >> 32)
    row = _mix(rows.to(torch.int32) + low) ^ _mix(
        (rows >> 32).to(torch.int32) + high
    )  # conversions keep the low 32 bits
    column = _mix(torch.arange(columns, dtype=torch.int32, device=rows.device) + high)
    return _mix(_mix(row).unsqueeze(-1) + column)


def dropout(x: Tensor, rate: float, key: int, rows: Tensor) -> Tensor:
    """Zeroes elements of x (B, L, E) with probability `rate` and scales the rest by 1/(1 − rate).

    rows: (B, L), see `Draws.rows`. The mask is a function of (key, row, element): the same wherever and whenever it
    is drawn again.
    """
    if rate == 0.0:
        return x
    keep = random_bits(key, rows, x.shape[2]) >= round(rate * 2**32) - 2**31
    return torch.where(keep, x * (1.0 / (1.0 - rate)), torch.zeros((), dtype=x.dtype, device=x.device))


def normal(key: int, rows: Tensor, columns: int) -> Tensor:
    """(*rows.shape, columns) fp32 standard normal numbers, each a function of (key, row number, column number).

    Box–Muller in float64 from two 32-bit draws.
    """
    radius, angle = (random_bits(derive(key, purpose), rows, columns) for purpose in ("radius", "angle"))
    uniform = (radius.double() + (2**31 + 0.5)) / 2**32  # in (0, 1)
    return (torch.sqrt(-2.0 * torch.log(uniform)) * torch.cos(angle.double() * (2 * math.pi / 2**32))).float()


def rotations(key: int, heads: range, rounds: int, head_dim: int, factors: list[int], device: torch.device) -> Tensor:
    """Gaussian projections of angular LSH, (H, R, D, Σ n_f/2), for the global head numbers `heads`.

    Each head and round has its own, whatever other heads and rounds are drawn: more rounds keep the first ones.
    """
    width = sum(factor // 2 for factor in factors)
    head = torch.arange(heads.start, heads.stop, device=device).unsqueeze(1) * (1 << 16)
    rows = head + torch.arange(rounds, device=device)  # (H, R)
    return normal(key, rows, head_dim * width).reshape(len(heads), rounds, head_dim, width)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (xor-shift, multiply; constants of C. Wellons' lowbias32), wrapping around."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _signed(x: int) -> int:
    """The low 32 bits of x as a signed number."""
    return ((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
