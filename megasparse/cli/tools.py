"""Commands that list, compare and report."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megasparse.cli.arguments import add_overrides
from megasparse.errors import ConfigError


def runnable(names: Iterable[str]) -> list[str]:
    """Return the configurations of runs, without comparisons."""
    return [name for name in names if not name.startswith("comparisons/")]


def purpose(values: dict[str, Any]) -> str:
    """One line about a configuration."""
    task, model, data = (values.get(section, {}) for section in ("task", "model", "data"))
    if task:
        return f"fine-tuning on {task['name']}, {task.get('max_length', 512)} tokens"
    kind = model.get("kind", "decoder").replace("_", "-")
    return f"{kind}, {data['sequence_length']:,} tokens, {data['path']}"


def add_configs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", nargs="?", default="", help="list only names that contain this")


def configs(args: argparse.Namespace) -> None:
    """List the shipped configurations by their names, each with its kind, its size and where it writes.

    megasparse configs                                        # all of them
    megasparse configs finetune                               # those whose name contains "finetune"
    megasparse pretrain reformer_64k --print-config           # one of them, whole
    """
    from megasparse.config.files import read_values, shipped_configs

    files = shipped_configs()
    for name in runnable(files):
        if args.part in name:
            print(f"{name:36} {purpose(read_values(files[name]))}")


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("comparison", metavar="COMPARISON", help="a comparison, by name or file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a run of every arm for each (default: 0)")
    parser.add_argument("--arms", nargs="+", help="only these; by default all")
    parser.add_argument("--corpora", nargs="+", help="only these, of a comparison with several; by default all")
    add_overrides(parser)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one CPU thread (default: 1)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the runs (default: runs/COMPARISON)")
    parser.add_argument("--dry-run", action="store_true", help="check the arms and print the commands; run nothing")


def compare(args: argparse.Namespace) -> None:
    """Train and evaluate several attention mechanisms alike on one task, and print the table.

        megasparse compare comparisons/duplication
        megasparse compare comparisons/masked_text --seeds 0 1 2 --jobs 2
        megasparse compare comparisons/duplication --arms full lha        (a CPU, two minutes)
        megasparse compare comparisons/duplication --arms lha --set training.steps=3000 --output runs/longer
        megasparse compare comparisons/reformer_table2 --dry-run          (what would be run)
        megasparse compare comparisons/pays --corpora client recall --seeds 0 1 2 --arms "window 64" n-gram

    A comparison is a JSON file: `prepare`, the arguments of `megasparse prepare-data` that make the data; `config`,
    the run's configuration; `evaluate`, further arguments of `megasparse evaluate`, or several such lists, each with
    its name; and `arms`, name -> what differs, as `section.key=value` each. Arms differ in nothing else: the data come
    in the same order, and weights that arms share start alike. Every step is an ordinary command. What is done already
    is not done again, so an interrupted comparison continues. In place of `prepare`, `corpora` names several, each
    with settings of its own, which all arms share, and a folder of its own. Results are OUTPUT/table.md and, of
    configurations with evaluation.every above 0, OUTPUT/curves.svg.
    """
    import shlex

    from megasparse.runs.comparison import load, plot, runs_of, table, train_all

    parts = load(args.comparison, args.corpora)
    if args.set and args.output is None:
        raise ConfigError("--set", "makes other runs than the comparison's own", "Give them a folder with --output")
    for corpus, part in parts.items():
        folder = (args.output or Path("runs") / Path(args.comparison).stem) / corpus
        runs = runs_of(part, folder, args.arms, args.seeds, args.set)
        if args.dry_run:
            trainings = [words for run in runs for words in (run.training, *run.evaluations.values())]
            for words in (["prepare-data", *part["prepare"]], *trainings):
                print(shlex.join(["megasparse", *words]))
            continue
        lines = table(train_all(part, runs, folder / "prepare.log", args.jobs))
        (folder / "table.md").write_text("\n".join(lines) + "\n")
        plot(folder, list(part["arms"]))
        print(*[f"{corpus}:"] * bool(corpus), *lines, sep="\n")


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the first run's folder")


def report(args: argparse.Namespace) -> None:
    """Write a page about a run to look at and to pass on: one HTML file that needs nothing but itself.

        megasparse report runs/quickstart                              # writes runs/quickstart/report.html
        megasparse report runs/lsh runs/full --output comparison.html  # curves of several runs in the same charts

    Headline numbers, curves of all scalars (docs/monitoring.md) with incidents marked on them, attention maps and
    samples, incidents, ranks, checkpoints, the configuration with what differs from the defaults. A run that is under
    way, has crashed or was restarted is shown as far as it got. Long curves keep the least and the greatest value of
    every stretch.
    """
    from megasparse.evaluation.outputs import require_writable, whole_file
    from megasparse.runs.report import page, read_run

    runs = [read_run(path) for path in args.run]
    output = args.output or args.run[0] / "report.html"
    require_writable(output)
    with whole_file(output) as file:
        file.write(page(runs).encode(errors="replace"))
    print(f"{output}: {output.stat().st_size:,} bytes")
