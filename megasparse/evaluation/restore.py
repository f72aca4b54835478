"""A trained model out of a checkpoint, for evaluation and generation."""

import os
from collections.abc import Sequence
from pathlib import Path

from megasparse.config.load import build_config
from megasparse.config.schema import Config
from megasparse.data.tokenizers import Tokenizer, build_tokenizer
from megasparse.errors import ConfigError
from megasparse.model.build import Model, build_model, empty_model
from megasparse.training.checkpoints.checkpoint import Checkpoint, find_checkpoint, load_weights
from megasparse.training.ranks import Ranks, start_ranks


def restore(directory: str | Path, overrides: Sequence[str] = ()) -> tuple[Model, Config, Checkpoint, Ranks]:
    """Build the model of a checkpoint, with its weights, in the precision and on the device that its run used, on each
    of the ranks that were started. Of several ranks `parallel.sequence` share every sequence; a single rank has whole
    sequences, however many shared them in training.

    directory: a checkpoint, or a run's folder, whose newest checkpoint is taken. overrides: `section.key=value`, on the
    configuration that the checkpoint holds.
    Raises CheckpointError where there is none or it is damaged, ConfigError for a wrong override, and for a number of
    ranks that is not a multiple of `parallel.sequence`.
    """
    checkpoint = Checkpoint.open(find_checkpoint(Path(directory)), build=empty_model)
    values, alone = checkpoint.config.model_dump(mode="json"), int(os.environ.get("WORLD_SIZE", "1")) == 1
    if alone:
        values["parallel"]["sequence"] = 1
    else:
        values["run"]["engine"] = "deepspeed"  # the rules allow shared sequences only with it
    config = build_config(values, overrides)
    run = config.run.model_copy(update={"engine": "torch" if alone else "deepspeed"})
    ranks = start_ranks(run, config.parallel.sequence)
    model = build_model(config.model, config.run.seed)
    load_weights(model, checkpoint)
    if config.training.precision == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    return model.to(ranks.device).eval(), config, checkpoint, ranks


def trained_tokenizer(config: Config, checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a configuration. Raises ConfigError where it cannot be read, or is not the checkpoint's."""
    tokenizer, trained = build_tokenizer(config.data.tokenizer), checkpoint.manifest["tokenizer"]
    identity = {"name": tokenizer.name, "sha256": tokenizer.sha256}
    if identity != trained:
        names = [f'"{x.get("name")}" (sha256 {x.get("sha256", "")[:12]}…)' for x in (identity, trained)]
        problem = f"{names[0]}, but the checkpoint was trained with {names[1]}"
        raise ConfigError("data.tokenizer", problem, "Give the one that it was trained with")
    return tokenizer
