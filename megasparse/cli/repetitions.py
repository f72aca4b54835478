"""Measure how far back a corpus repeats itself: what attention beyond a window has to win on it.

    megasparse repetitions --data data/pays/client --length 8192
    megasparse repetitions --data data/books --length 65536 --window 256 --ngrams 4 8 16 --json books.json

Of every sequence of --length tokens it says how many tokens have their last n tokens earlier in it, by the distance to
the latest such place, and how many of these are what followed there. Within a window any model sees that; farther away
only one whose attention reaches there. See docs/when-hashing-pays.md.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from megasparse.data.corpora.source import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="a folder of `megasparse prepare-data`")
    parser.add_argument("--split", default="train", help="(default: %(default)s)")
    parser.add_argument("--length", type=positive, default=8192, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--window", type=positive, default=128, help="what is near, in tokens (default: %(default)s)")
    parser.add_argument("--ngrams", type=positive, nargs="+", default=[4, 12], help="n of each table (default: 4 12)")
    parser.add_argument("--limit", type=positive, default=128, help="sequences to read at most (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")


def run(args: argparse.Namespace) -> None:
    from megasparse.data.index import Index
    from megasparse.data.reader import EvaluationStream
    from megasparse.errors import ConfigError
    from megasparse.evaluation.repetitions import repetitions, shares

    if args.window >= args.length:
        problem = f"{args.window} is no part of --length {args.length}"
        raise ConfigError("--window", problem, f"Give less than {args.length}")
    stream = EvaluationStream(Index.load(args.data), args.split)
    count = min(args.limit, max(1, stream.tokens // args.length))
    starts = range(0, count * args.length, args.length)
    bounds = [0, args.window]
    while bounds[-1] * 4 < args.length:
        bounds.append(bounds[-1] * 4)
    bounds.append(args.length)
    tables = {}
    for n in args.ngrams:
        found = [repetitions(stream.read(s, min(s + args.length, stream.tokens)), n, bounds) for s in starts]
        tables[n] = shares(sum(found[1:], found[0]), bounds, min(count * args.length, stream.tokens))
        print(f"last {n} tokens stood earlier   of all tokens   followed by the same")
        for row in tables[n]:
            print(f"  {row.nearest:>8,} to {row.furthest:>8,} back   {row.share:>12.1%}   {row.right:>19.0%}")
    if args.json is not None:
        text = {str(n): [asdict(row) for row in rows] for n, rows in tables.items()}
        args.json.write_text(json.dumps(text, indent=1) + "\n")
