"""YOSO's kernels, in Triton's interpreter, against the definition in float64."""

import itertools

import pytest
import torch

from megasparse.ops.backend import VARIABLE
from megasparse.ops.hash_table_attention import HashTableAttentionSpec, blockwise, reference
from megasparse.ops.hash_table_attention import hash_table_attention as operator
from megasparse.ops.kernels import recorded
from tests.helpers.kernels import DEVICE

kernels = pytest.importorskip("megasparse.ops.hash_table_attention.gpu")

BARS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 3e-2), torch.float16: (1e-2, 3e-2)}


def random_heads(length, keys=None, dim=5, dtype=torch.float32, batch=2):
    generator = torch.Generator().manual_seed(length + dim)
    sizes = (length, keys or length, keys or length)
    q, k, v = (torch.randn(batch, 1, n, dim, generator=generator) for n in sizes)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return [x.to(DEVICE, dtype) for x in (q, k, v)]


def random_codes(heads, hashes, code_bits, dtype=torch.int16):
    generator = torch.Generator().manual_seed(1)
    sizes = [(x.shape[0], x.shape[1], hashes, x.shape[2]) for x in heads[:2]]
    return [torch.randint(1 << code_bits, n, generator=generator).to(DEVICE, dtype) for n in sizes]


def random_masks(length, batch=2):
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(batch, length, generator=generator) > 0.3
    documents = torch.randint(0, 3, (batch, length), generator=generator).sort(-1).values
    return mask.to(DEVICE), documents.to(DEVICE)


def call(attention, heads, *codes, query_mask=None, key_mask=None, segments=None, **rule):
    return attention(*heads, *codes, HashTableAttentionSpec(**rule), query_mask, key_mask, segments)


def gradients(attention, heads, codes, **rule):
    q, k, v = (x.detach().clone().requires_grad_() for x in heads)
    out, total = call(attention, (q, k, v), *codes, **rule)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return out.detach(), total, *torch.autograd.grad(out, [q, k, v], grad)


def defined(heads, codes, **rule):
    return gradients(reference.hash_table_attention, [x.double() for x in heads], codes, **rule)


def check(heads, codes, **rule):
    """Output, row sums (exactly) and gradients are those of the definition, padding's zeros among them."""
    ours = gradients(kernels.hash_table_attention, heads, codes, **rule)
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
    mask, documents = random_masks(37)
    who = dict(query_mask=mask, key_mask=mask, segments=documents) if masked else {}
    check(heads, random_codes(heads, 3, 2), code_bits=2, causal=causal, **who)


def test_other_lengths_of_keys_and_their_padding():
    heads = random_heads(7, keys=70)
    check(heads, random_codes(heads, 2, 3), code_bits=3, causal=False, key_mask=random_masks(70)[0])


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


def test_more_buckets_than_tokens_and_no_collision():
    heads = random_heads(6, batch=1)
    number = torch.arange(6, device=DEVICE).expand(1, 1, 2, -1)
    results = gradients(kernels.hash_table_attention, heads, (number, number + 6), code_bits=20, causal=False)
    assert all((x == 0).all() for x in results)


def test_fp32_queries_beside_half_precision_values_and_strided_heads():
    """As the attention layer calls it: q and k are of length 1 in fp32, heads are views."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in random_heads(20, dim=16))
    codes = random_codes((q, k), 2, 2)
    rule = dict(code_bits=2, causal=True)
    ours = gradients(kernels.hash_table_attention, (q, k, v.to(torch.bfloat16)), codes, **rule)
    assert [x.dtype for x in ours] == [torch.float32] * 4 + [torch.bfloat16]
    for mine, exact in zip(ours, defined((q, k, v.to(torch.bfloat16)), codes, **rule), strict=True):
        assert (mine.double() - exact).norm() < 3e-2 * exact.norm()


def test_two_runs_are_bit_identical():
    heads = random_heads(40, dim=8, batch=1)
    codes = random_codes(heads, 2, 2)
    runs = [gradients(kernels.hash_table_attention, heads, codes, code_bits=2, causal=True) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


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
    # Windows, sums, tails, reading; backward: windows twice, the same for ∇v, products, tails and hashes for q and k
    assert len(launches) == 4 + 2 + 3 + 2 * (2 + 4)


@pytest.mark.parametrize("forced", ["reference", "blockwise", "triton"])
def test_the_operator_runs_what_is_forced(forced, monkeypatch):
    """In each implementation, which differ in their last bits."""
    monkeypatch.setenv(VARIABLE, forced)
    heads = random_heads(12)
    codes = random_codes(heads, 2, 1)
    rule = dict(code_bits=1, causal=True)
    module = {"reference": reference, "blockwise": blockwise, "triton": kernels}[forced]
    exact = defined(heads, codes, **rule)
    called = []
    own = module.hash_table_attention
    monkeypatch.setattr(module, "hash_table_attention", lambda *x, **named: called.append(1) or own(*x, **named))
    for mine, theirs in zip(gradients(operator, heads, codes, **rule), exact, strict=True):
        assert (mine.double() - theirs).norm() < 1e-5 * theirs.norm()
    assert called == [1]


@pytest.mark.kernels
@pytest.mark.parametrize("dim", [16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", BARS)
def test_the_grid_of_shapes(dtype, dim):
    for length, causal in itertools.product([1, 17, 100], [False, True]):
        heads = random_heads(length, dim=dim, dtype=dtype, batch=1)
        check(heads, random_codes(heads, 2, 2), code_bits=2, causal=causal)
