"""Strict causality of bucketed attention, bit by bit, and the properties of the CPU libraries that it rests on."""

import itertools

import pytest
import torch

from megasparse.attention.lha_hash import HashInputs, bucket_codes
from megasparse.ops import hashing
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window
from megasparse.ops.bucketed_attention.blocks import _exp2
from megasparse.ops.bucketed_attention.blocks import bucketed_attention as blockwise
from megasparse.ops.operator import linear
from megasparse.ops.random import PairDropout
from tests.helpers.operators import random_masks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BOOLS = (False, True)
CASES = list(
    itertools.product(DTYPES, (1, 7, 40, 1500), (4, 16, 33, 64, 130), BOOLS, BOOLS, BOOLS, BOOLS)
)  # of a dtype, buckets, M, and whether codes are separate, tokens masked, probabilities dropped, queries hidden
TWO = pytest.mark.parametrize("threads", [1, 2], indirect=True)
LENGTHS = [1024, *(pytest.param(length, marks=pytest.mark.slow) for length in (4096, 16384))]


def random_codes(generator, shape, buckets, skewed):
    codes = torch.randint(0, buckets, shape, generator=generator)
    return (codes * torch.rand(shape, generator=generator)).long() if skewed else codes


@pytest.mark.parametrize("length", LENGTHS)
@TWO
def test_later_tokens_change_no_bit_of_earlier_outputs(length, threads):
    """Any two values of two axes meet in one case of the shortest length."""
    for number, case in enumerate(CASES[16 * (threads - 1) :: 33 if length == 1024 else 211]):
        dtype, buckets, chunk, separate, masked, dropped, exclude_self = case
        generator = torch.Generator().manual_seed(number)
        rounds = 1 + number % 3
        heads = [torch.randn(2, 2, length, 16, generator=generator).to(dtype) for _ in range(3)]
        codes = [random_codes(generator, (2, 2, rounds, length), buckets, number % 2) for _ in range(1 + separate)]
        mask, segments = random_masks(length) if masked else (None, None)
        dropout = PairDropout.of(0.2, 7, torch.arange(length).expand(2, -1), range(2)) if dropped else None
        spec = BucketedAttentionSpec(
            Window("band", chunk), True, 0.25, exclude_self, count_rounds=number % 4 != 1, buckets=buckets
        )

        def attend(heads, codes, spec=spec, mask=mask, segments=segments, dropout=dropout):
            pair = codes[0] if len(codes) == 1 else tuple(codes)
            return blockwise(*heads, pair, spec, mask, segments, dropout=dropout)

        outputs = attend(heads, codes)
        for first in (length * 2 // 7 + 3, length // 2 + 1, length - 1):
            others, other_codes = ([x.clone() for x in tensors] for tensors in (heads, codes))
            for x in others:
                x[:, :, first:] = 2 * torch.randn(x[:, :, first:].shape, generator=generator).to(dtype)
            for x in other_codes:
                x[..., first:] = random_codes(generator, x[..., first:].shape, buckets, not number % 2)
            for before, after in zip(outputs, attend(others, other_codes), strict=True):
                assert torch.equal(before[:, :, :first], after[:, :, :first]), (case, first)


SHAPES = [(8, 8), (8, 16), (16, 16), (16, 32), (32, 32), (32, 64), (32, 96), (64, 192), (64, 576)]


@TWO
def test_a_matrix_of_a_batched_product_is_the_same_in_any_batch_of_two_or_more(threads):
    for (rows, keys), dim in itertools.product(SHAPES, [4, 16, 20, 64, 128]):
        sizes, generator = ((rows, dim), (keys, dim), (rows, keys)), torch.Generator().manual_seed(0)
        q, k, weight = (torch.randn(70, *size, generator=generator) for size in sizes)
        hidden = (weight > 1).float()

        def scores(part, q=q, k=k, hidden=hidden):
            return hidden[part].clone().baddbmm_(q[part].clone(), k[part].clone().transpose(1, 2), beta=-(2.0**100))

        whole = scores(slice(None)), torch.bmm(weight, k), weight.sum(-1)
        for part in (slice(0, 2), slice(5, 7), slice(7, 20), slice(1, 70), slice(2, 67)):
            parts = scores(part), torch.bmm(weight[part].clone(), k[part].clone()), weight[part].clone().sum(-1)
            assert all(torch.equal(x[part], y) for x, y in zip(whole, parts, strict=True)), (rows, keys, dim, part)


@TWO
def test_a_row_of_a_product_ignores_other_rows_and_terms_of_weight_0(threads):
    for rows, keys in SHAPES:
        generator = torch.Generator().manual_seed(0)
        weight, values = (torch.rand(5, *sizes, generator=generator) for sizes in ((rows, keys), (keys, 16)))
        row = rows // 2
        weight[:, row, keys - rows + row + 1 :] = 0.0
        other, other_values = weight.clone(), values.clone()
        other[:, row + 1 :] = 0.0
        other_values[:, keys - rows + row + 1 :] = 7.0
        assert torch.equal(torch.bmm(weight, values)[:, row], torch.bmm(other, other_values)[:, row]), (rows, keys)


@TWO
def test_powers_and_logarithms_are_the_same_wherever_a_number_is(threads):
    x = 4 * torch.randn(1 << 17, generator=torch.Generator().manual_seed(0)) - 4
    powers, exps, logs = _exp2(x.clone()), x.exp(), x.abs().log2()
    for start, stop in ((64, 128), (192, 64 * 1003), (64 * 5, 64 * 2000)):
        assert torch.equal(_exp2(x[start:stop].clone()), powers[start:stop])
    for start, stop in ((1, 8), (5, 1003), (31, 40001), (8, 100008)):
        assert torch.equal(x[start:stop].clone().exp(), exps[start:stop])
        assert torch.equal(x[start:stop].abs().log2(), logs[start:stop])


@TWO
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_product_does_not_depend_on_the_number_of_rows(threads, dtype, monkeypatch):
    """Each vector meets two columns with the same product up to the order of its terms, or is on a hyperplane up to it:
    another order gives other codes."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(1, 2, 4096, 32, generator=generator).to(dtype)
    one, other = torch.randn(2, 2, 1, 32, 20, generator=generator)
    twins = torch.cat([torch.cat([one, other], 2), torch.cat([other, one], 2)], dim=3)  # (H, 1, D, 40)
    planes = torch.cat([one, one], 2).transpose(2, 3)  # (H, 1, τ, D)
    monkeypatch.setattr(hashing, "hash_planes", lambda *args: planes)
    weight, bias = twins[0, 0].T.to(dtype).contiguous(), torch.randn(40, generator=generator).to(dtype)
    for function, x in (
        (lambda x: hashing.angular_hash(x, twins, [80]), torch.cat([half, half], -1)),
        (lambda x: bucket_codes(HashInputs((x,), ((twins[:, 0],),)), 40).unsqueeze(2), torch.cat([half, half], -1)),
        (lambda x: hashing.sign_codes(x, 0, range(2), 1, 20, "gaussian"), torch.cat([half, -half], -1)),
        (lambda x: linear(x, weight, bias).transpose(2, 3), torch.cat([half, half], -1)),
    ):
        whole = function(x)
        for rows in (1, 2, 3, 17, 4096):
            for first in (0, 1000, 4096 - rows):
                part = slice(first, first + rows) if first + rows <= 4096 else slice(0, rows)
                assert torch.equal(function(x[:, :, part].contiguous()), whole[..., part]), rows
