"""Official metrics of labels, rankings and texts, each computed by the library that the field uses, and their 95 %
confidence intervals. N examples, or impressions of a ranking.

Rankings are scored as by MIND's official evaluate.py, means over impressions. An impression's label is a tuple of 0 and
1 (clicked), its answer the tuple of scores. Among equal scores the later candidate ranks higher, as in the official
`argsort(scores)[::-1]`, except for AUC, where each such pair counts a half. The parts of a text metric and of a ranking
are cached by pair, so that the thousand resamples of an interval take seconds.
"""

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np

from megasparse.errors import UserError

CONFIDENCE = 0.95
RESAMPLES = 1000


def bootstrap_interval(
    metric: Callable[[np.ndarray, np.ndarray], float],
    labels: np.ndarray,
    predicted: np.ndarray,
    seed: int,
    step: Callable[[], object] = lambda: None,
) -> tuple[float, float] | None:
    """Return the percentile interval (Efron 1979) of a metric over resampled examples, labels and answers together.

    labels, predicted: (N,). step: called after each of RESAMPLES. Returns None for a single example.
    """
    from scipy.stats import bootstrap

    if len(labels) < 2:
        return None

    def statistic(labels: np.ndarray, predicted: np.ndarray) -> float:
        step()
        return metric(labels, predicted)

    interval = bootstrap(
        (labels, predicted), statistic, paired=True, vectorized=False, method="percentile", n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE, rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return float(interval.low), float(interval.high)


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return Student's t interval of the mean of two or more independent runs' values."""
    from scipy.stats import t

    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * deviation / len(values) ** 0.5
    return mean - half, mean + half


cached_ranking = lru_cache(1 << 19)
"""Decorator that caches the metrics of more impressions than MIND's validation set has."""


def _mean(labels: np.ndarray, predicted: np.ndarray, metric: Callable[..., float]) -> float:
    """Return the mean over impressions of the metric of one."""
    return statistics.fmean(map(metric, labels, predicted))


def ranking(scores: Sequence[float]) -> np.ndarray:
    """Return the candidates' indices, (C,) int64, the one of highest score first."""
    return np.argsort(np.asarray(scores), kind="stable")[::-1]


@cached_ranking
def _auc(clicked: tuple[int, ...], scores: tuple[float, ...]) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(clicked, scores))


@cached_ranking
def _mrr(clicked: tuple[int, ...], scores: tuple[float, ...]) -> float:
    """Σ y_i/rank_i ÷ Σ y_i."""
    hits = np.asarray(clicked)[ranking(scores)]
    return float((hits / np.arange(1, len(hits) + 1)).sum() / hits.sum())


@cached_ranking
def _ndcg(clicked: tuple[int, ...], scores: tuple[float, ...], k: int) -> float:
    """Compute nDCG by the order of the ranking, which has no ties for scikit-learn to average over."""
    from sklearn.metrics import ndcg_score

    order = np.empty(len(scores))
    order[ranking(scores)] = np.arange(len(scores), 0, -1)
    return float(ndcg_score([clicked], [order], k=k))


CACHED_PAIRS = 1 << 17
"""Number of pairs of texts whose statistics are cached at most."""
BLEUS: dict[str, dict[str, Any]] = {
    "bleu": {},
    "bleu_intl": {"tokenize": "intl"},
    "bleu_intl_uncased": {"tokenize": "intl", "lowercase": True},
}
"""Settings of sacrebleu's BLEU by metric: of plain text that sacrebleu tokenises itself; by the tokenizer "intl", which
knows Unicode's punctuation and symbols, as Reformer's Table 4 has it; of such texts in lower case."""
ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
"""Words, pairs of words, the longest common subsequence, the union of those of sentences (CNN/DailyMail: ROUGE-L)."""


def _corpus_score(labels: np.ndarray, predicted: np.ndarray, name: str) -> float:
    """Corpus BLEU (Papineni et al. 2002, Post 2018) or chrF (F2 of character n-grams to 6, Popović 2015), 0 to 100."""
    sums = np.array([_counts(name, *pair) for pair in zip(labels, predicted, strict=True)]).sum(0).tolist()
    return float(_scorer(name)._compute_score_from_stats(sums).score)


def _mean_rouge(labels: np.ndarray, predicted: np.ndarray, name: str) -> float:
    """Mean over examples of the F1 of words, stemmed by Porter's rules (Lin 2004), 0 to 1. rouge-score knows the
    letters a to z and digits alone: it is a measure of English.
    """
    return float(np.mean([_rouge(label, answer)[name] for label, answer in zip(labels, predicted, strict=True)]))


def signature(name: str) -> str | None:
    """Return the settings and version that a library reports with its metric; None for metrics without any."""
    if name == "chrf" or name in BLEUS:
        scorer = _scorer(name)
        scorer.corpus_score(["a"], [["a"]])
        return str(scorer.get_signature())
    if name in ROUGE:
        from importlib.metadata import version

        return f"{name}|f1|stemmer:porter|mean|version:{version('rouge-score')}"
    return None


@cache
def _scorer(name: str) -> Any:
    if name in ROUGE:
        from rouge_score.rouge_scorer import RougeScorer

        return RougeScorer(ROUGE, use_stemmer=True)
    from sacrebleu.metrics import BLEU, CHRF

    return CHRF() if name == "chrf" else BLEU(**BLEUS[name])


@lru_cache(maxsize=CACHED_PAIRS)
def _counts(name: str, reference: str, hypothesis: str) -> tuple[int, ...]:
    """Lengths and n-grams of a pair, whose sums decide the score. sacrebleu has no public name for them; those that it
    has are what its own resampling takes.
    """
    return tuple(_scorer(name)._extract_corpus_statistics([hypothesis], [[reference]])[0])


@lru_cache(maxsize=CACHED_PAIRS)
def _rouge(reference: str, hypothesis: str) -> dict[str, float]:
    """F1 of each of ROUGE."""
    scores = _scorer(ROUGE[0]).score(reference, hypothesis)
    return {name: scores[name].fmeasure for name in ROUGE}


SKLEARN: dict[str, tuple[str, dict[str, Any]]] = {
    "accuracy": ("accuracy_score", {}),
    "f1": ("f1_score", {"zero_division": 0.0}),
    "macro_f1": ("f1_score", {"average": "macro", "zero_division": 0.0}),
    "matthews": ("matthews_corrcoef", {}),
    "mse": ("mean_squared_error", {}),
    "mae": ("mean_absolute_error", {}),
}
"""Functions of scikit-learn and their settings by metric. f1 is that of class 1, as GLUE has it for MRPC and QQP;
macro_f1 the mean of the classes that occur among labels or predictions; Matthews' correlation is CoLA's metric."""
CORRELATIONS = ("matthews", "pearson", "spearman")
LOWER_IS_BETTER = ("mse", "mae")
"""Metrics for which lower is better; for all others higher is. They take all numbers of all examples."""


def _of_labels(labels: np.ndarray, predicted: np.ndarray, name: str) -> float:
    from scipy import stats
    from sklearn import metrics

    if name in CORRELATIONS and not (len(labels) > 1 and np.ptp(labels) > 0 and np.ptp(predicted) > 0):
        return 0.0
    if name in LOWER_IS_BETTER:
        labels, predicted = (np.concatenate([*map(np.ravel, values)]) for values in (labels, predicted))
    if name in SKLEARN:
        function, settings = SKLEARN[name]
        return float(getattr(metrics, function)(labels, predicted, **settings))
    return float(getattr(stats, f"{name}r")(labels, predicted).statistic)


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    **{name: partial(_of_labels, name=name) for name in (*SKLEARN, "pearson", "spearman")},
    **{name: partial(_corpus_score, name=name) for name in (*BLEUS, "chrf")},
    **{name: partial(_mean_rouge, name=name) for name in ROUGE},
    "auc": partial(_mean, metric=_auc),
    "mrr": partial(_mean, metric=_mrr),
    "ndcg5": partial(_mean, metric=partial(_ndcg, k=5)),
    "ndcg10": partial(_mean, metric=partial(_ndcg, k=10)),
}
"""(labels (N,), answers (N,)) -> the metric: class numbers, numbers, or objects of another form, of these texts. A
correlation with a constant, which is not defined, is 0. BLEU and chrF go from 0 to 100, as everyone gives them, ROUGE
from 0 to 1."""


def require_metrics(names: Sequence[str]) -> None:
    """Raise UserError if a library that computes these metrics is not installed."""
    for name in names:
        texts = "rouge_score" if name in ROUGE else "sacrebleu" if name == "chrf" or name in BLEUS else "sklearn"
        for library in (texts, "scipy"):
            if importlib.util.find_spec(library) is None:
                hint = 'Install what fine-tuning needs: pip install "megasparse[tasks]"'
                raise UserError(f"{library}: is not installed, and computes {name}. {hint}")
