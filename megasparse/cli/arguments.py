"""Options that several subcommands share."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megasparse.errors import ConfigError, whole

if TYPE_CHECKING:
    from megasparse.config.load import Settings


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
    parser.add_argument("--dry-run", action="store_true", help="measure the memory of one step; write nothing")


def add_start(parser: argparse.ArgumentParser) -> None:
    """Add --start, the pretrained model that a configuration extends."""
    parser.add_argument(
        "--start",
        metavar="FOLDER",
        help="initialize from a megasparse checkpoint or a Hugging Face model; model keys not set in CONFIG are copied"
        " from it, its attention may be replaced, and missing weights are randomly initialized",
    )


def config_from(args: argparse.Namespace, kind: "type[Settings]") -> "Settings":
    """Return the configuration selected by the options of `add_config` and `add_start`. With --print-config, print it
    and exit. Raises ConfigError if not exactly one is given, and the errors of `load_settings`.
    """
    if (args.name is None) == (args.config is None):
        problem = "no configuration is given" if args.name is None else f"{args.name} is also given"
        raise ConfigError("--config", problem, "Give one, such as quickstart or FILE.json")
    from megasparse.config.load import load_settings  # imports torch

    base = None
    if getattr(args, "start", None) is not None:
        from megasparse.hub.importing import base_values

        base = base_values(args.start)
    config = load_settings(args.config or args.name, args.set, kind, base)
    if args.print_config:
        print(config.model_dump_json(indent=2))
        sys.exit(0)
    return config
