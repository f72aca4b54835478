"""Commands that evaluate and use trained models."""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from megasparse.cli.arguments import add_checkpoint, add_coding, add_overrides, require_checkpoint, require_paths
from megasparse.errors import ConfigError, did_you_mean, positive, rank_variable, whole

OF_PRETRAINED = ("data", "stride", "rounds", "hash_seeds", "limit", "allow_leaking_attention")
OF_TASKS = ("source", "predictions")
"""Options for only one kind of model; all defaults are false."""


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that cannot be combined."""
    others, kind = (OF_TASKS, "a pretrained model") if args.task is None else (OF_PRETRAINED, "a fine-tuned model")
    for name in others:
        if getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')}", f"not supported for {kind}", "Remove it, or change --task")
    if args.task is None:
        if len(args.checkpoint) > 1:
            raise ConfigError("--checkpoint", f"{len(args.checkpoint)} pretrained models", "Evaluate them one by one")
        return
    from megasparse.settings.checks import require
    from megasparse.tasks.catalog import TASKS

    ranks, output = rank_variable("WORLD_SIZE", 1), args.predictions
    require(
        (args.task not in TASKS, "--task", f'unknown task "{args.task}"', did_you_mean(args.task, TASKS)),
        (ranks > 1, "--task", f"needs one process, but {ranks} ranks were started", "Start it without torchrun"),
        (not args.source, "--source", "is missing", f"Give the folder of {args.task}'s official files, or a file"),
        (output is not None and output.suffix != ".jsonl", "--predictions", f"{output} does not end in .jsonl",
         "Choose a name that does"),
        (output is not None and len(args.checkpoint) > 1, "--predictions", "needs a single checkpoint",
         "Give one --checkpoint, or remove it"),
    )  # fmt: skip


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--checkpoint", required=True, nargs="+", action="extend", metavar="DIR",
        help="a checkpoint, or a run (its newest, fine-tuned its best checkpoint); several fine-tuned models for the "
        "mean and interval over runs",
    )  # fmt: skip
    add_overrides(parser)
    add("--split", help='default: "test"; "validation" for a task without test labels')
    add("--batch", type=positive, help="windows or examples per forward pass")
    add("--json", type=Path, metavar="OUT", help="write the metrics and their protocol to this file")
    pretrained = parser.add_argument_group("pretrained models")
    pretrained.add_argument("--hash-seeds", type=positive, metavar="N", help="average over N draws of the hashes")
    pretrained.add_argument("--data", metavar="SHARDS", help="folder of shards; by default the training data")
    pretrained.add_argument("--rounds", type=positive, help="hash rounds instead of the configured ones")
    pretrained.add_argument("--stride", type=positive, help="new tokens per window; by default the whole window")
    pretrained.add_argument("--limit", type=positive, metavar="N", help="score only the first N windows")
    pretrained.add_argument("--allow-leaking-attention", action="store_true", help="score non-causal decoders")
    tasks = parser.add_argument_group("fine-tuned models")
    tasks.add_argument("--task", metavar="NAME", help="the task of the training, or another one with the same classes")
    tasks.add_argument("--source", nargs="+", metavar="FILE", help="folder of the official files, or labelled files")
    tasks.add_argument("--predictions", type=Path, metavar="OUT", help="write all predictions to this .jsonl file")


def evaluate(args: argparse.Namespace) -> None:
    """Evaluate a trained model on held-out text or examples.

        megasparse evaluate --checkpoint runs/quickstart --data data/quickstart --json runs/quickstart/test.json
        megasparse evaluate --checkpoint runs/quickstart --data data/quickstart --stride 1024 --rounds 8
        torchrun --nproc-per-node 2 -m megasparse evaluate --checkpoint runs/quickstart --set parallel.sequence=2
        megasparse evaluate --task rte --checkpoint runs/rte --source glue_data/RTE --predictions rte.jsonl
        megasparse evaluate --task rte --checkpoint runs/rte_0 runs/rte_1 runs/rte_2 --source glue_data/RTE

    Pretrained models: bits/dim, perplexities and accuracy of a decoder; loss and accuracy on the masked tokens of an
    encoder or on the targets of an encoder-decoder. Every token of the split (or of --limit windows) is scored once.
    Several ranks divide the windows, and with parallel.sequence the tokens of each window. Fine-tuned models (--task):
    the official metric with its confidence interval.
    """
    _check(args)
    require_paths(args.data, *args.source or ())
    for folder in args.checkpoint:
        require_checkpoint(folder, args.set)
    from megasparse.evaluation.outputs import require_writable, write_json

    require_writable(args.json, args.predictions, sources=args.source or ())
    if args.task is None:
        from megasparse.evaluation.results import Scoring
        from megasparse.runs.api import evaluate_split

        options = {name: getattr(args, name) for name in ("stride", "rounds", "limit", "allow_leaking_attention")}
        options |= {"split": args.split or "test", "hash_seeds": args.hash_seeds or 1, "batch": args.batch or 1}
        result, text = evaluate_split(args.checkpoint[0], args.data, args.set, Scoring(**options))
    else:
        from megasparse.tasks.run import evaluate_checkpoints, summary, write_predictions

        overrides = args.set + ([f"evaluation.batch={args.batch}"] if args.batch else [])
        result, rows = evaluate_checkpoints(args.checkpoint, overrides, args.task, args.source, args.split, log)
        if args.predictions:
            write_predictions(args.predictions, rows)
        text = summary(result)
    if rank_variable("RANK", 0) > 0:
        return
    print(text)
    if args.json:
        write_json(args.json, result)


def add_generate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_checkpoint(parser)
    add_overrides(parser)
    add("--prompt", default="", help="text to continue")
    add("--tokens", type=whole, metavar="N", help="maximum number of new tokens (default: 200)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--source", metavar="TEXT", help="source text of an encoder-decoder")
    kind.add_argument("--source-file", metavar="FILE", help="one source per line; prints one text per line")
    kind.add_argument("--images", type=whole, metavar="N", help="draw N images")
    kind.add_argument("--complete", nargs="+", metavar="IMAGE", help="redraw the lower halves of images")
    add("--output", metavar="DIR", help="a new folder for the images")
    add("--temperature", type=float, default=1.0, help="0 always selects the most likely token")
    add("--top-p", type=float, default=1.0, help="nucleus sampling: probability of the nucleus")
    add("--min-p", type=float, default=0.0, help="least probability, relative to the most likely token")
    add("--repetition-penalty", type=float, default=1.0, help="penalty of past tokens; 1 disables it")
    add("--seed", type=whole, default=0, help="seed of the sampling (default: %(default)s)")
    add("--beams", type=whole, metavar="K", help="width of beam search, instead of sampling")
    add("--length-penalty", type=float, metavar="A", help="exponent of ((5 + length)/6)^A")


def generate(args: argparse.Namespace) -> None:
    """Generate text or images with a trained model.

        megasparse generate --checkpoint runs/quickstart --prompt "The history of " --tokens 300 --temperature 0.8
        megasparse generate --checkpoint runs/pixels --images 16 --output samples
        megasparse generate --checkpoint runs/pixels --complete cat.png dog.png --output completions
        torchrun --nproc-per-node 2 -m megasparse generate --checkpoint runs/quickstart --set parallel.sequence=2
        megasparse generate --checkpoint runs/translation --source "Ein Satz." --beams 4 --length-penalty 0.6

    Several ranks generate a decoder's text together; each rank stores the KV caches of its heads.
    """
    drawing = args.images is not None or args.complete
    for option in ("prompt", "tokens", "beams", "length_penalty") if drawing else ("output",):
        if getattr(args, option) not in (None, ""):
            problem = f"not supported for {'images' if drawing else 'text'}"
            raise ConfigError(f"--{option.replace('_', '-')}", problem, "Remove it")
    if rank_variable("WORLD_SIZE", 1) > 1:
        for option in ("images", "complete", "source", "source_file"):
            if getattr(args, option) is not None:
                raise ConfigError(f"--{option.replace('_', '-')}", "not supported by several ranks", "Run one process")
    require_checkpoint(args.checkpoint, args.set)
    require_paths(args.source_file, *args.complete or ())
    from megasparse.evaluation.bits_per_dim import refuse_leaks
    from megasparse.evaluation.generate import Sampling, shared_decoder
    from megasparse.evaluation.images import complete_images, draw_images, shape_of
    from megasparse.evaluation.results import restore, trained_tokenizer
    from megasparse.evaluation.texts import Request, read_sources, texts
    from megasparse.model.encoder import Encoder

    model, config, checkpoint, ranks = restore(args.checkpoint, args.set)
    if isinstance(model, Encoder):
        raise ConfigError("--checkpoint", "an encoder cannot generate text", "Give the checkpoint of a decoder")
    refuse_leaks(model.leaks)
    tokenizer = trained_tokenizer(config, checkpoint)
    seed = config.run.seed
    sampling = Sampling(args.temperature, args.top_p, args.min_p, args.repetition_penalty, args.seed)
    if args.images is not None:
        draw_images(model, shape_of(config, "--images"), args.images, seed, sampling, args.output)
    elif args.complete:
        complete_images(model, shape_of(config, "--complete"), args.complete, seed, sampling, args.output)
    else:
        # the bytes that the shell passed, UTF-8 or not
        request = Request(os.fsencode(args.prompt), args.tokens, sampling, args.beams, args.length_penalty or 0.0)
        sources = read_sources(args.source, args.source_file)
        show: Any = partial(print, flush=True) if ranks.rank == 0 else lambda *_, **__: None
        decoder = shared_decoder(model, ranks) if config.model.source is None else model
        for pieces in texts(decoder, config, tokenizer, request, sources, ranks.device):
            for piece in pieces:
                show(" ".join(piece.split("\n")) if args.source_file else piece, end="")
            show()


def log(line: str) -> None:
    print(line, file=sys.stderr)


def add_predict(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_checkpoint(parser)
    add_overrides(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--source", nargs="+", metavar="FILE", help="files in the task's format, or their folder")
    source.add_argument("--text", action="append", metavar="TEXT", help="one example; for a pair give it twice")
    add("--split", help='split of a folder; default: "test", else "validation", else its only one')
    add("--output", type=Path, metavar="OUT", help="file to write: .jsonl, .json, .csv or .tsv")


def predict(args: argparse.Namespace) -> None:
    """Predict the labels, texts or values of new examples with a fine-tuned model.

        megasparse predict --checkpoint runs/my-run --source new.csv --output predictions.jsonl
        megasparse predict --checkpoint runs/rte --source glue_data/RTE/test.tsv --output submission/RTE.tsv
        megasparse predict --checkpoint runs/my-run --text "One text. For a pair, give --text twice."

    New files have the format of the task's files, with or without labels. The suffix of --output selects the format:
    .jsonl, an object per example; .json; .csv; .tsv, GLUE's format of submissions. Without it, JSON lines are printed.
    """
    require_checkpoint(args.checkpoint, args.set)
    require_paths(*args.source or ())
    from megasparse.evaluation.outputs import require_writable
    from megasparse.tasks.run import predict, predict_texts, require_form, restore_task, write_predictions

    if args.split and args.text:
        raise ConfigError("--split", f'"{args.split}", but --text is given', "Remove one of them")
    if args.output is not None:
        require_form(args.output)
        require_writable(args.output, sources=args.source or ())
    task = restore_task(args.checkpoint, args.set)
    rows = predict(task, args.source, log, args.split) if args.source else [predict_texts(task, args.text, log)]
    if args.output is None:
        for row in rows:
            print(json.dumps(row if args.source else {key: row[key] for key in row if key not in SOURCE_KEYS}))
        return
    write_predictions(args.output, rows)
    log(f"{len(rows):,} predictions by step {task.checkpoint.step} of {task.checkpoint.path}: {args.output}")


SOURCE_KEYS = ("name", "file", "line", "label")
"""Keys of a prediction that an example from --text does not have."""

SUFFIX = ".msz"


def add_compress(parser: argparse.ArgumentParser) -> None:
    add_coding(parser, f"file to write (default: FILE{SUFFIX})")


def compress(args: argparse.Namespace) -> None:
    """Compress a file losslessly with a trained decoder, to about the code length that evaluation reports.

        megasparse compress book.txt --checkpoint runs/quickstart              (writes book.txt.msz)

    Decompression needs the same checkpoint. Both commands predict token by token from a cache, many windows in
    parallel, in fp64, so that they compute identical probabilities on the same machine. On another machine they
    tolerate rounding differences, but not a different hash code: decompression then writes nothing.
    """
    require_paths(args.file)
    require_checkpoint(args.checkpoint)
    from megasparse.evaluation.compression import compress

    output = args.output or args.file.with_name(args.file.name + SUFFIX)
    before, after, seconds = compress(args.checkpoint, args.file, output)
    rates = f"{8 * after / before:.4f} bits/byte; {before / seconds:,.0f} bytes/s"
    print(f"{output}: {before:,} bytes compressed to {after:,} ({rates})")


def add_decompress(parser: argparse.ArgumentParser) -> None:
    add_coding(parser, f"file to write (default: FILE without {SUFFIX})")


def decompress(args: argparse.Namespace) -> None:
    """Restore a file compressed by `megasparse compress`, with the same checkpoint.

        megasparse decompress book.txt.msz --checkpoint runs/quickstart        (writes book.txt)

    If the file is damaged or belongs to another model, nothing is written.
    """
    if args.output is None and args.file.suffix != SUFFIX:
        raise ConfigError("--output", f"is missing, and {args.file} does not end in {SUFFIX}", "Name a file to write")
    require_paths(args.file)
    require_checkpoint(args.checkpoint)
    from megasparse.evaluation.compression import decompress

    output = args.output or args.file.with_suffix("")
    written, seconds = decompress(args.checkpoint, args.file, output)
    print(f"{output}: {written:,} bytes ({written / seconds:,.0f} bytes/s)")
