import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import megasparse.ops.sketch as module
from megasparse.ops.sketch import (
    KeyChoiceSpec,
    Noise,
    chosen_keys,
    exact_projection,
    sketched_attention,
    sketched_weights,
    uniform,
)
from megasparse.ops.sketch import best_keys as defined
from tests.helpers.kernels import DEVICE
from tests.helpers.operators import random_masks

KINDS = ["inverse_log_squared", "inverse_log", "raw", "top_k", "random"]


def random_sketch(length, batch=2, dim=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, length, dim, generator=generator, dtype=dtype) for _ in range(3)]


def some_noise(length, batch=2, heads=range(3, 6), key=17):
    return Noise(key, heads, torch.arange(5, 5 + batch)[:, None] * (1 << 32) + torch.arange(length))


def choose(q, k, count, causal, sampling, function=chosen_keys, **rest):
    return function(q, k, KeyChoiceSpec(count, causal, sampling), **rest)


def masks(length):
    key_mask, segments = random_masks(length)
    return [{}, {"key_mask": key_mask}, {"segments": segments}, {"key_mask": key_mask, "segments": segments}]


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(module, "_SCORE_ELEMENTS", 2 * 3 * 7 * 5)
    monkeypatch.setattr(module, "KEYS", 7)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 6, 33])
def test_the_attention_and_its_gradients_are_those_of_the_definition(length, causal, small_tiles):
    generator = torch.Generator().manual_seed(1)
    for mask in masks(length):
        q, k, v = (x.requires_grad_() for x in random_sketch(length))
        h, lse = sketched_attention(q, k, v, causal=causal, **mask)
        alpha, seen = sketched_weights(q, k, causal=causal, **mask)
        expected = alpha @ v
        torch.testing.assert_close(h, expected, rtol=1e-10, atol=1e-10)
        logits = (q @ k.transpose(1, 2) / 2).masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-10, atol=1e-10)
        assert not seen.any(-1).all() or (lse > -torch.inf).all()
        grad = torch.randn(h.shape, generator=generator, dtype=h.dtype)
        sees = seen.any(-1).expand(lse.shape)
        grad_lse = torch.randn(lse[sees].shape, generator=generator, dtype=h.dtype)
        summed = logits.masked_fill(~sees[..., None], 0.0).logsumexp(-1)
        ours, exact = (
            torch.autograd.grad([out, own[sees]], [q, k, v], [grad, grad_lse], retain_graph=True)
            for out, own in ((h, lse), (expected, summed))
        )
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)


def test_a_decoder_scores_half_of_the_pairs(monkeypatch):
    monkeypatch.setattr(module, "_SCORE_ELEMENTS", 8 * 256)

    def flops(causal):
        q, k, v = (x.requires_grad_() for x in random_sketch(256))
        with FlopCounterMode(display=False) as counter:
            sketched_attention(q, k, v, causal=causal)[0].sum().backward()
        return counter.get_total_flops()

    assert flops(causal=True) < 0.52 * flops(causal=False)


@pytest.mark.parametrize("sampling", KINDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length,count", [(1, 3), (9, 12), (33, 5)])
def test_the_keys_are_those_of_the_definition(length, count, causal, sampling, small_tiles):
    noise = some_noise(length)
    for mask in masks(length):
        q, k, v = random_sketch(length)
        _, lse = sketched_attention(q, k, v, causal=causal, **mask)
        for drawn in (noise,) if sampling == "random" else (noise, None):
            u = None if drawn is None else uniform(drawn, length)
            alpha, seen = sketched_weights(q, k, causal=causal, rounded=drawn is None, **mask)
            exact = defined(alpha, seen, count, sampling=sampling, uniform=u)
            ours = choose(q, k, count, causal=causal, sampling=sampling, noise=drawn, lse=lse, **mask)
            assert ours.dtype == torch.int32 and torch.equal(ours, exact.to(torch.int32))


def test_tiles_and_the_number_of_queries_at_a_time_change_nothing(monkeypatch):
    q, k, v = random_sketch(50, dtype=torch.float32)
    noise = some_noise(50)
    _, lse = sketched_attention(q, k, v, causal=True)
    rule = dict(causal=True, sampling="inverse_log_squared")
    whole = choose(q, k, 6, noise=noise, lse=lse, **rule)
    shared = choose(q, k, 6, noise=None, **rule)
    for i in (0, 3, 49):
        row = noise._replace(rows=noise.rows[:, i : i + 1])
        here = slice(i, i + 1)
        one = choose(q[:, here], k, 6, noise=row, lse=lse[:, here], first_query=i, **rule)
        assert torch.equal(one, whole[:, :, here])
    monkeypatch.setattr(module, "_SCORE_ELEMENTS", 77)
    assert torch.equal(choose(q, k, 6, noise=noise, lse=lse, **rule), whole)
    monkeypatch.setattr(module, "KEYS", 11)
    assert torch.equal(choose(q, k, 6, noise=None, **rule), shared)


@pytest.mark.usefixtures("implementation", "small_tiles")
def test_equal_scores_go_to_the_smaller_position():
    q, k, _ = (x[:1].to(DEVICE) for x in random_sketch(70, dtype=torch.float32))
    nearly = k[:, :1] * (1 + 1e-7 * torch.arange(70, device=DEVICE)[:, None])  # as if computed in another order
    for keys in (k * 0, k[:, :1].expand_as(k), k.abs() * -0.0, nearly):
        index = choose(q[:, :4], keys, 4, causal=False, sampling="top_k", noise=None)
        assert torch.equal(index, torch.arange(4, dtype=torch.int32, device=DEVICE).expand(1, 1, 4, 4))


@pytest.mark.usefixtures("implementation")
def test_a_weight_of_one_is_always_chosen_and_a_large_sketch_stays_in_order():
    """A weight α = 1 is p = ∞."""
    q, k, v = (x[:1].to(DEVICE) for x in random_sketch(30, dtype=torch.float32))
    k[:, 11] = q[:, 0] = torch.tensor([200.0, 0, 0, 0], device=DEVICE)
    noise = some_noise(30, batch=1, heads=range(2))
    rule = dict(causal=False, noise=noise._replace(rows=noise.rows[:, :4].to(DEVICE)))
    _, lse = sketched_attention(q, k, v, causal=False)
    for sampling in ("inverse_log_squared", "inverse_log"):
        index = choose(q[:, :4], k, 3, sampling=sampling, lse=lse[:, :4], **rule)
        assert (index[:, :, 0, 0] == 11).all() and (index[:, :, 0, 1:] != 11).all() and (index >= 0).all()
    _, lse = sketched_attention(q * 1e4, k * 1e4, v, causal=False)
    index = choose(q[:, :4] * 1e4, k * 1e4, 3, sampling="inverse_log_squared", lse=lse[:, :4], **rule)
    assert (index >= 0).all() and (index < 30).all()


@pytest.mark.parametrize("sampling", ["inverse_log_squared", "inverse_log", "raw", "random"])
def test_how_often_a_key_is_the_first_is_its_probability(sampling):
    """P(s_j is the highest) = ∫ Π_{k≠j} F_k(x) f_j(x) dx, with F_k(x) = min(1, x/p_k)."""
    samples = 4000
    q, k, v = (x[:1].expand(samples, -1, -1).contiguous() for x in random_sketch(8))
    heads = range(2)
    noise = Noise(3, heads, torch.arange(samples)[:, None] * (1 << 32) + torch.arange(8))
    _, lse = sketched_attention(q, k, v, causal=False)
    first = choose(q, k, 1, causal=False, sampling=sampling, noise=noise, lse=lse)[:, :, 5, 0]
    alpha, _ = sketched_weights(q[:1], k[:1], causal=False)
    a = alpha[0, 5]
    p = {"inverse_log_squared": a.log() ** -2, "inverse_log": -1 / a.log(), "raw": a, "random": a * 0 + 1}[sampling]
    x = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000 * p.max()
    below = (x[:, None] / p).clamp(max=1)
    step = p.max() / 200_000
    exact = torch.stack([below[:, torch.arange(8) != j].prod(-1)[x < p[j]].sum() * step / p[j] for j in range(8)])
    torch.testing.assert_close(exact.sum().item(), 1.0, rtol=1e-3, atol=1e-3)
    for head in heads:
        count = torch.bincount(first[:, head].long(), minlength=8)
        lse = (count - samples * exact) / (samples * exact * (1 - exact)).sqrt().clamp_min(1)
        assert lse.abs().max() < 4
    # Heads draw by themselves: they agree as often as independent ones.
    agree, chance = (first[:, 0] == first[:, 1]).double().sum(), (exact**2).sum()
    assert abs(agree - samples * chance) / math.sqrt(samples * chance * (1 - chance)) < 4


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("width", [3, 16])
def test_the_exact_projection_is_that_of_float64_and_each_rows_own(width):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 70, generator=generator).to(DEVICE, torch.bfloat16) for n in (37, width))
    x[5] = x[30]
    found = exact_projection(x[None], weight)
    assert found.dtype == torch.float64 and torch.equal(found[0, 5], found[0, 30])
    torch.testing.assert_close(found[0], x.double() @ weight.double().mT, rtol=1e-12, atol=1e-12)
