"""Metrics of rankings as MIND's official evaluate.py has them, means over impressions. N impressions.

An impression's label says of each candidate whether it was clicked (tuple of 0 and 1, both of which occur), its answer
is their scores (tuple). Among equal scores the candidate that stands later ranks higher, as in the official
`argsort(scores)[::-1]`, but for AUC, where each such pair counts a half. Results are kept, as intervals over
impressions drawn anew ask for the same ones a thousand times.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np

KEPT = 1 << 19
"""Number of impressions whose metrics are cached: more than MIND's validation set has."""


Each = Callable[[tuple[int, ...], tuple[float, ...]], float]


def _mean(each: Each) -> Callable[[np.ndarray, np.ndarray], float]:
    """The mean over impressions, (labels, answers) -> the metric, of the metric of one."""
    kept = lru_cache(KEPT)(each)

    def metric(labels: np.ndarray, predicted: np.ndarray) -> float:
        return statistics.fmean(kept(*one) for one in zip(labels, predicted, strict=True))

    return metric


def ranking(scores: Sequence[float]) -> np.ndarray:
    """(C,) int64: the candidates' indices, the one of highest score first."""
    return np.argsort(np.asarray(scores), kind="stable")[::-1]


def _auc(clicked: tuple[int, ...], scores: tuple[float, ...]) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(clicked, scores))


def _mrr(clicked: tuple[int, ...], scores: tuple[float, ...]) -> float:
    """Σ y_i/rank_i ÷ Σ y_i."""
    hits = np.asarray(clicked)[ranking(scores)]
    return float((hits / np.arange(1, len(hits) + 1)).sum() / hits.sum())


def _ndcg(clicked: tuple[int, ...], scores: tuple[float, ...], k: int) -> float:
    """Compute nDCG by the order of the ranking, which has no ties for scikit-learn to average over."""
    from sklearn.metrics import ndcg_score

    order = np.empty(len(scores))
    order[ranking(scores)] = np.arange(len(scores), 0, -1)
    return float(ndcg_score([clicked], [order], k=k))


RANKING_METRICS = {
    "auc": _mean(_auc),
    "mrr": _mean(_mrr),
    "ndcg5": _mean(partial(_ndcg, k=5)),
    "ndcg10": _mean(partial(_ndcg, k=10)),
}
