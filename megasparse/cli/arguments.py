"""Options that several subcommands share."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasparse.errors import ConfigError, DataError, HubError, whole

if TYPE_CHECKING:
    from megasparse.config.finetuning import FinetuneConfig
    from megasparse.config.schema import Config
    from megasparse.settings.load import Settings


def add_config(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", nargs="?", metavar="CONFIG", help="a name from `megasparse configs`, or a JSON file")
    add("--config", metavar="FILE", help="CONFIG as an option")
    add_overrides(parser)
    add("--print-config", action="store_true", help="print the complete configuration and exit")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a checkpoint or a run (newest checkpoint)")


def add_coding(parser: argparse.ArgumentParser, output: str) -> None:
    add = parser.add_argument
    add("file", type=Path, metavar="FILE")
    add_checkpoint(parser)
    add("--output", type=Path, metavar="FILE", help=output)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=JSON", help="override one key")


def add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_config(parser)
    add("--resume", default="auto", metavar="auto|never|PATH", help="checkpoint to resume from")
    add("--allow-changed-config", action="store_true", help="resume although the configuration differs")
    add("--stop-at", type=whole, metavar="STEP", help="save and stop after this step")
    add("--dry-run", action="store_true", help="measure memory and time; write nothing")


def add_start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--start",
        metavar="FOLDER",
        help="initialize from a megasparse checkpoint or a Hugging Face model; model keys not set in CONFIG are copied"
        " from it, its attention may be replaced, and missing weights are randomly initialized",
    )


# Checks of names and paths. Commands call them first, because the imports for their work take seconds.


def require_config(args: argparse.Namespace, task: bool = False) -> Any:
    """Return the configuration that the options of `add_config` name, with default attention.

    task: True for a fine-tuning run. Raises ConfigError if not one file is named, or a key, type or override is
    invalid; HubError or CheckpointError if the model of --start does not exist.
    """
    if (args.name is None) == (args.config is None):
        problem = "no configuration is given" if args.name is None else f"{args.name} is also given"
        raise ConfigError("--config", problem, "Give one, such as quickstart or FILE.json")
    if getattr(args, "start", None) is not None:
        require_model(args.start, checkpoints=True)
    from megasparse.config.finetuning import FinetuneConfig
    from megasparse.settings.load import Config, load_settings

    return load_settings(args.config or args.name, args.set, FinetuneConfig if task else Config, mechanisms=False)


def require_checkpoint(folder: str, overrides: Sequence[str] = ()) -> None:
    """Raise CheckpointError for a folder without a checkpoint, and ConfigError for a wrong key in `overrides`."""
    from megasparse.training.checkpoints.manifest import find_checkpoint, read_manifest

    checkpoint = find_checkpoint(Path(folder))
    if not overrides:
        return
    from megasparse.config.finetuning import FinetuneConfig
    from megasparse.settings.load import Config, build_settings

    values = read_manifest(checkpoint)["config"]
    build_settings(values, overrides, FinetuneConfig if "task" in values else Config, mechanisms=False)


def require_task(config: "FinetuneConfig") -> None:
    """Raise UserError for a missing file, column, model or checkpoint of a fine-tuning run."""
    from megasparse.tasks.catalog import build_task

    build_task(config.task)
    start = config.start
    if config.model is not None:
        require_tokenizer(config.task.tokenizer, config.run.directory)
    elif start.checkpoint is not None:
        require_checkpoint(start.checkpoint)
    elif start.huggingface is not None:
        require_model(start.huggingface)
    require_paths(start.glove, config.task.validation)


def require_tokenizer(name: str, run: str) -> None:
    """Raise DataError for a missing file of a tokenizer, unless a run's folder may contain a copy."""
    if name.endswith((".model", ".json", ".txt")) and not os.path.exists(run):
        require_paths(name)


def require_data(config: "Config") -> None:
    """Raise DataError for a missing file or folder of shards of a pretraining run."""
    from megasparse.data.index import Index
    from megasparse.data.index_file import INDEX_FILE

    require_tokenizer(config.data.tokenizer, config.run.directory)
    for folder in (config.data.path, *config.data.mixture):
        if "://" not in folder and not (Path(folder) / INDEX_FILE).exists():
            Index.load(folder)  # raises the error


def require_paths(*paths: str | Path | None) -> None:
    """Raise DataError for a path that does not exist. Not checked: URLs, "hub", and paths on other ranks than 0, whose
    machines may lack the files. FILE#test is a part of FILE.
    """
    from megasparse.config.files import find_file

    for name in map(str, filter(None, paths)):
        if "://" in name or name == "hub" or os.environ.get("RANK", "0") != "0":
            continue
        if not any(os.path.exists(find_file(path)) for path in (name, name.rpartition("#")[0] or name)):
            raise DataError(name, "no such file or folder", "Check the path")


def require_model(name: str | Path, checkpoints: bool = False) -> None:
    """Raise HubError unless `name` is a file, a folder with config.json, or a model in transformers' local cache.

    checkpoints: True also accepts a checkpoint or the folder of a run.
    """
    from megasparse.training.checkpoints.manifest import refuse_adapters

    refuse_adapters(Path(name))
    if os.path.isdir(name) and not (Path(name) / "config.json").exists():
        if not checkpoints:
            raise HubError(name, "contains no config.json", "Use the folder of a Hugging Face model")
        require_checkpoint(str(name))
    if os.path.exists(name):
        return
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        if isinstance(try_to_load_from_cache(str(name), "config.json"), str):
            return
    raise HubError(name, "no such file or folder, nor a model in transformers' cache", "Run `hf download` first")


def config_from(args: argparse.Namespace, kind: "type[Settings]", weights: bool = True) -> "Settings":
    """Return the configuration that `require_config` has checked. With --print-config, print it and exit.

    weights: False reads only config.json of a decoder in --start.
    """
    from megasparse.settings.load import load_settings

    base = None
    if getattr(args, "start", None) is not None:
        from megasparse.hub.importing import base_values

        base = base_values(args.start, weights)
    config = load_settings(args.config or args.name, args.set, kind, base)
    if args.print_config:
        print(json.dumps(config.model_dump(mode="json"), indent=2))  # in ASCII, for any terminal
        sys.exit(0)
    return config
