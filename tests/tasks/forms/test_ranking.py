"""Metrics of rankings against their definitions, and impressions as the model reads them."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import ndcg_score, roc_auc_score

from megasparse.config.finetuning import RecommendationConfig, TaskConfig
from megasparse.data.tokenizers import build_tokenizer
from megasparse.tasks import build_task
from megasparse.tasks.form import column
from megasparse.tasks.forms.ranking import RankingEncoder, RankingForm
from megasparse.tasks.metrics import LOWER_IS_BETTER, METRICS, ranking
from megasparse.tasks.task import Example, SourceLocation
from tests.helpers.finetuning import ENCODER, configured

NAMES = ("auc", "mrr", "ndcg5", "ndcg10")


def impressions(number: int, tied: bool) -> tuple[list[tuple[int, ...]], list[tuple[float, ...]]]:
    generator = np.random.default_rng(3)
    labels, scores = [], []
    for _ in range(number):
        count = int(generator.integers(2, 25))
        clicked = generator.integers(0, 2, count)
        clicked[generator.permutation(count)[:2]] = [0, 1]
        drawn = generator.integers(0, 4, count) if tied else generator.permutation(count)
        labels.append(tuple(clicked.tolist()))
        scores.append(tuple((drawn / 3).tolist()))
    return labels, scores


def brute_force(clicked: tuple[int, ...], scores: tuple[float, ...]) -> dict[str, float]:
    """By pairs, and by walking down the ranking; of equal scores the later candidate first."""
    pairs = [(x > y) + (x == y) / 2 for (x, i), (y, j) in product(zip(scores, clicked, strict=True), repeat=2) if i > j]
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], -place))
    hits = [clicked[place] for place in order]

    def dcg(hits: list[int], k: int) -> float:
        return sum((2**hit - 1) / math.log2(rank + 1) for rank, hit in enumerate(hits[:k], start=1))

    best = sorted(hits, reverse=True)
    return {
        "auc": sum(pairs) / len(pairs),
        "mrr": sum(hit / rank for rank, hit in enumerate(hits, start=1)) / sum(hits),
        **{f"ndcg{k}": dcg(hits, k) / dcg(best, k) for k in (5, 10)},
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_means_of_their_definitions(name, tied):
    labels, scores = impressions(60, tied)
    expected = np.mean([brute_force(*each)[name] for each in zip(labels, scores, strict=True)])
    assert METRICS[name](column(labels), column(scores)) == pytest.approx(expected, abs=1e-12)
    assert name not in LOWER_IS_BETTER


def test_metrics_are_scikit_learns_where_no_scores_are_equal():
    labels, scores = impressions(40, tied=False)
    both = list(zip(labels, scores, strict=True))
    given = column(labels), column(scores)
    assert METRICS["auc"](*given) == pytest.approx(np.mean([roc_auc_score(*each) for each in both]))
    for k in (5, 10):
        expected = np.mean([ndcg_score([clicked], [own], k=k) for clicked, own in both])
        assert METRICS[f"ndcg{k}"](*given) == pytest.approx(expected)


def test_of_equal_scores_the_later_candidate_ranks_higher():
    assert ranking([1.0, 2.0, 1.0, 2.0]).tolist() == [3, 1, 2, 0]


def form(tmp_path: Path, **changes: Any) -> RankingForm:
    task = {"name": "mind", "max_length": 16, "recommendation": {"history": 3}}
    config = configured(tmp_path / "run", tmp_path, model=ENCODER, task=task, **changes)
    return RankingForm(build_task(config.task), config)


def encoder(**changes: Any) -> RankingEncoder:
    config = TaskConfig(name="mind", recommendation=RecommendationConfig(history=3), **{"max_length": 16, **changes})
    return RankingEncoder(build_task(config), build_tokenizer("bytes"), 256)


def example(history: tuple[str, ...], shown: tuple[str, ...], label: Any = None, number: int = 1) -> Example:
    inputs: Any = (history, shown)
    return Example(inputs, label, SourceLocation(Path("behaviors.tsv"), number), f"I{number}")


EXAMPLES = [
    example(("ab", "c"), ("c", "def", "ab"), (0, 1, 0), 1),
    example((), ("x", "c"), (1, 0), 2),
    example(("ab", "c"), ("def", "x"), (1, 0), 3),
]


def text(segments: Any) -> str:
    return bytes(segments.tokens.tolist()).decode()


def test_each_text_and_each_history_is_encoded_once():
    own = encoder()
    found: list[Any] = list(own.encode(EXAMPLES))
    assert [tuple(map(text, each.history)) for each in found] == [each.inputs[0] for each in EXAMPLES]
    assert [tuple(map(text, each.sequences)) for each in found] == [each.inputs[1] for each in EXAMPLES]
    assert [(each.label, each.name, each.length) for each in found] == [
        ((0, 1, 0), "I1", 3), ((1, 0), "I2", 1), ((1, 0), "I3", 3),
    ]  # fmt: skip
    assert found[0].history is found[2].history
    distinct = {id(each) for one in found for each in (*one.history, *one.sequences)}
    assert len(distinct) == own.counts.texts == 4
    first, second = own.counts.lines("training", 16)
    assert first == "training: 3 examples, the longest of 3 tokens; 4 distinct texts, 3 clicks"
    assert second == "training: 1 impressions have no history: one learned vector stands for it"


def test_a_batch_has_every_text_once(tmp_path):
    batch = form(tmp_path).collate(list(encoder().encode(EXAMPLES)))
    texts = [bytes(row[:n].tolist()).decode() for row, n in zip(batch.news.tokens, batch.news.lengths, strict=True)]
    assert sorted(texts) == ["ab", "c", "def", "x"] and batch.numel() == 7 and len(set(batch.numbers.tolist())) == 4
    assert batch.history.shape == (3, 3) and batch.clicks.tolist() == [2, 0, 2] and batch.shown.tolist() == [3, 2, 2]
    for row, each in enumerate(EXAMPLES):
        assert tuple(texts[i] for i in batch.history[row, : batch.clicks[row]]) == each.inputs[0]
        assert tuple(texts[i] for i in batch.candidates[row, : batch.shown[row]]) == each.inputs[1]
    assert batch.clicked is not None and batch.clicked.int().tolist() == [[0, 1, 0], [1, 0, 0], [1, 0, 0]]
    other = form(tmp_path).collate(list(encoder().encode([EXAMPLES[2], example(("x",), ("c",))])))
    assert other.clicked is None  # one has no label
    known = {bytes(row.tolist()): number for row, number in zip(batch.news.tokens, batch.numbers.tolist(), strict=True)}
    for row, number in zip(other.news.tokens, other.numbers.tolist(), strict=True):
        assert known[bytes(row.tolist())] == number < 2**31
