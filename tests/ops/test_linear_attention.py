import pytest
import torch

import megasparse.ops.linear_attention as module
from megasparse.ops.linear_attention import causal_linear_attention, linear_attention, orthogonal_projections
from tests.helpers import definitions, operators

CPU = torch.device("cpu")
PROJECTION = orthogonal_projections(1, range(2), 12, 6, torch.device("cpu"))


def random_heads(length):
    return operators.random_heads(length, dim=6)


def ours(q, k, v, causal, chunk=8, **masks):
    if causal:
        return causal_linear_attention(q, k, v, PROJECTION, scale=0.4, chunk=chunk, **masks)[0]
    return linear_attention(q, k, v, PROJECTION, scale=0.4, **masks)


def dense(q, k, v, causal, **masks):
    return definitions.linear_attention(q, k, v, PROJECTION, causal=causal, scale=0.4, **masks)


def gradients(attention, heads, *arguments, **masks):
    heads = [x.clone().requires_grad_() for x in heads]
    out = attention(*heads, *arguments, **masks)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return out.detach(), *torch.autograd.grad(out, heads, grad.to(out.dtype))


@pytest.mark.parametrize("length,tile,chunk", [(1, 64, 64), (8, 1, 1), (29, 5, 7), (29, 64, 2), (29, 64, 64)])
def test_forward_and_gradients_equal_the_definition(length, tile, chunk, monkeypatch):
    monkeypatch.setattr(module, "_TILE", tile)
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[1] = False
    for causal in (True, False):
        for masks in ({}, {"key_mask": mask}):
            exact = gradients(dense, random_heads(length), causal, **masks)
            found = gradients(ours, random_heads(length), causal, chunk, **masks)
            torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "causal,dtype,bars", [(True, torch.bfloat16, (1e-2, 3e-2)), (False, torch.float32, (1e-5, 1e-4))]
)
def test_lower_precisions_are_within_their_bars(causal, dtype, bars):
    heads = [x.to(dtype) for x in random_heads(100)]
    exact = gradients(dense, [x.double() for x in heads], causal)
    for i, (a, b) in enumerate(zip(gradients(ours, heads, causal), exact, strict=True)):
        assert a.dtype == dtype
        assert (a - b).norm() / b.norm() < bars[i > 0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("change", ["large", "zero", "equal", "one large key"])
def test_hard_inputs_equal_the_definition(causal, change):
    """Exponents of 1e8: no common shift of all keys, or of all features, would keep a denominator."""
    q, k, v = random_heads(20)
    if change == "large":
        q, k = q * 1e4, k * 1e4
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


def test_a_later_token_with_large_exponents_does_not_change_earlier_outputs(monkeypatch):
    """Long keys have exponents of −|k|²/2: compared with a key of 0, all their features vanish."""
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


def vectors(length, dim=8, heads=2, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, length, dim, generator=generator, dtype=torch.float64) * scale


@pytest.mark.parametrize("features", [4, 20])
def test_the_kernel_is_unbiased(features):
    """2,000 heads are 2,000 independent draws of the projection."""
    projection = orthogonal_projections(4, range(2000), features, 8, CPU)
    for seed in range(3):
        x, y = (vectors(1, heads=1, scale=0.25, seed=2 * seed + i)[:1].expand(-1, 2000, -1, -1) for i in (0, 1))
        of_x, of_y = (definitions.positive_features(z, projection) for z in (x, y))
        estimate = (of_x * of_y).sum(-1).flatten()
        error = estimate.std() / len(estimate) ** 0.5
        assert (estimate.mean() - (x * y).sum(-1)[0, 0, 0].exp()).abs() < 4 * error


def test_projections_are_orthogonal_in_blocks_and_as_long_as_normal_vectors():
    projection = orthogonal_projections(5, range(500), 20, 8, CPU).double()
    for block in (projection[:, :8], projection[:, 8:16], projection[:, 16:]):
        products = block @ block.transpose(1, 2)
        assert (products - torch.diag_embed(products.diagonal(dim1=1, dim2=2))).abs().max() < 1e-5
    assert (projection[:, 0] * projection[:, 8]).sum(-1).abs().max() > 1  # blocks are independent
    squares = (projection**2).sum(-1)  # chi-square with 8 degrees: mean 8, variance 16
    assert (squares.mean() - 8).abs() < 4 * (16 / squares.numel()) ** 0.5
    assert (squares.var() / 16 - 1).abs() < 0.1
    directions = projection[:, 0] / squares[:, 0].sqrt()[:, None]  # uniform: no direction is preferred
    assert directions.mean(0).norm() < 4 * 500**-0.5
    torch.testing.assert_close(directions.T @ directions / 500, torch.eye(8).double() / 8, rtol=0, atol=0.04)


def test_projections_depend_on_the_global_head_and_the_row():
    everything = orthogonal_projections(6, range(0, 8), 40, 16, CPU)
    assert everything.shape == (8, 40, 16) and everything.dtype == torch.float32
    part = orthogonal_projections(6, range(3, 5), 20, 16, CPU)
    torch.testing.assert_close(part, everything[3:5, :20], rtol=0, atol=0)
    assert not torch.equal(orthogonal_projections(7, range(3, 5), 20, 16, CPU), part)
