import math

import pytest
import torch

import megasparse.ops.hashing as blockwise
from megasparse.ops.hashing import angular_hash
from megasparse.ops.hashing import reference_angular_hash as defined
from megasparse.ops.random import rotations

CPU = torch.device("cpu")


@pytest.mark.parametrize("factors", [[2], [16], [4, 6], [16, 32], [256, 256]])
@pytest.mark.parametrize("block", [1, 1 << 21])
def test_codes_are_those_of_the_definition(factors, block, monkeypatch):
    monkeypatch.setattr(blockwise, "_BLOCK_ELEMENTS", block)
    x = torch.randn(2, 3, 37, 8, generator=torch.Generator().manual_seed(0))
    matrices = rotations(1, range(3), 2, 8, factors, CPU)
    codes = angular_hash(x, matrices, factors)
    assert codes.shape == (2, 3, 2, 37)
    assert codes.min() >= 0 and codes.max() < math.prod(factors)
    assert torch.equal(codes, defined(x.double(), matrices, factors))


def test_scale_does_not_matter_and_opposite_vectors_never_meet():
    x = torch.randn(1, 2, 50, 8, generator=torch.Generator().manual_seed(0))
    matrices = rotations(1, range(2), 3, 8, [8], CPU)
    codes = angular_hash(x, matrices, [8])
    assert torch.equal(codes, angular_hash(x * 64, matrices, [8]))
    assert (codes != angular_hash(-x, matrices, [8])).all()


def test_near_vectors_share_a_bucket_more_often():
    x = torch.randn(1, 1, 4000, 16, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(1, 1, 4000, 16, generator=torch.Generator().manual_seed(1))
    matrices = rotations(2, range(1), 4, 16, [16], CPU)
    codes = angular_hash(x, matrices, [16])
    shared = [(codes == angular_hash(x + e * noise, matrices, [16])).double().mean() for e in (0.1, 0.5, 1.0, 1e6)]
    assert shared == sorted(shared, reverse=True)
    # Unrelated vectors meet a little more often than 1/16: random buckets are not equally large.
    assert shared[0] > 0.85 and 1 / 16 <= shared[-1] < 1.5 / 16


def test_zero_vectors_and_bf16_have_codes():
    matrices = rotations(1, range(2), 1, 8, [4, 4], CPU)
    assert (angular_hash(torch.zeros(1, 2, 3, 8), matrices, [4, 4]) == 0).all()
    x = torch.randn(1, 2, 9, 8).bfloat16()
    assert torch.equal(angular_hash(x, matrices, [4, 4]), angular_hash(x.float(), matrices, [4, 4]))
