"""Metrics of rankings as MIND's official evaluate.py has them, means over impressions. N impressions.

An impression's label says of each candidate whether it was clicked (tuple of 0 and 1, both of which occur), its answer
is their scores (tuple). Among equal scores the candidate that stands later ranks higher, as in the official
`argsort(scores)[::-1]`, but for AUC, where each such pair counts a half. Results are kept, as intervals over
impressions drawn anew ask for the same ones a thousand times.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

KEPT = 1 << 19
"""Number of impressions whose metrics are cached: more than MIND's validation set has."""


def auc(labels: np.ndarray, predicted: np.ndarray) -> float:
    return _mean(_auc, labels, predicted)


def mrr(labels: np.ndarray, predicted: np.ndarray) -> float:
    return _mean(_mrr, labels, predicted)


def ndcg5(labels: np.ndarray, predicted: np.ndarray) -> float:
    return _mean(_ndcg5, labels, predicted)


def ndcg10(labels: np.ndarray, predicted: np.ndarray) -> float:
    return _mean(_ndcg10, labels, predicted)


def ranking(scores: Sequence[float]) -> np.ndarray:
    """(C,) int64: the candidates' indices, the one of highest score first."""
    return np.argsort(np.asarray(scores), kind="stable")[::-1]


@lru_cache(KEPT)
def _auc(clicked: tuple[int, ...], scores: tuple[float, ...]) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(clicked, scores))


@lru_cache(KEPT)
def _mrr(clicked: tuple[int, ...], scores: tuple[float, ...]) -> float:
    """Σ y_i/rank_i ÷ Σ y_i."""
    hits = np.asarray(clicked)[ranking(scores)]
    return float((hits / np.arange(1, len(hits) + 1)).sum() / hits.sum())


@lru_cache(KEPT)
def _ndcg5(clicked: tuple[int, ...], scores: tuple[float, ...]) -> float:
    return _ndcg(clicked, scores, 5)


@lru_cache(KEPT)
def _ndcg10(clicked: tuple[int, ...], scores: tuple[float, ...]) -> float:
    return _ndcg(clicked, scores, 10)


def _ndcg(clicked: tuple[int, ...], scores: tuple[float, ...], k: int) -> float:
    """Compute nDCG by the order of the ranking, which has no ties for scikit-learn to average over."""
    from sklearn.metrics import ndcg_score

    order = np.empty(len(scores))
    order[ranking(scores)] = np.arange(len(scores), 0, -1)
    return float(ndcg_score([clicked], [order], k=k))


def _mean(each: Callable[[Any, Any], float], labels: np.ndarray, predicted: np.ndarray) -> float:
    return statistics.fmean(each(clicked, scores) for clicked, scores in zip(labels, predicted, strict=True))
