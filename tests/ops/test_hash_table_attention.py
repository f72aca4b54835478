import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import megasparse.ops.hash_table_attention as module
from megasparse.ops.hash_table_attention import (
    HashTableAttentionSpec,
    expected_attention,
    hash_table_attention,
    reference,
)
from megasparse.ops.hashing import sign_codes
from tests.helpers import definitions, operators
from tests.helpers.kernels import DEVICE
from tests.helpers.operators import random_masks

DEFINED = {hash_table_attention: reference, expected_attention: definitions.expected_attention}
PROCEDURES = pytest.mark.parametrize("backward", ["tables", "pairs"])


def random_heads(length, keys=None, batch=2, heads=2, dim=5, dtype=torch.float64, device="cpu"):
    """Random heads, whose q and k are of length 1."""
    q, k, v = operators.random_heads(length, keys, (batch, heads), dim)
    return [x.to(device, dtype) for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)]


def random_codes(heads, hashes, code_bits, dtype=torch.int16):
    generator = torch.Generator().manual_seed(1)
    shapes = [(*x.shape[:2], hashes, x.shape[2]) for x in heads[:2]]
    return [torch.randint(1 << code_bits, n, generator=generator).to(heads[0].device, dtype) for n in shapes]


def call(attention, heads, *codes, query_mask=None, key_mask=None, segments=None, **rule):
    return attention(*heads, *codes, HashTableAttentionSpec(**rule), query_mask, key_mask, segments)


def gradients(attention, heads, *codes, **rule):
    q, k, v = (x.clone().requires_grad_() for x in heads)
    out, total = call(attention, (q, k, v), *codes, **rule)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out.dtype)
    return out.detach(), total.detach(), *torch.autograd.grad(out, [q, k, v], grad)


def assert_equal_to_the_definition(attention, heads, codes, backward="auto", chunk=128, **rule):
    ours = gradients(attention, heads, *codes, **rule, chunk=chunk, backward=backward)
    exact = gradients(DEFINED[attention], heads, *codes, **rule)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-10)
    return ours


def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "_ROW_ELEMENTS", 250)  # several groups of rows
    monkeypatch.setattr(module, "_TABLE_ELEMENTS", 300)  # one hash at a time, or several
    monkeypatch.setattr(module, "_BLOCK_PAIRS", 7)
    monkeypatch.setattr(module, "_QUERIES", 4)
    monkeypatch.setattr(module, "_TILE_ELEMENTS", 40)


@PROCEDURES
@pytest.mark.parametrize("length", [1, 5, 29])
def test_sampled_forward_and_gradients_are_those_of_the_definition(length, backward, monkeypatch):
    small_blocks(monkeypatch)
    heads, (mask, documents) = random_heads(length), random_masks(length)
    flags = itertools.product([True, False], [None, mask], [None, documents], [1, 6], [1, 3])
    for causal, padding, segments, code_bits, hashes in flags:
        codes = random_codes(heads, hashes, code_bits)
        rule = dict(code_bits=code_bits, causal=causal, query_mask=padding, key_mask=padding, segments=segments)
        assert_equal_to_the_definition(hash_table_attention, heads, codes, backward, 4, **rule)


@pytest.mark.parametrize("length", [1, 5, 29])
def test_expected_forward_and_gradients_are_those_of_the_definition(length, monkeypatch):
    small_blocks(monkeypatch)
    heads, (mask, documents) = random_heads(length), random_masks(length)
    for causal, padding, segments in itertools.product([True, False], [None, mask], [None, documents]):
        rule = dict(code_bits=6, causal=causal, query_mask=padding, key_mask=padding, segments=segments)
        assert_equal_to_the_definition(expected_attention, heads, [], **rule)


@PROCEDURES
def test_other_lengths_of_keys_and_their_padding(backward):
    heads = random_heads(7, keys=19)
    codes, mask = random_codes(heads, 3, 2), random_masks(19)[0]
    rule = dict(code_bits=2, causal=False, key_mask=mask)
    assert_equal_to_the_definition(hash_table_attention, heads, codes, backward, **rule)
    assert_equal_to_the_definition(expected_attention, heads, [], **rule)


@PROCEDURES
def test_the_gradient_is_the_papers_lower_bound(backward):
    """Eq. 10 and 12 written out: ∇v = Bᵀg, ∇q = (gvᵀ ∘ τ/2·B)k, ∇k = (gvᵀ ∘ τ/2·B)ᵀq."""
    heads = q, k, v = random_heads(20)
    codes = random_codes(heads, 4, 3)
    g = torch.randn(2, 2, 20, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    sampled = (codes[0][..., :, None] == codes[1][..., None, :]).double().mean(2)
    certain = (1 - torch.acos(q @ k.transpose(-1, -2)) / math.pi) ** 3
    rule = dict(code_bits=3, causal=False, backward=backward)
    for weight, attention, hashed in ((sampled, hash_table_attention, codes), (certain, expected_attention, [])):
        pulled = (g @ v.transpose(-1, -2)) * 1.5 * weight
        _, _, dq, dk, dv = gradients(attention, heads, *hashed, **rule)
        torch.testing.assert_close(dv, weight.transpose(-1, -2) @ g)
        torch.testing.assert_close(dq, pulled @ k)
        torch.testing.assert_close(dk, pulled.transpose(-1, -2) @ q)


def test_the_bound_is_below_the_true_derivative_and_finite_where_that_is_not():
    cosine = torch.linspace(-1, 1, 41, dtype=torch.float64)
    x = cosine.clone().requires_grad_()
    weight = (1 - torch.acos(x) / math.pi) ** 8
    (true,) = torch.autograd.grad(weight.sum(), x)
    inside = slice(1, -1)
    assert (4 * weight.detach()[inside] <= true[inside] + 1e-12).all() and not torch.isfinite(true[-1])
    q = F.normalize(torch.randn(1, 1, 50, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    out, total, *grads = gradients(expected_attention, [q, q, q], code_bits=8, causal=False)
    assert all(torch.isfinite(x).all() for x in (out, total, *grads))


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_values_pass_gradcheck(causal):
    q, k, v = random_heads(9, batch=1)
    codes = random_codes((q, k), 3, 2)
    v = v.requires_grad_()

    def sampled(v):
        return call(hash_table_attention, (q, k, v), *codes, code_bits=2, causal=causal, chunk=4)[0]

    assert torch.autograd.gradcheck(sampled, v)
    spec = HashTableAttentionSpec(code_bits=2, causal=causal)
    assert torch.autograd.gradcheck(lambda v: expected_attention(q, k, v, spec)[0], v)


@PROCEDURES
@pytest.mark.parametrize("causal", [True, False])
def test_all_tokens_in_one_bucket_is_the_sum_of_all_values(causal, backward, monkeypatch):
    small_blocks(monkeypatch)
    heads = random_heads(13)
    codes = [torch.zeros_like(c) for c in random_codes(heads, 5, 4)]
    rule = dict(code_bits=4, causal=causal)
    ours = assert_equal_to_the_definition(hash_table_attention, heads, codes, backward, 4, **rule)
    expected_sum = heads[2].cumsum(2) if causal else heads[2].sum(2, keepdim=True).expand_as(heads[2])
    torch.testing.assert_close(ours[0], expected_sum)


@pytest.mark.usefixtures("implementation")
@PROCEDURES
def test_more_buckets_than_tokens_and_no_collision(backward):
    heads = random_heads(6, dtype=torch.float32, device=DEVICE)
    number = torch.arange(6, device=DEVICE).expand(2, 2, 3, -1)
    rule = dict(code_bits=20, causal=False, backward=backward)
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


def test_both_procedures_and_auto_agree_in_fp32():
    heads = random_heads(200, dim=16, dtype=torch.float32)
    codes = [sign_codes(x, 1, range(2), 8, 4, "hadamard") for x in heads[:2]]
    results = {
        backward: gradients(hash_table_attention, heads, *codes, code_bits=4, causal=True, chunk=32, backward=backward)
        for backward in ("tables", "pairs", "auto")
    }
    for other in ("pairs", "auto"):
        for mine, theirs in zip(results["tables"], results[other], strict=True):
            assert (mine - theirs).norm() < 1e-5 * mine.norm()


@pytest.mark.parametrize("code_bits,chosen", [(1, "tables"), (12, "pairs")])
def test_auto_takes_the_procedure_with_less_to_do(code_bits, chosen, monkeypatch):
    used = []
    for name in ("_pair_gradients", "_table_gradients"):
        procedure = getattr(module, name)

        def spy(*args, procedure=procedure, name=name, **rest):
            used.append("pairs" if name == "_pair_gradients" else "tables")
            return procedure(*args, **rest)

        monkeypatch.setattr(module, name, spy)
    heads = random_heads(400, dim=4)
    codes = random_codes(heads, 4, code_bits)
    gradients(hash_table_attention, heads, *codes, code_bits=code_bits, causal=False)
    assert set(used) == {chosen}


@pytest.mark.usefixtures("implementation")
@PROCEDURES
def test_two_runs_are_bit_identical(backward):
    heads = random_heads(40, dim=8, dtype=torch.float32, device=DEVICE)
    codes, rule = random_codes(heads, 2, 3), dict(code_bits=3, causal=True, backward=backward)
    operators.assert_same_bits(*(gradients(hash_table_attention, heads, *codes, **rule) for _ in range(2)))
