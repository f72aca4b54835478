"""Options that several subcommands share."""

import argparse
import sys
from pathlib import Path

from megasparse.config.load import Settings, load_settings
from megasparse.errors import ConfigError, whole


def add_config(parser: argparse.ArgumentParser) -> None:
    """A configuration by name or file, --set and --print-config."""
    parser.add_argument("name", nargs="?", metavar="CONFIG", help="a name that `megasparse configs` lists, or a file")
    parser.add_argument("--config", metavar="FILE", help="the same, as an option")
    add_overrides(parser)
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration and stop")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a run (its newest one)")


def add_coding(parser: argparse.ArgumentParser, output: str) -> None:
    """A file, the checkpoint that codes it, and where the result goes; `output` says where by default."""
    parser.add_argument("file", type=Path, metavar="FILE")
    add_checkpoint(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=JSON", help="override one key")


def add_training(parser: argparse.ArgumentParser) -> None:
    """A configuration, and where a run starts and stops."""
    add_config(parser)
    parser.add_argument("--resume", default="auto", metavar="auto|never|PATH", help="the checkpoint to resume from")
    parser.add_argument("--allow-changed-config", action="store_true", help="resume although the configuration differs")
    parser.add_argument("--stop-at", type=whole, metavar="STEP", help="save and end after this step")
    parser.add_argument("--dry-run", action="store_true", help="measure the memory of one step; write nothing")


def add_start(parser: argparse.ArgumentParser) -> None:
    """--start, whose model a configuration extends."""
    parser.add_argument(
        "--start",
        metavar="FOLDER",
        help="begin with the weights of a checkpoint of ours or of a HuggingFace model; what CONFIG does not say of the"
        " model is as there, its attention may be another, and weights that it has not begin with initial values",
    )


def config_from(args: argparse.Namespace, kind: type[Settings]) -> Settings:
    """The configuration that the options of `add_config` name, with `add_start`'s where there is one. With
    --print-config, print it and end the program.

    Raises ConfigError where none is named, or two are, and what `load_settings` raises.
    """
    if (args.name is None) == (args.config is None):
        problem = "no configuration is given" if args.name is None else f"{args.name} is given as well"
        raise ConfigError("--config", problem, "Name one, such as quickstart or FILE.json")
    base = None
    if getattr(args, "start", None) is not None:
        from megasparse.hub.importing import base_values  # imports torch

        base = base_values(args.start)
    config = load_settings(args.config or args.name, args.set, kind, base)
    if args.print_config:
        print(config.model_dump_json(indent=2))
        sys.exit(0)
    return config
