"""Measure what share of full attention windows, LSH's buckets, n-grams and the best keys cover in trained decoders.

    megasparse attention-coverage --checkpoint runs/full --data data/pays/client --json coverage.json
    megasparse attention-coverage --checkpoint runs/full/checkpoints/00000250 runs/full/checkpoints/00000600 \\
        --sequences 8 --restricted --json coverage.json --plot coverage.svg

For every layer of each checkpoint, on held-out sequences of the model's whole length: where the softmax over all
earlier keys has its mass, and how much of it each pattern holds, by distance; how often each pattern shows the token
that followed the latest earlier occurrence of a query's last --context tokens (induction); empty and overfull buckets;
deviation and entropy of the logits, as they are and with keys of norm 1; the mass on the token itself; gradients into
the layer. It measures --queries positions of each sequence, spread evenly, and holds a tile of them at a time.
See docs/when-hashing-pays.md.
"""

import argparse
from pathlib import Path

from megasparse.cli.arguments import add_json, add_overrides, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", required=True, nargs="+", metavar="DIR", help="checkpoints' folders, or runs' (their newest)"
    )
    add_overrides(parser)
    parser.add_argument("--data", metavar="SHARDS", help="folder of shards; by default the one trained on")
    parser.add_argument("--split", default="validation", help="measured on it (default: %(default)s)")
    parser.add_argument("--sequences", type=positive, default=4, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--length", type=positive, help="tokens of a sequence; default: model.max_length")
    parser.add_argument("--queries", type=positive, default=256, metavar="N", help="of a sequence (default: 256)")
    parser.add_argument("--context", type=positive, default=12, metavar="N", help="of induction (default: 12 tokens)")
    parser.add_argument(
        "--restricted", action="store_true", help="held-out bits where full attention sees only a pattern's keys, too"
    )
    add_json(parser)
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw the last checkpoint there")


def run(args: argparse.Namespace) -> None:
    from megasparse.evaluation.outputs import write_json
    from megasparse.runs.attention_coverage import attention_coverage, plot, summary

    options = ("command", "split", "sequences", "length", "queries", "context", "restricted")
    chosen = {name: getattr(args, name) for name in options}
    result = attention_coverage(args.checkpoint, args.data, args.set, **chosen)
    print(summary(result))
    if args.json:
        write_json(args.json, result)
    if args.plot:
        plot(result, args.plot)
