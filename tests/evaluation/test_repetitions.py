"""Distances of repetitions, against their definition; and the command."""

import itertools
import json

import pytest
import torch

from megasparse.cli.main import main
from megasparse.evaluation.repetitions import repetitions
from tests.helpers.models import random_tokens

BOUNDS = [0, 4, 16, 64]


def defined(tokens, n):
    """By looking back from every token."""
    counts = [[0, 0] for _ in BOUNDS[1:]]
    for i in range(n, len(tokens)):
        for back in range(1, i - n + 1):
            if tokens[i - n : i] == tokens[i - back - n : i - back]:
                for row, (low, high) in enumerate(itertools.pairwise(BOUNDS)):
                    if low < back <= high:
                        counts[row][0] += 1
                        counts[row][1] += tokens[i] == tokens[i - back]
                break
    return counts


@pytest.mark.parametrize("n", [1, 2, 3])
def test_counts_are_as_defined(n):
    tokens = random_tokens(1, 200, vocabulary=3)[0]
    found = repetitions(tokens, n, BOUNDS)
    assert found.tolist() == defined(tokens.tolist(), n) and found.sum() > 0


def test_a_sequence_shorter_than_an_ngram_has_none():
    assert repetitions(torch.tensor([1, 2]), 2, BOUNDS).sum() == 0


def test_the_command_finds_what_recall_repeats(tmp_path, capsys):
    main(
        ["prepare-data", "recall", "--length", "3000", "--pairs", "100", "--sequences", "4", "--output", str(tmp_path)]
    )
    main(["repetitions", "--data", str(tmp_path), "--length", "3000", "--window", "30", "--ngrams", "2",
          "--json", str(tmp_path / "found.json")])  # fmt: skip
    rows = json.loads((tmp_path / "found.json").read_text())["2"]
    far = [row for row in rows if row["nearest"] >= 30]
    assert 0.25 < sum(row["share"] * row["right"] for row in far) < 0.34, "the values of keys that came before"
    assert "followed by the same" in capsys.readouterr().out


def test_a_window_as_long_as_the_sequence_is_refused(tmp_path):
    with pytest.raises(SystemExit):
        main(["repetitions", "--data", str(tmp_path), "--length", "100", "--window", "100"])
