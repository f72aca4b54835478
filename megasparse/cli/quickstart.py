"""Go from nothing to a trained model, on any machine: real text, the real engine, held-out bits/dim, a sample.

    megasparse quickstart            # 9 minutes on two quiet cores; writes data/quickstart and runs/quickstart
    megasparse quickstart --small    # all steps in two or three minutes, into runs/quickstart_small
    make quickstart                  # the first in a checkout; installs into .venv first

Each step is an ordinary command of megasparse and is printed before it runs. Run again, finished steps are not
repeated: the corpus is not downloaded twice, and training resumes or reports that it is done.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", action="store_true", help="train for a minute, to see every step")


def run(args: argparse.Namespace) -> None:
    from megasparse.runs.quickstart import quickstart

    quickstart(args.small)
