"""Extend a checkpoint's learned positions to longer sequences: position i gets the embedding of position i mod P, where
P is the number of positions that it had.

    megasparse extend-positions --checkpoint runs/yoso_bert --max-length 4096 --output runs/yoso_bert_longer \\
      --set model.attention.yoso.code_bits=12
    megasparse pretrain yoso_bert_4096 --resume runs/yoso_bert_longer/checkpoints/00000000

Every other weight is the same; the optimizer starts anew. The settings of attention stay as they are, except for those
that --set changes: the configuration of the run that follows must have the same model.
"""

import argparse
from pathlib import Path

from megasparse.cli.arguments import add_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("--max-length", type=int, required=True, metavar="TOKENS", help="longest sequence from now on")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder, laid out like a run's")


def run(args: argparse.Namespace) -> None:
    from megasparse.hub.extend_positions import extend_positions

    print(extend_positions(args.checkpoint, args.max_length, args.output, args.set))
