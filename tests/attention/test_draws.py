"""Every mechanism decides and draws the same in a recomputation, after resume, and on any number of ranks."""

import torch

from megasparse.attention.contract import RecomputeCache
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from tests.helpers.comparing import assert_near, gradients
from tests.helpers.models import (
    CASES,
    EVERY,
    Single,
    attention,
    by_path,
    in_stack,
    kind_of,
    named,
    random_tokens,
    small,
)

WEIGHTS_BY_HEAD = {
    "lha",
    "ngram",
    "ranked",
    "routing",
    "local relative",
    "yoso gaussian, convolution",
    "smart_bird heads",
    "synthesizer",
    "sinkhorn",
}
"""Mechanisms with weights per head: a single head has other weights."""


@EVERY
def test_a_draw_depends_on_its_place_only(name, causal):
    """Neither the batch, so the number of ranks or the micro-batch, nor the other heads of a rank change it; a second
    mechanism draws the same bits."""
    single = Single(name, causal, 0.2)
    inputs = single.inputs(60)
    place = {"training": True, "step": 7}
    both = single(*inputs, **place, samples=torch.tensor([5, 9])).out
    assert torch.equal(Single(name, causal, 0.2)(*inputs, **place, samples=torch.tensor([5, 9])).out, both)
    alone = single(*(t[1:] for t in inputs), **place, samples=torch.tensor([9])).out
    torch.testing.assert_close(alone[0], both[1], rtol=1e-4, atol=1e-5)
    if not {name, single.kind} & WEIGHTS_BY_HEAD:
        x, *heads = inputs
        alone = single(x, *(h[:, 1:] for h in heads), **place, samples=torch.tensor([5, 9]), head_offset=1).out
        torch.testing.assert_close(alone[:, 0], both[:, 1], rtol=1e-4, atol=1e-5)


@by_path("name,causal", [case for case in CASES if kind_of(case[0]) != "yoso"])
def test_a_recomputation_decides_nothing_again(name, causal):
    """A reversible backward rebuilds x, q and k with other last bits. YOSO hashes again: see its flip rate."""
    single, recompute = Single(name, causal, 0.2), RecomputeCache()
    inputs = single.inputs(100)
    out = single(*inputs, training=True, recompute=recompute).out
    recompute.replay()
    generator = torch.Generator().manual_seed(5)
    rebuilt = [t * (1 + 1e-3 * torch.randn(t.shape, generator=generator)) for t in inputs]
    again = single(*rebuilt, training=True, recompute=recompute).out
    assert (again - out).abs().max() < 0.05  # a key more or less would move it by a tenth of a value or more


@EVERY
def test_reversible_gradients_equal_stored_activations(name, causal):
    config = small(attention=named(name, 0.2), **in_stack(causal), vocabulary=260, dropout=0.1)
    models = (build_model(config.model_copy(update={"activations": kind}), 0) for kind in ("reversible", "stored"))
    ours, exact = (gradients(model, random_tokens(2, 70), step=1)[1] for model in models)
    assert_near(ours, exact, 1e-4)


def test_heads_of_a_split_layer_are_the_mechanisms_side_by_side():
    """Each with the draws of its global head numbers."""
    tokens = random_tokens(1, 90)
    split = build_model(small(attention=attention({"local": 1, "lsh": 1}), layers=1), 0)
    nats = split.token_scores(tokens, RngContext.evaluation(0, 1)).nats
    layer = split.layers[0].attention.attention
    assert list(layer.split.items()) == [("local", 1), ("lsh", 1)]
    assert layer.key.weight.shape == (16, 32)  # only the local head has keys of its own
    with torch.no_grad():
        layer.output.weight[:, 16:] = 0  # the LSH head is silenced
    assert (split.token_scores(tokens, RngContext.evaluation(0, 1)).nats - nats).abs().max() > 1e-3
    with torch.no_grad():
        layer.query.weight[16:] *= 3
    silenced = split.token_scores(tokens, RngContext.evaluation(0, 1)).nats
    with torch.no_grad():
        layer.query.weight[16:] *= 3
    assert torch.equal(split.token_scores(tokens, RngContext.evaluation(0, 1)).nats, silenced)
