"""A mechanism that exists in this file alone, added as CONTRIBUTING.md describes: everything else finds it."""

import pytest
import torch
from pydantic import Field

from megasparse.attention.contract import Attention, AttentionOutput
from megasparse.attention.costs import Passes
from megasparse.attention.mechanisms import MECHANISMS
from megasparse.config.attention import AttentionConfig
from megasparse.config.load import build_settings
from megasparse.config.mechanism import MechanismSection
from megasparse.config.schema import Config, ModelConfig
from megasparse.errors import ConfigError
from megasparse.model.build import build_model
from megasparse.planning.flops import hardware_flops_per_token, known_flops_per_token, model_flops_per_token
from tests.helpers.models import random_tokens, training_draws


class MeanSection(MechanismSection):
    scale: float = 1.0

    def check(self, key: str, model: ModelConfig) -> None:
        if self.scale == 0.0:
            raise ConfigError(f"{key}.scale", "0 hides the values", "Set it to 1")


class MeanAttention(Attention):
    """The mean of the values so far, whatever the queries and keys are."""

    def __init__(self, config, spec):
        super().__init__(spec)
        self.config = config

    def forward(self, x, inputs, context):
        count = torch.arange(1, inputs.v.shape[2] + 1)[:, None]
        return AttentionOutput(self.config.scale * inputs.v.cumsum(2) / count, None, {})

    def flops(self, length):
        return Passes(1.0, 1.0) * (self.spec.heads * self.spec.head_dim)


class UncountedAttention(MeanAttention):
    flops = Attention.flops


class WithMean(AttentionConfig):
    pattern: list[str | dict[str, int]] = Field(default=["mean"])
    mean: MeanSection = MeanSection()


class ModelWithMean(ModelConfig):
    attention: WithMean = WithMean()


class ConfigWithMean(Config):
    model: ModelWithMean = ModelWithMean()


def config(monkeypatch, pattern="mean", mechanism=MeanAttention, **section):
    monkeypatch.setitem(MECHANISMS, "mean", mechanism)
    attention = {"pattern": [pattern], "mean": section, "local": {"chunk": 16}}
    model = {"max_length": 64, "layers": 2, "d_model": 32, "d_ff": 48, "heads": 4, "attention": attention}
    return build_settings({"model": model, "data": {"sequence_length": 64}}, [], ConfigWithMean).model


@pytest.mark.parametrize("pattern", ["mean", {"mean": 3, "local": 1}])
def test_it_trains(monkeypatch, pattern):
    model = build_model(config(monkeypatch, pattern), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss, _ = model(random_tokens(2, 64), training_draws(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


def test_its_settings_are_checked(monkeypatch):
    with pytest.raises(ConfigError, match=r"model\.attention\.mean\.scale: 0 hides the values"):
        config(monkeypatch, scale=0.0)


def test_planning_counts_it(monkeypatch):
    """Beside the layers' products, 32 additions a layer forward and backward, and again where layers run again."""
    model = config(monkeypatch)
    layers = 2 * (2 * 2 * 32 * 48 + 2 * 4 * 32 * 32)
    head = 2 * 64 * 256
    assert model_flops_per_token(model, 64) == pytest.approx(3 * (layers + head) + 2 * 2 * 32)
    assert hardware_flops_per_token(model, 64) == pytest.approx(4 * layers + 3 * head + 3 * 2 * 32)


def test_a_lack_is_refused_by_name(monkeypatch):
    model = build_model(config(monkeypatch), seed=0)
    with pytest.raises(ConfigError, match=r"MeanAttention cannot decode token by token.*implement MeanAttention\.new_"):
        model.new_cache(1, seed=0)
    assert len(known_flops_per_token(config(monkeypatch), 64)) == 2
    uncounted = config(monkeypatch, mechanism=UncountedAttention)
    with pytest.raises(ConfigError, match="UncountedAttention has no count of its FLOPs"):
        model_flops_per_token(uncounted, 64)
    assert known_flops_per_token(uncounted, 64) == ()  # so a run trains without
