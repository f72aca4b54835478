r"""A page of a run to look at and to hand on: one HTML file that needs nothing but itself.

    python tools/report.py runs/quickstart                              # writes runs/quickstart/report.html
    python tools/report.py runs/lsh runs/full --output comparison.html  # curves of several runs in the same charts

Headline numbers, curves of all scalars (docs/monitoring.md) with incidents marked on them, attention maps and samples,
incidents, ranks, checkpoints, the configuration with what differs from the defaults. Of a run that goes on, that
crashed or that was started again and again it shows what there is. Long curves keep the least and the greatest value
of every stretch.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megasparse.errors import report_user_errors
from megasparse.evaluation.outputs import require_writable, whole_file
from megasparse.report.page import page
from megasparse.report.run import read_run


@report_user_errors
def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="by default report.html in the first run's folder")
    args = parser.parse_args(given)
    runs = [read_run(path) for path in args.run]
    output = args.output or args.run[0] / "report.html"
    require_writable(output)
    with whole_file(output) as file:
        file.write(page(runs).encode(errors="replace"))
    print(f"{output}: {output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
