"""A checkpoint of ours out of weights that were not trained here, and a run that begins with those of another model,
whose attention and task may be others.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from megasparse.config.files import parse_json
from megasparse.config.schema import Config
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import ConfigError, HubError, UserError
from megasparse.hub import require_transformers
from megasparse.hub.megasparse_format import shapes, unfilled
from megasparse.hub.tensor_file import appearing
from megasparse.model.adapters import add_adapters
from megasparse.model.build import deferred_model, empty_model, initial_weight
from megasparse.training.checkpoints.bucket import newest_anywhere
from megasparse.training.checkpoints.checkpoint import (
    Checkpoint,
    Fragment,
    find_checkpoint,
    load_weights,
    persistent_buffers,
)
from megasparse.training.checkpoints.manifest import FORMAT, MANIFEST, NO_DATA, read_manifest, seal, versions
from megasparse.training.checkpoints.rank_file import RankFile, durable, make_folder
from megasparse.training.ranks import Ranks

VOCABULARY = ("embedding.weight", "head.weight", "head.bias")
"""Weights that have a row for each token."""

Readers = Mapping[str, Callable[[], Tensor]]
"""Name -> what reads the value of a weight."""
FIRST = Path("checkpoints", "00000000")
"""Path of a checkpoint in a run's folder before the first step."""


def write_checkpoint(
    config: Config,
    tensors: Readers,
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
    for weight in (*tensors, *expected):
        if weight not in expected or weight not in tensors:
            problem = "a weight of the model, is missing" if weight in expected else "is no weight of the model"
            raise HubError(weight, problem, "Give a model with its own config.json")
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


def with_first_token(tensors: Readers, first: int) -> Readers:
    """The same model with token `first` as token 0, the one after it as token 1, and those before it at the end."""

    def rolled(name: str) -> Tensor:
        value = tensors[name]()
        return value.roll(-first, dims=0) if name in VOCABULARY else value

    return {name: partial(rolled, name) for name in tensors}


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


# Runs that begin with the weights of another model


def base_values(source: str | Path) -> dict[str, Any]:
    """Return the values that a configuration extends if it starts from `source`: its model and tokenizer.

    Raises HubError and CheckpointError where there is no such model.
    """
    path = Path(source)
    if _is_huggingface(path):
        require_transformers()
        from megasparse.hub.hf_model import HFModel

        config = HFModel.open(path).config
    else:
        checkpoint = find_checkpoint(path)
        config = Checkpoint(checkpoint, read_manifest(checkpoint)).config
    return config.model_dump(mode="json", include={"model": True, "data": {"tokenizer"}})


def resumed_from(config: Config, source: str | Path, ranks: Ranks) -> str:
    """Return what a run that starts from `source` resumes from: its newest checkpoint if it has one, else the one that
    `write_start` makes in RUN/start, once, on the first rank. With adapters "auto": these are in its checkpoints, and
    the weights that they belong to in RUN/start. Every rank calls it.

    Raises UserError, on all ranks, where the weights cannot be used.
    """
    start = _start_of(config)
    problem = None
    has_checkpoints = False
    if ranks.rank == 0:
        try:
            has_checkpoints = newest_anywhere(config) is not None
            if not start.exists() and (config.lora is not None or not has_checkpoints):
                new = write_start(config, Path(source), start.parents[1])
                print(f"started from {source}; new weights: {', '.join(new) or 'none'}", file=sys.stderr)
        except UserError as error:
            problem = str(error)
    has_checkpoints, problem = ranks.gather([has_checkpoints, problem])[0]
    if problem is not None:
        raise UserError(problem)
    return "auto" if has_checkpoints or config.lora is not None else str(start)


def require_base(config: Config) -> None:
    """Raise ConfigError for adapters of a run that has no start to which they could belong."""
    if config.lora is not None and not (start := _start_of(config)).exists():
        problem = f"given, but {start.parents[1]} has no weights that adapters could belong to"
        raise ConfigError("lora", problem, "Name a pretrained model with --start, or set it to null")


def _start_of(config: Config) -> Path:
    return Path(config.run.directory) / "start" / FIRST


def adapted(config: Config) -> nn.Module:
    """The model of a run with adapters before its first step: the frozen weights of RUN/start, in the precision of the
    run, and the adapters.
    """
    assert config.lora is not None
    model = empty_model(config.model)
    load_weights(model, Checkpoint.open(_start_of(config), build=empty_model))
    add_adapters(model, config.lora, config.run.seed)
    if config.training.precision == "bf16":  # as every engine will, before a GPU has them whole in fp32
        for weight in model.parameters():
            if not weight.requires_grad:
                weight.data = weight.data.bfloat16()
    return model


def write_start(config: Config, source: Path, output: Path) -> list[str]:
    """Write OUTPUT/checkpoints/00000000, the model of `config` before its first step: each weight is the pretrained
    model's of that name, where it has one, and else initial. Returns the names of the initial ones.

    source: a checkpoint or a run's folder, or a HuggingFace model's, with or without the head that predicts tokens.
    What it has beyond the model, such as another attention's own weights, is left out. Raises HubError where a weight
    has another shape, or the tokens are another tokenizer's.
    """
    pretrained, tokenizer = (_of_huggingface if _is_huggingface(source) else _of_checkpoint)(source)
    if tokenizer != identity(config.data.tokenizer):
        problem = f"its tokenizer ({tokenizer['name']}) is another than data.tokenizer = {config.data.tokenizer}"
        raise HubError(source, problem, "Prepare the data with the model's own tokenizer, and name it there")
    new = [name for name in shapes(config.model) if name not in pretrained]
    model = deferred_model(config.model, config.run.seed) if new else unfilled(config.model)
    weights = {**dict(model.named_parameters()), **persistent_buffers(model)}
    if "embedding.weight" not in pretrained:
        raise HubError(source, "has no embedding of tokens", "Give a pretrained decoder or encoder")
    readers: Readers = {
        name: partial(_pretrained, source, name, pretrained[name], weight)
        if name in pretrained
        else partial(_initial, config, name, weight)
        for name, weight in weights.items()
    }
    write_checkpoint(config.model_copy(update={"lora": None}), readers, output)
    return new


def _initial(config: Config, name: str, weight: Tensor) -> Tensor:
    if not weight.is_meta:
        return weight.detach()
    return initial_weight(config.model, config.run.seed, name, weight.shape).view(weight.shape)


def _pretrained(source: Path, name: str, read: Callable[[], Tensor], weight: Tensor) -> Tensor:
    value = read()
    if value.shape != weight.shape:
        problem = f"{name} has shape {list(value.shape)}, and {list(weight.shape)} in the configured model"
        raise HubError(source, problem, "Give the model the sizes of what it starts from (model.*)")
    return value


def _is_huggingface(source: Path) -> bool:
    """A run of ours has a config.json too, which names no type."""
    try:
        values = parse_json((source / "config.json").read_text(encoding="utf-8"), str(source))
    except (OSError, UnicodeDecodeError):
        return False
    return isinstance(values, dict) and "model_type" in values


def _of_huggingface(source: Path) -> tuple[Readers, dict[str, str]]:
    require_transformers()
    from megasparse.hub.hf_model import HFModel

    model = HFModel.open(source)
    return model.tensors, identity(model.config.data.tokenizer)


def _of_checkpoint(source: Path) -> tuple[Readers, dict[str, str]]:
    checkpoint = Checkpoint.open(find_checkpoint(source), build=empty_model)
    names = checkpoint.manifest["tensors"]["weight"]
    return {name: partial(checkpoint.tensor, "weight", name) for name in names}, checkpoint.manifest["tokenizer"]
