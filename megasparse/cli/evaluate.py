"""Evaluate a trained model on text or examples that it has not seen.

    megasparse evaluate --checkpoint runs/quickstart --data data/quickstart --json runs/quickstart/test.json
    megasparse evaluate --checkpoint runs/quickstart --data data/quickstart --stride 1024 --rounds 8
    megasparse supervise --ranks 2 evaluate --checkpoint runs/quickstart --set parallel.sequence=2
    megasparse evaluate --task rte --checkpoint runs/rte --source glue_data/RTE --predictions rte.jsonl
    megasparse evaluate --task rte --checkpoint runs/rte_0 runs/rte_1 runs/rte_2 --source glue_data/RTE

Pretrained models: bits/dim, perplexities and accuracy of a decoder, loss and accuracy on the masked tokens of an
encoder or on the targets of an encoder-decoder. Every symbol of the split is scored once (or the first --limit
windows). Fine-tuned models (--task): the official metric with its confidence interval. The numbers are written with
their whole protocol.

Several ranks share out the windows of a pretrained model, and parallel.sequence of them the tokens of each.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from megasparse.cli.arguments import add_json, add_overrides, positive
from megasparse.errors import ConfigError

OF_PRETRAINED = ("data", "stride", "rounds", "limit", "allow_leaking_attention")
OF_TASKS = ("source", "predictions")
"""Options that only one kind of model has; the default of each is false."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", required=True, nargs="+", action="extend", metavar="DIR",
        help="a checkpoint's folder, or a run's (its newest checkpoint, of a fine-tuning run its best); several "
        "fine-tuned models give mean and interval over runs",
    )  # fmt: skip
    add_overrides(parser)
    parser.add_argument("--split", help='default: "test"; "validation" for a task without test labels')
    parser.add_argument("--batch", type=positive, help="windows or examples scored at once")
    parser.add_argument(
        "--hash-seeds", type=positive, default=1, metavar="N", help="repeat with N draws of the rotations (and masks)"
    )
    add_json(parser)
    pretrained = parser.add_argument_group("pretrained models")
    pretrained.add_argument("--data", metavar="SHARDS", help="folder of shards; by default the one trained on")
    pretrained.add_argument("--rounds", type=positive, help="hash rounds in place of the configured ones")
    pretrained.add_argument("--stride", type=positive, help="new tokens per window; by default the whole window")
    pretrained.add_argument("--limit", type=positive, metavar="N", help="score only the first N windows")
    pretrained.add_argument(
        "--allow-leaking-attention", action="store_true", help="score a model that sees later tokens"
    )
    tasks = parser.add_argument_group("fine-tuned models")
    tasks.add_argument("--task", metavar="NAME", help="the task trained on, or another one with the same classes")
    tasks.add_argument("--source", nargs="+", metavar="FILE", help="folder of the official files, or labelled files")
    tasks.add_argument("--predictions", type=Path, metavar="OUT", help="write every prediction to this .jsonl file")


def run(args: argparse.Namespace) -> None:
    _check(args)
    from megasparse.evaluation.outputs import require_writable, write_json

    require_writable(args.json, args.predictions, sources=args.source or ())
    result, summary = _evaluate_task(args) if args.task else _evaluate_split(args)
    if int(os.environ.get("RANK", "0")) > 0:
        return
    print(summary)
    if args.json:
        write_json(args.json, result)


def _evaluate_split(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from megasparse.runs.evaluation import evaluate_split

    return evaluate_split(
        args.checkpoint[0],
        args.data,
        split=args.split or "test",
        overrides=args.set,
        stride=args.stride,
        rounds=args.rounds,
        hash_seeds=args.hash_seeds,
        batch=args.batch or 1,
        limit=args.limit,
        allow_leaking_attention=args.allow_leaking_attention,
    )


def _evaluate_task(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The result and its summary. Writes the predictions where these are asked for."""
    from megasparse.tasks.evaluate import evaluate_checkpoints, summary, write_predictions

    overrides = args.set + ([f"evaluation.batch={args.batch}"] if args.batch else [])
    log = lambda line: print(line, file=sys.stderr)  # noqa: E731
    result, evaluated = evaluate_checkpoints(
        args.checkpoint, overrides, args.task, args.source, args.split, args.hash_seeds, log
    )
    if args.predictions:
        write_predictions(args.predictions, evaluated[0].predictions(), evaluated[0].form)
    return result, summary(result)


def _check(args: argparse.Namespace) -> None:
    """ConfigError for options that do not go together."""
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
    if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ConfigError("--task", f"is evaluated by one rank, and {ranks} were started", "Start it without supervise")
    if not args.source:
        raise ConfigError("--source", "is missing", f"Give the folder of {args.task}'s official files, or a file")
    if args.predictions is None:
        return
    if args.predictions.suffix != ".jsonl":
        raise ConfigError("--predictions", f"{args.predictions} is no .jsonl", "Give a name that ends in .jsonl")
    if len(args.checkpoint) > 1 or args.hash_seeds > 1:
        hint = "Give one --checkpoint and no --hash-seeds, or leave it out"
        raise ConfigError("--predictions", "is of one checkpoint and one draw", hint)
