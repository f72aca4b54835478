"""Official metrics of labels, rankings and texts, each computed by the field's standard library, and their 95 %
confidence intervals. N examples, or impressions of a ranking.

Rankings are scored as by MIND's official evaluate.py, as means over impressions. An impression's label is a tuple of 0
and 1 (clicked), its answer the tuple of scores. Among equal scores the later candidate ranks higher; AUC gives each
such pair half a point. Statistics of texts and rankings are cached, so that resampling takes seconds.
"""

import importlib.util
import re
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
) -> tuple[float | None, float | None]:
    """Return the percentile interval (Efron 1979) of a metric over resampled pairs of label and answer, (N,) each;
    (None, None) for a single example. step: called after each of RESAMPLES.
    """
    from scipy.stats import bootstrap

    if len(labels) < 2:
        return None, None

    def statistic(labels: np.ndarray, predicted: np.ndarray) -> float:
        step()
        return metric(labels, predicted)

    interval = bootstrap(
        (labels, predicted), statistic, paired=True, vectorized=False, method="percentile", n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE, rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return float(interval.low), float(interval.high)


def t_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return Student's t interval of the mean of two or more independent values."""
    from scipy.stats import t

    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * deviation / len(values) ** 0.5
    return mean - half, mean + half


cached = lru_cache(1 << 19)  # decorator with a cache that fits the impressions of MIND's validation set


@cached
def _of_impression(clicked: tuple[int, ...], scores: tuple[float, ...], name: str) -> float:
    """Compute AUC; the reciprocal rank, Σ y_i/rank_i ÷ Σ y_i; or nDCG from ranks, so without ties."""
    from sklearn.metrics import ndcg_score, roc_auc_score

    if name == "auc":
        return float(roc_auc_score(clicked, scores))
    order, ranks = np.argsort(np.asarray(scores), kind="stable")[::-1], np.arange(1, len(scores) + 1)
    hits = np.asarray(clicked)[order]
    if name == "mrr":
        return float((hits / ranks).sum() / hits.sum())
    return float(ndcg_score([hits], [-ranks], k=int(name.removeprefix("ndcg"))))


SACREBLEU: dict[str, tuple[str, dict[str, Any]]] = {
    "bleu": ("BLEU", {}),
    "bleu_tokenized": ("BLEU", {"tokenize": "none"}),
    "bleu_intl": ("BLEU", {"tokenize": "intl"}),
    "bleu_intl_uncased": ("BLEU", {"tokenize": "intl", "lowercase": True}),
    "chrf": ("CHRF", {}),
}
"""Classes of sacrebleu and their settings by metric. The tokenizer "intl" handles Unicode punctuation and symbols, as
in Reformer's Table 4. `bleu_tokenized` is its first column, as multi-bleu.perl: texts tokenized by 13a, whose compounds
are split at hyphens (Vaswani et al. 2017).
"""
ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
"""Words, word pairs, longest common subsequence, union of subsequences over sentences (CNN/DailyMail's ROUGE-L)."""


def signature(name: str) -> str | None:
    """Return the settings and version that a metric's library reports; None for other metrics."""
    if name in SACREBLEU:
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
    from sacrebleu import metrics

    kind, settings = SACREBLEU[name]
    return getattr(metrics, kind)(**settings)


@cached
def _of_texts(reference: str, hypothesis: str, name: str) -> Any:
    """Return the F1 of each of ROUGE, or the statistics whose sums determine a score, as in sacrebleu's resampling."""
    if name in ROUGE:
        scores = _scorer(ROUGE[0]).score(reference, hypothesis)
        return {name: scores[name].fmeasure for name in ROUGE}
    if name == "bleu_tokenized":
        reference, hypothesis = map(_split_compounds, (reference, hypothesis))
    return tuple(_scorer(name)._extract_corpus_statistics([hypothesis], [[reference]])[0])


def _split_compounds(text: str) -> str:
    return re.sub(r"(\S)-(?=\S)", r"\1 ##AT##-##AT## ", _scorer("bleu").tokenizer(text))


SKLEARN: dict[str, tuple[str, dict[str, Any]]] = {
    "accuracy": ("accuracy_score", {}),
    "f1": ("f1_score", {"zero_division": 0.0}),
    "macro_f1": ("f1_score", {"average": "macro", "zero_division": 0.0}),
    "matthews": ("matthews_corrcoef", {}),
    "mse": ("mean_squared_error", {}),
    "mae": ("mean_absolute_error", {}),
}
"""Functions of scikit-learn and their settings by metric. f1 is for class 1, as in GLUE's MRPC and QQP; macro_f1 is the
mean over classes that occur among labels or predictions.
"""
CORRELATIONS = ("matthews", "pearson", "spearman")
LOWER_IS_BETTER = ("mse", "mae")  # computed over all numbers of all examples
RANKING = ("auc", "mrr", "ndcg5", "ndcg10")


def _score(labels: np.ndarray, predicted: np.ndarray, name: str) -> float:
    pairs = zip(labels, predicted, strict=True)
    if name in RANKING:
        return statistics.fmean(_of_impression(*pair, name) for pair in pairs)
    if name in ROUGE:
        return float(np.mean([_of_texts(*pair, ROUGE[0])[name] for pair in pairs]))
    if name in SACREBLEU:
        sums = np.array([_of_texts(*pair, name) for pair in pairs]).sum(0).tolist()
        return float(_scorer(name)._compute_score_from_stats(sums).score)
    if name in CORRELATIONS and not (len(labels) > 1 and np.ptp(labels) > 0 and np.ptp(predicted) > 0):
        return 0.0
    if name in LOWER_IS_BETTER:
        labels, predicted = (np.concatenate([*map(np.ravel, values)]) for values in (labels, predicted))
    if name in SKLEARN:
        from sklearn import metrics

        function, settings = SKLEARN[name]
        return float(getattr(metrics, function)(labels, predicted, **settings))
    from scipy import stats

    return float(getattr(stats, f"{name}r")(labels, predicted).statistic)


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    name: partial(_score, name=name) for name in (*SKLEARN, "pearson", "spearman", *SACREBLEU, *ROUGE, *RANKING)
}
"""Metric of (labels (N,), answers (N,)): class numbers, numbers, or objects of another form, such as texts. A
correlation with a constant returns 0. BLEU (Papineni et al. 2002, Post 2018) and chrF (Popović 2015) range from 0 to
100; ROUGE is the mean F1 over examples (Lin 2004), from 0 to 1, of stemmed words.
"""


def require_metrics(names: Sequence[str]) -> None:
    for name in names:
        texts = "rouge_score" if name in ROUGE else "sacrebleu" if name in SACREBLEU else "sklearn"
        for library in (texts, "scipy"):
            if importlib.util.find_spec(library) is None:
                hint = 'Install the packages for fine-tuning: pip install -e ".[tasks]"'
                raise UserError(f"{library}: is not installed, but is needed for {name}. {hint}")
