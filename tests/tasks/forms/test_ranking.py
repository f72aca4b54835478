"""MIND: impressions read and encoded, NRMS against a straight computation, and metrics against definitions."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megasparse.config.attention import AttentionConfig
from megasparse.config.finetuning import FinetuneConfig, HeadConfig, RecommendationConfig, TaskConfig
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import ConfigError, DataError
from megasparse.ops.random import RngContext
from megasparse.tasks.batches import EncodedExample, Padded
from megasparse.tasks.catalog import build_task
from megasparse.tasks.form import column
from megasparse.tasks.forms import ranking as forms
from megasparse.tasks.forms.ranking import (
    Impressions,
    MatchingRecommender,
    NewsRecommender,
    RankingForm,
    drawn_negatives,
)
from megasparse.tasks.metrics import LOWER_IS_BETTER, METRICS
from megasparse.tasks.run import TaskRun
from megasparse.tasks.task import Example, SourceLocation, Task
from tests.helpers.cases import together
from tests.helpers.finetuning import (
    ENCODER,
    assert_resumes,
    behaviors_row,
    configured,
    mind,
    news_row,
    opened,
    our_body,
    plain,
    split_folder,
)


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


@together("tied", [False, True])
@together("name", ["auc", "mrr", "ndcg5", "ndcg10"])
def test_metrics_are_means_of_their_definitions(name, tied):
    labels, scores = impressions(60, tied)
    expected = np.mean([brute_force(*each)[name] for each in zip(labels, scores, strict=True)])
    assert METRICS[name](column(labels), column(scores)) == pytest.approx(expected, abs=1e-12)
    assert name not in LOWER_IS_BETTER


def form(tmp_path: Path, **changes: Any) -> RankingForm:
    task = {"name": "mind", "max_length": 16, "recommendation": {"history": 3}}
    config = configured(tmp_path / "run", tmp_path, model=ENCODER, task=task, **changes)
    return RankingForm(build_task(config.task), config)


def encoder(**changes: Any) -> RankingForm:
    config = TaskConfig(name="mind", recommendation=RecommendationConfig(history=3), **{"max_length": 16, **changes})
    form = RankingForm(build_task(config), FinetuneConfig(task=config))
    form.prepare(SimpleNamespace(vocabulary=256, separators=1), build_tokenizer("bytes"))  # type: ignore[arg-type]
    return form


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
    result: list[Any] = list(own.encode(EXAMPLES))
    assert [tuple(map(text, each.history)) for each in result] == [each.inputs[0] for each in EXAMPLES]
    assert [tuple(map(text, each.sequences)) for each in result] == [each.inputs[1] for each in EXAMPLES]
    assert [(each.label, each.name, each.length) for each in result] == [
        ((0, 1, 0), "I1", 3), ((1, 0), "I2", 1), ((1, 0), "I3", 3),
    ]  # fmt: skip
    assert result[0].history is result[2].history
    distinct = {id(each) for one in result for each in (*one.history, *one.sequences)}
    assert len(distinct) == own.counts.kinds["distinct texts"] == 4
    counts = "clicks: 3, distinct texts: 4, users without clicks: 1"
    assert own.lines("training") == [f"training: 3 examples, the longest of 3 tokens; {counts}"]


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


TITLES = {"N1": 'The "Brands" they Swear By', "N2": "Cold \u2028 soup", "N3": "Rain", "N4": "Rain"}
NEWS = [news_row(*item) for item in TITLES.items()]


def task(history: int = 50, **changes: Any) -> Task:
    return build_task(TaskConfig(name="mind", recommendation=RecommendationConfig(history=history), **changes))


def test_an_impression_is_the_titles_of_clicked_and_of_shown_news(tmp_path):
    rows = [("17", "N1 N3", "N2-1 N1-0 N3-0"), ("9", "", "N3-0 N4-1"), ("9", "N2", "N3 N2")]
    file = split_folder(tmp_path / "dev", NEWS, [behaviors_row(*row) for row in rows])
    first, second, third = task().read(file)
    brands, soup = TITLES["N1"], TITLES["N2"]
    assert first.inputs == ((brands, "Rain"), (soup, brands, "Rain")) and first.label == (1, 0, 0)
    assert first.name == "17" and str(first.location) == f"{file}:1"
    assert second.inputs == ((), ("Rain", "Rain")) and second.label == (0, 1)
    assert third.inputs == ((soup,), ("Rain", soup)) and third.label is None


@together(
    ("news", "rows", "problem"),
    [
        ([], [behaviors_row("2", "N1 N9", "N1-0 N2-1")], r'behaviors.tsv:2: "N9" is not in .*news\.tsv'),
        ([], [behaviors_row("2", "N1", "N1 N7")], r'behaviors.tsv:2: "N7" is not in .*news\.tsv'),
        ([], [behaviors_row("2", "N1", "N1-0 N2-2")], 'behaviors.tsv:2: the label of "N2-2" is not 0 or 1'),
        ([], [behaviors_row("2", "N1", "N1-0 N2")], 'behaviors.tsv:2: the label of "N2" is not 0 or 1'),
        ([], [behaviors_row("2", "N1", " ")], "behaviors.tsv:2: an impression without any news"),
        ([], [behaviors_row("2", "N1", "N1-0 N2-0")], "behaviors.tsv:2: no click on any news shown"),
        ([], [behaviors_row("2", "N1", "N1-1")], "behaviors.tsv:2: a click on every news shown"),
        ([], ["2\tU1\tnow\tN1\n"], r"behaviors.tsv:2: 4 fields instead of 5 \(impression id, user id"),
        ([news_row("N5", "")], [], 'news.tsv:5: the title of "N5" is empty'),
        ([news_row("N1", "again")], [], 'news.tsv:5: "N1" occurs twice'),
        (["N5\tnews\ta title\n"], [], "news.tsv:5: 3 fields instead of 8"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, news, rows, problem):
    file = split_folder(tmp_path, [*NEWS, *news], [behaviors_row("1", "N1", "N1-0 N2-1"), *rows])
    with pytest.raises(DataError, match=f"{tmp_path}/{problem}"):
        list(task().read(file))


HISTORY = 6
TASK = {"name": "mind", "max_length": 32, "recommendation": {"history": HISTORY, "heads": 4}}
STILL = {**ENCODER, "dropout": 0.0}


def run_of(folder: Path, model: dict[str, Any] = STILL, **sections: Any) -> TaskRun:
    """A run whose model has larger weights, including an unknown user's."""
    given = {"task": TASK, "head": {"hidden": 24, "dropout": 0.0}, **sections}
    run = opened(folder / "run", mind(folder / "mind", 24, 12, cold=0.3), model=model, **given)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("straight"))


def pooled(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    """Pool x (L, E)."""
    dense, bias = weights[f"{name}_pooling.dense.weight"], weights[f"{name}_pooling.dense.bias"]
    scores = [weights[f"{name}_pooling.query.weight"][0] @ torch.tanh(dense @ row + bias) for row in x]
    share = [torch.exp(score) / sum(torch.exp(other) for other in scores) for score in scores]
    return torch.stack([part * row for part, row in zip(share, x, strict=True)]).sum(0)


def straight_scores(model: NewsRecommender, example: EncodedExample) -> Tensor:
    """One impression, every title and every head by itself, nothing padded."""
    assert isinstance(example, forms.Impression)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    rng = RngContext.evaluation(0, 1)

    def vector(news: Any) -> Tensor:
        tokens = torch.from_numpy(news.tokens).unsqueeze(0)
        read = Padded(tokens, torch.zeros_like(tokens), torch.tensor([tokens.shape[1]]))
        return pooled(model.body(read, rng, None)[0][0].detach(), weights, "news")

    user = weights["unknown_user"]
    if example.history:
        clicked = torch.stack([vector(each) for each in example.history])
        q, k, v = (clicked @ weights[f"attention.{part}.weight"].T for part in ("query", "key", "value"))
        size = clicked.shape[1] // 4
        heads = []
        for head in range(4):
            own = slice(head * size, (head + 1) * size)
            heads.append(torch.softmax(q[:, own] @ k[:, own].T / math.sqrt(size), dim=-1) @ v[:, own])
        user = pooled(torch.cat(heads, dim=1) @ weights["attention.output.weight"].T, weights, "user")
    return torch.stack([user @ vector(each) for each in example.sequences])


def evaluated(run: TaskRun, examples: Sequence[EncodedExample]) -> tuple[list[Tensor], dict[str, Any]]:
    run.model.eval()
    with torch.no_grad():
        result = run.model(run.form.collate(examples), RngContext.evaluation(0, len(examples)))[1]
    return result["predicted"], result


def trained(run: TaskRun, examples: Sequence[EncodedExample], step: int = 1, first: int = 0, **given: Any) -> Any:
    run.model.train()
    rng = RngContext(run.config.run.seed, step, torch.arange(first, first + len(examples)), training=True)
    return run.model(run.form.collate(examples), rng, **given)


def test_scores_and_costs_equal_a_straight_computation(run):
    predicted, result = evaluated(run, run.validation)
    assert {bool(getattr(each, "history", None)) for each in run.validation} == {True, False}
    assert len({len(each) for each in predicted}) > 1
    for example, scores, cost in zip(run.validation, predicted, result["costs"].tolist(), strict=True):
        expected = straight_scores(run.model, example)
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
        others = [score for score, label in zip(expected, example.label, strict=True) if not label]
        clicked = [score for score, label in zip(expected, example.label, strict=True) if label]
        nats = [math.log(sum(math.exp(other - score) for other in [*others, score])) for score in clicked]
        assert cost == pytest.approx(sum(nats), rel=1e-3, abs=1e-4)
    assert result["weights"].tolist() == [sum(example.label) for example in run.validation]
    assert float(result["nats"]) == pytest.approx(sum(result["costs"].tolist()), rel=1e-5)


def test_a_training_step_learns_each_click_among_the_drawn_news(run):
    examples = run.train[:5]
    objective, result = trained(run, examples)
    batch = run.form.collate(examples)
    rows, chosen = drawn_negatives(batch, RngContext(0, 1, torch.arange(5), training=True), 4)
    costs = []
    for row, news in zip(rows.tolist(), chosen, strict=True):
        scores = straight_scores(run.model, examples[row])
        known = batch.candidates[row].tolist()
        own = torch.stack([scores[known.index(each)] for each in news.tolist()])
        costs.append(-torch.log_softmax(own, 0)[0].item())
    assert len(costs) == sum(sum(each.label) for each in examples) == int(result["tokens"])
    assert objective.item() == pytest.approx(sum(costs) / len(costs), rel=1e-4)
    assert result["nats"].item() == pytest.approx(sum(costs), rel=1e-4)
    assert run.model.count_scored(batch).item() == len(costs)


def shown(counts: list[int], clicked: list[list[int]]) -> Impressions:
    width = max(counts)
    rows = torch.arange(len(counts) * width).view(len(counts), width)
    table = torch.zeros(len(counts), width, dtype=torch.bool)
    for row, places in zip(table, clicked, strict=True):
        row[places] = True
    tokens = torch.zeros(rows.numel(), 1, dtype=torch.int64)
    news = Padded(tokens, tokens, torch.ones(rows.numel(), dtype=torch.int64))
    none = torch.zeros(len(counts), dtype=torch.int64)
    return Impressions(news, rows.flatten(), rows[:, :1], none, rows, torch.tensor(counts), table)


def test_negatives_are_others_of_the_impression_each_once_while_there_are_enough():
    batch = shown([9, 3, 5], [[2, 4], [0], [1, 2, 3, 4]])
    for step in range(30):
        rows, news = drawn_negatives(batch, RngContext(5, step, torch.arange(3), training=True), 4)
        assert rows.tolist() == [0, 0, 1, 2, 2, 2, 2] and news.shape == (7, 5)
        assert news[:, 0].tolist() == [2, 4, 9, 19, 20, 21, 22]
        for row in news[:2, 1:].tolist():
            assert len(set(row)) == 4 and set(row) <= {0, 1, 3, 5, 6, 7, 8}
        assert Counter(news[2, 1:].tolist()) == {10: 2, 11: 2}  # fewer than are wanted: again and again
        assert set(news[3:, 1:].flatten().tolist()) == {18}


def test_a_draw_depends_only_on_seed_step_and_sample():
    one, both = shown([9], [[2, 4]]), shown([7, 9], [[1], [2, 4]])

    def of(batch: Impressions, samples: list[int], seed: int = 5, step: int = 3) -> list[list[int]]:
        return drawn_negatives(batch, RngContext(seed, step, torch.tensor(samples), training=True), 4)[1].tolist()

    own = of(one, [17])
    assert own == of(one, [17]) == [[news - 9 for news in row] for row in of(both, [16, 17])[1:]]
    assert all(own != other for other in (of(one, [18]), of(one, [17], seed=6), of(one, [17], step=4)))


def test_a_gradient_does_not_depend_on_micro_batches_or_other_examples(tmp_path):
    run = run_of(tmp_path, model={**ENCODER, "dropout": 0.2}, head={"hidden": 24, "dropout": 0.2})
    examples = run.train[:8]
    clicks = sum(sum(each.label) for each in examples)

    def gradient(pieces: list[range]) -> Tensor:
        run.model.zero_grad()
        for piece in pieces:
            trained(run, [examples[i] for i in piece], first=piece.start, divisor=clicks)[0].backward()
        return torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None])

    whole = gradient([range(8)])
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(gradient([range(3), range(3, 8)]), whole, rtol=1e-4, atol=1e-5)
    still = trained(run, examples)[0].item()
    assert still == trained(run, examples)[0].item() != trained(run, examples, step=2)[0].item()


def test_a_user_without_clicks_has_a_learned_vector(run):
    cold = [each for each in run.train if not getattr(each, "history", None)]
    warm = [each for each in run.train if getattr(each, "history", None)]
    for examples, touched in ((cold, True), (warm, False), ([*cold, *warm], True)):
        run.model.zero_grad()
        trained(run, examples)[0].backward()
        gradients = {name: p.grad for name, p in run.model.named_parameters()}
        assert all(bool(torch.isfinite(each).all()) for each in gradients.values())
        assert bool(gradients["unknown_user"].any()) == touched


def test_a_smart_bird_sketch_reads_titles_and_learns(tmp_path):
    attention = {"pattern": ["smart_bird"], "smart_bird": {"keys": 4, "objective": "pooled", "labels": 5}}
    run = run_of(tmp_path, model={**STILL, "attention": attention})
    trained(run, run.train)[0].backward()
    gradients = {name: p.grad for name, p in run.model.body.named_parameters() if "smart_bird" in name}
    assert any(".query." in name for name in gradients) and any(".objective." in name for name in gradients)
    assert all(gradient is not None and bool(gradient.any()) for gradient in gradients.values())


@together(
    "settings, message",
    [
        ({"heads": 5}, "task.recommendation.heads: 5 heads do not divide the width of the news' vectors, 32"),
        ({"attention": AttentionConfig(pattern=["smart_bird"])}, r'objective: "token" is not a target of this stack'),
        ({"history": 16, "attention": AttentionConfig(pattern=["lsh"])}, r"attention.lsh.chunk: 64 is .*history = 16"),
    ],
)
def test_an_unsuitable_attention_is_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        NewsRecommender(our_body(), RecommendationConfig(**settings), HeadConfig(), 0)


def test_a_stopped_run_resumes_with_the_same_losses(tmp_path):
    folder = mind(tmp_path / "mind", 30, 8)
    sections: dict[str, Any] = {
        "model": {**STILL, "layers": 1},
        "task": {"name": "mind", "max_length": 24, "recommendation": {"history": 8, "heads": 4}},
        "head": {"hidden": 16, "dropout": 0.1},
        "training": {"steps": 8},
        "evaluation": {"every": 4, "batch": 4},
    }
    assert len(plain(assert_resumes(tmp_path, folder, 5, **sections))) == 8


def test_matching_equals_its_definition_with_gradients():
    """FIM: dilated convolutions of words, products of all words as images, and a volume of the images."""
    config = RecommendationConfig(user="matching", history=2)
    model = MatchingRecommender(our_body(), config, HeadConfig(), 5, 0).double()
    lengths = torch.tensor([5, 3, 1, 4])
    states = torch.randn(4, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaves = [states.clone().requires_grad_() for _ in range(2)]
    levels = model.levels(leaves[0], lengths)
    real = torch.arange(5) < lengths[:, None]
    expected = [leaves[1] * real[..., None]]
    for number, (convolution, norm) in enumerate(zip(model.words, model.norms, strict=True)):
        rows = []
        for news, at in product(range(4), range(5)):
            x = convolution.bias
            for tap, place in enumerate((at - number - 1, at, at + number + 1)):
                x = x + (convolution.weight[..., tap] @ expected[-1][news, place] if 0 <= place < 5 else 0)
            rows.append(norm(torch.relu(x)) * real[news, at])
        expected.append(torch.stack(rows).view(4, 5, -1))
    matched = model.match([level[1:3] for level in levels], [level[[0, 3]] for level in levels])
    volume = torch.zeros(2, 4, 2, 5, 5, dtype=torch.float64)
    images = []
    for candidate, level, clicked in product((1, 2), expected, (0, 3)):
        images.append(level[candidate] @ level[clicked].mT / level.shape[-1] ** 0.5)
    volume = torch.stack(images).view_as(volume)
    for convolution in model.cubes:
        volume = torch.relu(convolution(volume))
        parts = [x.amax((-1, -2, -3)) for h in volume.split(3, 2) for r in h.split(3, 3) for x in r.split(3, 4)]
        volume = torch.stack(parts, -1).view(2, -1, *(-(-n // 3) for n in volume.shape[2:]))
    scores = model.output(volume.flatten(1)).squeeze(-1)
    torch.testing.assert_close(matched, scores)
    weights = [parameter for name, parameter in model.named_parameters() if not name.startswith("body.")]
    sides = zip((matched, scores), leaves, strict=True)
    grads = [torch.autograd.grad(x.square().sum(), [leaf, *weights]) for x, leaf in sides]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
