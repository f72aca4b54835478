"""Plot forecasts of a fine-tuned model beside those of the last value and of the same time yesterday.

    megasparse plot-forecasts runs/etth1_24 --output runs/etth1_24/forecasts
    megasparse plot-forecasts runs/sales --source sales.csv --split validation --output plots --windows 6

Writes a picture for each target column (some windows: what was read, what came, what was forecast, in the file's
units), and forecasts.json and forecasts.md: errors on all windows of the split, scaled as the metrics are. Baselines
read the same windows. `last value`: the last row read, repeated. `seasonal`: the row one day before, from the last day
read where the horizon is longer; only where a day is a whole number of steps, and read.
"""

import argparse
from pathlib import Path

from megasparse.cli.arguments import add_overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder, or a checkpoint's")
    parser.add_argument("--source", help="folder of the official files, or a CSV file; by default the run's own")
    parser.add_argument("--split", default="test", help="train, validation or test")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--windows", type=int, default=4, help="windows in a picture")
    add_overrides(parser)


def run(args: argparse.Namespace) -> None:
    from megasparse.tasks.forecast_plots import plot_forecasts

    print("\n".join(plot_forecasts(args.run, args.output, args.source, args.split, args.windows, args.set)))
