"""Confidence intervals against their definitions."""

import numpy as np
import pytest

from megasparse.tasks.metrics import METRICS, bootstrap_interval, t_interval


def drawn(number=200, seed=0):
    """Labels of three classes, and answers that are right for about 7 of 10."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, number)
    return labels, np.where(generator.random(number) < 0.6, labels, generator.integers(0, 3, number))


def by_hand(metric, labels, predicted, resamples=4000):
    """The percentile bootstrap in numpy."""
    generator, values = np.random.default_rng(1234), []
    for _ in range(resamples):
        chosen = generator.choice(len(labels), len(labels))
        values.append(np.mean([metric(labels[chosen], each[chosen]) for each in predicted]))
    return np.percentile(values, [2.5, 97.5])


def accuracy(labels, predicted):
    return float((labels == predicted).mean())


def macro_f1(labels, predicted):
    scores = []
    for each in np.union1d(labels, predicted):
        right = ((labels == each) & (predicted == each)).sum()
        scores.append(2 * right / ((labels == each).sum() + (predicted == each).sum()))
    return float(np.mean(scores))


@pytest.mark.parametrize("metric", [accuracy, macro_f1])
def test_the_bootstrap_interval_is_that_of_its_definition(metric):
    labels, predicted = drawn()
    found = bootstrap_interval(metric, labels, predicted, 0)
    assert found == pytest.approx(by_hand(metric, labels, [predicted]), abs=0.01)  # 4 deviations of a quantile's own
    assert found == bootstrap_interval(metric, labels, predicted, 0)
    assert found != bootstrap_interval(metric, labels, predicted, 1)


def test_students_interval_of_a_case_worked_by_hand():
    # mean 3, deviation √(10/4) = 1.581139; t(0.975; 4) = 2.776445 by the tables; 2.776445·1.581139/√5 = 1.963243
    assert t_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3 - 1.963243, 3 + 1.963243), abs=1e-5)
    # two values a, b: half the difference times t(0.975; 1) = 12.7062
    assert t_interval([0.8, 0.9]) == pytest.approx((0.85 - 12.7062 * 0.05, 0.85 + 12.7062 * 0.05), abs=1e-5)
    assert t_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


def test_a_resample_of_one_class_is_no_matter_for_people(recwarn):
    labels = np.array([0, 0, 0, 1])
    assert bootstrap_interval(METRICS["matthews"], labels, labels, 0) == (0.0, 1.0)  # 0 where it is not defined
    assert not recwarn.list
