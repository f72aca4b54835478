"""YOSO's kernels, in Triton's interpreter, against the definition in float64."""

import itertools

import pytest
import torch

from megasparse.ops.hash_table_attention import reference
from megasparse.ops.kernels import recorded
from tests.helpers.kernels import DEVICE
from tests.helpers.operators import BARS, as_views, random_masks
from tests.ops.test_hash_table_attention import call, gradients, random_codes
from tests.ops.test_hash_table_attention import random_heads as heads_on

kernels = pytest.importorskip("megasparse.ops.hash_table_attention_kernels")


def random_heads(length, keys=None, dim=5, dtype=torch.float32, batch=2):
    return heads_on(length, keys, batch, 1, dim, dtype, DEVICE)


def defined(heads, codes, **rule):
    return gradients(reference, [x.double() for x in heads], *codes, **rule)


def check(heads, codes, **rule):
    """Output, row sums (exactly) and gradients are those of the definition, padding's zeros among them."""
    ours = gradients(kernels.hash_table_attention, heads, *codes, **rule)
    forward, backward = BARS[heads[0].dtype]
    for place, (mine, exact) in enumerate(zip(ours, defined(heads, codes, **rule), strict=True)):
        mine = mine.double()
        assert mine.shape == exact.shape and torch.equal(mine[exact == 0], exact[exact == 0])
        error = (mine - exact).norm() / exact.norm().clamp_min(1e-30)
        bar = (forward, 1e-7, backward, backward, backward)[place]
        assert error <= bar, (("out", "total", "dq", "dk", "dv")[place], error)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_are_the_definition(causal, masked, monkeypatch):
    monkeypatch.setattr(kernels, "_BYTES", 2 * 2 * 37 * 24 * 4)  # two hashes, then one
    heads = random_heads(37, dim=24)
    mask, documents = random_masks(37, device=DEVICE)
    who = dict(query_mask=mask, key_mask=mask, segments=documents) if masked else {}
    check(heads, random_codes(heads, 3, 2), code_bits=2, causal=causal, **who)


def test_other_lengths_of_keys_and_their_padding():
    heads = random_heads(7, keys=70)
    check(heads, random_codes(heads, 2, 3), code_bits=3, causal=False, key_mask=random_masks(70, device=DEVICE)[0])


@pytest.mark.parametrize("code_bits,segment", [(0, 1), (1, 16)])
@pytest.mark.parametrize("causal", [False, True])
def test_runs_that_cross_many_spans_and_segments(causal, code_bits, segment, monkeypatch):
    """With 0 bits all tokens are in one bucket."""
    monkeypatch.setattr(kernels, "_SEGMENT", segment)
    heads = random_heads(390, batch=1)
    check(heads, random_codes(heads, 1, code_bits), code_bits=1, causal=causal)


def test_a_few_queries_over_many_keys_skip_what_none_of_them_sees():
    heads = random_heads(9, keys=300, batch=1)
    codes = random_codes(heads, 1, 6, dtype=torch.int32)
    codes[1][..., :140] = codes[0][..., 3:4]  # one run crosses a boundary, the others are short
    check(heads, codes, code_bits=6, causal=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_bars_in_long_runs(dtype):
    heads = random_heads(270, dim=16, dtype=dtype, batch=1)
    check(heads, random_codes(heads, 1, 1), code_bits=1, causal=True)


def test_fp32_queries_beside_half_precision_values_and_strided_heads():
    """The attention layer calls it so: q and k are of length 1 in fp32, heads are views."""
    q, k, v = as_views(random_heads(20, dim=16))
    codes = random_codes((q, k), 2, 2)
    rule = dict(code_bits=2, causal=True)
    ours = gradients(kernels.hash_table_attention, (q, k, v.to(torch.bfloat16)), *codes, **rule)
    assert [x.dtype for x in ours] == [torch.float32] * 4 + [torch.bfloat16]
    for mine, exact in zip(ours, defined((q, k, v.to(torch.bfloat16)), codes, **rule), strict=True):
        assert (mine.double() - exact).norm() < 3e-2 * exact.norm()


def test_values_with_a_number_more_than_keys():
    q, k, v = random_heads(20, dim=16)
    v = torch.nn.functional.pad(v, (0, 1), value=1.0)
    check((q, k, v), random_codes((q, k), 2, 2), code_bits=2, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_the_host_never_waits_for_the_device(causal):
    """Tensors without data: whatever reads one raises."""
    nowhere = {"device": "meta"}
    with recorded() as launches:
        shape = (2, 3, 1000, 64)
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, requires_grad=True, **nowhere) for _ in range(3))
        codes = [torch.empty(2, 3, 4, 1000, dtype=torch.int16, **nowhere) for _ in range(2)]
        documents = torch.empty(2, 1000, dtype=torch.int64, **nowhere)
        out, _ = call(kernels.hash_table_attention, (q, k, v), *codes, code_bits=6, causal=causal, segments=documents)
        out.sum().backward()
    # Windows, sums, tails, reading; backward: windows twice, the same for ∇v, four each for ∇q and ∇k
    assert len(launches) == 4 + 2 + 3 + 2 * 4


@pytest.mark.kernels
@pytest.mark.parametrize("dim", [16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", BARS)
def test_the_grid_of_shapes(dtype, dim):
    for length, causal in itertools.product([1, 17, 100], [False, True]):
        heads = random_heads(length, dim=dim, dtype=dtype, batch=1)
        check(heads, random_codes(heads, 2, 2), code_bits=2, causal=causal)
