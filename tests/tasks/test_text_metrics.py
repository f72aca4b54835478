"""Metrics of texts against the libraries' own results of the same strings, and against their definitions."""

import random
from importlib.metadata import version

import numpy as np
import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

from megasparse.tasks.form import column
from megasparse.tasks.metrics import METRICS, bootstrap_interval, signature

LABELS = [
    "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt.",
    'Ein Boston Terrier läuft über "saftig-grünes" Gras.',
    "the cats were running in the garden\nit is raining again today",
    "Leute Reparieren das Dach eines Hauses.",
    "Five people wearing winter jackets stand in the snow .",
]
PREDICTED = [
    "Ein Mann mit orangem Hut starrt etwas an.",
    "Ein Terrier läuft über saftig grünes Gras vor einem weißen Zaun.",
    "it rained again today\nthe cat runs in the garden",
    "",
    "Five people wearing winter jackets stand in the snow .",
]
ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def value(name, labels=LABELS, predicted=PREDICTED):
    return METRICS[name](column(labels), column(predicted))


def test_bleu_and_chrf_are_sacrebleus_of_the_corpus():
    assert value("bleu") == pytest.approx(sacrebleu.corpus_bleu(PREDICTED, [LABELS]).score, abs=1e-9)
    assert value("chrf") == pytest.approx(sacrebleu.corpus_chrf(PREDICTED, [LABELS]).score, abs=1e-9)
    assert 1 < value("bleu") < 100 and 1 < value("chrf") < 100


def test_reformers_bleus_are_sacrebleus_by_another_tokenizer_and_uncased():
    labels, predicted = ["Preis: 5€–6€ (ca.) Für ALLE da"], ["Preis: 5€–6€ (ca.) für alle da"]
    found = {name: value(name, labels, predicted) for name in ("bleu", "bleu_intl", "bleu_intl_uncased")}
    intl = [
        sacrebleu.corpus_bleu(predicted, [labels], tokenize="intl", lowercase=lowercase).score
        for lowercase in (False, True)
    ]
    assert found["bleu_intl"] == pytest.approx(intl[0]) and found["bleu_intl_uncased"] == pytest.approx(intl[1])
    assert found["bleu"] < found["bleu_intl"] < found["bleu_intl_uncased"] == pytest.approx(100)
    assert "case:lc|eff:no|tok:intl" in signature("bleu_intl_uncased")


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_of_any_choice_of_pairs_too(name):
    drawn = random.Random(0)
    for number in (1, 2, 3, 8):
        chosen = drawn.choices(range(5), k=number)
        labels, predicted = [LABELS[i] for i in chosen], [PREDICTED[i] for i in chosen]
        expected = {"bleu": sacrebleu.corpus_bleu, "chrf": sacrebleu.corpus_chrf}[name](predicted, [labels]).score
        assert value(name, labels, predicted) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ROUGE)
def test_rouge_is_the_mean_of_rouge_scores_f1(name):
    scorer = RougeScorer([name], use_stemmer=True)
    expected = [
        scorer.score(label, predicted)[name].fmeasure for label, predicted in zip(LABELS, PREDICTED, strict=True)
    ]
    assert value(name) == pytest.approx(sum(expected) / 5, abs=1e-12)


def test_signatures_are_sacrebleus_own():
    scorer = sacrebleu.BLEU()
    scorer.corpus_score(PREDICTED, [LABELS])
    assert signature("bleu") == str(scorer.get_signature())
    assert signature("bleu") == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{version('sacrebleu')}"
    other = sacrebleu.CHRF()
    other.corpus_score(PREDICTED, [LABELS])
    assert signature("chrf") == str(other.get_signature())
    assert all(version("rouge-score") in signature(name) for name in ROUGE)
    assert signature("accuracy") is None


@pytest.mark.parametrize("name", ["bleu", pytest.param("rouge2", marks=pytest.mark.slow)])
def test_an_interval_of_texts_is_that_of_the_library(name):
    """The same draws, scored by the library from the strings."""
    labels, predicted = column(LABELS * 2), column(PREDICTED * 2)
    scorer = RougeScorer([name], use_stemmer=True) if name != "bleu" else None

    def direct(labels, predicted):
        if scorer is None:
            return sacrebleu.corpus_bleu(list(predicted), [list(labels)]).score
        return float(np.mean([scorer.score(*pair)[name].fmeasure for pair in zip(labels, predicted, strict=True)]))

    assert bootstrap_interval(METRICS[name], labels, predicted, 3) == pytest.approx(
        bootstrap_interval(direct, labels, predicted, 3)
    )
