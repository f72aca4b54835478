"""Official metrics, each computed by the library that the field computes it with. N examples."""

from collections.abc import Callable

import numpy as np

from megasparse.errors import UserError
from megasparse.tasks.ranking_metrics import RANKING_METRICS
from megasparse.tasks.text_metrics import TEXT_METRICS


def accuracy(labels: np.ndarray, predicted: np.ndarray) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predicted))


def f1(labels: np.ndarray, predicted: np.ndarray) -> float:
    """F1 of class 1, as GLUE has it for MRPC and QQP."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predicted, zero_division=0.0))


def macro_f1(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Mean F1 of the classes that occur among labels or predictions."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predicted, average="macro", zero_division=0.0))


def matthews(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Matthews' correlation, CoLA's metric."""
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predicted)) if _vary(labels, predicted) else 0.0


def pearson(labels: np.ndarray, predicted: np.ndarray) -> float:
    from scipy.stats import pearsonr

    return float(pearsonr(labels, predicted).statistic) if _vary(labels, predicted) else 0.0


def spearman(labels: np.ndarray, predicted: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(labels, predicted).statistic) if _vary(labels, predicted) else 0.0


def mse(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Mean squared error of all numbers of all examples."""
    from sklearn.metrics import mean_squared_error

    return float(mean_squared_error(_numbers(labels), _numbers(predicted)))


def mae(labels: np.ndarray, predicted: np.ndarray) -> float:
    from sklearn.metrics import mean_absolute_error

    return float(mean_absolute_error(_numbers(labels), _numbers(predicted)))


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    **{each.__name__: each for each in (accuracy, f1, macro_f1, matthews, pearson, spearman, mse, mae)},
    **TEXT_METRICS,
    **RANKING_METRICS,
}
"""(labels (N,), answers (N,)) -> the metric: class numbers, numbers, or objects of another form, of these texts. A
correlation with a constant, which is not defined, is 0. BLEU and chrF go from 0 to 100, as everyone gives them, ROUGE
from 0 to 1."""
LOWER_IS_BETTER: tuple[str, ...] = ("mse", "mae")
"""Metrics for which lower is better; for all others higher is."""


def require_metrics() -> None:
    """Raise UserError where the libraries are not installed."""
    try:
        import rouge_score  # noqa: F401
        import sacrebleu  # noqa: F401
        import scipy  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        hint = 'Install what fine-tuning needs: pip install "megasparse[tasks]"'
        raise UserError(f"{error.name}: is not installed, and computes the official metrics. {hint}") from None


def _vary(labels: np.ndarray, predicted: np.ndarray) -> bool:
    return len(labels) > 1 and bool(np.ptp(labels) > 0 and np.ptp(predicted) > 0)


def _numbers(values: np.ndarray) -> np.ndarray:
    """All numbers in one dimension, from numbers or arrays of them."""
    return np.concatenate([np.ravel(value) for value in values])
