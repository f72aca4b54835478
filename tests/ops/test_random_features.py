import pytest
import torch

from megasparse.ops.linear_attention import orthogonal_projections, positive_features
from tests.helpers.definitions import positive_features as defined

CPU = torch.device("cpu")


def vectors(length, dim=8, heads=2, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, length, dim, generator=generator, dtype=torch.float64) * scale


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("features", [1, 5, 8, 20])
def test_features_and_their_gradients_are_those_of_the_definition(per_row, features):
    projection = orthogonal_projections(3, range(2), features, 8, CPU).double()
    x = vectors(7).requires_grad_()
    stabilised, shift = positive_features(x, projection, per_row=per_row)
    assert shift.shape == ((2, 2, 7, 1) if per_row else (2, 2, 1, 1))
    assert (stabilised >= 0).all() and stabilised.max() <= features**-0.5 + 1e-12
    weight = torch.randn(stabilised.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = defined(x, projection)
    torch.testing.assert_close(stabilised * shift.exp(), exact, rtol=1e-9, atol=1e-9)
    ours, theirs = (torch.autograd.grad((f * weight).sum(), x)[0] for f in (stabilised * shift.exp(), exact))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("features", [4, 8, 20])
def test_the_kernel_is_unbiased(features):
    """2,000 heads are 2,000 independent draws of the projection."""
    projection = orthogonal_projections(4, range(2000), features, 8, CPU)
    for seed in range(3):
        x, y = (vectors(1, heads=1, scale=0.25, seed=2 * seed + i)[:1].expand(-1, 2000, -1, -1) for i in (0, 1))
        estimate = (defined(x, projection) * defined(y, projection)).sum(-1).flatten()
        error = estimate.std() / len(estimate) ** 0.5
        assert (estimate.mean() - (x * y).sum(-1)[0, 0, 0].exp()).abs() < 4 * error


def test_projections_are_orthogonal_in_blocks_and_as_long_as_normal_vectors():
    projection = orthogonal_projections(5, range(500), 20, 8, CPU).double()
    for block in (projection[:, :8], projection[:, 8:16], projection[:, 16:]):
        products = block @ block.transpose(1, 2)
        off = products - torch.diag_embed(products.diagonal(dim1=1, dim2=2))
        assert off.abs().max() < 1e-5
    assert (projection[:, 0] * projection[:, 8]).sum(-1).abs().max() > 1  # blocks are independent
    squares = (projection**2).sum(-1)  # chi-square with 8 degrees: mean 8, variance 16
    assert (squares.mean() - 8).abs() < 4 * (16 / squares.numel()) ** 0.5
    assert (squares.var() / 16 - 1).abs() < 0.1
    directions = projection[:, 0] / squares[:, 0].sqrt()[:, None]  # uniform: no direction is preferred
    assert directions.mean(0).norm() < 4 * 500**-0.5
    torch.testing.assert_close(directions.T @ directions / 500, torch.eye(8).double() / 8, rtol=0, atol=0.04)


def test_projections_are_those_of_the_global_head_and_the_row():
    everything = orthogonal_projections(6, range(0, 8), 40, 16, CPU)
    assert everything.shape == (8, 40, 16) and everything.dtype == torch.float32
    part = orthogonal_projections(6, range(3, 5), 20, 16, CPU)
    torch.testing.assert_close(part, everything[3:5, :20], rtol=0, atol=0)
    assert not torch.equal(orthogonal_projections(7, range(3, 5), 20, 16, CPU), part)


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("scale", [0.0, 1e-40, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_at_any_scale(per_row, scale, dtype):
    projection = orthogonal_projections(8, range(2), 32, 8, CPU)
    x = vectors(9, scale=scale).to(dtype).requires_grad_()
    features, shift = positive_features(x, projection, per_row=per_row)
    assert features.dtype == torch.float32
    assert torch.isfinite(features).all() and torch.isfinite(shift).all()
    # The largest feature of each row (or of all) is 1/√F: nothing underflows to nothing.
    assert (features.amax(-1 if per_row else (-2, -1)) - 32**-0.5).abs().max() < 1e-6
    features.sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("per_row", [True, False])
def test_padding_moves_nothing(per_row):
    projection = orthogonal_projections(9, range(2), 32, 8, CPU)
    x = vectors(9, scale=100.0).float()
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, 6:] = False
    alone, shift = positive_features(x[:, :, :6], projection, per_row=per_row)
    x[:, :, 6:] = torch.tensor([0.0, 1e4, 1e-3])[:, None]  # a zero vector has by far the largest exponent
    x.requires_grad_()
    features, shift_all = positive_features(x, projection, per_row=per_row, key_mask=mask)
    torch.testing.assert_close(features[:, :, :6], alone)
    torch.testing.assert_close(shift_all[:, :, :6] if per_row else shift_all, shift)
    assert (features[:, :, 6:] == 0).all()
    features.sum().backward()
    assert (x.grad[:, :, 6:] == 0).all() and torch.isfinite(x.grad).all()
