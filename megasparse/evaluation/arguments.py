"""The command line of launch/evaluate.py, which knows two kinds of checkpoints."""

import argparse
from pathlib import Path

from megasparse.config.command_line import add_overrides
from megasparse.errors import ConfigError

OF_PRETRAINED = ("data", "stride", "rounds", "limit", "allow_leaking_attention")
OF_TASKS = ("source", "predictions")
"""Options that only one kind has, each with a default that is no value."""


def evaluation_arguments(description: str | None) -> argparse.Namespace:
    """Raises ConfigError for options that do not go together."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--checkpoint", required=True, nargs="+", action="extend", metavar="DIR",
        help="a checkpoint's folder, or a run's (its newest checkpoint, of a fine-tuning run its best); of fine-tuned "
        "models several: mean and interval over runs",
    )  # fmt: skip
    add_overrides(parser)
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)  # deepspeed's
    parser.add_argument("--split", help='"test" where left out; of a task without test labels "validation"')
    parser.add_argument("--batch", type=positive, help="windows or examples scored at once")
    parser.add_argument(
        "--hash-seeds", type=positive, default=1, metavar="N", help="repeat with N draws of the rotations (and masks)"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers and their protocol to this file")
    pretrained = parser.add_argument_group("pretrained models")
    pretrained.add_argument("--data", metavar="SHARDS", help="folder of shards; the one trained on where left out")
    pretrained.add_argument("--rounds", type=positive, help="hash rounds in place of the configured ones")
    pretrained.add_argument("--stride", type=positive, help="new tokens a window; all of it where left out")
    pretrained.add_argument("--limit", type=positive, metavar="N", help="score only the first N windows")
    pretrained.add_argument(
        "--allow-leaking-attention", action="store_true", help="score a model that sees later tokens"
    )
    tasks = parser.add_argument_group("fine-tuned models")
    tasks.add_argument("--task", metavar="NAME", help="the task trained on, or another one of the same classes")
    tasks.add_argument("--source", nargs="+", metavar="FILE", help="folder of the official files, or labelled files")
    tasks.add_argument("--predictions", type=Path, metavar="OUT", help="write each example's to this .jsonl file")
    args = parser.parse_args()
    _check(args)
    return args


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _check(args: argparse.Namespace) -> None:
    others, kind = (OF_TASKS, "a pretrained model") if args.task is None else (OF_PRETRAINED, "a fine-tuned model")
    for name in others:
        if getattr(args, name):
            hint = "Leave it out, or give --task" if args.task is None else "Leave it out, and --task besides it"
            raise ConfigError(f"--{name.replace('_', '-')}", f"is nothing that {kind} is evaluated with", hint)
    if args.task is None:
        if len(args.checkpoint) > 1:
            problem = f"{len(args.checkpoint)} pretrained models"
            raise ConfigError("--checkpoint", problem, "Evaluate them one by one, or give --task of fine-tuned ones")
        return
    if not args.source:
        raise ConfigError("--source", "is missing", f"Give the folder of {args.task}'s official files, or a file")
    if args.predictions is None:
        return
    if args.predictions.suffix != ".jsonl":
        raise ConfigError("--predictions", f"{args.predictions} is no .jsonl", "Give a name that ends in .jsonl")
    if len(args.checkpoint) > 1 or args.hash_seeds > 1:
        hint = "Give one --checkpoint and no --hash-seeds, or leave it out"
        raise ConfigError("--predictions", "is of one checkpoint and one draw", hint)
