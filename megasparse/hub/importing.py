"""A checkpoint of ours out of weights that were not trained here."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from megasparse.config.schema import Config
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import HubError
from megasparse.hub.megasparse_format import shapes
from megasparse.hub.output_folder import appearing
from megasparse.training.checkpoints.checkpoint import Fragment
from megasparse.training.checkpoints.manifest import FORMAT, MANIFEST, NO_DATA, seal, versions
from megasparse.training.checkpoints.rank_file import RankFile, durable, make_folder

VOCABULARY = ("embedding.weight", "head.weight", "head.bias")
"""Weights that have a row for each token."""

FIRST = Path("checkpoints", "00000000")
"""Path of a checkpoint in a run's folder before the first step."""


def write_checkpoint(
    config: Config,
    tensors: Mapping[str, Callable[[], Tensor]],
    output: str | Path,
    tokenizer: Path | None = None,
    files: Mapping[str, str | bytes] | None = None,
) -> Path:
    """Write OUTPUT/checkpoints/00000000, a checkpoint of weights alone, and OUTPUT/config.json; returns its path.

    A run goes on from it with `megasparse pretrain --resume PATH`, on any data of its tokenizer and with any settings
    but those of its model. tensors: the value (fp32) of every parameter and persistent buffer of `config.model`, read
    one at a time. tokenizer: its file, which is copied to `data.tokenizer`, a file in OUTPUT. files: content of
    further files, by name. OUTPUT appears whole or not at all.
    Raises HubError where OUTPUT exists, cannot be written, or a tensor is missing, unexpected, of another shape or not
    finite.
    """
    output, name, expected = Path(output), "rank-00000.safetensors", shapes(config.model)
    for weight in tensors:
        if weight not in expected:
            raise HubError(weight, "is no weight of the model", "Give a model with its own config.json")
    for weight in expected:
        if weight not in tensors:
            raise HubError(weight, "a weight of the model, is missing", "Give a model with its own config.json")
    fragments = [_Unread(weight, shape, tensors[weight]) for weight, shape in expected.items()]
    written = {"config.json": (config.model_dump_json(indent=2) + "\n").encode(), **(files or {})}
    if tokenizer is not None:
        written[Path(config.data.tokenizer).name] = tokenizer.read_bytes()
    with appearing(output) as folder:
        make_folder(folder / FIRST)
        file = RankFile(cast(list[Fragment], fragments))
        digest = file.write(folder / FIRST / name, lambda: None)
        pieces = {part: {"shape": shape, "pieces": [{"file": name, **piece}]} for _, part, shape, piece in file.pieces}
        manifest = {
            "format": FORMAT,
            "step": 0,
            "sequences": 0,
            "state": {},
            "optimizer_steps": 0,
            "world_size": 1,
            "data_fingerprint": NO_DATA,
            "versions": versions(),
            "files": {name: {"bytes": file.bytes, "sha256": digest}},
            "tensors": {"weight": pieces},
            "config": json.loads(config.model_dump_json()),
            "tokenizer": identity(config.data.tokenizer if tokenizer is None else str(tokenizer)),
        }
        written[str(FIRST / MANIFEST)] = seal(manifest)
        for path, content in written.items():
            raw = content.encode() if isinstance(content, str) else content
            with durable(folder / path, len(raw)) as out:
                out.write(raw)
    return output / FIRST


def turned(tensors: Mapping[str, Callable[[], Tensor]], first: int) -> dict[str, Callable[[], Tensor]]:
    """The same model with token `first` as token 0, the one after it as token 1, and those before it at the end."""

    def roll(read: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: read().roll(-first, dims=0)

    return {name: roll(read) if name in VOCABULARY else read for name, read in tensors.items()}


class _Unread:
    """The part of a Fragment that `RankFile` needs, whose memory exists only while it is written."""

    kind, start = "weight", 0

    def __init__(self, name: str, shape: tuple[int, ...], read: Callable[[], Tensor]):
        self.name, self.shape, self.numel, self._read = name, shape, math.prod(shape), read

    @property
    def memory(self) -> Tensor:
        value = self._read()
        if tuple(value.shape) != self.shape:
            problem = f"has shape {list(value.shape)}, and {list(self.shape)} in the model"
            raise HubError(self.name, problem, "Give a model with its own config.json")
        if not value.isfinite().all():
            raise HubError(self.name, "holds a number that is not finite", "Give a model that is sound")
        return value.detach().to(torch.float32).contiguous().view(-1)


def identity(name: str) -> dict[str, str]:
    """Return how a checkpoint identifies the tokenizer that `data.tokenizer` names."""
    tokenizer = build_tokenizer(name)
    return {"name": tokenizer.name, "sha256": tokenizer.sha256}
