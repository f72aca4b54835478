"""Train and evaluate several attention mechanisms alike on one task, and print the table.

    megasparse compare comparisons/duplication
    megasparse compare comparisons/masked_text --seeds 0 1 2 --jobs 2
    megasparse compare comparisons/duplication --arms full lha        (a CPU, two minutes)
    megasparse compare comparisons/duplication --arms lha --set training.steps=3000 --output runs/longer
    megasparse compare comparisons/reformer_table2 --dry-run          (what would be run)
    megasparse compare comparisons/pays --corpora client recall --seeds 0 1 2 --arms "window 64" n-gram
    megasparse compare comparisons/pays --plot curves.svg             (curves, and their numbers in curves_client.json)

A comparison is a JSON file: `prepare`, the arguments of `megasparse prepare-data` that make the data; `config`, the
run's configuration; `evaluate`, further arguments of `megasparse evaluate`, or several such lists, each with its name;
and `arms`, name -> what differs, as `section.key=value` each. Arms differ in nothing else: the data come in the same
order, and weights that arms share start alike. Every step is an ordinary command. What is done already is not done
again, so an interrupted comparison continues. In place of `prepare`, `corpora` names several, each with settings of
its own, which all arms share; each corpus has its folder, and in it a table and a picture (report.md).
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
    parser.add_argument("--corpora", nargs="+", help="only these, of a comparison with several; by default all")
    add_overrides(parser)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one CPU thread (default: 1)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the runs (default: runs/COMPARISON)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="draw the held-out curves of what has run so far; run nothing"
    )
    parser.add_argument("--dry-run", action="store_true", help="check the arms and print the commands; run nothing")


def run(args: argparse.Namespace) -> None:
    from megasparse.config.files import find_config
    from megasparse.runs.comparison import by_corpus, chosen, commands, load, table, train_all
    from megasparse.runs.comparison_plot import plot, report

    path = find_config(args.comparison)
    comparison = load(path)
    if args.set and args.output is None:
        raise ConfigError("--set", "makes other runs than the comparison's own", "Give them a folder with --output")
    output = args.output or Path("runs") / path.stem
    for corpus, part in by_corpus(comparison, args.corpora).items():
        folder, arms = output / corpus, chosen(args.arms, part["arms"])
        if corpus and not args.dry_run:
            print(f"{corpus}:")
        if args.plot is not None:
            picture = args.plot.with_stem(f"{args.plot.stem}_{corpus}") if corpus else args.plot
            print("\n".join(plot(folder, arms, picture)))
        elif args.dry_run:
            for words in commands(part, folder, args.arms, args.seeds, args.set):
                print(shlex.join(["megasparse", *words]))
        else:
            lines = table(train_all(part, folder, args.arms, args.seeds, args.set, args.jobs))
            (folder / "table.md").write_text("\n".join(lines) + "\n")
            print("\n".join([*lines, *report(folder, list(part["arms"]))]))
