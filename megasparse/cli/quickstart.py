"""Go from nothing to a trained model, on any machine: real text, the real engine, held-out bits/dim, a sample.

    megasparse quickstart    # 15 minutes on two cores; writes data/quickstart and runs/quickstart
    make quickstart          # the same in a checkout; installs into .venv first

Each step is an ordinary command of megasparse and is printed before it runs. Run again, finished steps are not
repeated: the corpus is not downloaded twice, and training resumes or reports that it is done.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def run(args: argparse.Namespace) -> None:
    from megasparse.runs.quickstart import quickstart

    quickstart()
