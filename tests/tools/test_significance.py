"""One-tailed tests between fine-tuned runs, against cases worked by hand."""

import json
import math
import random
import statistics

import pytest

from tests.helpers.commands import refused, run
from tools import significance


def result(path, accuracies, examples=100):
    runs = [{"seed": seed, "metrics": {"accuracy": value}} for seed, value in accuracies.items()]
    path.write_text(json.dumps({"runs": runs, "examples": examples}))
    return path


def test_p_values_are_those_worked_by_hand():
    # 140 and 120 of 200: pooled .65, error √(.65·.35·2/200) = .047697, z = .1/.047697 = 2.09657, upper tail .01801
    # differences .1, .05, .15: mean .1, deviation .05, t = .1/(.05/√3) = 3.4641 of 2 degrees: .0371
    first, second = {0: 0.8, 1: 0.6, 2: 0.7}, {0: 0.7, 1: 0.55, 2: 0.55}
    values = significance.p_values({0: 0.7, 1: 0.7}, {0: 0.6, 1: 0.6}, 100)
    assert values == {"proportions": pytest.approx(0.01801, abs=1e-5), "paired": None}
    assert significance.p_values(first, second, 100)["paired"] == pytest.approx(0.0371, abs=1e-4)
    assert significance.p_values(second, first, 100)["proportions"] > 0.5


def area(lowest, power, parts=10_000):
    """Integrate a power of the cosine from `lowest` to π/2."""
    width = (math.pi / 2 - lowest) / parts
    return width * sum(math.cos(lowest + (part + 0.5) * width) ** power for part in range(parts))


@pytest.mark.slow
def test_paired_p_values_are_areas_under_students_density():
    """With t = √n·tan(x) for n degrees of freedom, the density of x is proportional to cos(x) to the power n - 1."""
    draw = random.Random(0)
    for runs in range(2, 9):
        first, second = ({seed: draw.random() for seed in range(runs)} for _ in range(2))
        differences = [first[seed] - second[seed] for seed in range(runs)]
        t = statistics.mean(differences) / statistics.stdev(differences) * math.sqrt(runs)
        tail, whole = area(math.atan(t / math.sqrt(runs - 1)), runs - 2), area(-math.pi / 2, runs - 2)
        assert significance.p_values(first, second, 100)["paired"] == pytest.approx(tail / whole, abs=1e-6)


def test_results_are_compared_and_others_are_one_line(tmp_path, capsys):
    files = [result(tmp_path / f"{n}.json", {0: value, 1: value + n / 100}) for n, value in ((1, 0.9), (2, 0.8))]
    run(significance, *files)
    assert "proportions: p = " in capsys.readouterr().out
    other = result(tmp_path / "other.json", {0: 0.5}, examples=7)
    assert "7 examples, not 100" in refused(capsys, significance, files[0], other)
    (tmp_path / "no.json").write_text("[1]")
    assert "not a result with accuracies" in refused(capsys, significance, files[0], tmp_path / "no.json")
