"""A trained model out of a checkpoint, for evaluation and generation."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from megasparse.config.load import build_config
from megasparse.config.schema import Config
from megasparse.data.tokenizers import Tokenizer, build_tokenizer
from megasparse.errors import ConfigError
from megasparse.model.build import Model, build_model, empty_model
from megasparse.training.checkpoints.checkpoint import Checkpoint, find_checkpoint, load_weights
from megasparse.training.ranks import Ranks, start_ranks


def restore(directory: str | Path, overrides: Sequence[str] = ()) -> tuple[Model, Config, Checkpoint, torch.device]:
    """Build the model of a checkpoint, with its weights, in the precision and on the device that its run used.

    directory: a checkpoint, or a run's folder, whose newest checkpoint is taken. overrides: `section.key=value`, on the
    configuration that the checkpoint holds.
    Raises CheckpointError where there is none or it is damaged, ConfigError for a wrong override.
    """
    checkpoint = Checkpoint.open(find_checkpoint(Path(directory)), build=empty_model)
    config = build_config(checkpoint.config.model_dump(mode="json"), overrides)
    device = start_ranks(config.run.model_copy(update={"engine": "torch"})).device
    return _built(config, checkpoint, device), config, checkpoint, device


def restore_on_ranks(directory: str | Path, overrides: Sequence[str] = ()) -> tuple[Model, Config, Checkpoint, Ranks]:
    """`restore` on each of the ranks that were started, of which `parallel.sequence` share every sequence; each has the
    whole model. One rank alone has whole sequences, however many shared them in training.

    Raises ConfigError also where their number is no multiple of that.
    """
    checkpoint = Checkpoint.open(find_checkpoint(Path(directory)), build=empty_model)
    values, alone = checkpoint.config.model_dump(mode="json"), int(os.environ.get("WORLD_SIZE", "1")) == 1
    values["run"]["engine"] = "deepspeed"  # for the rules alone: whatever trained it, nothing is trained here
    if alone:
        values["parallel"]["sequence"] = 1
    config = build_config(values, overrides)
    run = config.run.model_copy(update={"engine": "torch" if alone else "deepspeed"})
    ranks = start_ranks(run, config.parallel.sequence)
    return _built(config, checkpoint, ranks.device), config, checkpoint, ranks


def _built(config: Config, checkpoint: Checkpoint, device: torch.device) -> Model:
    """The model with its weights, in the precision that its run used."""
    model = build_model(config.model, config.run.seed)
    load_weights(model, checkpoint)
    if config.training.precision == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    return model.to(device).eval()


def trained_tokenizer(config: Config, checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a configuration. Raises ConfigError where it cannot be read, or is not the checkpoint's."""
    tokenizer, trained = build_tokenizer(config.data.tokenizer), checkpoint.manifest["tokenizer"]
    identity = {"name": tokenizer.name, "sha256": tokenizer.sha256}
    if identity != trained:
        names = [f'"{x.get("name")}" (sha256 {x.get("sha256", "")[:12]}…)' for x in (identity, trained)]
        problem = f"{names[0]}, but the checkpoint was trained with {names[1]}"
        raise ConfigError("data.tokenizer", problem, "Give the one that it was trained with")
    return tokenizer
