"""A trained model out of a checkpoint, for evaluation and generation."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megasparse.config.load import build_config
from megasparse.config.schema import Config
from megasparse.data.tokenizers import Tokenizer, build_tokenizer
from megasparse.errors import ConfigError
from megasparse.model.build import Model, build_model, empty_model
from megasparse.training.checkpoints.checkpoint import Checkpoint, find_checkpoint, load_weights
from megasparse.training.ranks import start_ranks


def restore(directory: str | Path, overrides: Sequence[str] = ()) -> tuple[Model, Config, Checkpoint, torch.device]:
    """Build the model of a checkpoint, with its weights, in the precision and on the device that its run used.

    directory: a checkpoint, or a run's folder, whose newest checkpoint is taken. overrides: `section.key=value`, on the
    configuration that the checkpoint holds.
    Raises CheckpointError where there is none or it is damaged, ConfigError for a wrong override.
    """
    checkpoint = Checkpoint.open(find_checkpoint(Path(directory)), build=empty_model)
    config = build_config(checkpoint.config.model_dump(mode="json"), overrides)
    device = start_ranks(config.run.model_copy(update={"engine": "torch"})).device
    model = build_model(config.model, config.run.seed)
    load_weights(model, checkpoint)
    if config.training.precision == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    return model.to(device).eval(), config, checkpoint, device


def trained_tokenizer(config: Config, checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a configuration. Raises ConfigError where it cannot be read, or is not the checkpoint's."""
    tokenizer, trained = build_tokenizer(config.data.tokenizer), checkpoint.manifest["tokenizer"]
    identity = {"name": tokenizer.name, "sha256": tokenizer.sha256}
    if identity != trained:
        now, then = (f'"{each.get("name")}" (sha256 {each.get("sha256", "")[:12]}…)' for each in (identity, trained))
        problem = f"{now}, but the checkpoint was trained with {then}"
        raise ConfigError("data.tokenizer", problem, "Give the one that it was trained with")
    return tokenizer
