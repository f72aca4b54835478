"""Metrics of texts: BLEU and chrF by sacrebleu, ROUGE by rouge-score. N examples.

What one pair of texts adds is computed once and kept, so that the thousand resamples of an interval take seconds.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np

KEPT = 1 << 17
"""Number of pairs of texts whose statistics are cached at most."""
BLEUS: dict[str, dict[str, Any]] = {
    "bleu": {},
    "bleu_intl": {"tokenize": "intl"},
    "bleu_intl_uncased": {"tokenize": "intl", "lowercase": True},
}
"""Settings of sacrebleu's BLEU by metric: of plain text that sacrebleu tokenises itself; by the tokenizer "intl", which
knows Unicode's punctuation and symbols, as Reformer's Table 4 has it; of such texts in lower case."""
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
"""Words, pairs of words, the longest common subsequence, the union of those of sentences (CNN/DailyMail: ROUGE-L)."""


def _bleu(labels: np.ndarray, predicted: np.ndarray, name: str) -> float:
    """Corpus BLEU, 0 to 100 (Papineni et al. 2002, Post 2018)."""
    from sacrebleu.metrics import BLEU

    sums = _summed(partial(_bleu_counts, name), labels, predicted)
    orders = (len(sums) - 2) // 2
    correct, total = sums[2 : 2 + orders], sums[2 + orders :]
    return float(BLEU.compute_bleu(correct, total, sums[0], sums[1], smooth_method="exp").score)


def _chrf(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Corpus chrF, 0 to 100: F2 of character n-grams to 6 (Popović 2015)."""
    return float(_scorer("chrf")._compute_score_from_stats(_summed(_chrf_counts, labels, predicted)).score)


def _mean_rouge(labels: np.ndarray, predicted: np.ndarray, name: str) -> float:
    """Mean over examples of the F1 of words, stemmed by Porter's rules (Lin 2004), 0 to 1. rouge-score knows the
    letters a to z and digits alone: it is a measure of English.
    """
    return float(np.mean([_rouge(label, own)[name] for label, own in zip(labels, predicted, strict=True)]))


TEXT_METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    **{name: partial(_bleu, name=name) for name in BLEUS},
    "chrf": _chrf,
    **{name: partial(_mean_rouge, name=name) for name in ROUGE_TYPES},
}


def signature(name: str) -> str | None:
    """The settings and version that a library wants reported beside its metric; None for metrics without any."""
    if name == "chrf" or name in BLEUS:
        scorer = _scorer(name)
        scorer.corpus_score(["a"], [["a"]])
        return str(scorer.get_signature())
    if name in ROUGE_TYPES:
        from importlib.metadata import version

        return f"{name}|f1|stemmer:porter|mean|version:{version('rouge-score')}"
    return None


@cache
def _scorer(name: str, sentence: bool = False) -> Any:
    from sacrebleu.metrics import BLEU, CHRF

    return CHRF() if name == "chrf" else BLEU(effective_order=sentence, **BLEUS[name])


@lru_cache(maxsize=KEPT)
def _bleu_counts(name: str, reference: str, hypothesis: str) -> tuple[int, ...]:
    """Lengths of hypothesis and reference, n-grams that are right, n-grams, of each order."""
    found = _scorer(name, sentence=True).sentence_score(hypothesis, [reference])
    return found.sys_len, found.ref_len, *found.counts, *found.totals


@lru_cache(maxsize=KEPT)
def _chrf_counts(reference: str, hypothesis: str) -> tuple[int, ...]:
    """Count n-grams of the hypothesis, of the reference, and those of both, of each order. sacrebleu has no public name
    for them; those that it has are what its own resampling takes.
    """
    return tuple(_scorer("chrf")._extract_corpus_statistics([hypothesis], [[reference]])[0])


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(ROUGE_TYPES, use_stemmer=True)


@lru_cache(maxsize=KEPT)
def _rouge(reference: str, hypothesis: str) -> dict[str, float]:
    """F1 of each of ROUGE_TYPES."""
    found = _rouge_scorer().score(reference, hypothesis)
    return {name: found[name].fmeasure for name in ROUGE_TYPES}


def _summed(counts: Callable[[str, str], tuple[int, ...]], labels: np.ndarray, predicted: np.ndarray) -> list[int]:
    return np.array(list(map(counts, labels, predicted))).sum(0).tolist()
