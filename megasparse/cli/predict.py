"""Predict the labels, texts or values of new examples with a fine-tuned model.

    megasparse predict --checkpoint runs/my-run --source new.csv --output predictions.jsonl
    megasparse predict --checkpoint runs/rte --source glue_data/RTE/test.tsv --output submission/RTE.tsv
    megasparse predict --checkpoint runs/my-run --text "One text. For a pair, give --text twice."

New files have the format of the task's own, with or without labels. The suffix of the output decides its format:
.jsonl, an object per example; .csv; .tsv, what GLUE takes as a submission. Without --output, the predictions are
printed as JSON lines.
"""

import argparse
import json
import sys
from pathlib import Path

from megasparse.cli.arguments import add_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--source", nargs="+", metavar="FILE", help="files in the task's format")
    given.add_argument("--text", action="append", metavar="TEXT", help="one example; for a pair give it twice")
    parser.add_argument("--output", type=Path, metavar="OUT", help="file to write: .jsonl, .json, .csv, .tsv or .txt")


def log(line: str) -> None:
    print(line, file=sys.stderr)


def run(args: argparse.Namespace) -> None:
    from megasparse.evaluation.outputs import require_writable
    from megasparse.tasks.evaluate import predict, predict_texts, require_form, write_predictions
    from megasparse.tasks.run import restore_task

    if args.output is not None:
        require_form(args.output)
        require_writable(args.output, sources=args.source or ())
    found = restore_task(args.checkpoint, args.set)
    rows = predict(found, args.source, log) if args.source else [predict_texts(found, args.text, log)]
    if args.output is None:
        for row in rows:
            print(json.dumps(row))
        return
    write_predictions(args.output, rows, found.form)
    log(f"{len(rows):,} predictions by step {found.checkpoint.step} of {found.checkpoint.path}: {args.output}")
