"""Metrics and confidence intervals against their definitions, the libraries' own results and numbers worked by hand."""

import importlib.util
import math
from importlib.metadata import version

import numpy as np
import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

from megasparse.errors import UserError
from megasparse.tasks.form import column
from megasparse.tasks.metrics import METRICS, ROUGE, bootstrap_interval, require_metrics, signature, t_interval
from tests.helpers.cases import together


@together(
    ("name", "labels", "predicted", "expected"),
    [
        # of class 1: 5 right, 1 missed, 1 wrongly predicted
        ("f1", [0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 0, 1, 1, 1, 1, 1], 10 / 12),
        # class 0: 1 right, 1 missed, 1 wrongly predicted; class 1: 2 right, 1 wrong; class 3: never predicted
        ("macro_f1", [0, 0, 1, 1, 3], [0, 1, 1, 1, 0], (2 / 4 + 4 / 5 + 0) / 3),
        # deviations −2 −1 0 3 and 1 2 −1 −2
        ("pearson", [1.0, 2.0, 3.0, 6.0], [-2.0, -1.0, -4.0, -5.0], -10 / math.sqrt(140)),
        # ranks, of equal ones the mean
        ("spearman", [0.1, 7.0, 7.0, 100.0], [3.0, 1.0, 5.0, 4.0], np.corrcoef([1, 2.5, 2.5, 4], [2, 1, 4, 3])[0, 1]),
    ],
)
def test_metrics_are_those_worked_by_hand(name, labels, predicted, expected):
    assert METRICS[name](np.array(labels), np.array(predicted)) == pytest.approx(expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_a_correlation_with_a_constant_is_0(name):
    values, same = np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.1, 0.1])
    assert METRICS[name](values, same) == METRICS[name](same, values) == METRICS[name](same, same) == 0.0
    assert METRICS[name](values[:1], same[:1]) == 0.0


def test_metrics_of_a_single_class():
    zeros, ones = np.zeros(4, dtype=int), np.ones(4, dtype=int)
    assert [METRICS[name](zeros, ones) for name in ("accuracy", "f1", "macro_f1", "matthews")] == [0.0] * 4
    assert [METRICS[name](zeros, zeros) for name in ("f1", "matthews")] == [0.0] * 2
    assert METRICS["accuracy"](zeros, zeros) == METRICS["macro_f1"](zeros, zeros) == 1.0


@together(
    ("missing", "needed"),
    [("sklearn", "f1 auc"), ("scipy", "f1 bleu"), ("sacrebleu", "bleu chrf"), ("rouge_score", "rougeL")],
)
def test_a_missing_metric_library_is_one_line(missing, needed, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    for name in needed.split():
        with pytest.raises(UserError, match=rf'{missing}: .*is needed for {name}.*pip install -e "\.\[tasks\]"'):
            require_metrics([name])
    require_metrics(["accuracy", "macro_f1"] if missing in ("sacrebleu", "rouge_score") else [])


def by_hand(metric, labels, predicted, resamples=4000):
    generator = np.random.default_rng(1234)
    draws = (generator.choice(len(labels), len(labels)) for _ in range(resamples))
    return np.percentile([metric(labels[chosen], predicted[chosen]) for chosen in draws], [2.5, 97.5])


def accuracy(labels, predicted):
    return float((labels == predicted).mean())


def test_the_bootstrap_interval_equals_its_definition():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 200)
    predicted = np.where(generator.random(200) < 0.6, labels, generator.integers(0, 3, 200))
    result = bootstrap_interval(accuracy, labels, predicted, 0)
    assert result == pytest.approx(by_hand(accuracy, labels, predicted), abs=0.01)  # 4 deviations of a quantile's own
    assert result == bootstrap_interval(accuracy, labels, predicted, 0)
    assert result != bootstrap_interval(accuracy, labels, predicted, 1)


def test_students_interval_of_a_case_worked_by_hand():
    # mean 3, deviation √(10/4) = 1.581139; t(0.975; 4) = 2.776445 by the tables; 2.776445·1.581139/√5 = 1.963243
    assert t_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3 - 1.963243, 3 + 1.963243), abs=1e-5)
    # two values a, b: half the difference times t(0.975; 1) = 12.7062
    assert t_interval([0.8, 0.9]) == pytest.approx((0.85 - 12.7062 * 0.05, 0.85 + 12.7062 * 0.05), abs=1e-5)
    assert t_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


def test_a_resample_with_one_class_prints_no_warning(recwarn):
    labels = np.array([0, 0, 0, 1])
    assert bootstrap_interval(METRICS["matthews"], labels, labels, 0) == (0.0, 1.0)  # 0 where it is not defined
    assert not recwarn.list


TEXTS = [
    "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt.",
    'Ein Boston Terrier läuft über "saftig-grünes" Gras.',
    "the cats were running in the garden\nit is raining again today",
    "Leute Reparieren das Dach eines Hauses.",
    "Five people wearing winter jackets stand in the snow .",
]
PREDICTED_TEXTS = [
    "Ein Mann mit orangem Hut starrt etwas an.",
    "Ein Terrier läuft über saftig grünes Gras vor einem weißen Zaun.",
    "it rained again today\nthe cat runs in the garden",
    "",
    "Five people wearing winter jackets stand in the snow .",
]


def value(name, labels=TEXTS, predicted=PREDICTED_TEXTS):
    return METRICS[name](column(labels), column(predicted))


def test_bleu_and_chrf_are_sacrebleus_of_the_corpus():
    assert value("bleu") == pytest.approx(sacrebleu.corpus_bleu(PREDICTED_TEXTS, [TEXTS]).score, abs=1e-9)
    assert value("chrf") == pytest.approx(sacrebleu.corpus_chrf(PREDICTED_TEXTS, [TEXTS]).score, abs=1e-9)
    assert 1 < value("bleu") < 100 and 1 < value("chrf") < 100


def test_reformers_bleus_are_sacrebleus_by_another_tokenizer_and_uncased():
    labels, predicted = ["Preis: 5€–6€ (ca.) Für ALLE da"], ["Preis: 5€–6€ (ca.) für alle da"]
    result = {name: value(name, labels, predicted) for name in ("bleu", "bleu_intl", "bleu_intl_uncased")}
    for name, lowercase in (("bleu_intl", False), ("bleu_intl_uncased", True)):
        expected = sacrebleu.corpus_bleu(predicted, [labels], tokenize="intl", lowercase=lowercase).score
        assert result[name] == pytest.approx(expected)
    assert result["bleu"] < result["bleu_intl"] < result["bleu_intl_uncased"] == pytest.approx(100)
    assert "case:lc|eff:no|tok:intl" in signature("bleu_intl_uncased")


def test_reformers_tokenized_bleu_is_that_of_tokens_with_compounds_split():
    labels, predicted = ["The well-known (Ost-West-) border, 5 km."], ["The well-known (Ost-West-) line, 5 km."]
    tokens = "The well ##AT##-##AT## known ( Ost ##AT##-##AT## West- ) {} , 5 km ."
    expected = sacrebleu.corpus_bleu([tokens.format("line")], [[tokens.format("border")]], tokenize="none").score
    assert value("bleu_tokenized", labels, predicted) == pytest.approx(expected)
    assert value("bleu", labels, predicted) != pytest.approx(expected)


@together("name", ROUGE)
def test_rouge_is_the_mean_of_rouge_scores_f1(name):
    scorer = RougeScorer([name], use_stemmer=True)
    expected = [scorer.score(*pair)[name].fmeasure for pair in zip(TEXTS, PREDICTED_TEXTS, strict=True)]
    assert value(name) == pytest.approx(sum(expected) / 5, abs=1e-12)


def test_signatures_are_sacrebleus_own():
    for name, scorer in (("bleu", sacrebleu.BLEU()), ("chrf", sacrebleu.CHRF())):
        scorer.corpus_score(PREDICTED_TEXTS, [TEXTS])
        assert signature(name) == str(scorer.get_signature())
    assert signature("bleu") == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{version('sacrebleu')}"
    assert all(version("rouge-score") in signature(name) for name in ROUGE)
    assert signature("accuracy") is None
