"""Cross-attention against its definition, dense and in float64."""

import pytest
import torch

from megasparse.attention.contract import AttentionContext
from megasparse.attention.cross import CrossAttention, EncoderOutput
from megasparse.model.build import initialise
from megasparse.ops.random import RngContext
from tests.helpers.models import attention, small_pair, training_draws
from tests.helpers.peak_memory import PeakMemory

M = 4


def cross(kind, **changes):
    layers = attention("full", lsh={"chunk": M, "rounds": 3, "buckets": 6, **changes.pop("lsh", {})})
    config = small_pair(attention=layers, source={"length": 40, "cross_attention": kind}, **changes)
    made = CrossAttention(config)
    initialise(made, config, seed=5)
    return made


def inputs(target, source, padded=True, batch=2):
    generator = torch.Generator().manual_seed(0)
    x, states = (torch.randn(batch, n, 32, generator=generator, requires_grad=True) for n in (target, source))
    real = torch.rand(batch, source, generator=generator) < 0.7 if padded else None
    return x, states, real


def split(x):
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def visible(query_codes, key_codes, real):
    """(B, H, R, T, S) bool, counted pair by pair: of its bucket's real keys a query sees the last M at or before its
    position and the M after it."""
    same = query_codes[..., :, None] == key_codes[..., None, :]
    same = same & real[:, None, None, None]
    targets, sources = same.shape[-2:]
    position, key = torch.arange(targets)[:, None], torch.arange(sources)[None]
    before = (same & (key <= position)).sum(-1, keepdim=True)
    rank = same.long().cumsum(-1) - 1  # of each key among those of the query's bucket
    return same & (rank >= before - M) & (rank < before + M)


def definition(made, x, states, seen, once):
    """Attention by its definition. seen: (B, H, R, T, S). Queries without visible keys get 0."""
    w = {name: p.detach().double() for name, p in made.named_parameters()}
    q, k, v = (
        split(y.double() @ w[f"{part}.weight"].T) for part, y in (("query", x), ("key", states), ("value", states))
    )
    counts = seen.sum(2)
    counts = (counts > 0).double() if once else counts.double()
    weight = counts * (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).exp()
    out = weight / weight.sum(-1, keepdim=True).clamp_min(1e-300) @ v
    return out.transpose(1, 2).flatten(2) @ w["output.weight"].T


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize(("target", "source"), [(25, 40), (40, 25), (30, 30), (1, 9)])
@pytest.mark.parametrize("kind", ["full", "lsh"])
def test_outputs_and_gradients_equal_the_definition(kind, target, source, once):
    made = cross(kind, lsh={"count_rounds": once})
    x, states, real = inputs(target, source)
    context = AttentionContext(1, training_draws(2))
    ours = made(x, EncoderOutput(states, real), context)
    seen = real[:, None, None, None].expand(2, 2, 1, target, source)
    if kind == "lsh":
        query_codes, key_codes = (
            made._codes(split(part(y)), context) for part, y in ((made.query, x), (made.key, states))
        )
        seen = visible(query_codes, key_codes, real)
        assert query_codes.shape[2] == 3 and 0 < seen.float().mean() < 0.5
    exact = definition(made, x, states, seen, once or kind == "full")
    assert (ours - exact).abs().max() < 1e-5
    weight = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), (x, states)) for y in (ours, exact)), strict=True):
        assert (a - b).abs().max() < 1e-4


def test_rounds_of_evaluation():
    made, (_, states, real) = cross("lsh", lsh={"evaluation_rounds": 5}), inputs(20, 30)
    for rng, rounds in ((training_draws(2), 3), (RngContext.evaluation(0, 2), 5), (RngContext.evaluation(0, 2, 7), 7)):
        assert made.read(EncoderOutput(states, real), AttentionContext(0, rng)).codes.shape == (2, 2, rounds, 30)


def test_buckets_of_the_longer_side_and_separate_draws():
    assert cross("lsh", lsh={"buckets": None}, max_length=20).factors == [20]  # 2·40/4
    assert cross("lsh", lsh={"buckets": None}, max_length=64).factors == [32]
    made, (_, states, real) = cross("lsh"), inputs(20, 30)
    places = [AttentionContext(layer, training_draws(2, step)) for layer, step in ((0, 0), (0, 0), (1, 0), (0, 1))]
    first, same, *others = (made.read(EncoderOutput(states, real), place).codes for place in places)
    assert torch.equal(first, same) and not any(torch.equal(first, other) for other in others)


def test_hashed_memory_is_linear():
    def peak(length):
        layers = attention("full", lsh={"chunk": 32, "rounds": 1})
        config = small_pair(max_length=8192, attention=layers, source={"length": 8192, "cross_attention": "lsh"})
        made = CrossAttention(config)
        initialise(made, config, seed=0)
        x, states, _ = inputs(length, length, padded=False, batch=1)
        with PeakMemory() as memory:
            made(x, EncoderOutput(states, None), AttentionContext(0, training_draws(1))).sum().backward()
        return memory.peak

    assert peak(8192) < 2.2 * peak(4096)
