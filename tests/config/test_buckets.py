"""Bucket counts against the paper's 2·L/M, and the factors they are hashed in."""

import math

import pytest

from megasparse.attention.lsh import LSHAttentionConfig, lsh_buckets


@pytest.mark.parametrize(
    ("length", "chunk", "factors"),
    [
        (65536, 256, [16, 32]),  # the paper's 512
        (12288, 128, [12, 16]),  # the paper's 192 for imagenet64
        (1024, 64, [32]),
        (4096, 64, [128]),
        (8192, 64, [16, 16]),
        (64, 64, [2]),
        (65, 64, [4]),
    ],
)
def test_null_takes_twice_the_length_over_the_chunk(length, chunk, factors):
    assert lsh_buckets(LSHAttentionConfig(chunk=chunk), length) == factors


@pytest.mark.parametrize("length", range(8, 9000, 123))
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_factors_are_even_near_each_other_and_barely_more_than_the_papers_number(length, chunk):
    if chunk > length:
        return
    factors = lsh_buckets(LSHAttentionConfig(chunk=chunk), length)
    count, paper = math.prod(factors), 2 * length / chunk
    assert all(factor % 2 == 0 for factor in factors)
    assert paper <= count <= 1.1 * paper + 8
    assert len(factors) == (1 if count <= 128 else 2)
    assert factors[-1] <= 2 * factors[0]


@pytest.mark.parametrize("power", range(8, 17))
def test_a_power_of_two_has_powers_of_two_as_factors(power):
    assert lsh_buckets(LSHAttentionConfig(buckets=2**power), 64) == [2 ** (power // 2), 2 ** (power - power // 2)]


def test_numbers_given_are_kept():
    assert lsh_buckets(LSHAttentionConfig(buckets=6), 10**6) == [6]
    assert lsh_buckets(LSHAttentionConfig(buckets=148), 64) == [2, 74]
    assert lsh_buckets(LSHAttentionConfig(buckets=[4, 10]), 64) == [4, 10]
    assert lsh_buckets(LSHAttentionConfig(buckets=[256]), 64) == [256]
    with pytest.raises(ValueError, match="130"):
        lsh_buckets(LSHAttentionConfig(buckets=130), 64)
