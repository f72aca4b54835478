"""Options that several subcommands share."""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megasparse.errors import ConfigError, DataError, HubError, whole

if TYPE_CHECKING:
    from megasparse.settings.load import Settings


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add options for a configuration by name or file, --set and --print-config."""
    parser.add_argument("name", nargs="?", metavar="CONFIG", help="a name from `megasparse configs`, or a JSON file")
    parser.add_argument("--config", metavar="FILE", help="CONFIG as an option")
    add_overrides(parser)
    parser.add_argument("--print-config", action="store_true", help="print the complete configuration and exit")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a checkpoint or a run (newest checkpoint)")


def add_coding(parser: argparse.ArgumentParser, output: str) -> None:
    """Add options for a file, the checkpoint that codes it, and the result. output: help text of --output."""
    parser.add_argument("file", type=Path, metavar="FILE")
    add_checkpoint(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=JSON", help="override one key")


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add options for a configuration, and for the start and end of a run."""
    add_config(parser)
    parser.add_argument("--resume", default="auto", metavar="auto|never|PATH", help="checkpoint to resume from")
    parser.add_argument("--allow-changed-config", action="store_true", help="resume although the configuration differs")
    parser.add_argument("--stop-at", type=whole, metavar="STEP", help="save and stop after this step")
    parser.add_argument("--dry-run", action="store_true", help="measure memory and time; write nothing")


def add_start(parser: argparse.ArgumentParser) -> None:
    """Add --start, the pretrained model that a configuration extends."""
    parser.add_argument(
        "--start",
        metavar="FOLDER",
        help="initialize from a megasparse checkpoint or a Hugging Face model; model keys not set in CONFIG are copied"
        " from it, its attention may be replaced, and missing weights are randomly initialized",
    )


# Checks of names and paths. Commands call them first, because the imports for their work take seconds.


def require_config(args: argparse.Namespace) -> None:
    """Raise ConfigError unless the options of `add_config` name one readable file, and HubError as `require_model`."""
    if (args.name is None) == (args.config is None):
        problem = "no configuration is given" if args.name is None else f"{args.name} is also given"
        raise ConfigError("--config", problem, "Give one, such as quickstart or FILE.json")
    from megasparse.config.files import read_values

    read_values(args.config or args.name)
    if getattr(args, "start", None) is not None:
        require_model(args.start)


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


def require_model(name: str) -> None:
    """Raise HubError unless `name` is a path that exists, or a model in transformers' local cache."""
    if os.path.exists(name):
        return
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    hint = "Use the folder of a model, or download the model first with the `hf download` command"
    raise HubError(name, "no such file or folder, and no model of this name is in transformers' local cache", hint)


def config_from(args: argparse.Namespace, kind: "type[Settings]") -> "Settings":
    """Return the configuration that `require_config` has checked. With --print-config, print it and exit.

    Raises the errors of `load_settings`.
    """
    from megasparse.settings.load import load_settings

    base = None
    if getattr(args, "start", None) is not None:
        from megasparse.hub.importing import base_values

        base = base_values(args.start)
    config = load_settings(args.config or args.name, args.set, kind, base)
    if args.print_config:
        print(config.model_dump_json(indent=2))
        sys.exit(0)
    return config
