"""Write a page about a run to look at and to pass on: one HTML file that needs nothing but itself.

    megasparse report runs/quickstart                              # writes runs/quickstart/report.html
    megasparse report runs/lsh runs/full --output comparison.html  # curves of several runs in the same charts

Headline numbers, curves of all scalars (docs/monitoring.md) with incidents marked on them, attention maps and samples,
incidents, ranks, checkpoints, the configuration with what differs from the defaults. A run that is under way, has
crashed or was restarted is shown as far as it got. Long curves keep the least and the greatest value of every stretch.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the first run's folder")


def run(args: argparse.Namespace) -> None:
    from megasparse.evaluation.outputs import require_writable, whole_file
    from megasparse.runs.report import page, read_run

    runs = [read_run(path) for path in args.run]
    output = args.output or args.run[0] / "report.html"
    require_writable(output)
    with whole_file(output) as file:
        file.write(page(runs).encode(errors="replace"))
    print(f"{output}: {output.stat().st_size:,} bytes")
