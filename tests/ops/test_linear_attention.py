import pytest
import torch

import megasparse.ops.linear_attention as module
from megasparse.ops.linear_attention import causal_linear_attention, linear_attention, orthogonal_projections
from tests.helpers import operators
from tests.helpers.definitions import linear_attention as defined

PROJECTION = orthogonal_projections(1, range(2), 12, 6, torch.device("cpu"))


def random_heads(length):
    return operators.random_heads(length, dim=6)


def ours(q, k, v, causal, chunk=8, **masks):
    if causal:
        return causal_linear_attention(q, k, v, PROJECTION, scale=0.4, chunk=chunk, **masks)[0]
    return linear_attention(q, k, v, PROJECTION, scale=0.4, **masks)


def dense(q, k, v, causal, **masks):
    return defined(q, k, v, PROJECTION, causal=causal, scale=0.4, **masks)


def gradients(attention, heads, *arguments, **masks):
    heads = [x.clone().requires_grad_() for x in heads]
    out = attention(*heads, *arguments, **masks)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return out.detach(), *torch.autograd.grad(out, heads, grad.to(out.dtype))


@pytest.mark.parametrize("length", [1, 7, 8, 29])
@pytest.mark.parametrize("tile,chunk", [(1, 1), (5, 4), (5, 7), (64, 1), (64, 2), (64, 64)])
def test_forward_and_gradients_are_those_of_the_definition(length, tile, chunk, monkeypatch):
    monkeypatch.setattr(module, "_TILE", tile)
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[1] = False
    for causal in (True, False):
        for masks in ({}, {"key_mask": mask}):
            exact = gradients(dense, random_heads(length), causal, **masks)
            found = gradients(ours, random_heads(length), causal, chunk, **masks)
            torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype,bars", [(torch.float32, (1e-5, 1e-4)), (torch.bfloat16, (1e-2, 3e-2))])
def test_lower_precisions_are_within_their_bars(causal, dtype, bars):
    heads = [x.to(dtype) for x in random_heads(100)]
    exact = gradients(dense, [x.double() for x in heads], causal)
    for i, (a, b) in enumerate(zip(gradients(ours, heads, causal), exact, strict=True)):
        assert a.dtype == dtype
        assert (a - b).norm() / b.norm() < bars[i > 0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("change", ["large q", "large k", "large", "zero", "equal", "one large key"])
def test_hard_inputs_give_what_the_definition_gives(causal, change):
    """Exponents of 1e8: no common shift of all keys, or of all features, would keep a denominator."""
    q, k, v = random_heads(20)
    if change.startswith("large"):
        q, k = q * (1e4 if change != "large k" else 1.0), k * (1e4 if change != "large q" else 1.0)
    if change == "zero":
        q, k = q * 0, k * 0
    if change == "equal":
        q, k = (x[:, :, :1].expand_as(x) for x in (q, q))
    if change == "one large key":
        k[:, :, 13] *= 1e3
    exact = gradients(dense, (q, k, v), causal)
    assert all(torch.isfinite(x).all() for x in exact)
    for a, b in zip(gradients(ours, (q, k, v), causal), exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * b.abs().max().item() + 1e-9)
    for a in gradients(ours, [x.float() for x in (q, k, v)], causal):
        assert torch.isfinite(a).all()


def test_a_later_token_moves_no_earlier_output_however_much_larger_its_exponents(monkeypatch):
    """Long keys have exponents of −|k|²/2: beside a key of 0, all their features vanish."""
    monkeypatch.setattr(module, "_TILE", 16)
    q, k, v = (x.float() for x in random_heads(24))
    k = k * 30
    before = ours(q, k, v, causal=True, chunk=4)
    assert (before.abs().amax(-1) > 1e-3).all()
    for t in (1, 6, 15, 16, 23):
        keys, values = k.clone(), v.clone()
        keys[:, :, t], values[:, :, t:] = 0, 1e6
        torch.testing.assert_close(ours(q, keys, values, causal=True, chunk=4)[:, :, :t], before[:, :, :t])


def test_a_sequence_can_be_taken_in_parts():
    heads = random_heads(20)
    whole = ours(*heads, causal=True)
    state, parts = None, []
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 20)):
        piece = [x[:, :, start:stop] for x in heads]
        out, state = causal_linear_attention(*piece, PROJECTION, scale=0.4, chunk=4, state=state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=1e-9, atol=1e-9)
