"""Average the weights of a run's last checkpoints, and write the mean as a run (Vaswani et al. 2017, section 6.1).

    megasparse finetune finetune/wmt14_base --set checkpoint.keep=5
    megasparse average runs/wmt14_base --output runs/wmt14_base_averaged
    megasparse average runs/wmt14_big --last 20 --output runs/wmt14_big_averaged
    megasparse evaluate --task wmt14 --checkpoint runs/wmt14_base_averaged --source data/wmt14

Weights are summed in float64; the optimizer's state is left out. The checkpoint has the step of the newest one.
"""

import argparse
from pathlib import Path

from megasparse.cli.arguments import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--last", type=positive, default=5, metavar="N", help="checkpoints to take (default: 5)")
    parser.add_argument("--output", type=Path, required=True, metavar="NEWRUN", help="a new run's folder")


def run(args: argparse.Namespace) -> None:
    from megasparse.runs.averaging import average

    path, steps = average(args.run, args.last, args.output)
    print(f"{path}: the mean of steps {', '.join(map(str, steps))}")
