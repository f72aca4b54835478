"""What a fine-tuned model tells of new examples.

    python launch/predict.py --checkpoint runs/my-run --source new.csv --output predictions.jsonl
    python launch/predict.py --checkpoint runs/rte --source glue_data/RTE/test.tsv --output submission/RTE.tsv
    python launch/predict.py --checkpoint runs/my-run --text "One text. Of a pair, --text once for each."

New files have the form of the task's own, without labels or with them. The output's suffix tells its form: .jsonl, one
object an example; .csv; .tsv, what GLUE takes as a submission. Without --output, to the terminal as .jsonl has it.
"""

import argparse
import json
import sys
from pathlib import Path

from megasparse.config.command_line import checkpoint_parser
from megasparse.errors import report_user_errors


def arguments() -> argparse.Namespace:
    parser = checkpoint_parser(__doc__)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--source", nargs="+", metavar="FILE", help="files of the task's form")
    given.add_argument("--text", action="append", metavar="TEXT", help="one example; of a pair give it twice")
    parser.add_argument("--output", type=Path, metavar="OUT", help="file to write: .jsonl, .json, .csv, .tsv or .txt")
    return parser.parse_args()


def say(line: str) -> None:
    print(line, file=sys.stderr)


@report_user_errors
def main() -> None:
    args = arguments()
    from megasparse.evaluation.outputs import require_writable
    from megasparse.tasks.predictions import predict, predict_texts, require_form, write_predictions
    from megasparse.tasks.restore import restore_task

    if args.output is not None:
        require_form(args.output)
        require_writable(args.output, sources=args.source or ())
    found = restore_task(args.checkpoint, args.set)
    rows = predict(found, args.source, say) if args.source else [predict_texts(found, args.text, say)]
    if args.output is None:
        for row in rows:
            print(json.dumps(row))
        return
    write_predictions(args.output, rows, found.form)
    say(f"{len(rows):,} predictions by step {found.checkpoint.step} of {found.checkpoint.path}: {args.output}")


if __name__ == "__main__":
    main()
