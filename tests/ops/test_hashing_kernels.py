"""The hashing kernels, in Triton's interpreter: codes differ only where scores are equal up to rounding (float64)."""

import pytest
import torch

from megasparse.ops.hashing import angular_hash, hyperplanes, sign_codes
from megasparse.ops.hashing import reference_angular_hash as defined
from megasparse.ops.hashing_kernels import learned_codes
from megasparse.ops.random import rotations
from tests.helpers.kernels import DEVICE

ROUNDING = 1e-6
KINDS = pytest.mark.parametrize("kind", ["hadamard", "gaussian"])
GRID = [(width, torch.float32, length) for width in (16, 24, 32, 64, 128, 256) for length in (1, 17, 100)]
GRID += [(width, dtype, 17) for width in (16, 24, 32, 64, 128, 256) for dtype in (torch.bfloat16, torch.float16)]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")


def heads(length, width, dtype=torch.float32):
    """(2, 2, L, D), as attention hands them over: views of (B, L, H, D)."""
    generator = torch.Generator().manual_seed(width)
    return torch.randn(2, length, 2, width, generator=generator).to(DEVICE, dtype).transpose(1, 2)


def assert_largest(codes, x, matrices, factors):
    """Each digit's score is the largest of [xR; −xR], up to rounding."""
    x, matrices = x.double(), matrices.double()
    scores = torch.einsum("bhld,hrds->bhrls", x, matrices)
    size = x.norm(dim=-1)[:, :, None, :] * matrices.norm(dim=2).amax(-1)[None, :, :, None]
    rest = codes.long()
    for part, factor in reversed(list(zip(scores.split([n // 2 for n in factors], -1), factors, strict=True))):
        both = torch.cat([part, -part], -1)
        chosen = both.gather(-1, (rest % factor)[..., None])[..., 0]
        assert (chosen >= both.amax(-1) - ROUNDING * size).all()
        rest = rest // factor
    assert (rest == 0).all()


def assert_sides(codes, x, key, global_heads, bits, kind):
    """Each bit is its projection's sign, unless that is zero up to rounding."""
    x, hashes = x.double(), codes.shape[2]
    for number, head in enumerate(global_heads):
        for hash_ in range(hashes):
            normals = hyperplanes(key, head, hash_, bits, x.shape[3], kind).to(DEVICE)
            projected = x[:, number] @ normals.T  # (B, L, τ)
            bit = codes[:, number, hash_, :, None].long() >> torch.arange(bits, device=DEVICE) & 1
            size = x[:, number].norm(dim=-1, keepdim=True) * normals.norm(dim=-1)
            assert ((bit == (projected >= 0)) | (projected.abs() <= ROUNDING * size)).all()
    assert (codes >= 0).all() and (codes.long() < 1 << bits).all()


@pytest.mark.parametrize("factors", [[2], [4, 6], [40], [16, 66], [256, 256], [2, 4, 6]])
def test_buckets_are_those_of_the_largest_score(factors):
    x, matrices = heads(70, 24), rotations(1, range(2), 2, 24, factors, DEVICE)
    codes = angular_hash(x, matrices, factors)
    assert codes.shape == (2, 2, 2, 70) and codes.dtype == (torch.int32 if factors == [256, 256] else torch.int16)
    assert_largest(codes, x, matrices, factors)


def test_of_equal_scores_the_first_and_the_positive_one_wins():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (1, 2, 60, 4), generator=generator).float()  # exact products, and many equal ones
    matrices = torch.randint(-1, 2, (2, 3, 4, 40), generator=generator).float()
    x, matrices = x.to(DEVICE), matrices.to(DEVICE)
    assert torch.equal(angular_hash(x, matrices, [80]).long(), defined(x, matrices, [80]))
    assert (angular_hash(torch.zeros_like(x), matrices, [40, 40]) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("functions", [1, 2])
@pytest.mark.parametrize("width,buckets,length", [(16, 3, 17), (24, 50, 70)])
@pytest.mark.parametrize("linear", [False, True])
def test_learned_buckets_are_those_of_the_largest_score(width, buckets, length, functions, dtype, linear):
    """Of one function, and of a sum of two: W2·relu(W1·x + b1) + b2, or W·x."""
    inputs = [heads(length, width, dtype), heads(length, width, dtype).flip(2)][:functions]
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, width, buckets)] if linear else [(2, width, width), (2 * width,), (2, width, buckets), (2 * buckets,)]
    weights = [tuple(torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes) for _ in inputs]
    codes = learned_codes(inputs, weights)
    assert codes.shape == (2, 2, length) and codes.dtype == torch.int16
    scores = torch.zeros(2, 2, length, buckets, dtype=torch.float64, device=DEVICE)
    for x, w in zip((x.double() for x in inputs), ([p.double() for p in each] for each in weights), strict=True):
        if linear:
            scores += x @ w[0]
        else:
            scores += torch.relu(x @ w[0] + w[1].view(2, 1, -1)) @ w[2] + w[3].view(2, 1, -1)
    chosen = scores.gather(-1, codes.long().unsqueeze(-1)).squeeze(-1)
    assert (chosen >= scores.amax(-1) - ROUNDING * width * scores.abs().amax()).all()
    assert (codes.long() == scores.argmax(-1)).double().mean() > 0.99
    again = learned_codes([x[:, :, :1].expand(-1, -1, 9, -1) for x in inputs], weights)
    assert (again == again[:, :, :1]).all()


def test_of_equal_learned_scores_the_first_wins():
    x, zero = torch.ones(1, 1, 5, 16, device=DEVICE), torch.zeros(1, 16, 40, device=DEVICE)
    assert (learned_codes([x], [(zero,)]) == 0).all()
    zero[:, :, [7, 33]] = 1.0
    assert (learned_codes([x], [(zero,)]) == 7).all()


@KINDS
@pytest.mark.parametrize(
    "width,hashes,bits", [(8, 3, 4), (6, 20, 3), (1, 2, 2), (16, 5, 17), (16, 70, 2), (100, 70, 1)]
)
def test_codes_are_the_sides_of_the_hyperplanes(kind, width, hashes, bits, monkeypatch):
    x = heads(35, width)
    codes = sign_codes(x, 7, range(4, 6), hashes, bits, kind)
    assert codes.shape == (2, 2, hashes, 35) and codes.dtype == (torch.int16 if bits <= 15 else torch.int32)
    assert_sides(codes, x, 7, range(4, 6), bits, kind)
    if kind == "hadamard":  # the same sums in the same order, of products by 1 and −1, which are exact: fused or not
        monkeypatch.setenv("MEGASPARSE_OPS", "blockwise")
        assert torch.equal(codes.cpu(), sign_codes(x.cpu(), 7, range(4, 6), hashes, bits, kind))


def test_more_tokens_than_one_program_takes():
    x = heads(300, 8)
    matrices = rotations(1, range(2), 1, 8, [8], DEVICE)
    assert_largest(angular_hash(x, matrices, [8]), x, matrices, [8])
    for kind in ("hadamard", "gaussian"):
        assert_sides(sign_codes(x, 7, range(2), 2, 2, kind), x, 7, range(2), 2, kind)


@KINDS
def test_zero_vectors_have_all_bits_and_the_length_does_not_matter(kind):
    x = heads(20, 8)
    assert (sign_codes(torch.zeros_like(x), 1, range(2), 12, 3, kind) == 7).all()
    assert torch.equal(sign_codes(x, 1, range(2), 12, 3, kind), sign_codes(x * 2**14, 1, range(2), 12, 3, kind))


def test_no_tokens_have_no_codes():
    x = torch.zeros(2, 2, 0, 8, device=DEVICE)
    assert angular_hash(x, torch.zeros(2, 3, 8, 4, device=DEVICE), [8]).shape == (2, 2, 3, 0)
    assert sign_codes(x, 1, range(2), 5, 3, "hadamard").shape == (2, 2, 5, 0)


@pytest.mark.kernels
@pytest.mark.parametrize("width,dtype,length", GRID)
def test_angular_grid(width, dtype, length):
    x = heads(length, width, dtype)
    for factors in ([14, 32], [64]):
        matrices = rotations(1, range(2), 2, width, factors, DEVICE)
        assert_largest(angular_hash(x, matrices, factors), x, matrices, factors)


@pytest.mark.kernels
@KINDS
@pytest.mark.parametrize("width,dtype,length", GRID)
def test_sign_grid(width, dtype, length, kind):
    x = heads(length, width, dtype)
    assert_sides(sign_codes(x, 3, range(1, 3), 18, 3, kind), x, 3, range(1, 3), 3, kind)
