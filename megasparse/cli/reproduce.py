"""Try the papers' claims at a size that this machine bears, and write one page: verified, refuted, not attempted.

    megasparse reproduce --list                        (claims, rules, minutes)
    megasparse reproduce                               (all that a CPU can do: eight hours of a core)
    megasparse reproduce --only yoso_estimator lsh_rounds
    megasparse reproduce --budget gpu --dry-run        (what would be run)

Each claim has its rule of acceptance and its budget in megasparse/claims/, written before the trial. Each seed's
numbers are a file, DIR/CLAIM/seed-N.json, with settings, seconds, commit and machine; what is there is not measured
again, so an interrupted command goes on. DIR/claims.md, claims.html and claims.json are written anew each time.
"""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="CLAIM", help="only these; by default all")
    parser.add_argument("--budget", choices=["cpu", "gpu"], default="cpu", help="sizes of the trials (default: cpu)")
    parser.add_argument("--output", type=Path, default=Path("runs/claims"), metavar="DIR", help="default: runs/claims")
    parser.add_argument("--list", action="store_true", help="print the claims and their rules; run nothing")
    parser.add_argument("--dry-run", action="store_true", help="print what would be run; run nothing")


def run(args: argparse.Namespace) -> None:
    from megasparse.claims.page import counts, write_page
    from megasparse.claims.registry import find
    from megasparse.claims.reproduction import described, planned, reproduce, results
    from megasparse.evaluation.figure import new_figure

    claims = find(args.only)
    if args.list:
        print("\n\n".join(described(claim) for claim in claims))
        return
    if args.dry_run:
        print("\n".join(planned(claims, args.budget, args.output)))
        return
    new_figure(1)  # raises, where matplotlib is missing, before hours of trials
    reproduce(claims, args.budget, args.output, lambda doing: print(doing, file=sys.stderr, flush=True))
    found = results(claims, args.budget, args.output)
    for known in found:
        print(f"{known['status']:14} {known['name']}: {known.get('sentence') or known['missing']}")
    print(f"{counts(found)}; {' '.join(map(str, write_page(claims, found, args.output)))}")
