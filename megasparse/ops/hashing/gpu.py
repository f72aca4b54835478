"""Angular and sign hashing on a GPU: one launch for all rows, rounds and hashes.

B batch, H heads, L length, D head dim, R rounds, S columns of a round's rotations, P the next power of two, m hashes,
τ code bits.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megasparse.ops.hashing import kernels
from megasparse.ops.hashing.sign import Kind, code_dtype
from megasparse.ops.kernels import launch, whole_vectors

_WARPS = 4
_DEPTH = 16  # of D at a time: a thread keeps this much of whole rows of both factors
_COORDINATES = 64 * 32 * _WARPS  # of the tokens of one program: 64 a thread; up to P = 64 threads exchange nothing
_HASHES = 64  # whose codes one program keeps


def angular_hash(x: Tensor, rotations: Tensor, factors: list[int]) -> Tensor:
    """Computes `operator.angular_hash` by kernels.

    Cost: 2·B·H·R·L·D·S operations in fp32, outside the tensor cores. Moves x once (the rounds and factors read it again
    from the cache), the rotations, and 2 or 4 bytes a code: B·H·L·(D·bytes + 2·R).
    """
    x = whole_vectors(x)
    batch, heads, length, width = x.shape
    rounds, columns = rotations.shape[1], rotations.shape[3]
    codes = torch.empty(batch, heads, rounds, length, dtype=code_dtype(math.prod(factors)), device=x.device)
    sizes = _tile(max(factors) // 2)
    grid = (-(-length // sizes["TOKENS"]) * batch * heads * rounds,)
    arguments = (x, rotations.float().contiguous(), codes, length, heads, rounds, *x.stride()[:3], columns)
    launch(kernels.angular, grid, *arguments, FACTORS=tuple(factors), D=width, **sizes)
    return codes


def learned_codes(inputs: Sequence[Tensor], weights: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """The first of the largest of Σ_f W2_f·relu(W1_f·x_f + b1_f) + b2_f, one of N buckets: (B, H, L).

    inputs: x_f (B, H, L, D). weights: of each function (H, D, D), (H·D), (H, D, N), (H·N), or of a linear one (H, D, N)
    alone. Cost: 2·B·H·L·D·(D + N) operations in fp32 for each input, outside the tensor cores. Moves the inputs once,
    the hidden units twice, and 2 or 4 bytes a token.
    """
    batch, heads, length, width = inputs[0].shape
    wide = [tuple(w.float() for w in each) for each in weights]
    if len(weights[0]) == 1:
        hidden, second = torch.cat([x.float() for x in inputs], -1), torch.cat([w[0] for w in wide], 1)
        bias = torch.zeros(heads, second.shape[2], dtype=torch.float32, device=second.device)
    else:
        total = width * len(inputs)
        hidden = torch.empty(batch, heads, length, total, dtype=torch.float32, device=inputs[0].device)
        sizes = _tile(width)
        grid = (-(-length // sizes["TOKENS"]) * batch * heads * -(-width // sizes["COLUMNS"]),)
        for number, (x, w) in enumerate(zip(map(whole_vectors, inputs), wide, strict=True)):
            arguments = (x, w[0].contiguous(), w[1].contiguous(), hidden, length, heads, *x.stride()[:3])
            launch(kernels.hidden_units, grid, *arguments, total, number * width, D=width, **sizes)
        second, bias = torch.cat([w[2] for w in wide], 1), torch.stack([w[3] for w in wide]).sum(0)
    codes = torch.empty(batch, heads, length, dtype=code_dtype(second.shape[2]), device=hidden.device)
    sizes = _tile(second.shape[2])
    grid = (-(-length // sizes["TOKENS"]) * batch * heads,)
    arguments = (hidden, second, bias, codes, length, heads, second.shape[2])
    launch(kernels.best_bucket, grid, *arguments, D=hidden.shape[3], **sizes)
    return codes


def sign_codes(x: Tensor, drawn: Tensor, hashes: int, kind: Kind) -> Tensor:
    """Computes `operator.sign_codes` by kernels, from what was `sign.drawn`.

    Cost: gaussian 2·B·H·L·D·m·τ operations in fp32; hadamard 3·B·H·L·τ·P·(1 + log₂ P) for each P hashes. Moves x once
    and 2 or 4 bytes a code: B·H·L·(D·bytes + 2·m).
    """
    x = whole_vectors(x)
    (batch, heads, length, width), code_bits = x.shape, drawn.shape[2]
    codes = torch.empty(batch, heads, hashes, length, dtype=code_dtype(1 << code_bits), device=x.device)
    if kind == "gaussian":
        drawn = drawn.permute(0, 2, 3, 1).contiguous()  # (H, τ, D, m)
        sizes = _tile(hashes)
        grid = (-(-length // sizes["TOKENS"]) * batch * heads * -(-hashes // sizes["COLUMNS"]),)
        arguments = (x, drawn, codes, length, heads, hashes, code_bits, *x.stride()[:3])
        launch(kernels.sides, grid, *arguments, D=width, **sizes)
        return codes
    power = 1 << (width - 1).bit_length()
    tokens = min(32 * _WARPS, _COORDINATES // power)
    together = min(power, 1 << (hashes - 1).bit_length(), _HASHES)
    parts = -(-hashes // together)
    grid = (-(-length // tokens) * batch * heads * parts,)
    arguments = (x, drawn, codes, length, heads, hashes, code_bits, *x.stride()[:3])
    levels = power.bit_length() - 1
    split = {"LEVELS": levels, "PARTS_LEVELS": levels - (together.bit_length() - 1), "FIRST": parts == 1}
    launch(kernels.transformed_sides, grid, *arguments, 0, D=width, **split, TOKENS=tokens, num_warps=_WARPS)
    return codes


def _tile(columns: int) -> dict[str, int]:
    """Tiles of products with `columns` columns: 16 numbers a thread, whose factors fit its registers."""
    tokens, block_columns = (128, 16) if columns <= 16 else (64, 32)
    return {"TOKENS": tokens, "COLUMNS": block_columns, "DEPTH": _DEPTH, "num_warps": _WARPS}
