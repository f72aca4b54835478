"""A run of ours that begins with the weights of another model, whose attention and task may be others."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megasparse.config.files import parse_json
from megasparse.config.schema import Config
from megasparse.errors import ConfigError, HubError, UserError
from megasparse.hub import require_transformers
from megasparse.hub.importing import FIRST, identity, write_checkpoint
from megasparse.hub.megasparse_format import shapes, unfilled
from megasparse.model.adapters import add_adapters
from megasparse.model.build import deferred_model, empty_model, initial_weight
from megasparse.training.checkpoints.bucket import newest_anywhere
from megasparse.training.checkpoints.checkpoint import Checkpoint, find_checkpoint, load_weights, persistent_buffers
from megasparse.training.checkpoints.manifest import read_manifest
from megasparse.training.ranks import Ranks

Readers = dict[str, Callable[[], Tensor]]


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
