"""95 % confidence intervals of metrics. N examples."""

import statistics
from collections.abc import Callable, Sequence

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 1000


def bootstrap_interval(
    metric: Callable[[np.ndarray, np.ndarray], float],
    labels: np.ndarray,
    predicted: Sequence[np.ndarray],
    seed: int,
    step: Callable[[], object] = lambda: None,
) -> tuple[float, float] | None:
    """The percentile interval (Efron 1979) of a metric over resampled examples, labels and answers together; None where
    there is a single example.

    labels: (N,). predicted: (N,) for each pass over the examples; the interval is that of the metric's mean over
    passes. step: called after each of RESAMPLES.
    """
    from scipy.stats import bootstrap

    if len(labels) < 2:
        return None

    def statistic(labels: np.ndarray, *predicted: np.ndarray) -> float:
        step()
        return statistics.fmean(metric(labels, each) for each in predicted)

    found = bootstrap(
        (labels, *predicted), statistic, paired=True, vectorized=False, method="percentile", n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE, rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's t interval of the mean of two or more independent runs' values."""
    from scipy.stats import t

    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * deviation / len(values) ** 0.5
    return mean - half, mean + half
