"""The sketch's kernels, in Triton's interpreter, against the definition in float64."""

import pytest
import torch

from megasparse.errors import ConfigError
from megasparse.ops import sketch, sketch_kernels
from megasparse.ops.sketch import reference_attention as exactly
from megasparse.ops.sketch import reference_choice as defined
from megasparse.ops.sketch import sketched_attention, sketched_weights, uniform
from tests.helpers.kernels import DEVICE
from tests.ops import test_sketch as drawn_on_cpu
from tests.ops.test_sketch import KINDS, choose


def random_sketch(length, **settings):
    return [x.to(DEVICE) for x in drawn_on_cpu.random_sketch(length, **settings)]


def some_noise(length, **settings):
    noise = drawn_on_cpu.some_noise(length, **settings)
    return noise._replace(rows=noise.rows.to(DEVICE))


def masks(length):
    return [{name: x.to(DEVICE) for name, x in mask.items()} for mask in drawn_on_cpu.masks(length)]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")
    for module in (sketch, sketch_kernels):
        monkeypatch.setattr(module, "KEYS", 24)  # tiles that the columns of a program do not divide


def distance(ours, exact):
    assert torch.equal(ours.isfinite(), exact.isfinite())
    ours, exact = ours.double().nan_to_num(), exact.nan_to_num()
    return ((ours - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def check_attention(length, dim, dtype, causal, forward, backward, **mask):
    generator = torch.Generator().manual_seed(2)
    inputs = [x.to(dtype).requires_grad_() for x in random_sketch(length, dim=dim)]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    h, lse = sketched_attention(*inputs, causal=causal, **mask)
    exact = exactly(*doubles, causal=causal, **mask)
    assert h.dtype == lse.dtype == torch.float32
    assert distance(h, exact[0]) < forward and distance(lse, exact[1]) < forward
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(DEVICE) for x in (h, lse)]
    # The lse of a blind row is −∞ whatever the inputs.
    grads[1] = grads[1].where(lse.isfinite(), 0.0)
    ours = torch.autograd.grad([h, lse], inputs, [g.float() for g in grads])
    for a, b, x in zip(ours, torch.autograd.grad(exact, doubles, grads), inputs, strict=True):
        assert a.dtype == x.dtype and distance(a, b) < backward


@pytest.mark.parametrize("causal", [True, False])
def test_the_attention_and_its_gradients_are_those_of_the_definition(causal):
    for mask in masks(33)[::3]:
        check_attention(33, 4, torch.float32, causal, 1e-5, 1e-4, **mask)


@pytest.mark.kernels
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length,dim", [(1, 4), (17, 1), (17, 4), (17, 11), (17, 16), (100, 4)])
def test_the_attention_at_every_width_and_dtype(length, dim, causal):
    mask = masks(length)[3 if length == 17 else 0]
    check_attention(length, dim, torch.float32, causal, 1e-5, 1e-4, **mask)
    if (length, dim) == (17, 4):  # only what goes in and comes out depends on the dtype
        for dtype, bar in ((torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
            check_attention(length, dim, dtype, causal, 1e-5, bar)


def test_large_queries_and_keys_stay_finite():
    q, k, v = (x.float().requires_grad_() for x in random_sketch(20))
    h, lse = sketched_attention(q * 1e4, k * 1e4, v, causal=True)
    grads = torch.autograd.grad([h.sum() + lse.sum()], [q, k, v])
    assert all(x.isfinite().all() for x in (h, lse, *grads))


def check_choice(ours, score, seen):
    """Check ours (B, H, Lq, K) chosen by score (B, H, Lq, L): as many as are visible, all visible, once each, best
    first, and none left out that is better by more than rounding."""
    count = ours.shape[-1]
    assert torch.equal((ours >= 0).sum(-1), seen.sum(-1).clamp(max=count)[:, None].expand(ours.shape[:-1]))
    assert ((ours[..., 1:] < 0) | (ours[..., :-1] >= 0)).all()  # −1 last
    score = score.masked_fill(~seen[:, None], -1.0).expand(*ours.shape[:-1], -1)
    best = torch.sort(score, dim=-1, descending=True).values[..., :count]
    chosen = score.gather(-1, ours.clamp_min(0).long())
    found = ours >= 0
    best, chosen = best[found[..., : best.shape[-1]]], chosen[found]
    both_infinite = best.isinf() & chosen.isinf()
    assert (both_infinite | ((chosen - best).abs() <= 1e-5 * best)).all()
    in_order = torch.sort(ours.masked_fill(~found, 1 << 30), dim=-1).values
    assert ((in_order[..., 1:] > in_order[..., :-1]) | (in_order[..., 1:] == 1 << 30)).all()


def scores(q, k, sampling, noise, **rule):
    """Return s of every pair by the definition, in float64, and who is visible."""
    alpha, seen = sketched_weights(q.double(), k.double(), **rule)
    p = {
        "inverse_log_squared": alpha.log() ** -2,
        "inverse_log": 1 / alpha.log().abs(),
        "random": torch.ones_like(alpha),
    }
    return uniform(noise, k.shape[1]) * p.get(sampling, alpha)[:, None], seen


def check_kind(sampling, length, first, causal, count, **mask):
    q, k, v = random_sketch(length)
    noise = some_noise(length, heads=range(3, 5))
    noise = noise._replace(rows=noise.rows[:, first:])
    _, lse = exactly(q, k, v, causal=causal, **mask)
    rule = dict(causal=causal, first_query=first, **mask)
    q, lse = q[:, first:], lse[:, first:]
    ours = choose(q, k, count, sampling=sampling, noise=noise, lse=lse, **rule)
    assert ours.dtype == torch.int32 and ours.shape == (2, 2, length - first, count)
    check_choice(ours, *scores(q, k, sampling, noise, **rule))


@pytest.mark.parametrize("sampling", KINDS)
def test_the_keys_are_those_of_the_definition(sampling):
    check_kind(sampling, 41, 38, False, 3, **masks(41)[3])
    check_kind(sampling, 6, 0, True, 3)


@pytest.mark.kernels
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sampling", KINDS)
def test_the_keys_in_many_tiles(sampling, causal):
    check_kind(sampling, 70, 62, causal, 20, **masks(70)[0 if causal else 3])


@pytest.mark.parametrize("length,count,first", [(1, 3, 0), (13, 9, 0), (90, 20, 82)])
def test_without_noise_they_are_exactly_those_of_the_definition(length, count, first):
    """Numbers of a few bits, whose products are exact: the rounding, halves included, and the ties are too."""
    for causal, mask in ((True, masks(length)[0]), (False, masks(length)[3])):
        q, k, _ = ((x[:1] * 8).round() / 16 for x in random_sketch(length))
        rule = dict(causal=causal, sampling="top_k", noise=None, first_query=first)
        rule |= {name: x[:1] for name, x in mask.items()}
        ours = choose(q[:, first:], k / 2, count, **rule)
        assert torch.equal(ours, choose(q[:, first:], k / 2, count, function=defined, **rule))


def test_a_row_by_itself_chooses_what_it_does_among_others():
    q, k, v = (x[:1] for x in random_sketch(34, dtype=torch.float32))
    noise = some_noise(34, batch=1, heads=range(1))
    _, lse = sketched_attention(q, k, v, causal=True)
    for drawn in (noise, None):
        rule = dict(causal=True, sampling="inverse_log_squared")
        whole = choose(q, k, 4, noise=drawn, lse=lse, **rule)
        for i in (0, 13, 33):
            row = None if drawn is None else noise._replace(rows=noise.rows[:, i : i + 1])
            here, seen = slice(i, i + 1), k[:, : i + 1]
            one = choose(q[:, here], seen, 4, noise=row, lse=lse[:, here], first_query=i, **rule)
            assert torch.equal(one, whole[:, :, here])


def test_the_draws_are_those_of_the_other_implementations():
    """Where nothing but u ranks the keys, the choice is exactly the same."""
    q, k, _ = random_sketch(40)
    noise = some_noise(40, heads=range(6, 8))
    noise = noise._replace(rows=noise.rows[:, :4], key=2**63 + 5)
    rule = dict(causal=False, sampling="random", noise=noise)
    assert torch.equal(choose(q[:, :4], k, 7, **rule), choose(q[:, :4], k, 7, function=defined, **rule))


def test_a_sketch_wider_than_its_registers_is_refused_where_kernels_are_forced():
    q, k, v = (x.float() for x in random_sketch(5, dim=17))
    with pytest.raises(ConfigError, match="up to a head dim of 16"):
        sketched_attention(q, k, v, causal=True)
    with pytest.raises(ConfigError, match="up to a head dim of 16"):
        choose(q, k, 2, causal=True, sampling="top_k", noise=None)


@pytest.mark.parametrize("name", ["reference", "blockwise"])
def test_the_definition_can_be_forced_and_takes_what_a_model_gives(monkeypatch, name):
    monkeypatch.setenv("MEGASPARSE_OPS", name)
    for mask in masks(21):
        q, k, v = (x.requires_grad_() for x in random_sketch(21, dtype=torch.float32))
        h, lse = sketched_attention(q, k, v, causal=True, **mask)
        grads = torch.autograd.grad(h.sum() + lse.nan_to_num(neginf=0.0).sum(), [q, k, v])
        assert all(g.isfinite().all() for g in grads)
        here = choose(
            q[:, 9:], k, 4, causal=True, sampling="raw", noise=some_noise(21)._replace(rows=some_noise(21).rows[:, 9:]),
            lse=lse[:, 9:], first_query=9, **mask,
        )  # fmt: skip
        whole = choose(q, k, 4, causal=True, sampling="raw", noise=some_noise(21), lse=lse, **mask)
        assert torch.equal(here, whole[:, :, 9:])
