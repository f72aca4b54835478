"""Frozen weights: they stay what they are, are in no checkpoint, and a run goes on exactly beside them."""

from pathlib import Path

import pytest

from megasparse.errors import CheckpointError
from megasparse.training.checkpoints.checkpoint import Checkpoint, find_checkpoint, load_weights
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.ranks import Ranks, start_ranks
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import TinyModel, identity_of, tiny_config, tiny_engine, train_steps

FROZEN = {"embedding.weight", "hidden.weight", "hidden.bias"}
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
ENGINES = {
    "0": {"stage": 0},
    "2 offloaded": OFFLOADED,
    "3 offloaded": {**OFFLOADED, "stage": 3, "offload_param": {"device": "cpu"}},
}


def frozen_model():
    model = TinyModel(seed=1)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in FROZEN)
    return model


def went_on(config, ranks):
    """The losses of 6 steps, those of a run that was saved after 3 of them and started again, and the checkpoint."""
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
def test_a_run_with_frozen_weights_goes_on_exactly(tmp_path, precision):
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
    found = {}
    for name, zero in ENGINES.items():
        config = tiny_config(f"{folder}/{name}", "deepspeed", deepspeed={"zero_optimization": zero})
        whole, again, checkpoint = went_on(config, start_ranks(config.run))
        found[name] = [sorted(checkpoint.manifest["tensors"]["weight"]), whole, again]
    return found


@pytest.mark.slow
def test_deepspeed_does_the_same(tmp_path):
    expected = went_on(tiny_config(tmp_path / "torch"), Ranks())[0]
    (found,) = run_ranks(in_deepspeed, world_size=1, timeout=900, folder=str(tmp_path))
    for name in ENGINES:
        saved, whole, again = found[name]
        assert saved == sorted(set(dict(TinyModel().named_parameters())) - FROZEN)
        assert whole == pytest.approx(expected, rel=1e-5) and again == whole[3:]
