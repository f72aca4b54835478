"""Test whether one set of fine-tuned runs is better than another, from results of `megasparse evaluate --task --json`.

    megasparse evaluate --task byte_imdb --checkpoint runs/lha_0 runs/lha_1 --source data/aclImdb --json a.json
    megasparse evaluate --task byte_imdb --checkpoint runs/full_0 runs/full_1 --source data/aclImdb --json b.json
    python tools/significance.py a.json b.json

Both tests are one-tailed: the first runs are better. The test of proportions (LHA's Table 3) takes accuracies as shares
of independent examples, pooled over seeds. The paired t-test takes the differences of runs with the same seed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megasparse.errors import DataError, report_user_errors
from megasparse.files import json_object, read_file


def accuracies(path: Path) -> tuple[dict[int, float], int]:
    """Return the accuracy of each seed, and the number of examples."""
    try:
        result = json_object(read_file(path))
        return {run["seed"]: run["metrics"]["accuracy"] for run in result["runs"]}, result["examples"]
    except (KeyError, TypeError, ValueError):
        raise DataError(
            path, "not a result with accuracies", "Write it with megasparse evaluate --task --json"
        ) from None


def p_values(first: dict[int, float], second: dict[int, float], examples: int) -> dict[str, float | None]:
    """Return the one-tailed p-values of both tests; None for a paired test of fewer than two seeds."""
    from scipy import stats

    counts = [len(runs) * examples for runs in (first, second)]
    shares = [sum(runs.values()) / len(runs) for runs in (first, second)]
    pooled = sum(share * count for share, count in zip(shares, counts, strict=True)) / sum(counts)
    error = (pooled * (1 - pooled) * sum(1 / count for count in counts)) ** 0.5
    z = (shares[0] - shares[1]) / error if error else 0.0
    seeds = sorted(first.keys() & second.keys())
    differences = [first[seed] - second[seed] for seed in seeds]
    paired = None
    if len(set(differences)) > 1:
        paired = float(stats.ttest_1samp(differences, 0.0, alternative="greater").pvalue)
    return {"proportions": float(stats.norm.sf(z)), "paired": paired}


@report_user_errors
def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs=2, type=Path, metavar="RESULT", help="JSON file of evaluate --task")
    first_file, second_file = parser.parse_args(words).results
    (first, examples), (second, others) = map(accuracies, (first_file, second_file))
    if examples != others:
        raise DataError(second_file, f"{others:,} examples, not {examples:,}", "Evaluate both on the same split")
    for test, p in p_values(first, second, examples).items():
        print(f"{test}: " + ("needs two seeds with different results" if p is None else f"p = {p:.4g}, one-tailed"))


if __name__ == "__main__":
    main()
