"""Train and evaluate several attention mechanisms alike on one task, and print the table.

    megasparse compare comparisons/duplication
    megasparse compare comparisons/masked_text --seeds 0 1 2 --jobs 2
    megasparse compare comparisons/duplication --arms full lha        (a CPU, two minutes)
    megasparse compare comparisons/duplication --arms lha --set training.steps=3000 --output runs/longer
    megasparse compare comparisons/reformer_table2 --dry-run          (what would be run)
    megasparse compare comparisons/pays_code --plot code.svg          (curves, and their numbers in code.json)

A comparison is a JSON file: `prepare`, the arguments of `megasparse prepare-data` that make the data; `config`, the
run's configuration; `evaluate`, further arguments of `megasparse evaluate`, or several such lists, each with its name;
and `arms`, name -> what differs, as `section.key=value` each. Arms differ in nothing else: the data come in the same
order, and weights that arms share start alike. Every step is an ordinary command. What is done already is not done
again, so an interrupted comparison continues.
"""

import argparse
import shlex
from pathlib import Path

from megasparse.cli.arguments import add_overrides
from megasparse.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("comparison", metavar="COMPARISON", help="a comparison, by name or file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a run of every arm for each (default: 0)")
    parser.add_argument("--arms", nargs="+", help="only these; by default all")
    add_overrides(parser)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one CPU thread (default: 1)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the runs (default: runs/COMPARISON)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="draw the held-out curves of what has run so far; run nothing"
    )
    parser.add_argument("--dry-run", action="store_true", help="check the arms and print the commands; run nothing")


def run(args: argparse.Namespace) -> None:
    from megasparse.config.shipped import find_config
    from megasparse.runs.comparison import chosen, commands, compare, load
    from megasparse.runs.comparison_plot import plot

    path = find_config(args.comparison)
    comparison = load(path)
    if args.set and args.output is None:
        raise ConfigError("--set", "makes other runs than the comparison's own", "Give them a folder with --output")
    output = args.output or Path("runs") / path.stem
    if args.plot is not None:
        plot(output, chosen(args.arms, comparison["arms"]), args.plot)
        return
    if args.dry_run:
        for words in commands(comparison, output, args.arms, args.seeds, args.set):
            print(shlex.join(["megasparse", *words]))
        return
    print("\n".join(compare(comparison, output, args.arms, args.seeds, args.set, args.jobs)))
