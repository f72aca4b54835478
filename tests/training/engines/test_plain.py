"""The engine on one process; tests/distributed has it on two. Frozen weights do not change, are not in a checkpoint,
and a run with them resumes exactly."""

import logging
import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from megasparse.data.batches import Batch
from megasparse.errors import CheckpointError, ConfigError
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.training.checkpoints.checkpoint import Checkpoint, load_weights
from megasparse.training.checkpoints.manifest import find_checkpoint
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines import build_engine
from megasparse.training.engines.deepspeed import _lines_in
from megasparse.training.ranks import Ranks, start_ranks
from tests.helpers.cases import together
from tests.helpers.models import small
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import DummyBatches, TinyModel, identity_of, make_rng, tiny_config, tiny_engine, train_steps
from tests.training.test_ranks import LAUNCHED


@pytest.mark.parametrize("micro_batch", [1, 4, 8])
def test_accumulation_does_not_change_the_run(tmp_path, micro_batch):
    whole = tiny_config(tmp_path, training={"micro_batch": 8})
    cut = tiny_config(tmp_path, training={"micro_batch": micro_batch})
    expected = train_steps(tiny_engine(whole), whole, 1, 10)
    assert train_steps(tiny_engine(cut), cut, 1, 10) == pytest.approx(expected, rel=1e-6)


def test_micro_batches_without_a_scored_token_do_not_shrink_the_loss(tmp_path):
    """One masked token in four micro-batches: the mean is of that one, as in a single micro-batch of them all."""
    ids, objectives = {"padding_token": 101}, []
    tokens = torch.full((4, 32), 101)
    tokens[1, :7] = torch.arange(7)
    for size in (4, 1):
        model = build_model(small(kind="encoder", vocabulary=257, **ids), seed=0)
        assert model.count_scored(tokens) == 1
        config = tiny_config(tmp_path, training={"global_batch": 4, "micro_batch": size})
        engine = build_engine(model, config, partial(RngContext, 0, training=True), Ranks())
        parts = [Batch(*part) for part in zip(tokens.split(size), torch.arange(4).split(size), strict=True)]
        result = engine.train_step(parts, 1, 0.01)
        objectives.append((result.statistics["objective"], result.grad_norm))
        assert engine.train_step([Batch(0 * part.tokens + 101, part.samples) for part in parts], 2, 0.01).loss == 0.0
    assert objectives[1] == pytest.approx(objectives[0], rel=1e-5)


def test_a_step_against_its_definition(tmp_path):
    """Loss, statistics, gradient norm and clipping of the first step, directly from the model."""
    config = tiny_config(tmp_path, training={"gradient_clipping": 0.25}, optimizer={"weight_decay": 0.0, "eps": 1.0})
    data = next(DummyBatches(config, Ranks()))
    model = TinyModel()
    losses = [model(batch.tokens, make_rng(1, batch.samples))[0] for batch in data.micro_batches]
    loss = torch.stack(losses).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert norm > 0.25

    engine = tiny_engine(config)
    result = engine.train_step(data.micro_batches, 1, 0.01)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.statistics == {"width": 13.0, "objective": pytest.approx(loss.item(), rel=1e-6)}
    assert result.tokens == 8 * 24 and result.applied
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    for before, after, g in zip(model.parameters(), engine.module.parameters(), gradients, strict=True):
        clipped = g * 0.25 / norm
        torch.testing.assert_close(after, before - 0.01 * clipped / (clipped.abs() + 1.0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_is_not_finite_changes_nothing(tmp_path, poison, precision):
    config = tiny_config(tmp_path, training={"precision": precision})
    model = TinyModel()
    model.poisoned = {3: poison}
    engine = tiny_engine(config, model=model)
    before = [fragment.memory.clone() for fragment in engine.fragments()]
    result = engine.train_step(next(DummyBatches(config, Ranks())).micro_batches, 1, 0.01)
    assert not result.applied and engine.steps_done() == 0
    assert all(torch.equal(a, b.memory) for a, b in zip(before, engine.fragments(), strict=True))


@pytest.mark.parametrize("micro_batch", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bf16_keeps_fp32_weights(tmp_path, micro_batch):
    config = tiny_config(tmp_path, training={"precision": "bf16", "micro_batch": micro_batch})
    engine = tiny_engine(config)
    losses = train_steps(engine, config, 1, 20)
    masters = {fragment.name: fragment.memory for fragment in engine.fragments() if fragment.kind == "weight"}
    for name, parameter in engine.module.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.detach().view(-1), masters[name].bfloat16())
        assert not torch.equal(parameter.detach().view(-1).float(), masters[name])
    exact = tiny_config(tmp_path)
    assert losses == pytest.approx(train_steps(tiny_engine(exact), exact, 1, 20), rel=1e-2)


def test_a_checkpoint_before_the_first_update_serves_its_own_model_only(tmp_path):
    config = tiny_config(tmp_path)
    engine = tiny_engine(config)
    saved = Checkpoint.open(Saver(identity_of(config), Ranks()).save(engine, 1, 8, {}))
    resumed = tiny_engine(config, model=TinyModel(seed=1), start=saved)
    assert train_steps(resumed, config, 1, 3) == train_steps(engine, config, 1, 3)
    with pytest.raises(CheckpointError, match=r"embedding.weight has shape \[256, 13\], in the model \[256, 7\]"):
        tiny_engine(config, model=TinyModel(width=7), start=saved)


@together("optimizer", ["adamw", "adafactor"])
def test_a_run_with_a_weight_without_gradients_resumes_exactly(tmp_path, optimizer):
    config = tiny_config(tmp_path, optimizer={"name": optimizer})
    models = [TinyModel(seed) for seed in (0, 1)]
    for model in models:
        model.unused = torch.nn.Parameter(torch.ones(3, 3))
    engine = tiny_engine(config, model=models[0])
    train_steps(engine, config, 1, 2)
    saved = Checkpoint.open(Saver(identity_of(config), Ranks()).save(engine, 2, 16, {}))
    resumed = tiny_engine(config, model=models[1], start=saved)
    assert train_steps(resumed, config, 3, 4) == train_steps(engine, config, 3, 4)
    assert resumed.steps_done() == engine.steps_done() == 4


def test_plain_torch_on_two_ranks_is_rejected(tmp_path, monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"run.engine"):
        start_ranks(tiny_config(tmp_path).run)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"run.device"):
        start_ranks(tiny_config(tmp_path, run={"device": "cuda"}).run)


def test_the_host_waits_once_a_step(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, training={"global_batch": 4, "micro_batch": 1, "gradient_clipping": 1.0})
    engine, batches = tiny_engine(config), iter(DummyBatches(config, Ranks()))
    waits = []
    for name in ("item", "tolist", "__bool__", "__float__"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, own=own, name=name: waits.append(name) or own(x))
    engine.train_step(next(batches).micro_batches, 1, 0.01)
    assert waits == ["tolist"]


def test_deepspeed_output_is_written_to_the_run_folder(tmp_path, capsys, monkeypatch):
    logger = logging.getLogger("DeepSpeed")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(sys.stdout)])  # as DeepSpeed makes one when imported
    for run, word in ((tmp_path, "first"), (tmp_path, "second"), (tmp_path / "missing", "third")):
        with _lines_in(run):
            print(f"{word} MA 0.51 GB")
            logger.warning("%s setting", word)
    logger.warning("afterwards")
    log = (tmp_path / "deepspeed.log").read_text()
    assert log == "first MA 0.51 GB\nfirst setting\nsecond MA 0.51 GB\nsecond setting\n"
    assert capsys.readouterr().out == "afterwards\n" and not (tmp_path / "missing").exists()


class Counted(TinyModel):
    """Counts the calls of `count_scored`."""

    calls = 0

    def __init__(self, varying: bool):
        super().__init__()
        self.varying_token_counts = varying

    def count_scored(self, tokens: torch.Tensor, sequence: object) -> torch.Tensor:
        self.calls += 1
        return torch.tensor(tokens.numel())

    def forward(self, tokens, rng, divisor, sequence):
        return super().forward(tokens, rng)


@pytest.mark.parametrize(("varying", "steps"), [(False, 1), (True, 3)])
def test_shared_sequences_are_counted_once_if_counts_do_not_vary(tmp_path, varying, steps):
    config, model = tiny_config(tmp_path), Counted(varying)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        engine = tiny_engine(config, Ranks(0, 2, sequence=torch.distributed.group.WORLD), model)
        train_steps(engine, config, 1, 3)
    finally:
        torch.distributed.destroy_process_group()
    assert model.calls == steps * 4  # micro-batches


FROZEN = {"embedding.weight", "hidden.weight", "hidden.bias"}
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
ENGINES = {"0": {"stage": 0}, "2 offloaded": OFFLOADED}
ENGINES["3 offloaded"] = {**OFFLOADED, "stage": 3, "offload_param": {"device": "cpu"}}


def frozen_model():
    model = TinyModel(seed=1)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in FROZEN)
    return model


def went_on(config, ranks):
    """The losses of 6 steps, the losses of a run that was saved after 3 and resumed, and the checkpoint."""
    engine = tiny_engine(config, ranks, frozen_model())
    whole = train_steps(engine, config, 1, 3)
    Saver(identity_of(config), ranks).save(engine, 3, 24, {})
    whole += train_steps(engine, config, 4, 6)
    engine.close()
    checkpoint = Checkpoint.open(find_checkpoint(Path(config.run.directory)))
    engine = tiny_engine(config, ranks, frozen_model(), checkpoint)
    again = train_steps(engine, config, 4, 6)
    engine.close()
    return whole, again, checkpoint


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_with_frozen_weights_resumes_exactly(tmp_path, precision):
    config = tiny_config(tmp_path, training={"precision": precision})
    whole, again, checkpoint = went_on(config, Ranks())
    assert whole[3:] == again and whole[5] < whole[0]
    names = set(dict(TinyModel().named_parameters()))
    assert set(checkpoint.manifest["tensors"]["weight"]) == names - FROZEN
    assert set(checkpoint.manifest["tensors"]["exp_avg"]) == names - FROZEN


def test_frozen_weights_do_not_change(tmp_path):
    config, model = tiny_config(tmp_path, optimizer={"weight_decay": 0.5}), frozen_model()
    train_steps(tiny_engine(config, model=model), config, 1, 3)
    for (name, weight), before in zip(model.named_parameters(), frozen_model().parameters(), strict=True):
        assert weight.equal(before) == (name in FROZEN)


def test_filling_a_model_leaves_its_frozen_weights(tmp_path):
    checkpoint = went_on(tiny_config(tmp_path), Ranks())[2]
    model = frozen_model()
    model.embedding.weight.data.fill_(7.0)
    load_weights(model, checkpoint)
    assert (model.embedding.weight == 7.0).all() and not model.out.weight.equal(frozen_model().out.weight)
    with pytest.raises(CheckpointError, match="embedding"):
        load_weights(TinyModel(), checkpoint)  # which trains all of them


def in_deepspeed(folder):
    """For each setting of ENGINES: the names of saved weights, and the losses as `went_on` has them."""
    result = {}
    for name, zero in ENGINES.items():
        config = tiny_config(f"{folder}/{name}", "deepspeed", deepspeed={"zero_optimization": zero})
        whole, again, checkpoint = went_on(config, start_ranks(config.run))
        result[name] = [sorted(checkpoint.manifest["tensors"]["weight"]), whole, again]
    return result


@pytest.mark.slow
def test_deepspeed_does_the_same(tmp_path):
    expected = went_on(tiny_config(tmp_path / "torch"), Ranks())[0]
    (result,) = run_ranks(in_deepspeed, world_size=1, timeout=900, folder=str(tmp_path))
    for name in ENGINES:
        saved, whole, again = result[name]
        assert saved == sorted(set(dict(TinyModel().named_parameters())) - FROZEN)
        assert whole == pytest.approx(expected, rel=1e-5) and again == whole[3:]
