"""Models for tests of exports to HuggingFace."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from megasparse.config.schema import Config, DataConfig, MaskingConfig, ModelConfig, RunConfig
from megasparse.hub.formats import Format, Imported
from megasparse.hub.importing import write_checkpoint
from megasparse.hub.tensor_file import TensorFile
from megasparse.model.build import Model, build_model
from megasparse.training.checkpoints.checkpoint import persistent_buffers
from tests.helpers.models import named, small

SEED = 7


def decoder(name: str, **changes: Any) -> ModelConfig:
    return small(**{"attention": named(name), "layers": 2, **changes})


def encoder(name: str, **changes: Any) -> ModelConfig:
    return decoder(name, kind="encoder", vocabulary=264, masking=MaskingConfig(token=256), **changes)


def made(config: ModelConfig, seed: int = SEED) -> Model:
    """A model all of whose weights, norms, biases and learned buffers included, are random."""
    model = build_model(config, seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in [*model.parameters(), *model.buffers()]:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def checkpoint(config: ModelConfig, run: Path) -> tuple[Model, Path]:
    model = made(config)
    source = 0 if config.source is None else config.source.length
    whole = Config(run=RunConfig(seed=SEED), model=config, data=DataConfig(sequence_length=source + 64))
    return model, write_model(whole, model, run)


def write_model(config: Config, model: Model, run: Path) -> Path:
    """A checkpoint of a model in the run's folder `run`."""
    weights = {**dict(model.named_parameters()), **persistent_buffers(model)}
    return write_checkpoint(config, {name: weight.detach for name, weight in weights.items()}, run)


def load(form: Format, folder: Path) -> Imported:
    return form.load(json.loads((folder / "config.json").read_text()), TensorFile.open(folder))


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].view(torch.int32), value.view(torch.int32)), name


def assert_trainer_resumes(make: Callable[[], torch.nn.Module], data: list[dict[str, Any]], folder: Path) -> None:
    """Six steps of transformers' Trainer, and three followed by a resume, have the same losses and weights."""
    runs = []
    for name, saved, resumed in (("whole", 6, None), ("saved", 3, None), ("again", 3, folder / "saved/checkpoint-3")):
        torch.manual_seed(len(runs))  # which Trainer replaces
        arguments = TrainingArguments(
            str(folder / name), max_steps=6, save_steps=saved, logging_steps=1, per_device_train_batch_size=2,
            learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(make(), arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resumed and str(resumed))
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        runs.append((losses, trainer.model.state_dict()))
    for losses, weights in runs[1:]:
        assert losses == runs[0][0] and len(losses) == 6
        assert all(torch.equal(value, runs[0][1][name]) for name, value in weights.items())
