"""Compress a file with a trained decoder: its code length as evaluation promises it, in a file.

    megasparse compress book.txt --checkpoint runs/quickstart              (writes book.txt.msz)
    megasparse decompress book.txt.msz --checkpoint runs/quickstart --output again.txt

The text comes back byte for byte, from the same checkpoint alone, whatever folder it lies in. Whole windows are
compressed at once; decompression predicts token by token, many windows side by side.
"""

import argparse

from megasparse.cli.arguments import add_coding

SUFFIX = ".msz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_coding(parser, f"file to write (default: FILE{SUFFIX})")


def run(args: argparse.Namespace) -> None:
    from megasparse.evaluation.compression import compress

    output = args.output or args.file.with_name(args.file.name + SUFFIX)
    before, after, seconds = compress(args.checkpoint, args.file, output)
    rates = f"{8 * after / before:.4f} bits/byte; {before / seconds:,.0f} bytes/s"
    print(f"{output}: {before:,} bytes became {after:,} ({rates})")
