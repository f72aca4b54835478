"""A mechanism defined only in this file, added as CONTRIBUTING.md describes, works everywhere."""

import json
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch

import megasparse
from megasparse.attention.contract import Attention, AttentionOutput
from megasparse.attention.flops import Flops
from megasparse.config.attention import MECHANISMS, AttentionConfig, MechanismSection, mechanism, rebuild_schemas
from megasparse.errors import CheckpointError, ConfigError
from megasparse.model.build import build_model
from megasparse.planning.flops import known_flops_per_token, model_flops_per_token
from megasparse.planning.plan import GPUS, Plan
from megasparse.settings.load import build_config
from megasparse.training.checkpoints.resume import find_start
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.ranks import Ranks
from tests.helpers.commands import refusal
from tests.helpers.models import random_tokens, training_draws
from tests.helpers.tiny import identity_of, tiny_config, tiny_engine


class MeanConfig(MechanismSection):
    scale: float = 1.0
    """Factor of the output."""

    def check(self, key, model):
        if self.scale == 0.0:
            raise ConfigError(f"{key}.scale", "0 hides the values", "Set it to 1")


class MeanAttention(Attention):
    """The mean of the values so far, whatever the queries and keys are."""

    def forward(self, x, inputs, context):
        count = torch.arange(1, inputs.v.shape[2] + 1, device=inputs.v.device)[:, None]
        return AttentionOutput(self.config.scale * inputs.v.cumsum(2) / count, None, {})

    def flops(self, length):
        return Flops(1.0, 1.0) * (self.spec.heads * self.spec.head_dim)


class TaughtAttention(MeanAttention):
    """The mean of the values, and an auxiliary loss of a weight."""

    has_auxiliary_loss = True
    initial_deviations: ClassVar = {"taught": 3.0}

    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.taught = torch.nn.Parameter(torch.empty(64, 64))

    def forward(self, x, inputs, context):
        loss = self.taught.square().mean() if context.rng.training else None
        return super().forward(x, inputs, context)._replace(auxiliary_loss=loss)


class UndeclaredAttention(TaughtAttention):
    has_auxiliary_loss = False


class UncountedAttention(MeanAttention):
    flops = Attention.flops


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The mechanisms, for this file only. A mechanism of a user's stays for the whole program."""
    classes = {
        "toy_mean": MeanAttention,
        "toy_taught": TaughtAttention,
        "toy_undeclared": UndeclaredAttention,
        "toy_uncounted": UncountedAttention,
    }
    for name, cls in classes.items():
        mechanism(name, MeanConfig)(cls)
    yield
    for name in classes:
        del MECHANISMS[name], AttentionConfig.__pydantic_fields__[name]
    rebuild_schemas()


def config(pattern="toy_mean", **section):
    attention = {"pattern": [pattern], "toy_mean": section, "local": {"chunk": 16}}
    model = {"max_length": 64, "layers": 2, "d_model": 32, "d_ff": 48, "heads": 4, "attention": attention}
    return build_config({"model": model, "data": {"sequence_length": 64}})


@pytest.mark.parametrize("pattern", ["toy_mean", {"toy_mean": 3, "local": 1}])
def test_it_trains(pattern):
    model = build_model(config(pattern).model, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss, _ = model(random_tokens(2, 64), training_draws(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


def test_its_settings_are_checked():
    message = refusal(lambda: config(scale=0.0), ConfigError)
    assert message == "model.attention.toy_mean.scale: 0 hides the values. Set it to 1"
    assert refusal(lambda: config(scael=1.0), ConfigError).startswith("model.attention.toy_mean.scael: unknown key")
    assert 'Did you mean "toy_mean"' in refusal(lambda: config("toy_maen"), ConfigError)


def test_its_key_is_one_of_the_schema():
    """Other sections and defaults stay as they are, and a checkpoint's configuration loads again."""
    assert AttentionConfig().toy_mean == MeanConfig()
    assert megasparse.load_config("quickstart").model.attention.toy_mean.scale == 1.0
    written = json.loads(config(scale=2.0).model_dump_json())
    assert written["model"]["attention"]["toy_mean"] == {"scale": 2.0}
    assert build_config(written) == config(scale=2.0)


def test_it_resumes_from_its_weights_and_its_written_configuration():
    model = build_model(config(scale=2.0).model, seed=0)
    again = build_model(build_config(json.loads(config(scale=2.0).model_dump_json())).model, seed=1)
    again.load_state_dict(model.state_dict())
    losses = [one(random_tokens(2, 64), training_draws(2))[0] for one in (model, again)]
    assert torch.equal(*losses)


def test_a_name_is_given_once():
    for name in ("toy_mean", "lsh", "pattern"):
        with pytest.raises(ValueError, match=f'already contains a key "{name}"'):
            mechanism(name, MeanConfig)


def test_its_weights_start_as_it_declares():
    weights = dict(build_model(config({"toy_taught": 3, "toy_mean": 1}).model, seed=0).named_parameters())
    taught = [weight for name, weight in weights.items() if name.endswith("taught")]
    assert len(taught) == 2 and all(abs(weight.std().item() / 3 - 1) < 0.1 for weight in taught)


def test_its_auxiliary_loss_is_trained_planned_and_makes_micro_batch_a_setting_of_the_run(tmp_path):
    """The loss is a mean over a micro-batch, as with the package's own mechanisms."""
    model = build_model(config("toy_taught").model, seed=0)
    objective, _ = model(random_tokens(2, 64), training_draws(2))
    objective.backward()
    assert all(weight.grad.any() for name, weight in model.named_parameters() if "taught" in name)
    plans = [Plan(config(kind), GPUS["A100"]) for kind in ("toy_mean", "toy_taught")]
    assert plans[1].states.trained - plans[0].states.trained == 2 * 64 * 64
    assert plans[1].peak - plans[0].peak >= 4 * 4 * 2 * 64 * 64  # weight, gradient and moments
    for kind, changed in (("toy_mean", False), ("toy_taught", True)):
        attention = {"attention": {"pattern": ["local", {kind: 2}]}}
        before = tiny_config(tmp_path / kind, model=attention)
        Saver(identity_of(before), Ranks()).save(tiny_engine(before), 1, 8, {})
        after = identity_of(tiny_config(tmp_path / kind, model=attention, training={"micro_batch": 4}))
        with pytest.raises(CheckpointError, match=r"micro_batch: 2 -> 4") if changed else nullcontext():
            assert find_start(after, Ranks()).step == 1
    with pytest.raises(AssertionError, match="set its has_auxiliary_loss"):
        build_model(config("toy_undeclared").model, seed=0)(random_tokens(2, 64), training_draws(2))


def test_planning_counts_it():
    """Beside the layers' products, 32 additions a layer forward and backward, and again where layers run again."""
    model = config().model
    layers = 2 * (2 * 2 * 32 * 48 + 2 * 4 * 32 * 32)
    head = 2 * 64 * 256
    assert model_flops_per_token(model, 64) == pytest.approx(3 * (layers + head) + 2 * 2 * 32)
    assert known_flops_per_token(model, 64)[1] == pytest.approx(4 * layers + 3 * head + 3 * 2 * 32)


def test_a_missing_method_is_named():
    model = build_model(config().model, seed=0)
    with pytest.raises(ConfigError, match=r"MeanAttention cannot decode token by token.*implement MeanAttention\.new_"):
        model.new_cache(1, seed=0)
    assert len(known_flops_per_token(config().model, 64)) == 2
    uncounted = config("toy_uncounted").model
    with pytest.raises(ConfigError, match="UncountedAttention does not define its FLOPs"):
        model_flops_per_token(uncounted, 64)
    assert known_flops_per_token(uncounted, 64) == ()  # so a run trains without
