"""List the shipped configurations by their names, each with its kind, its size and where it writes.

megasparse configs                                        # all of them
megasparse configs finetune                               # those whose name contains "finetune"
megasparse pretrain reformer_64k --print-config           # one of them, whole
"""

import argparse
from collections.abc import Iterable
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", nargs="?", default="", help="list only names that contain this")


def run(args: argparse.Namespace) -> None:
    from megasparse.config.files import read_values, shipped_configs

    files = shipped_configs()
    for name in runnable(files):
        if args.part in name:
            print(f"{name:36} {purpose(read_values(files[name]))}")


def runnable(names: Iterable[str]) -> list[str]:
    """Return the configurations of runs, without comparisons."""
    return [name for name in names if not name.startswith("comparisons/")]


def purpose(values: dict[str, Any]) -> str:
    """One line about a configuration."""
    task, model, data = (values.get(section, {}) for section in ("task", "model", "data"))
    if task:
        return f"fine-tuning on {task['name']}, {task.get('max_length', 512)} tokens"
    kind = model.get("kind", "decoder").replace("_", "-")
    return f"{kind}, {data['sequence_length']:,} tokens, {data['path']}"
