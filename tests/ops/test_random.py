import torch

from megasparse.ops.random import RngContext, derive, dropout, normal, random_bits, rotations


def test_keys_differ_by_every_part_and_by_type():
    keys = {derive(*parts) for parts in [(0, 1), (1, 0), (0, 1, 2), (0, "1"), ("0", 1), (0, 12), (1, 2)]}
    assert len(keys) == 7
    assert derive(7, "lsh") == derive(7, "lsh") < 2**64


def test_bits_are_uniform_and_unrelated_over_rows_columns_and_keys():
    rows = torch.arange(2000) * (1 << 32) + torch.arange(2000).flip(0)
    bits = random_bits(derive("a"), rows, 128)
    uniform = (bits.double() + 2**31) / 2**32
    assert abs(uniform.mean() - 0.5) < 4 * (1 / 12 / uniform.numel()) ** 0.5
    histogram = torch.histc(uniform, 64)
    chi_square = ((histogram - uniform.numel() / 64) ** 2 / (uniform.numel() / 64)).sum()
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5
    other = random_bits(derive("b"), rows, 128).double()
    for a, b in [(uniform[1:], uniform[:-1]), (uniform[:, 1:], uniform[:, :-1]), (uniform, other)]:
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 4 / a.numel() ** 0.5


def test_sample_and_position_are_not_interchangeable():
    rows = RngContext(0, 0, torch.tensor([0, 1]), True).rows(2, torch.device("cpu"))
    bits = random_bits(1, rows, 8)
    assert not torch.equal(bits[0, 1], bits[1, 0])


def test_dropout_depends_on_sample_and_position_only():
    x = torch.ones(3, 40, 16)
    rows = RngContext(0, 5, torch.tensor([8, 9, 10]), True).rows(40, x.device)
    whole = dropout(x, 0.25, 99, rows)
    torch.testing.assert_close(dropout(x[1:2, 10:], 0.25, 99, rows[1:2, 10:]), whole[1:2, 10:], rtol=0, atol=0)
    assert set(whole.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert not torch.equal(dropout(x, 0.25, 100, rows), whole)
    many = dropout(torch.ones(1, 4000, 64), 0.25, 3, RngContext(0, 0, torch.tensor([0]), True).rows(4000, x.device))
    assert abs((many == 0).double().mean() - 0.25) < 4 * (0.25 * 0.75 / many.numel()) ** 0.5


def test_normal_has_normal_moments():
    x = normal(derive("moments"), torch.arange(1000), 1000).double()
    n = x.numel()
    assert abs(x.mean()) < 4 / n**0.5
    assert abs((x**2).mean() - 1) < 4 * (2 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 4 * (96 / n) ** 0.5


def test_rotations_are_those_of_the_global_head_and_the_round():
    everything = rotations(5, range(0, 8), 4, 16, [8, 6], torch.device("cpu"))
    assert everything.shape == (8, 4, 16, 7)
    part = rotations(5, range(3, 5), 2, 16, [8, 6], torch.device("cpu"))
    torch.testing.assert_close(part, everything[3:5, :2], rtol=0, atol=0)


def test_draws_change_with_seed_step_layer_and_purpose():
    samples = torch.arange(1)
    keys = {RngContext(*place, samples, True).key(layer, "x") for place in [(0, 0), (0, 1), (1, 0)] for layer in (0, 1)}
    assert len(keys) == 6
    assert RngContext.evaluation(0, 1).key(0, "x") == RngContext.evaluation(0, 4).key(0, "x")
