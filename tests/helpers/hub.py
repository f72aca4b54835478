"""Models for tests of exports to HuggingFace."""

import json
from pathlib import Path
from typing import Any

import torch

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
