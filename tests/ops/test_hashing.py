"""Bucket codes and sign codes, in torch and by kernels: these differ only where scores are equal up to rounding."""

import math

import pytest
import torch

import megasparse.ops.hashing as hashing
from megasparse.ops.hashing import (
    angular_hash,
    code_gap,
    sign_codes,
)
from megasparse.ops.hashing_kernels import learned_codes
from megasparse.ops.random import rotations
from tests.helpers import definitions
from tests.helpers.cases import together
from tests.helpers.operators import DEVICE

ROUNDING = 1e-6
GRID = [(width, torch.float32, length) for width in (16, 24, 32, 64, 128, 256) for length in (1, 17, 100)]
GRID += [(width, dtype, 17) for width in (16, 24, 32, 64, 128, 256) for dtype in (torch.bfloat16, torch.float16)]
KERNELS = pytest.mark.usefixtures("kernels")


def more(*cases):
    """Cases that `make kernels` runs."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.kernels) for case in cases]


CPU = torch.device("cpu")


@pytest.mark.parametrize("factors,block", [([2], 1), ([4, 6], 1 << 21), ([16, 32], 1), ([256, 256], 1 << 21)])
def test_angular_codes_equal_the_definition(factors, block, monkeypatch):
    monkeypatch.setattr(hashing, "_BLOCK_ELEMENTS", block)
    x = torch.randn(2, 3, 37, 8, generator=torch.Generator().manual_seed(0))
    matrices = rotations(1, range(3), 2, 8, factors, CPU)
    codes = angular_hash(x, matrices, factors)
    assert codes.shape == (2, 3, 2, 37)
    assert codes.min() >= 0 and codes.max() < math.prod(factors)
    assert torch.equal(codes, definitions.angular_hash(x.double(), matrices, factors))
    parts = torch.einsum("bhld,hrds->bhrls", x, matrices).split([n // 2 for n in factors], dim=-1)
    ordered = [torch.cat([part, -part], dim=-1).sort(dim=-1).values for part in parts]
    gap = min((scores[..., -1] - scores[..., -2]).min() for scores in ordered) / x.norm(dim=-1).max()
    assert code_gap(x, matrices, factors) == pytest.approx(float(gap), abs=ROUNDING)


def test_angular_codes_ignore_scale_and_opposite_vectors_never_meet():
    x = torch.randn(1, 2, 50, 8, generator=torch.Generator().manual_seed(0))
    matrices = rotations(1, range(2), 3, 8, [8], CPU)
    codes = angular_hash(x, matrices, [8])
    assert torch.equal(codes, angular_hash(x * 64, matrices, [8]))
    assert (codes != angular_hash(-x, matrices, [8])).all()


def test_zero_vectors_and_bf16_have_codes():
    matrices = rotations(1, range(2), 1, 8, [4, 4], CPU)
    assert (angular_hash(torch.zeros(1, 2, 3, 8), matrices, [4, 4]) == 0).all()
    x = torch.randn(1, 2, 9, 8).bfloat16()
    assert torch.equal(angular_hash(x, matrices, [4, 4]), angular_hash(x.float(), matrices, [4, 4]))


KINDS = pytest.mark.parametrize("kind", ["hadamard", "gaussian"])


def vectors(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pairs_at(cosine, count, width):
    x, other = (torch.nn.functional.normalize(vectors(count, width, seed=s).double(), dim=-1) for s in (1, 2))
    other = torch.nn.functional.normalize(other - (other * x).sum(-1, keepdim=True) * x, dim=-1)
    return x, cosine * x + math.sqrt(1 - cosine**2) * other


def collision_share(kind, cosine, width, bits, heads=400, pairs=200, hashes=16):
    """Share of collisions over heads (with separate hyperplanes), hashes and pairs, and its standard error."""
    x, y = (t.expand(1, heads, -1, -1) for t in pairs_at(cosine, pairs, width))
    met = [sign_codes(t, 5, range(heads), hashes, bits, kind) for t in (x, y)]
    share = (met[0] == met[1]).double().mean((0, 2, 3))  # (heads,) independent draws
    return share.mean().item(), (share.std() / heads**0.5).item()


@KINDS
@together("width,hashes,bits,block", [(8, 3, 4, 1), (6, 20, 3, 1 << 20), (1, 2, 2, 1), (16, 5, 17, 1 << 20)])
def test_sign_codes_equal_the_definition(kind, width, hashes, bits, block, monkeypatch):
    monkeypatch.setattr(hashing, "_SIGN_ELEMENTS", block)
    x = vectors(2, 3, 11, width)
    codes = sign_codes(x, 7, range(4, 7), hashes, bits, kind)
    assert codes.shape == (2, 3, hashes, 11) and codes.dtype == (torch.int16 if bits <= 15 else torch.int32)
    assert torch.equal(codes, definitions.sign_codes(x, 7, range(4, 7), hashes, bits, kind))


def test_the_fast_transform_is_the_matrix():
    x = vectors(3, 32).double()
    torch.testing.assert_close(hashing.hadamard(x), x @ definitions.hadamard_matrix(32))


@KINDS
def test_draws_belong_to_global_heads_and_more_hashes_keep_the_first(kind):
    x = vectors(1, 4, 9, 8)
    codes = sign_codes(x, 3, range(4), 20, 5, kind)
    assert torch.equal(sign_codes(x, 3, range(4), 7, 5, kind), codes[:, :, :7])
    assert torch.equal(sign_codes(x[:, 2:], 3, range(2, 4), 20, 5, kind), codes[:, 2:])
    same = sign_codes(x[:, :1].expand(-1, 4, -1, -1), 3, range(4), 20, 5, kind)
    assert len({tuple(row) for row in same.flatten(2)[0].tolist()}) == 4
    assert not torch.equal(sign_codes(x, 4, range(4), 20, 5, kind), codes)


@KINDS
def test_sign_codes_ignore_scale_and_opposite_vectors_never_meet(kind):
    x = vectors(1, 2, 50, 8)
    codes = sign_codes(x, 1, range(2), 12, 3, kind)
    assert torch.equal(codes, sign_codes(x * 1e4, 1, range(2), 12, 3, kind))
    assert (codes != sign_codes(-x, 1, range(2), 12, 3, kind)).all()
    low = x.bfloat16()
    assert torch.equal(sign_codes(low, 1, range(2), 12, 3, kind), sign_codes(low.float(), 1, range(2), 12, 3, kind))
    assert (sign_codes(torch.zeros(1, 2, 3, 8), 1, range(2), 12, 3, kind) == 7).all()


@pytest.mark.parametrize("width,cosine", [(64, 0.3), (16, 0.9)])
def test_each_bit_of_the_fast_transform_is_nearly_unbiased(width, cosine):
    """To the 9th power, as in a code of 9 bits: a deviation under 2.5 %, of which the measurement itself has 0.8."""
    share, _ = collision_share("hadamard", cosine, width, 1, heads=600, pairs=50)
    assert abs((share / (1 - math.acos(cosine) / math.pi)) ** 9 - 1) < 0.025


@pytest.mark.parametrize(
    "kind,hashes,width,cosine",
    [("gaussian", 4, 16, 0.3), ("gaussian", 4, 16, 0.9), ("hadamard", 16, 64, 0.3), ("hadamard", 16, 16, 0.7)],
)
def test_collisions_have_the_probability_of_the_paper(kind, hashes, width, cosine):
    """The bits of one code are independent. Out of one transform they are not: 15 % fewer collisions at (64, 0.3), 24 %
    at (16, 0.7)."""
    share, error = collision_share(kind, cosine, width, 9, pairs=100, hashes=hashes)
    assert abs(share - (1 - math.acos(cosine) / math.pi) ** 9) < 4 * error


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
            normals = definitions.hyperplanes(key, head, hash_, bits, x.shape[3], kind).to(DEVICE)
            projected = x[:, number] @ normals.T  # (B, L, τ)
            bit = codes[:, number, hash_, :, None].long() >> torch.arange(bits, device=DEVICE) & 1
            size = x[:, number].norm(dim=-1, keepdim=True) * normals.norm(dim=-1)
            assert ((bit == (projected >= 0)) | (projected.abs() <= ROUNDING * size)).all()
    assert (codes >= 0).all() and (codes.long() < 1 << bits).all()


@KERNELS
@pytest.mark.parametrize("factors", [[4, 6], [256, 256], *more([2], [40], [16, 66], [2, 4, 6])])
def test_a_bucket_is_the_largest_score(factors):
    x, matrices = heads(70, 24), rotations(1, range(2), 2, 24, factors, DEVICE)
    codes = angular_hash(x, matrices, factors)
    assert codes.shape == (2, 2, 2, 70) and codes.dtype == (torch.int32 if factors == [256, 256] else torch.int16)
    assert_largest(codes, x, matrices, factors)


@KERNELS
def test_ties_of_scores_go_to_the_first_and_the_positive_one():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (1, 2, 60, 4), generator=generator).float()  # exact products, and many equal ones
    matrices = torch.randint(-1, 2, (2, 3, 4, 40), generator=generator).float()
    x, matrices = x.to(DEVICE), matrices.to(DEVICE)
    assert torch.equal(angular_hash(x, matrices, [80]).long(), definitions.angular_hash(x, matrices, [80]))
    assert (angular_hash(torch.zeros_like(x), matrices, [40, 40]) == 0).all()


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, *more(torch.bfloat16)])
@pytest.mark.parametrize("functions", [1, 2])
@pytest.mark.parametrize("width,buckets,length", [(24, 50, 70), *more((16, 3, 17))])
@pytest.mark.parametrize("linear", [False, True])
def test_a_learned_bucket_is_the_largest_score(width, buckets, length, functions, dtype, linear):
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


@KERNELS
def test_ties_of_learned_scores_go_to_the_first():
    x, zero = torch.ones(1, 1, 5, 16, device=DEVICE), torch.zeros(1, 16, 40, device=DEVICE)
    assert (learned_codes([x], [(zero,)]) == 0).all()
    zero[:, :, [7, 33]] = 1.0
    assert (learned_codes([x], [(zero,)]) == 7).all()


@KERNELS
@KINDS
@pytest.mark.parametrize(
    "width,hashes,bits", [(8, 3, 4), (6, 20, 3), *more((1, 2, 2), (16, 5, 17), (16, 70, 2), (100, 70, 1))]
)
def test_codes_are_the_sides_of_the_hyperplanes(kind, width, hashes, bits, monkeypatch):
    x = heads(35, width)
    codes = sign_codes(x, 7, range(4, 6), hashes, bits, kind)
    assert codes.shape == (2, 2, hashes, 35) and codes.dtype == (torch.int16 if bits <= 15 else torch.int32)
    assert_sides(codes, x, 7, range(4, 6), bits, kind)
    if kind == "hadamard":  # the same sums in the same order, of products by 1 and −1, which are exact: fused or not
        monkeypatch.setenv("MEGASPARSE_OPS", "blockwise")
        assert torch.equal(codes.cpu(), sign_codes(x.cpu(), 7, range(4, 6), hashes, bits, kind))


@KERNELS
def test_no_tokens_have_no_codes():
    x = torch.zeros(2, 2, 0, 8, device=DEVICE)
    assert angular_hash(x, torch.zeros(2, 3, 8, 4, device=DEVICE), [8]).shape == (2, 2, 3, 0)
    assert sign_codes(x, 1, range(2), 5, 3, "hadamard").shape == (2, 2, 5, 0)


@KERNELS
@pytest.mark.parametrize("width,dtype,length", [(8, torch.float32, 300), *more(*GRID)])
def test_codes_of_any_width_dtype_and_length(width, dtype, length):
    """One program does not take 300 tokens."""
    x = heads(length, width, dtype)
    for factors in ([14, 32], [64]):
        matrices = rotations(1, range(2), 2, width, factors, DEVICE)
        assert_largest(angular_hash(x, matrices, factors), x, matrices, factors)
    for kind in ("hadamard", "gaussian"):
        assert_sides(sign_codes(x, 3, range(1, 3), 18, 3, kind), x, 3, range(1, 3), 3, kind)
