import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import megasparse.ops.sketch as module
from megasparse.errors import ConfigError
from megasparse.ops import sketch_kernels
from megasparse.ops.sketch import (
    KeyChoiceSpec,
    Noise,
    chosen_keys,
    exact_projection,
    sketched_attention,
)
from tests.helpers import definitions
from tests.helpers.definitions import best_keys as defined
from tests.helpers.definitions import sketched_weights, uniform
from tests.helpers.operators import DEVICE, random_masks

KINDS = ["inverse_log_squared", "inverse_log", "raw", "top_k", "random"]


def random_sketch(length, batch=2, dim=4, dtype=torch.float64, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, length, dim, generator=generator, dtype=dtype).to(device) for _ in range(3)]


def some_noise(length, batch=2, heads=range(3, 6), key=17, device="cpu"):
    rows = torch.arange(5, 5 + batch)[:, None] * (1 << 32) + torch.arange(length)
    return Noise(key, heads, rows.to(device))


def choose(q, k, count, causal, sampling, function=chosen_keys, **rest):
    return function(q, k, KeyChoiceSpec(count, causal, sampling), **rest)


def masks(length, device="cpu"):
    key_mask, segments = random_masks(length, device=device)
    return [{}, {"key_mask": key_mask}, {"segments": segments}, {"key_mask": key_mask, "segments": segments}]


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(module, "_SCORE_ELEMENTS", 2 * 3 * 7 * 5)
    monkeypatch.setattr(module, "_WIDE", 9)
    monkeypatch.setattr(module, "KEYS", 7)


def distance(ours, exact):
    assert torch.equal(ours.isfinite(), exact.isfinite())
    ours, exact = ours.double().nan_to_num(), exact.nan_to_num()
    return ((ours - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def check_attention(length, dim, dtype, causal, forward, backward, device=DEVICE, **mask):
    """Compare with the definition: outputs, and gradients toward both of them."""
    generator = torch.Generator().manual_seed(2)
    inputs = [x.to(dtype).requires_grad_() for x in random_sketch(length, dim=dim, device=device)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    h, lse = sketched_attention(*inputs, causal=causal, **mask)
    exact = definitions.sketched_attention(*doubles, causal=causal, **mask)
    assert h.dtype == lse.dtype == torch.promote_types(dtype, torch.float32)
    assert distance(h, exact[0]) < forward and distance(lse, exact[1]) < forward
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(device) for x in (h, lse)]
    # The lse of a blind row is −∞ whatever the inputs.
    grads[1] = grads[1].where(lse.isfinite(), 0.0)
    ours = torch.autograd.grad([h, lse], inputs, [g.to(h.dtype) for g in grads])
    for a, b, x in zip(ours, torch.autograd.grad(exact, doubles, grads), inputs, strict=True):
        assert a.dtype == x.dtype and distance(a, b) < backward


@pytest.mark.parametrize(
    "length,causal", [(1, True), (33, True), (33, False), pytest.param(70, True, marks=pytest.mark.slow)]
)
def test_blocks_of_the_attention_are_the_definition(length, causal, small_tiles):
    for mask in masks(length):
        check_attention(length, 4, torch.float64, causal, 1e-10, 1e-9, "cpu", **mask)


def test_a_decoder_scores_half_of_the_pairs(monkeypatch):
    monkeypatch.setattr(module, "_SCORE_ELEMENTS", 8 * 256)

    def flops(causal):
        q, k, v = (x.requires_grad_() for x in random_sketch(256))
        with FlopCounterMode(display=False) as counter:
            sketched_attention(q, k, v, causal=causal)[0].sum().backward()
        return counter.get_total_flops()

    assert flops(causal=True) < 0.52 * flops(causal=False)


@pytest.mark.parametrize("sampling", KINDS)
@pytest.mark.parametrize("length,count,causal", [(9, 12, False), (33, 5, True)])
def test_blocks_choose_the_keys_of_the_definition(length, count, causal, sampling, small_tiles):
    noise = some_noise(length)
    for mask in masks(length):
        q, k, v = random_sketch(length)
        _, lse = sketched_attention(q, k, v, causal=causal, **mask)
        for drawn in (noise,) if sampling == "random" else (noise, None):
            u = None if drawn is None else uniform(drawn, length)
            alpha, visible = sketched_weights(q, k, causal=causal, rounded=drawn is None, **mask)
            exact = defined(alpha, visible, count, sampling=sampling, uniform=u)
            ours = choose(q, k, count, causal=causal, sampling=sampling, noise=drawn, lse=lse, **mask)
            assert ours.dtype == torch.int32 and torch.equal(ours, exact.to(torch.int32))


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
def test_the_exact_projection_equals_float64_in_every_batch(width):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 70, generator=generator).to(DEVICE, torch.bfloat16) for n in (37, width))
    x[5] = x[30]
    projected = exact_projection(x[None], weight)
    assert projected.dtype == torch.float64 and torch.equal(projected[0, 5], projected[0, 30])
    torch.testing.assert_close(projected[0], x.double() @ weight.double().mT, rtol=1e-12, atol=1e-12)


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")
    for where in (module, sketch_kernels):
        monkeypatch.setattr(where, "KEYS", 64)  # the columns of a program, so that there are several tiles


@pytest.mark.parametrize("causal", [True, False])
def test_kernels_of_the_attention_are_the_definition(causal, kernels):
    for mask in masks(33, DEVICE)[::3]:
        check_attention(33, 4, torch.float32, causal, 1e-5, 1e-4, **mask)


@pytest.mark.kernels
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length,dim", [(1, 4), (17, 1), (17, 4), (17, 11), (17, 16), (100, 4)])
def test_kernels_of_the_attention_at_every_width_and_dtype(length, dim, causal, kernels):
    check_attention(length, dim, torch.float32, causal, 1e-5, 1e-4, **masks(length, DEVICE)[3 if length == 17 else 0])
    if (length, dim) == (17, 4):  # only what goes in and comes out depends on the dtype
        for dtype, bar in ((torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
            check_attention(length, dim, dtype, causal, 1e-5, bar)


@pytest.mark.usefixtures("implementation")
def test_large_queries_and_keys_stay_finite():
    q, k, v = (x.float().requires_grad_() for x in random_sketch(20, device=DEVICE))
    h, lse = sketched_attention(q * 1e4, k * 1e4, v, causal=True)
    grads = torch.autograd.grad([h.sum() + lse.sum()], [q, k, v])
    assert all(x.isfinite().all() for x in (h, lse, *grads))


def check_choice(ours, score, visible):
    """Check ours (B, H, Lq, K) chosen by score (B, H, Lq, L): as many as are visible, all visible, once each, best
    first, and none left out that is better by more than rounding."""
    count = ours.shape[-1]
    assert torch.equal((ours >= 0).sum(-1), visible.sum(-1).clamp(max=count)[:, None].expand(ours.shape[:-1]))
    assert ((ours[..., 1:] < 0) | (ours[..., :-1] >= 0)).all()  # −1 last
    score = score.masked_fill(~visible[:, None], -1.0).expand(*ours.shape[:-1], -1)
    best = torch.sort(score, dim=-1, descending=True).values[..., :count]
    chosen = score.gather(-1, ours.clamp_min(0).long())
    chosen_slots = ours >= 0
    best, chosen = best[chosen_slots[..., : best.shape[-1]]], chosen[chosen_slots]
    assert ((best.isinf() & chosen.isinf()) | ((chosen - best).abs() <= 1e-5 * best)).all()
    in_order = torch.sort(ours.masked_fill(~chosen_slots, 1 << 30), dim=-1).values
    assert ((in_order[..., 1:] > in_order[..., :-1]) | (in_order[..., 1:] == 1 << 30)).all()


def scores(q, k, sampling, noise, **rule):
    """Return s of every pair by the definition, in float64, and who is visible."""
    alpha, visible = sketched_weights(q.double(), k.double(), **rule)
    p = {
        "inverse_log_squared": alpha.log() ** -2,
        "inverse_log": 1 / alpha.log().abs(),
        "random": torch.ones_like(alpha),
    }
    return uniform(noise, k.shape[1]) * p.get(sampling, alpha)[:, None], visible


def check_kind(sampling, length, first, causal, count, **mask):
    q, k, v = random_sketch(length, device=DEVICE)
    noise = some_noise(length, heads=range(3, 5), device=DEVICE)
    noise = noise._replace(rows=noise.rows[:, first:])
    _, lse = definitions.sketched_attention(q, k, v, causal=causal, **mask)
    rule = dict(causal=causal, first_query=first, **mask)
    q, lse = q[:, first:], lse[:, first:]
    ours = choose(q, k, count, sampling=sampling, noise=noise, lse=lse, **rule)
    assert ours.dtype == torch.int32 and ours.shape == (2, 2, length - first, count)
    check_choice(ours, *scores(q, k, sampling, noise, **rule))


@pytest.mark.parametrize("sampling", KINDS)
def test_kernels_choose_the_keys_of_the_definition(sampling, kernels):
    check_kind(sampling, 70, 67, False, 3, **masks(70, DEVICE)[3])
    check_kind(sampling, 6, 0, True, 3)


@pytest.mark.kernels
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sampling", KINDS)
def test_kernels_choose_keys_in_many_tiles(sampling, causal, kernels):
    check_kind(sampling, 70, 62, causal, 20, **masks(70, DEVICE)[0 if causal else 3])


@pytest.mark.parametrize("length,count,first", [(13, 9, 0), (90, 20, 86)])
def test_kernels_without_noise_choose_exactly_those_of_the_definition(length, count, first, kernels):
    """Numbers of a few bits, whose products are exact: the rounding, halves included, and the ties are too."""
    for causal, mask in ((True, masks(length, DEVICE)[0]), (False, masks(length, DEVICE)[3])):
        q, k, _ = ((x[:1] * 8).round() / 16 for x in random_sketch(length, device=DEVICE))
        rule = dict(causal=causal, sampling="top_k", noise=None, first_query=first)
        rule |= {name: x[:1] for name, x in mask.items()}
        ours = choose(q[:, first:], k / 2, count, **rule)
        assert torch.equal(ours, choose(q[:, first:], k / 2, count, function=definitions.chosen_keys, **rule))


@pytest.mark.usefixtures("implementation")
def test_the_keys_of_a_row_do_not_depend_on_other_rows():
    q, k, v = (x[:1] for x in random_sketch(34, dtype=torch.float32, device=DEVICE))
    noise = some_noise(34, batch=1, heads=range(1), device=DEVICE)
    _, lse = sketched_attention(q, k, v, causal=True)
    for drawn in (noise, None):
        rule = dict(causal=True, sampling="inverse_log_squared")
        whole = choose(q, k, 4, noise=drawn, lse=lse, **rule)
        for i in (0, 13, 33):
            row = None if drawn is None else noise._replace(rows=noise.rows[:, i : i + 1])
            one = choose(q[:, [i]], k[:, : i + 1], 4, noise=row, lse=lse[:, [i]], first_query=i, **rule)
            assert torch.equal(one, whole[:, :, [i]])


def test_kernels_draw_the_numbers_of_the_other_implementations(kernels):
    """Where nothing but u ranks the keys, the choice is exactly the same."""
    q, k, _ = random_sketch(70, device=DEVICE)
    noise = some_noise(70, heads=range(6, 8), device=DEVICE)
    noise = noise._replace(rows=noise.rows[:, :4], key=2**63 + 5)
    rule = dict(causal=False, sampling="random", noise=noise)
    assert torch.equal(choose(q[:, :4], k, 7, **rule), choose(q[:, :4], k, 7, function=definitions.chosen_keys, **rule))


def test_kernels_reject_a_sketch_wider_than_their_registers(kernels):
    q, k, v = (x.float() for x in random_sketch(5, dim=17, device=DEVICE))
    with pytest.raises(ConfigError, match="up to a head dim of 16"):
        sketched_attention(q, k, v, causal=True)


def test_products_in_fp32_are_rounded_as_in_float64():
    """These products in steps are n + ½ ± 1e-9, which fp32 cannot tell apart."""
    q, k = torch.ones(1, 40, 4, dtype=torch.float64), torch.zeros(1, 500, 4, dtype=torch.float64)
    numbers = torch.Generator().manual_seed(0)
    sign = torch.randint(2, (500,), generator=numbers) * 2.0 - 1.0
    k[0, :, 0] = (torch.randint(9, (500,), generator=numbers) + 0.5 + 1e-9 * sign.double()) / 128
    given = q, k, KeyChoiceSpec(30, True, "top_k"), None, None, None, None, 460
    assert torch.equal(chosen_keys(*given), definitions.chosen_keys(*given))
