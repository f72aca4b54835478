"""The arguments that all launchers share."""

import argparse
import sys

from megasparse.config.load import Settings, load_settings


def config_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with --config, --set and --print-config. `description`: the launcher's docstring."""
    parser = _parser(description)
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="the run's JSON file, or the name of one in configs/"
    )
    add_overrides(parser)
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration and stop")
    return parser


def checkpoint_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with --checkpoint and --set, for launchers that work on what a run has left behind."""
    parser = _parser(description)
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a checkpoint's folder, or a run's (its newest checkpoint)"
    )
    add_overrides(parser)
    return parser


def config_from(arguments: argparse.Namespace, kind: type[Settings]) -> Settings:
    """The configuration that the arguments of `config_parser` name. With --print-config, print it and end the
    program.
    """
    config = load_settings(arguments.config, arguments.set, kind)
    if arguments.print_config:
        print(config.model_dump_json(indent=2))
        sys.exit(0)
    return config


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=JSON", help="override one key; may be repeated"
    )


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    # The deepspeed launcher appends this to the command of each rank; the engine reads the environment instead.
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser
