"""The definitions of bucket codes and sign codes, to test against.

B batch, H heads, L length, D head dim, R rounds, m hashes, τ code bits.
"""

import torch
from torch import Tensor

from megasparse.ops.random import normal, random_bits


def angular_hash(x: Tensor, rotations: Tensor, factors: list[int]) -> Tensor:
    """Compute h(x) = argmax([xR; −xR]) (Reformer section 2), mixed-radix over the factors: h = h_1·n_2 + h_2.

    x: (B, H, L, D). rotations: (H, R, D, Σ n_f/2), the factors' matrices side by side. Returns (B, H, R, L) int64.
    Computed in float64.
    """
    rotated = torch.einsum("bhld,hrds->bhrls", x.double(), rotations.double())
    code = torch.zeros(rotated.shape[:-1], dtype=torch.int64, device=x.device)
    for part, factor in zip(rotated.split([n // 2 for n in factors], dim=-1), factors, strict=True):
        code = code * factor + torch.cat([part, -part], dim=-1).argmax(dim=-1)
    return code


def hadamard_matrix(power: int) -> Tensor:
    """Sylvester's matrix: H_2n = [[H_n, H_n], [H_n, −H_n]], float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < power:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def hyperplanes(key: int, head: int, hash_: int, code_bits: int, width: int, kind: str) -> Tensor:
    """The normals (τ, D) of one head's hash, float64."""
    if kind == "gaussian":
        return normal(key, torch.tensor(head * 65536 + hash_), code_bits * width).view(code_bits, width).double()
    power = 1
    while power < width:
        power *= 2
    matrix, normals = hadamard_matrix(power), []
    for bit in range(code_bits):
        row = head * 65536 + (hash_ // power) * code_bits + bit
        signs = torch.where(random_bits(key, torch.tensor(row), 3 * power) < 0, -1.0, 1.0).double()
        first, second, third = (torch.diag(d) for d in signs.view(3, power))
        normals.append((matrix @ third @ matrix @ second @ matrix @ first)[hash_ % power, :width])
    return torch.stack(normals)


def sign_codes(x: Tensor, key: int, heads: range, hashes: int, code_bits: int, kind: str) -> Tensor:
    """Σ_t 2^t·[r_t·x >= 0] for every head and hash: x (B, H, L, D); (B, H, m, L) int64."""
    codes = torch.empty(x.shape[0], x.shape[1], hashes, x.shape[2], dtype=torch.int64, device=x.device)
    for number, head in enumerate(heads):
        for hash_ in range(hashes):
            normals = hyperplanes(key, head, hash_, code_bits, x.shape[3], kind).to(x.device)
            bits = (x[:, number].double() @ normals.T >= 0).long()  # (B, L, τ)
            codes[:, number, hash_] = (bits * 2 ** torch.arange(code_bits, device=x.device)).sum(-1)
    return codes
