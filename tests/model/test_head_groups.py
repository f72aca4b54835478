"""Attention of a few heads at a time, against all heads at once and against its definition."""

import pytest
import torch

from megasparse.attention.heads import Padding
from megasparse.errors import ConfigError
from megasparse.model.branch import Pass
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.settings.load import load_config
from tests.helpers import models
from tests.helpers.cases import together
from tests.helpers.models import PARTS, attention, named, random_tokens, small, training_draws

SHARED = {name for name in models.all_names() if name.startswith("smart_bird")} - {"smart_bird heads"}
SHARED.add("lha projected, normalized")
"""Mechanisms whose heads are not independent."""
EVERY = models.by_path("name,causal", [case for case in models.CASES if case[0] not in SHARED])
REVERSIBLE = {"blocks": "reversible", "activations": "reversible"}
STORED = {"blocks": "ordinary", "activations": "stored"}
CHECKPOINT = {"blocks": "ordinary", "activations": "checkpoint"}


def grouped(config, groups):
    own = config.attention.model_copy(update={"head_groups": groups})
    return config.model_copy(update={"attention": own})


def step(config, tokens, dtype=torch.float64):
    model = build_model(config, 0, dtype)
    objective, statistics = model(tokens, training_draws(len(tokens), 3))
    objective.backward()
    return objective.detach(), statistics, {n: p.grad for n, p in model.named_parameters()}


def assert_same(config, groups, tokens=None, tolerance=1e-9):
    """The same step with groups of heads and without. What is summed in another order is the output projection over
    heads, and with it every sum after it."""
    tokens = random_tokens(2, 90) if tokens is None else tokens
    whole, parts = (step(grouped(config, n), tokens) for n in (1, groups))
    torch.testing.assert_close(parts[0], whole[0], rtol=tolerance, atol=0)
    assert parts[1].keys() == whole[1].keys()
    assert parts[2].keys() == whole[2].keys()
    for name, exact in whole[2].items():
        own = parts[2][name]
        assert (own is None) == (exact is None), name
        if exact is not None:
            bar = tolerance * max(exact.abs().max().item(), 1e-12)
            torch.testing.assert_close(own, exact, rtol=0, atol=bar, msg=name)


@EVERY
def test_head_groups_do_not_change_the_result(name, causal):
    settings = {"heads": 4, "layers": 1, "dropout": 0.1, "feed_forward_tiles": 3, "vocabulary": 257}
    config = small(attention=named(name), kind="decoder" if causal else "encoder", **settings, **REVERSIBLE)
    assert_same(config, 2)


@pytest.mark.parametrize("blocks", [REVERSIBLE, STORED, CHECKPOINT], ids=["reversible", "stored", "checkpoint"])
@pytest.mark.parametrize("groups", [2, 4])
def test_several_layers_with_grouped_keys_biases_norms_and_packed_documents(blocks, groups):
    """With 8 heads of 4 keys' heads, groups are 2 pairs, or one; two mechanisms share a layer."""
    pattern = attention({"local": 4, "lsh": 4}, "lha", lsh={"shared_qk": False})
    parts = {**PARTS, "key_heads": 4, "attention_biases": "all", "query_key_norm": True}
    settings = {"heads": 8, "layers": 3, "dropout": 0.1, "document_separator": 10, "padding_token": 11}
    config = small(attention=pattern, feed_forward_tiles=4, **{**parts, **settings, **blocks})
    tokens = random_tokens(2, 90, vocabulary=12)
    tokens[0, -7:] = 11
    assert_same(config, groups, tokens)


def test_a_group_may_have_a_part_of_the_heads_that_share_keys():
    config = small(("lsh",), **{**PARTS, "heads": 8, "key_heads": 2, "layers": 2})
    assert_same(config, 8)


def test_attention_dropout_post_norm_and_biases():
    settings = {**models.BERT, "tied_embeddings": False, "kind": "encoder", "vocabulary": 257}
    config = small(attention=named("full", 0.2), heads=4, layers=2, dropout=0.1, **settings)
    assert_same(config, 4)


def test_in_float32_losses_are_the_same_to_a_millionth():
    """Outputs of groups are added to the stream one after another, in fp32; all heads at once are one product."""
    config = small(("lsh", "lha"), heads=4, layers=4, dropout=0.1, feed_forward_tiles=2, **REVERSIBLE)
    tokens = random_tokens(2, 120)
    (one, _, _), (four, _, _) = (step(grouped(config, n), tokens, torch.float32) for n in (1, 4))
    torch.testing.assert_close(four, one, rtol=1e-6, atol=0)


def test_full_attention_in_groups_is_its_definition():
    config = grouped(small(("full",), heads=4, layers=1, feed_forward_tiles=3, positions={"kind": "sinusoidal"}), 2)
    branch = build_model(config, 0, torch.float64).blocks[0].attention
    x = torch.randn(2, 50, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    direction = x.detach().cos()

    def defined(x):
        y = torch.nn.functional.layer_norm(x, (32,), branch.norm.weight, branch.norm.bias)
        own = branch.attention
        q, k, v = ((y @ part.weight.T).view(2, 50, 4, 8).transpose(1, 2) for part in (own.query, own.key, own.value))
        score = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~torch.ones(50, 50).tril().bool(), -torch.inf)
        return (score.softmax(-1) @ v).transpose(1, 2).reshape(2, 50, 32) @ own.output.weight.T

    weights = list(branch.parameters())
    out, _ = branch.update(x, Pass(RngContext.evaluation(0, 2), Padding()))
    found = torch.autograd.grad((out * direction).sum(), [x, *weights])
    expected = torch.autograd.grad((defined(x) * direction).sum(), [x, *weights])
    torch.testing.assert_close(out, defined(x), rtol=1e-9, atol=1e-9)
    for own, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(own, exact, rtol=1e-9, atol=1e-9)


def test_the_streams_of_a_user_are_left_as_they_are():
    """Only the model's own objective gives its streams away; those that `streams` returns are not overwritten."""
    model = build_model(grouped(small(("lsh",), heads=4, layers=2, **REVERSIBLE), 2), 0)
    streams, _, _ = model.streams(random_tokens(1, 40), training_draws(1), Padding())
    before = [x.detach().clone() for x in streams]
    weight = torch.ones(1, 1, 32)
    grads = weight.expand_as(streams[0])
    torch.autograd.backward(streams, [grads, grads])
    assert all(torch.equal(x, y) for x, y in zip(before, streams, strict=True))
    assert torch.equal(weight, torch.ones(1, 1, 32))


def test_generation_takes_all_heads_at_once_and_evaluation_groups():
    config = small(("lsh", "local"), heads=4, layers=2, **REVERSIBLE)
    one, two = (build_model(grouped(config, n), 0).eval() for n in (1, 2))
    tokens = random_tokens(1, 60)
    torch.testing.assert_close(two(tokens)[0], one(tokens)[0])
    for model in (one, two):
        model.cache = model.new_cache(1, seed=0)
    assert torch.equal(one.prefill(tokens, one.cache), two.prefill(tokens, two.cache))


@together(
    ("changes", "problem"),
    [
        (["model.attention.head_groups=3"], "3 groups cannot divide the 4 heads of"),
        (["model.attention.head_groups=2", 'model.attention.pattern=["smart_bird"]'], "all heads share one sketch"),
        (
            ["model.attention.head_groups=2", "model.heads=6", "model.d_model=192", "model.key_heads=3"],
            "groups of 3 heads split 2 heads that share a key head",
        ),
    ],
)
def test_impossible_head_groups_are_rejected(changes, problem):
    with pytest.raises(ConfigError, match=rf"model\.attention\.head_groups: .*{problem}"):
        load_config("quickstart", ["model.heads=4", 'model.attention.pattern=["local"]', *changes])
