"""Longer sequences for a checkpoint with learned positions.

P positions that the checkpoint has, E width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megasparse.config.load import build_config
from megasparse.config.schema import ModelConfig
from megasparse.errors import ConfigError
from megasparse.hub.importing import write_checkpoint
from megasparse.hub.output_folder import refuse_existing
from megasparse.model.build import empty_model
from megasparse.training.checkpoints.checkpoint import Checkpoint, find_checkpoint

TABLE = "embedding.positions.table"


def extend_positions(directory: str | Path, length: int, output: Path, overrides: Sequence[str] = ()) -> Path:
    """Write a checkpoint whose model takes `length` tokens: position i has the embedding of position i mod P.

    directory: a checkpoint, or a run's folder, whose newest checkpoint is taken. output: a new run's folder. overrides:
    `section.key=value`. Every other weight is the same, and the optimizer starts anew. Returns the checkpoint's path.
    Raises ConfigError where the positions are not a table with fewer rows, HubError where `output` exists.
    """
    refuse_existing(output)
    checkpoint = Checkpoint.open(find_checkpoint(Path(directory)), build=empty_model)
    values = checkpoint.config.model_dump(mode="json")
    weights = tensors(checkpoint, checkpoint.config.model, length)
    values["model"]["max_length"] = values["data"]["sequence_length"] = length
    values["run"]["directory"] = str(output)
    return write_checkpoint(build_config(values, overrides), weights, output)


def tensors(checkpoint: Checkpoint, model: ModelConfig, length: int) -> dict[str, Callable[[], Tensor]]:
    """How each weight of the longer model is read. model: the checkpoint's.

    Raises ConfigError where the positions are not a table with fewer rows.
    """
    if model.source is not None:
        problem = '"encoder_decoder" has positions on two sides, of which none is extended here'
        raise ConfigError("model.kind", problem, "Give the checkpoint of a decoder or an encoder")
    if model.positions.kind != "learned":
        reason = {
            "axial": "the embedding of a cell is made of its row's and its column's: copies would not be axial",
            "sinusoidal": "they are computed for any length",
        }.get(model.positions.kind, "they have no table")
        hint = "Start a new run with another model.max_length"
        raise ConfigError("model.positions.kind", f'"{model.positions.kind}" cannot be extended: {reason}', hint)
    if length <= model.max_length:
        problem = f"{length} is no more than the {model.max_length} that the checkpoint has"
        raise ConfigError("--max-length", problem, f"Give more than {model.max_length}")
    read = {name: partial(checkpoint.tensor, "weight", name) for name in checkpoint.manifest["tensors"]["weight"]}
    return {**read, TABLE: lambda: extended(read[TABLE](), model.positions.offset, length)}


def extended(table: Tensor, offset: int, length: int) -> Tensor:
    """Return a longer table of positions. table: (offset + P, E). Returns (offset + length, E)."""
    rows = offset + torch.arange(length) % (len(table) - offset)
    return torch.cat([table[:offset], table[rows]])
