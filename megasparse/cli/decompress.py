"""Restore a file that `megasparse compress` wrote, byte for byte, with the checkpoint that it was made with.

    megasparse decompress book.txt.msz --checkpoint runs/quickstart        (writes book.txt)

A file that is damaged, or of another model, is refused in one line, and nothing is written.
"""

import argparse

from megasparse.cli.arguments import add_coding
from megasparse.cli.compress import SUFFIX
from megasparse.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_coding(parser, f"file to write (default: FILE without {SUFFIX})")


def run(args: argparse.Namespace) -> None:
    from megasparse.evaluation.compression import decompress

    if args.output is None and args.file.suffix != SUFFIX:
        raise ConfigError("--output", f"is not given, and {args.file} does not end in {SUFFIX}", "Name a file to write")
    output = args.output or args.file.with_suffix("")
    written, seconds = decompress(args.checkpoint, args.file, output)
    print(f"{output}: {written:,} bytes ({written / seconds:,.0f} bytes/s)")
