"""Metrics of rankings against their definitions, and impressions as the model reads them."""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score, roc_auc_score

from megasparse.config.finetuning import RecommendationConfig, TaskConfig
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import ConfigError, DataError
from megasparse.tasks import build_task
from megasparse.tasks.batches import Encoded, fingerprint
from megasparse.tasks.evaluate import write_predictions
from megasparse.tasks.form import column
from megasparse.tasks.forms.ranking import Impression, RankingEncoder, RankingForm
from megasparse.tasks.metrics import LOWER_IS_BETTER, METRICS, ranking
from megasparse.tasks.task import Example, SourceLocation
from tests.helpers.finetuning import ENCODER, configured, our_body

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


def test_by_hand():
    given = column([(0, 1, 0, 1)]), column([(4.0, 3.0, 2.0, 1.0)])
    assert METRICS["auc"](*given) == 0.25
    assert METRICS["mrr"](*given) == pytest.approx((1 / 2 + 1 / 4) / 2)
    gain = (1 / math.log2(3) + 1 / math.log2(5)) / (1 + 1 / math.log2(3))
    assert METRICS["ndcg5"](*given) == METRICS["ndcg10"](*given) == pytest.approx(gain)


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


def test_long_texts_are_cut_and_empty_ones_refused_or_kept():
    own = encoder(max_length=2, empty="keep")
    (found,) = own.encode([example(("abc", ""), ("abc", "d"), (0, 1))])
    assert isinstance(found, Impression) and [text(each) for each in found.history] == ["ab", ""]
    assert (own.counts.cut, own.counts.empty, own.counts.longest) == (1, 1, 3)
    with pytest.raises(DataError, match=r"behaviors\.tsv:1: is empty"):
        list(encoder().encode([example((), ("", "d"))]))
    with pytest.raises(DataError, match=r"behaviors\.tsv:1: 3 tokens are more than task\.max_length = 2"):
        list(encoder(max_length=2, too_long="refuse").encode([example((), ("abc", "d"))]))


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


@pytest.mark.parametrize(
    "changed",
    [
        example(("ab",), ("c", "def", "ab"), (0, 1, 0)),
        example(("c", "ab"), ("c", "def", "ab"), (0, 1, 0)),
        example(("ab", "c"), ("c", "dxf", "ab"), (0, 1, 0)),
        example(("ab", "c"), ("c", "def", "ab"), (1, 1, 0)),
        example(("ab", "c", "c"), ("def", "ab"), (0, 1)),
    ],
)
def test_the_fingerprint_depends_on_what_is_learned_from(changed):
    def of(one: Example) -> str:
        return fingerprint(list(encoder().encode([one])))

    assert of(EXAMPLES[0]) == of(EXAMPLES[0]) != of(changed)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_dummy_batch_is_as_large_as_asked_for(tmp_path, batch):
    made = form(tmp_path).dummy_batch(our_body(), batch, 16)
    assert made.news.tokens.shape == (batch * 43, 16) and made.clicked is not None
    assert made.history.shape == (batch, 3) and made.candidates.shape == made.clicked.shape == (batch, 40)
    assert torch.cat([made.history, made.candidates], dim=1).unique().numel() == batch * 43
    assert made.clicked.sum(1).tolist() == [1] * batch


def test_a_txt_file_is_the_official_submission(tmp_path):
    """Scored as the official evaluate.py does: each candidate's score is 1/rank."""
    own, (labels, scores) = form(tmp_path), impressions(20, tied=True)
    rows = []
    for number, (clicked, predicted) in enumerate(zip(labels, scores, strict=True), start=1):
        one = Encoded((), clicked, SourceLocation(Path("f"), number), str(number))
        rows.append({"name": one.name, "file": "f", "line": number, **own.row(one, np.array(predicted))})
    write_predictions(tmp_path / "prediction.txt", rows, own)
    lines = (tmp_path / "prediction.txt").read_text().splitlines()
    submitted = []
    for number, line in enumerate(lines, start=1):
        name, _, ranks = line.partition(" ")
        assert name == str(number) and " " not in ranks
        assert sorted(json.loads(ranks)) == list(range(1, len(labels[number - 1]) + 1))
        submitted.append(tuple(1 / rank for rank in json.loads(ranks)))
    for metric in ("mrr", "ndcg5", "ndcg10"):
        found = METRICS[metric](column(labels), column(submitted))
        assert found == pytest.approx(METRICS[metric](column(labels), column(scores)), abs=1e-12)


def test_a_submission_by_hand_and_other_files(tmp_path):
    own = form(tmp_path)
    one = Encoded((), None, SourceLocation(Path("f"), 7), "12")
    row = {"name": "12", "file": "f", "line": 7, **own.row(one, np.array([0.5, -1.0, 3.0]))}
    assert row["label"] is None and own.answer(one, np.array([0.5, -1.0])) == (0.5, -1.0)
    assert own.line(row) == "12 [2,3,1]"
    for suffix, expected in ((".tsv", "index\tprediction\n12\t[0.5, -1.0, 3.0]\n"), (".jsonl", json.dumps(row) + "\n")):
        write_predictions(tmp_path / f"out{suffix}", [row], own)
        assert (tmp_path / f"out{suffix}").read_text() == expected


def test_other_poolings_and_texts_of_the_command_line_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r'head.pooling: "mean", and news are pooled by additive attention'):
        form(tmp_path, head={"pooling": "mean"}).model(our_body())
    with pytest.raises(ConfigError, match='--text: "mind" reads no texts'):
        form(tmp_path).example(["a"])
