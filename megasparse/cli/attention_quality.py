"""Measure how well hashes find the attention of a trained model: utility, imbalance, recall, errors of the output.

    megasparse attention-quality --checkpoint runs/full --data data/enwik8 --json quality.json
    megasparse attention-quality --checkpoint runs/full --data data/enwik8 --split test --windows 20 --picture maps

Takes a decoder or encoder with any attention, best with full attention. On windows of held-out text it reads the
queries and keys of every layer and assigns them to --buckets equal buckets: at random, by position, by LSH, by SMYRF,
and by LHA's hash functions, which are trained here on windows of the training split while the model stays as it is.
It prints the attention utility of each (LHA Eq. 5) beside its upper bound and floor, how unequal the buckets are, the
recall of the largest weights, and the error of the output by hash rounds. Holds the L² weights of a layer: for windows
of up to a few thousand tokens.
"""

import argparse
from pathlib import Path

from megasparse.cli.arguments import add_checkpoint, add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("--data", metavar="SHARDS", help="folder of shards; by default the one trained on")
    parser.add_argument("--split", default="validation", help="measured on it (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=10, metavar="N", help="windows of text (default: %(default)s)")
    parser.add_argument("--length", type=int, help="tokens per window; default: data.sequence_length, 1,024 at most")
    parser.add_argument("--buckets", type=int, default=4, help="an even number (default: %(default)s)")
    parser.add_argument("--top", type=int, default=16, help="weights per query that recall counts (default: 16)")
    parser.add_argument(
        "--hash-steps", type=int, default=300, help="training of LHA's hashes, a window per step (default: %(default)s)"
    )
    parser.add_argument(
        "--hash-utility",
        choices=["exact", "sampled", "features"],
        default="exact",
        help="how the targets of LHA's hashes are found (default: %(default)s)",
    )
    add_json(parser)
    parser.add_argument("--picture", type=Path, metavar="DIR", help="write attention maps, a PNG per layer, there")


def run(args: argparse.Namespace) -> None:
    from megasparse.evaluation.attention.study import summary
    from megasparse.evaluation.outputs import write_json
    from megasparse.runs.attention_quality import attention_quality

    options = ("split", "windows", "length", "buckets", "top", "hash_steps", "hash_utility", "picture")
    chosen = {name: getattr(args, name) for name in options}
    result = attention_quality(args.checkpoint, args.data, args.set, **chosen)
    print(summary(result))
    if args.json:
        write_json(args.json, result)
