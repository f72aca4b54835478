import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import megasparse.ops.hash_table_attention as module
from megasparse.ops import hash_table_attention_kernels
from megasparse.ops.hash_table_attention import (
    HashTableAttentionSpec,
    expected_attention,
    hash_table_attention,
)
from megasparse.ops.hashing import sign_codes
from megasparse.ops.kernels import recorded
from tests.helpers import definitions, operators
from tests.helpers.operators import BARS, DEVICE, as_views, random_masks

DEFINED = {
    hash_table_attention: definitions.hash_table_attention,
    expected_attention: definitions.expected_attention,
}
PAIR_COSTS = {"tables": math.inf, "pairs": 0.0}


@pytest.fixture(params=PAIR_COSTS)
def procedure(request, monkeypatch):
    monkeypatch.setattr(module, "_PAIR_COST", PAIR_COSTS[request.param])


def random_heads(length, keys=None, batch=2, heads=2, dim=5, dtype=torch.float64, device="cpu"):
    """Random heads, whose q and k are of length 1."""
    q, k, v = operators.random_heads(length, keys, (batch, heads), dim)
    return [x.to(device, dtype) for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)]


def random_codes(heads, hashes, code_bits, dtype=torch.int16):
    generator = torch.Generator().manual_seed(1)
    shapes = [(*x.shape[:2], hashes, x.shape[2]) for x in heads[:2]]
    return [torch.randint(1 << code_bits, n, generator=generator).to(heads[0].device, dtype) for n in shapes]


def call(attention, heads, *codes, key_mask=None, segments=None, **rule):
    return attention(*heads, *codes, HashTableAttentionSpec(**rule), key_mask, segments)


def gradients(attention, heads, *codes, **rule):
    q, k, v = (x.clone().requires_grad_() for x in heads)
    out, total = call(attention, (q, k, v), *codes, **rule)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out.dtype)
    return out.detach(), total.detach(), *torch.autograd.grad(out, [q, k, v], grad)


def assert_equal_to_the_definition(attention, heads, codes, chunk=128, **rule):
    ours = gradients(attention, heads, *codes, **rule, chunk=chunk)
    torch.testing.assert_close(ours, gradients(DEFINED[attention], heads, *codes, **rule), rtol=1e-9, atol=1e-10)
    return ours


def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "_ROW_ELEMENTS", 250)  # several groups of rows
    monkeypatch.setattr(module, "_TABLE_ELEMENTS", 300)  # one hash at a time, or several
    monkeypatch.setattr(module, "_BLOCK_PAIRS", 7)
    monkeypatch.setattr(module, "_QUERIES", 4)
    monkeypatch.setattr(module, "_TILE_ELEMENTS", 40)


@pytest.mark.parametrize("length", [1, 29])
def test_blocks_are_the_definition(length, monkeypatch):
    small_blocks(monkeypatch)
    heads, (mask, documents) = random_heads(length), random_masks(length)
    flags = list(itertools.product([True, False], [None, mask], [None, documents], [1, 6], [1, 3], PAIR_COSTS))
    for causal, padding, segments, code_bits, hashes, cheaper in flags[::3]:  # each pair of values is among them
        monkeypatch.setattr(module, "_PAIR_COST", PAIR_COSTS[cheaper])
        codes = random_codes(heads, hashes, code_bits)
        rule = dict(code_bits=code_bits, causal=causal, key_mask=padding, segments=segments)
        assert_equal_to_the_definition(hash_table_attention, heads, codes, 4, **rule)
        if hashes == 1:
            assert_equal_to_the_definition(expected_attention, heads, [], **rule)


@pytest.mark.usefixtures("procedure")
def test_other_lengths_of_keys():
    heads = random_heads(7, keys=19)
    codes = random_codes(heads, 3, 2)
    rule = dict(code_bits=2, causal=False)
    assert_equal_to_the_definition(hash_table_attention, heads, codes, **rule)
    assert_equal_to_the_definition(expected_attention, heads, [], **rule)


@pytest.mark.usefixtures("procedure")
def test_the_gradient_is_the_papers_lower_bound():
    """Eq. 10 and 12 written out: ∇v = Bᵀg, ∇q = (gvᵀ ∘ τ/2·B)k, ∇k = (gvᵀ ∘ τ/2·B)ᵀq."""
    heads = q, k, v = random_heads(20)
    codes = random_codes(heads, 4, 3)
    g = torch.randn(2, 2, 20, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    sampled = (codes[0][..., :, None] == codes[1][..., None, :]).double().mean(2)
    certain = (1 - torch.acos(q @ k.transpose(-1, -2)) / math.pi) ** 3
    rule = dict(code_bits=3, causal=False)
    for weight, attention, hashed in ((sampled, hash_table_attention, codes), (certain, expected_attention, [])):
        pulled = (g @ v.transpose(-1, -2)) * 1.5 * weight
        _, _, dq, dk, dv = gradients(attention, heads, *hashed, **rule)
        torch.testing.assert_close(dv, weight.transpose(-1, -2) @ g)
        torch.testing.assert_close(dq, pulled @ k)
        torch.testing.assert_close(dk, pulled.transpose(-1, -2) @ q)


@pytest.mark.usefixtures("implementation")
def test_more_buckets_than_tokens_and_no_collision():
    heads = random_heads(6, dtype=torch.float32, device=DEVICE)
    number = torch.arange(6, device=DEVICE).expand(2, 2, 3, -1)
    rule = dict(code_bits=20, causal=False)
    assert all((x == 0).all() for x in gradients(hash_table_attention, heads, number, number + 6, **rule))


@pytest.mark.parametrize("causal", [True, False])
def test_fp32_and_bf16_are_within_their_bars_of_the_definition(causal):
    heads = random_heads(300, dim=16)
    codes = [sign_codes(x, 1, range(2), 8, 5, "gaussian") for x in heads[:2]]
    rule = dict(code_bits=5, causal=causal)
    for dtype, forward, backward in ((torch.float32, 1e-5, 1e-4), (torch.bfloat16, 1e-2, 3e-2)):
        rounded = [x.to(dtype) for x in heads]
        for mine, hashed in ((hash_table_attention, codes), (expected_attention, [])):
            ours = gradients(mine, rounded, *hashed, **rule)
            exact = gradients(DEFINED[mine], [x.double() for x in rounded], *hashed, **rule)
            for place, (x, y) in enumerate(zip(ours, exact, strict=True)):
                error = (x.double() - y).norm() / y.norm()
                assert error < (forward if place < 2 else backward), (dtype, mine.__name__, place, error)


@pytest.mark.parametrize("code_bits,chosen", [(1, "_table_gradients"), (12, "_pair_gradients")])
def test_auto_takes_the_procedure_with_less_to_do(code_bits, chosen, monkeypatch):
    calls = []
    for name in ("_pair_gradients", "_table_gradients"):
        procedure = getattr(module, name)
        spy = lambda *args, procedure=procedure, name=name, **rest: calls.append(name) or procedure(*args, **rest)  # noqa: E731
        monkeypatch.setattr(module, name, spy)
    heads = random_heads(400, dim=4)
    gradients(hash_table_attention, heads, *random_codes(heads, 4, code_bits), code_bits=code_bits, causal=False)
    assert set(calls) == {chosen}


@pytest.mark.usefixtures("procedure")
def test_heads_inside_tokens_of_one_sequence():
    """As a projection leaves them; batch and heads then merge without a copy, and keep their strides."""
    heads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in random_heads(20, batch=1)]
    codes = random_codes(heads, 2, 3)
    assert_equal_to_the_definition(hash_table_attention, heads, codes, code_bits=3, causal=True)


def test_two_runs_are_bit_identical(implementation, monkeypatch):
    heads = random_heads(20, dim=8, dtype=torch.float32, device=DEVICE)
    for cost in [0.0] if implementation == "triton" else PAIR_COSTS.values():
        monkeypatch.setattr(module, "_PAIR_COST", cost)
        codes, rule = random_codes(heads, 2, 3), dict(code_bits=3, causal=True)
        operators.assert_same_bits(*(gradients(hash_table_attention, heads, *codes, **rule) for _ in range(2)))


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")
    return hash_table_attention_kernels


def narrow_heads(length, keys=None, dim=5, dtype=torch.float32, batch=2):
    return random_heads(length, keys, batch, 1, dim, dtype, DEVICE)


def check(heads, codes, **rule):
    """Compare the kernels with the definition: row sums exactly, padding's zeros among them."""
    results = gradients(hash_table_attention, heads, *codes, **rule)
    forward, backward = BARS[heads[2].dtype]
    definition = gradients(definitions.hash_table_attention, [x.double() for x in heads], *codes, **rule)
    for name, a, exact in zip(("out", "total", "dq", "dk", "dv"), results, definition, strict=True):
        a, bar = a.double(), 1e-7 if name == "total" else backward if name.startswith("d") else forward
        assert a.shape == exact.shape and torch.equal(a[exact == 0], exact[exact == 0])
        assert (a - exact).norm() <= bar * exact.norm().clamp_min(1e-30), name
    return results


@pytest.mark.parametrize("causal,masked", [(False, True), (True, False), (True, True)])
def test_kernels_are_the_definition(causal, masked, kernels, monkeypatch):
    monkeypatch.setattr(kernels, "_BYTES", 2 * 2 * 37 * 24 * 4)  # two hashes, then one
    heads = narrow_heads(37, dim=24)
    mask, documents = random_masks(37, device=DEVICE)
    masks = dict(key_mask=mask, segments=documents) if masked else {}
    check(heads, random_codes(heads, 3, 2), code_bits=2, causal=causal, **masks)


def test_kernels_take_other_lengths_of_keys(kernels):
    heads = narrow_heads(7, keys=70)
    check(heads, random_codes(heads, 2, 3), code_bits=3, causal=False)


@pytest.mark.parametrize("causal,code_bits,segment", [(False, 0, 1), (True, 1, 16)])
def test_kernels_sum_runs_across_many_spans_and_segments(causal, code_bits, segment, kernels, monkeypatch):
    """With 0 bits all tokens are in one bucket."""
    monkeypatch.setattr(kernels, "_SEGMENT", segment)
    heads = narrow_heads(390, batch=1)
    check(heads, random_codes(heads, 1, code_bits), code_bits=1, causal=causal)


def test_kernels_skip_keys_that_no_query_of_a_block_sees(kernels):
    heads = narrow_heads(9, keys=300, batch=1)
    codes = random_codes(heads, 1, 6, dtype=torch.int32)
    codes[1][..., :140] = codes[0][..., 3:4]  # one run crosses a boundary, the others are short
    check(heads, codes, code_bits=6, causal=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.kernels)])
def test_kernels_in_half_precision_keep_their_bars_in_long_runs(dtype, kernels):
    heads = narrow_heads(270, dim=16, dtype=dtype, batch=1)
    check(heads, random_codes(heads, 1, 1), code_bits=1, causal=True)


def test_kernels_take_fp32_queries_with_wider_half_precision_values_of_strided_heads(kernels):
    """Attention layers call them so: q and k are of length 1 in fp32, heads are views, values may have a 1 appended."""
    q, k, v = as_views(narrow_heads(20, dim=16))
    v = F.pad(v, (0, 1), value=1.0).to(torch.bfloat16)
    results = check((q, k, v), random_codes((q, k), 2, 2), code_bits=2, causal=True)
    assert [x.dtype for x in results] == [torch.float32] * 4 + [torch.bfloat16]
    check((q, k, v[..., :14]), random_codes((q, k), 2, 2), code_bits=2, causal=True)  # Remark 2 widens q and k


def test_the_host_never_waits_for_the_device(kernels):
    """Tensors without data: reading a value raises."""
    with recorded() as launches:
        shape = (2, 3, 1000, 64)
        heads = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True, device="meta") for _ in range(3)]
        codes = [torch.empty(2, 3, 4, 1000, dtype=torch.int16, device="meta") for _ in range(2)]
        documents = torch.empty(2, 1000, dtype=torch.int64, device="meta")
        out, _ = call(hash_table_attention, heads, *codes, code_bits=6, causal=True, segments=documents)
        out.sum().backward()
    # Windows, sums, tails, reading; backward: windows twice, the same for ∇v, four each for ∇q and ∇k
    assert len(launches) == 4 + 2 + 3 + 2 * 4


@pytest.mark.kernels
@pytest.mark.parametrize("dim", [16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", BARS)
def test_kernels_at_every_head_dim_and_length(dtype, dim, kernels):
    for length, causal in itertools.product([1, 17, 100], [False, True]):
        heads = narrow_heads(length, dim=dim, dtype=dtype, batch=1)
        check(heads, random_codes(heads, 2, 2), code_bits=2, causal=causal)
