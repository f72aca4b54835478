"""Encoders of `style` bert: HuggingFace's BERT with the same weights, and that all that encoders can do works."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForMaskedLM

from megasparse.attention.heads import Padding
from megasparse.config.schema import Config
from megasparse.errors import ConfigError
from megasparse.hub.architectures import format_named
from megasparse.model.block import FeedForward
from megasparse.model.build import build_model, empty_model
from megasparse.ops.random import RngContext
from megasparse.settings.load import build_config
from tests.helpers.cases import together
from tests.helpers.models import BERT, named, random_tokens, randomise, small, training_draws

STYLE = {**BERT, "kind": "encoder", "token_types": 2, "norm_eps": 1e-12, "vocabulary": 260}
STYLE["positions"] = {"kind": "learned"}


def bert(*pattern, **changes):
    return small(pattern or ("full",), **{**STYLE, **changes})


def with_theirs(config):
    """Our model and HuggingFace's with the same random weights: no bias is 0, no norm 1."""
    ours = build_model(config, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    weights = dict(ours.named_parameters())
    exported = format_named("bert").export(Config(model=config), lambda name: weights[name].detach())
    theirs = BertForMaskedLM(BertConfig.from_dict(exported.config)).eval()
    missing, unexpected = theirs.load_state_dict(dict(exported.tensors()), strict=False)
    assert not unexpected and all(name.startswith("cls.predictions.decoder.") for name in missing)
    return ours, theirs


@pytest.mark.parametrize(
    "changes", [{}, {"loss_tiles": 3, "feed_forward_tiles": 4, "activations": "checkpoint"}, {"tied_embeddings": False}]
)
def test_scores_and_gradients_equal_huggingface(changes):
    ours, theirs = with_theirs(bert(**changes))
    tokens, rng = random_tokens(3, 50, seed=4), RngContext.evaluation(0, 3)
    real = torch.arange(50) < torch.tensor([[50], [33], [1]])
    read, scored = ours.prepare_inputs(tokens, rng, Padding(real))
    result = theirs(read, attention_mask=real.long(), labels=torch.where(scored, tokens, -100))
    nats = F.cross_entropy(result.logits.transpose(1, 2), tokens, reduction="none")
    scores = ours.token_scores(tokens, rng, Padding(real))
    torch.testing.assert_close(scores.nats[real], nats[real], rtol=1e-5, atol=1e-5)
    objective, _ = ours(tokens, rng, Padding(real))
    objective.backward()
    result.loss.backward()
    torch.testing.assert_close(objective, result.loss, rtol=1e-5, atol=1e-5)
    found = {name: p.grad for name, p in ours.named_parameters()}
    exported = dict(format_named("bert").export(Config(model=ours.config), lambda name: found[name]).tensors())
    for name, parameter in theirs.named_parameters():
        if name in exported and parameter.grad is not None:
            error = (exported[name] - parameter.grad).norm()
            assert error <= 1e-4 * parameter.grad.norm() + 1e-6, name


def test_streams_and_norms_are_fp32_in_half_precision():
    config, tokens = bert(layers=6), random_tokens(2, 60)
    single, half = (build_model(config, 0, dtype) for dtype in (torch.float32, torch.bfloat16))
    block, x = half.layers[0], torch.randn(1, 60, 32)
    assert half.embedding(tokens, 0).dtype == torch.float32
    run = (RngContext.evaluation(0, 1), Padding())
    streams, _, _ = half.streams(tokens[:1], *run)
    assert streams[0].dtype == torch.float32
    assert not torch.equal(streams[0], streams[0].bfloat16().float())
    assert block.attention.read(x).dtype == torch.bfloat16
    rng = RngContext.evaluation(0, 2)
    near, exact = half.token_scores(tokens, rng).nats, single.token_scores(tokens, rng).nats
    assert (near - exact).abs().max() < 0.02


def test_nothing_is_dropped_inside_a_feed_forward():
    """BERT applies dropout to the output of a branch, not inside it."""
    layer = FeedForward(bert(dropout=0.5), 0)
    x = torch.randn(2, 9, 32, generator=randomise(layer))
    expected = F.linear(F.gelu(F.linear(x, layer.up, layer.up_bias)), layer.down, layer.down_bias)
    torch.testing.assert_close(layer(x, training_draws(2)), expected)


def test_dropout_after_the_embedding_and_each_branch(monkeypatch):
    model, tokens = build_model(bert(dropout=0.5, layers=2), 0), random_tokens(2, 40)
    rng, counts = training_draws(2), []
    for branch in (branch for block in model.layers for branch in (block.attention, block.feed_forward)):

        def noted(stream, out, rng, add=branch.add):
            counts.append((add(torch.zeros_like(stream), out, rng) == 0).float().mean())
            return add(stream, out, rng)

        monkeypatch.setattr(branch, "add", noted)
    (entered,) = model._enter(tokens, 0, rng)
    model(tokens, rng)
    shares = [(entered == 0).float().mean(), *counts]
    assert len(shares) == 5 and all(abs(share - 0.5) < 0.05 for share in shares)


def test_initial_weights_are_berts():
    parameters = dict(build_model(bert({"full": 1, "lha": 1}, d_model=64, d_ff=100), 0).named_parameters())
    assert {name for name in parameters if "bias" in name} > {"head.bias", "head.dense_bias"}
    for name, parameter in parameters.items():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if "bias" in name else 1.0)), name
        elif "mechanisms." not in name and parameter.numel() > 1000:
            assert abs(parameter.std() / 0.02 - 1) < 0.1, name
    own = {name: p.std().item() for name, p in parameters.items() if "mechanisms." in name and p.dim() > 1}
    assert own and all(deviation > 0.05 for deviation in own.values())
    loss, _ = build_model(bert(), 0)(random_tokens(8, 100), training_draws(8))
    assert abs(loss - math.log(260)) < 0.1


@together(
    ("changes", "key", "problem"),
    [
        ({"kind": "decoder"}, "model.style", '"bert" needs model.kind = "encoder", but it is "decoder"'),
        ({"blocks": "reversible"}, "model.style", '"bert" needs model.blocks = "ordinary", but it is "reversible"'),
        ({"style": "reformer"}, "model.token_types", '2 is given, but only style "bert"'),
        ({"positions": {"kind": "none", "offset": 2}}, "model.positions.offset", '2 is given, but only kind "learned"'),
        ({"norm_eps": 0.0}, "model.norm_eps", "0.0"),
    ],
)
def test_incompatible_options_are_rejected(changes, key, problem):
    values = {**STYLE, "max_length": 64, "masking": {"token": 256}, "attention": {"pattern": ["full"]}, **changes}
    with pytest.raises(ConfigError, match=problem) as error:
        build_config({"model": values, "data": {"sequence_length": 64}})
    assert error.value.key == key


@pytest.mark.parametrize("name", ["yoso", "longformer", "bigbird", "performer", "lsh separate"])
def test_another_attention_has_the_same_weights(name):
    """So a pretrained encoder can resume with it: `megasparse pretrain --resume ... --allow-changed-config`."""
    with torch.device("meta"):
        models = [empty_model(bert(attention=named(each))) for each in ("full", name)]
    full, other = ({name: weight.shape for name, weight in model.named_parameters()} for model in models)
    assert other == full
