"""Let a checkpoint with learned positions take longer sequences: position i gets the embedding of position i mod P, P
the number it had.

    python tools/extend_positions.py --checkpoint runs/yoso_bert --max-length 4096 --output runs/yoso_bert_longer \
      --set model.attention.yoso.code_bits=12
    python launch/pretrain.py --config configs/yoso_bert_4096.json --resume runs/yoso_bert_longer/checkpoints/00000000

Every other weight is the same; the optimizer starts anew. Settings of attention stay as they are, but for those that
--set changes: the configuration of the run that goes on must have the same model.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megasparse.config.command_line import checkpoint_parser
from megasparse.config.load import build_config
from megasparse.config.schema import ModelConfig
from megasparse.errors import ConfigError, report_user_errors
from megasparse.hub.importing import write_checkpoint
from megasparse.hub.output_folder import refuse_existing
from megasparse.model.build import empty_model
from megasparse.training.checkpoints.checkpoint import Checkpoint, find_checkpoint

TABLE = "embedding.positions.table"


def build_parser() -> argparse.ArgumentParser:
    parser = checkpoint_parser(__doc__)
    parser.prog = "extend_positions.py"
    parser.add_argument("--max-length", type=int, required=True, metavar="TOKENS", help="longest sequence from now on")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder, as of a run")
    return parser


def tensors(checkpoint: Checkpoint, model: ModelConfig, length: int) -> dict[str, Callable[[], Tensor]]:
    """How each weight of the longer model is read. model: of the checkpoint.

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
    """table: (offset + P, E). Returns (offset + length, E)."""
    rows = offset + torch.arange(length) % (len(table) - offset)
    return torch.cat([table[:offset], table[rows]])


@report_user_errors
def main(arguments: Sequence[str] | None = None) -> None:
    given = build_parser().parse_args(arguments)
    refuse_existing(given.output)
    checkpoint = Checkpoint.open(find_checkpoint(Path(given.checkpoint)), build=empty_model)
    values = checkpoint.config.model_dump(mode="json")
    old = checkpoint.config.model
    weights = tensors(checkpoint, old, given.max_length)
    values["model"]["max_length"] = given.max_length
    values["data"]["sequence_length"] = given.max_length
    values["run"]["directory"] = str(given.output)
    print(write_checkpoint(build_config(values, given.set), weights, given.output))


if __name__ == "__main__":
    main()
