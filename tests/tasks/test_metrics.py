"""Every metric against its definition and numbers worked by hand."""

import builtins
import math

import numpy as np
import pytest

from megasparse.errors import UserError
from megasparse.tasks.metrics import METRICS, require_metrics

LABELS = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
PREDICTED = np.array([1, 1, 1, 0, 1, 0, 0, 0, 0, 0])
"""3 true positives, 1 false one, 5 true negatives, 1 false one."""


def test_f1_is_that_of_class_1():
    assert METRICS["f1"](1 - LABELS, 1 - PREDICTED) == pytest.approx(10 / 12)


def test_macro_f1_is_the_mean_over_the_classes_that_occur():
    labels, predicted = np.array([0, 0, 1, 1, 3]), np.array([0, 1, 1, 1, 0])
    # class 0: 1 right, 1 missed, 1 wrongly predicted; class 1: 2 right, 1 wrong; class 3: never predicted; 2: nowhere
    assert METRICS["macro_f1"](labels, predicted) == pytest.approx((2 / 4 + 4 / 5 + 0) / 3)


def test_matthews_of_several_classes():
    """Gorodkin's generalisation, a correlation of the one-hot matrices."""
    generator = np.random.default_rng(0)
    labels, predicted = generator.integers(0, 4, 200), generator.integers(0, 4, 200)
    predicted[::2] = labels[::2]
    x, y = np.eye(4)[labels], np.eye(4)[predicted]
    x, y = x - x.mean(0), y - y.mean(0)
    expected = (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())
    assert METRICS["matthews"](labels, predicted) == pytest.approx(expected)


def test_pearson():
    labels, predicted = np.array([1.0, 2.0, 3.0, 6.0]), np.array([2.0, 1.0, 4.0, 5.0])
    # deviations −2 −1 0 3 and −1 −2 1 2
    assert METRICS["pearson"](labels, predicted) == pytest.approx((2 + 2 + 0 + 6) / math.sqrt(14 * 10))
    assert METRICS["pearson"](labels, -predicted) == pytest.approx(-10 / math.sqrt(140))


def test_spearman_is_the_correlation_of_ranks():
    labels, predicted = np.array([0.1, 7.0, 7.0, 100.0]), np.array([3.0, 1.0, 5.0, 4.0])
    ranks, others = np.array([1, 2.5, 2.5, 4]), np.array([2, 1, 4, 3])  # of equal ones the mean
    expected = np.corrcoef(ranks, others)[0, 1]
    assert METRICS["spearman"](labels, predicted) == pytest.approx(expected)
    assert METRICS["spearman"](labels, np.exp(predicted)) == pytest.approx(expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_a_correlation_with_a_constant_is_0(name):
    values, same = np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.1, 0.1])
    assert METRICS[name](values, same) == METRICS[name](same, values) == METRICS[name](same, same) == 0.0
    assert METRICS[name](values[:1], same[:1]) == 0.0


def test_one_class_alone():
    zeros, ones = np.zeros(4, dtype=int), np.ones(4, dtype=int)
    assert [METRICS[name](zeros, ones) for name in ("accuracy", "f1", "macro_f1", "matthews")] == [0.0] * 4
    assert [METRICS[name](zeros, zeros) for name in ("f1", "matthews")] == [0.0] * 2
    assert METRICS["accuracy"](zeros, zeros) == METRICS["macro_f1"](zeros, zeros) == 1.0


@pytest.mark.parametrize("missing", ["sklearn", "scipy", "sacrebleu", "rouge_score"])
def test_missing_libraries_are_one_clear_line(missing, monkeypatch):
    own = builtins.__import__

    def importing(name: str, *rest: object, **named: object) -> object:
        if name == missing:
            raise ImportError(f"No module named '{missing}'", name=missing)
        return own(name, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(UserError, match=rf'{missing}.*pip install "megasparse\[tasks\]"'):
        require_metrics()
