import pytest
import torch

from megasparse.hub.compare import TOLERANCE, first_difference, our_outputs
from megasparse.ops.random import RngContext
from tests.helpers.hub import SEED, decoder, encoder, made
from tests.helpers.models import random_tokens


@pytest.mark.parametrize("kind", [decoder, encoder])
def test_outputs_are_those_of_the_layers_in_order(kind):
    config = kind("full", blocks="ordinary", activations="stored")
    model, tokens = made(config), random_tokens(2, 9)
    outputs = dict(our_outputs(model, tokens, SEED))
    layers = [f"layer {layer} {part}" for layer in range(2) for part in ("attention", "feed-forward")]
    assert list(outputs) == ["embedding", *layers, "logits"]
    stream = outputs["embedding"] + sum(outputs[layer] for layer in layers)
    torch.testing.assert_close(outputs["logits"], model.logits((stream,)), atol=1e-5, rtol=0)
    if kind is decoder:
        nats = model.token_scores(tokens, RngContext.evaluation(SEED, 2)).nats
        predicted = torch.nn.functional.cross_entropy(outputs["logits"].transpose(1, 2), tokens, reduction="none")
        torch.testing.assert_close(predicted, nats, atol=1e-5, rtol=0)


def test_the_draws_are_those_of_the_seed():
    model, tokens = made(decoder("lsh")), random_tokens(2, 40)
    ours = list(our_outputs(model, tokens, SEED))
    assert first_difference(ours, our_outputs(model, tokens, SEED)) is None
    name, size = first_difference(ours, our_outputs(model, tokens, SEED + 1))
    assert name == "layer 0 attention" and size > TOLERANCE


@pytest.mark.parametrize(
    "changed, layer",
    [
        ("embedding.start", "embedding"),
        ("blocks.0.attention.attention.value.weight", "layer 0 attention"),
        ("blocks.1.feed_forward.feed_forward.down", "layer 1 feed-forward"),
        ("head.norm_weight", "logits"),
    ],
)
@pytest.mark.parametrize("by", [0.5, float("nan")])
def test_the_first_layer_that_differs_is_named(changed, layer, by):
    model, other = made(decoder("local")), made(decoder("local"))
    with torch.no_grad():
        dict(other.named_parameters())[changed] += by
    tokens = random_tokens(1, 9)
    assert first_difference(our_outputs(model, tokens, SEED), our_outputs(other, tokens, SEED))[0] == layer


def test_small_differences_are_none_and_models_of_other_layers_an_error():
    one = torch.zeros(2, 3)
    assert first_difference([("a", one)], [("a", one + 0.9e-4)]) is None
    assert first_difference([("a", one)], [("a", one + 1.1e-4)])[0] == "a"
    with pytest.raises(AssertionError):
        first_difference([("a", one)], [("b", one)])
    with pytest.raises(ValueError):
        first_difference([("a", one)], [])
