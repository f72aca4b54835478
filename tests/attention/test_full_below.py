"""Full attention in place of hashing, on the same weights, in models shorter than `attention.full_below`."""

import pytest
import torch

from megasparse.attention.full import FullAttention, KeyValueCache
from megasparse.attention.heads import build_mechanism
from megasparse.config.load import build_config
from megasparse.errors import ConfigError
from megasparse.model.build import build_model
from megasparse.planning.flops import model_flops_per_token
from tests.helpers.comparing import gradients
from tests.helpers.models import attention, random_tokens, small

LENGTH = 128  # model.max_length of `small`
EACH = pytest.mark.parametrize(
    ("kind", "settings", "shared"), [("lsh", {}, True), ("lsh", {"shared_qk": False}, False), ("smyrf", {}, False)]
)


def models(kind, settings, shared, full_below):
    """A model of the mechanism with `full_below`, and one of full attention with its weights."""
    changes = {"kind": "encoder", "vocabulary": 257} if kind == "smyrf" else {}
    sparse = attention(kind, "local", **{kind: settings}).model_copy(update={"full_below": full_below})
    full = attention("full", "local", full={"shared_qk": shared})
    return [build_model(small(attention=made, **changes), seed=3) for made in (sparse, full)]


def same(one, other, length):
    """Whether a step of both has the same objective and gradients to the bit."""
    (loss, own), (other_loss, others) = (gradients(model, random_tokens(2, length)) for model in (one, other))
    return loss == other_loss and all(torch.equal(x, y) for x, y in zip(own.values(), others.values(), strict=True))


@EACH
def test_below_it_the_model_is_that_of_full_attention(kind, settings, shared):
    ours, full = models(kind, settings, shared, LENGTH + 1)
    assert same(ours, full, LENGTH)
    assert model_flops_per_token(ours.config, LENGTH) == model_flops_per_token(full.config, LENGTH)


@EACH
def test_the_models_length_decides_never_the_batchs(kind, settings, shared):
    hashed, never = (models(kind, settings, shared, below)[0] for below in (LENGTH, None))
    full = models(kind, settings, shared, None)[1]
    assert same(hashed, never, 40) and not same(hashed, full, 40)


@EACH
def test_weights_move_both_ways(kind, settings, shared):
    """The names and shapes of all that a checkpoint keeps."""
    below, full = models(kind, settings, shared, LENGTH + 1)
    hashed, _ = models(kind, settings, shared, None)
    states = [{name: x.shape for name, x in model.state_dict().items()} for model in (below, full, hashed)]
    assert states[0] == states[1] == states[2]
    fresh, _ = models(kind, settings, shared, None)
    below.load_state_dict(hashed.state_dict())
    hashed.load_state_dict(below.state_dict())
    assert same(hashed, fresh, LENGTH)


def test_the_cache_is_full_attentions():
    model = small(attention=attention("lsh").model_copy(update={"full_below": LENGTH + 1}))
    mechanism = build_mechanism("lsh", model, heads=2)
    assert isinstance(mechanism, FullAttention) and mechanism.shared_qk
    assert isinstance(mechanism.new_cache(1, torch.zeros(1), rounds=None), KeyValueCache)


@pytest.mark.parametrize("kind", ["local", "lha", "yoso", "smart_bird", "routing"])
def test_what_has_weights_of_its_own_is_never_replaced(kind):
    below = attention("lsh", kind).model_copy(update={"full_below": LENGTH + 1})
    assert not isinstance(build_mechanism(kind, small(attention=below), heads=2), FullAttention)


def test_it_must_concern_a_layer():
    base = {"max_length": 64, "d_model": 32, "heads": 4, "layers": 4}
    pattern = {"pattern": ["local", "lha"], "full_below": 100}

    def refused(**model):
        with pytest.raises(ConfigError) as caught:
            build_config({"model": base | model, "data": {"sequence_length": 64}})
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert refused(attention=pattern).startswith('model.attention.full_below: 100 is given, but no layer has "lsh"')
    source = {"length": 16, "attention": pattern}
    reported = refused(kind="encoder_decoder", attention={"pattern": ["lsh"]}, source=source)
    assert reported.startswith("model.source.attention.full_below: 100")
    assert refused(attention={"full_below": 0}).startswith("model.attention.full_below: 0")
