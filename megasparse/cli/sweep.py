"""Fine-tune with every combination of some settings, on several seeds each, and report which one is best.

    megasparse sweep --config finetune/glue_rte --grid finetune/grids/lha_glue --seeds 3 --output runs/sweep_rte
    megasparse sweep ... --dry-run                                (what would be run)
    megasparse sweep ... --set start.attention.lha.chunk=8        (the same for all runs)

A grid is a JSON file: {"section.key": [value, ...], ...}. Runs follow one another, each a process of its own with a
folder of its own, OUTPUT/COMBINATION/seed0 and so on, and with its output in seed0.log beside it. Started again,
finished runs are not repeated, and an interrupted one resumes. A run that fails does not end the sweep: the exit code
is 2 then. The table, best mean first, is printed, and OUTPUT/sweep.json has it with every run's metrics.
"""

import argparse
from pathlib import Path

from megasparse.cli.arguments import add_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="a fine-tuning configuration, by name or file")
    parser.add_argument("--grid", required=True, metavar="FILE", help="the settings and their values, by name or file")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N-1 (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the runs")
    add_overrides(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the commands; run and write nothing")


def run(args: argparse.Namespace) -> None:
    from megasparse.config.shipped import find_config
    from megasparse.runs.sweep import Sweep, sweep

    given = Sweep(find_config(args.config), find_config(args.grid), args.output, args.seeds, args.set)
    sweep(given, args.dry_run)
