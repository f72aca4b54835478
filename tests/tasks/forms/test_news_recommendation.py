"""NRMS against a straight computation, its negatives, and runs that learn and go on."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megasparse.config.attention import AttentionConfig
from megasparse.config.finetuning import HeadConfig, RecommendationConfig
from megasparse.errors import ConfigError
from megasparse.ops.random import EVALUATION_STEP, RngContext
from megasparse.tasks.batches import Encoded, Padded
from megasparse.tasks.evaluate import predict_examples
from megasparse.tasks.forms.ranking import Impression, Impressions, NewsRecommender, drawn_negatives
from megasparse.tasks.metrics import METRICS
from megasparse.tasks.run import TaskRun
from megasparse.training.ranks import Ranks
from tests.helpers.finetuning import ENCODER, assert_resumes, launch, opened, our_body, plain
from tests.helpers.mind import mind

HISTORY = 6
TASK = {"name": "mind", "max_length": 32, "recommendation": {"history": HISTORY, "negatives": 3, "heads": 4}}
STILL = {**ENCODER, "dropout": 0.0}


def run_of(folder: Path, model: dict[str, Any] = STILL, **sections: Any) -> TaskRun:
    """A run whose model has weights that are no longer small, an unknown user's among them."""
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


def straight_scores(model: NewsRecommender, example: Encoded) -> Tensor:
    """One impression, every title and every head by itself, nothing padded."""
    assert isinstance(example, Impression)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    rng = RngContext(0, EVALUATION_STEP, torch.zeros(1, dtype=torch.int64), training=False)

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


def evaluated(run: TaskRun, examples: Sequence[Encoded]) -> tuple[list[Tensor], dict[str, Any]]:
    run.model.eval()
    rng = RngContext(0, EVALUATION_STEP, torch.arange(len(examples)), training=False)
    with torch.no_grad():
        found = run.model(run.form.collate(examples), rng)[1]
    return found["predicted"], found


def trained(run: TaskRun, examples: Sequence[Encoded], step: int = 1, first: int = 0, **given: Any) -> Any:
    run.model.train()
    rng = RngContext(run.config.run.seed, step, torch.arange(first, first + len(examples)), training=True)
    return run.model(run.form.collate(examples), rng, **given)


def test_scores_and_costs_are_those_of_a_straight_computation(run):
    predicted, found = evaluated(run, run.validation)
    assert {bool(getattr(each, "history", None)) for each in run.validation} == {True, False}
    assert len({len(each) for each in predicted}) > 1
    for example, scores, cost in zip(run.validation, predicted, found["costs"].tolist(), strict=True):
        expected = straight_scores(run.model, example)
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
        others = [score for score, label in zip(expected, example.label, strict=True) if not label]
        nats = [
            math.log(sum(math.exp(other - score) for other in [*others, score]))
            for score, label in zip(expected, example.label, strict=True)
            if label
        ]
        assert cost == pytest.approx(sum(nats), rel=1e-3, abs=1e-4)
    assert found["weights"].tolist() == [sum(example.label) for example in run.validation]
    assert float(found["nats"]) == pytest.approx(sum(found["costs"].tolist()), rel=1e-5)


def test_a_training_step_learns_each_click_among_the_drawn_news(run):
    examples = run.train[:5]
    objective, found = trained(run, examples)
    batch = run.form.collate(examples)
    rows, chosen = drawn_negatives(batch, RngContext(0, 1, torch.arange(5), training=True), 3)
    costs = []
    for row, news in zip(rows.tolist(), chosen, strict=True):
        scores = straight_scores(run.model, examples[row])
        known = batch.candidates[row].tolist()
        own = torch.stack([scores[known.index(each)] for each in news.tolist()])
        costs.append(-torch.log_softmax(own, 0)[0].item())
    assert len(costs) == sum(sum(each.label) for each in examples) == int(found["tokens"])
    assert objective.item() == pytest.approx(sum(costs) / len(costs), rel=1e-4)
    assert found["nats"].item() == pytest.approx(sum(costs), rel=1e-4)
    assert run.model.count_scored(batch).item() == len(costs)


def test_scores_depend_neither_on_the_batch_nor_on_padding(run):
    together, _ = evaluated(run, run.validation)
    for number, example in enumerate(run.validation):
        (alone,), _ = evaluated(run, [example])
        torch.testing.assert_close(alone, together[number], rtol=1e-5, atol=1e-5)
    reversed_, _ = evaluated(run, run.validation[::-1])
    for one, other in zip(reversed_[::-1], together, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_every_news_is_read_once_and_in_training_only_what_is_needed(run, monkeypatch):
    read: list[int] = []
    hook = run.model.body.register_forward_pre_hook(lambda module, given: read.append(len(given[0].tokens)))
    examples = run.train[:6]
    evaluated(run, examples)
    texts = {id(each) for one in examples for each in (*one.sequences, *getattr(one, "history", ()))}
    batch = run.form.collate(examples)
    trained(run, examples)
    hook.remove()
    _, chosen = drawn_negatives(batch, RngContext(0, 1, torch.arange(6), training=True), 3)
    clicked = {place for row, count in zip(batch.history, batch.clicks, strict=True) for place in row[:count].tolist()}
    assert read == [len(texts), len(clicked | set(chosen.flatten().tolist()))]


def shown(counts: list[int], clicked: list[list[int]]) -> Impressions:
    """Impressions of so many candidates, all news of their own."""
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


def test_a_draw_depends_on_seed_step_and_sample_alone():
    one, both = shown([9], [[2, 4]]), shown([7, 9], [[1], [2, 4]])

    def of(batch: Impressions, samples: list[int], seed: int = 5, step: int = 3) -> list[list[int]]:
        return drawn_negatives(batch, RngContext(seed, step, torch.tensor(samples), training=True), 4)[1].tolist()

    own = of(one, [17])
    assert own == of(one, [17]) == [[news - 9 for news in row] for row in of(both, [16, 17])[1:]]
    assert all(own != other for other in (of(one, [18]), of(one, [17], seed=6), of(one, [17], step=4)))


def test_a_gradient_depends_neither_on_micro_batches_nor_on_what_else_is_read(tmp_path):
    """With dropout, whose draws go by the news and by the impression."""
    run = run_of(tmp_path, model={**ENCODER, "dropout": 0.2}, head={"hidden": 24, "dropout": 0.2})
    examples = run.train[:8]
    clicks = sum(sum(each.label) for each in examples)

    def gradient(pieces: list[range]) -> Tensor:
        run.model.zero_grad()
        for piece in pieces:
            some = [examples[i] for i in piece]
            trained(run, some, first=piece.start, divisor=clicks)[0].backward()
        return torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None])

    whole = gradient([range(8)])
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(gradient([range(3), range(3, 8)]), whole, rtol=1e-4, atol=1e-5)
    still = trained(run, examples)[0].item()
    assert still == trained(run, examples)[0].item() != trained(run, examples, step=2)[0].item()


def test_a_user_without_clicks_has_a_learned_vector(run):
    cold = [each for each in run.train if not getattr(each, "history", None)]
    warm = [each for each in run.train if getattr(each, "history", None)]
    inner: list[Tensor] = []
    parts = (run.model.attention, run.model.user_pooling)
    hooks = [
        part.register_forward_hook(lambda module, given, out: inner.append(out[0] if isinstance(out, tuple) else out))
        for part in parts
    ]
    for examples, touched in ((cold, True), (warm, False), ([*cold, *warm], True)):
        run.model.zero_grad()
        trained(run, examples)[0].backward()
        gradients = {name: p.grad for name, p in run.model.named_parameters()}
        assert all(bool(torch.isfinite(each).all()) for each in gradients.values())
        assert bool(gradients["unknown_user"].any()) == touched
    for hook in hooks:
        hook.remove()
    assert len(inner) == 6 and all(bool(torch.isfinite(each).all()) for each in inner)
    before, _ = evaluated(run, [cold[0], warm[0]])
    kept = run.model.unknown_user.detach().clone()
    with torch.no_grad():
        run.model.unknown_user.mul_(2.0)
    after, _ = evaluated(run, [cold[0], warm[0]])
    with torch.no_grad():
        run.model.unknown_user.copy_(kept)
    torch.testing.assert_close(after[0], 2 * before[0])
    assert torch.equal(after[1], before[1])


def test_a_smart_bird_sketch_reads_titles_and_learns(tmp_path):
    attention = {"pattern": ["smart_bird"], "smart_bird": {"keys": 4, "objective": "pooled", "labels": 5}}
    run = run_of(tmp_path, model={**STILL, "attention": attention})
    trained(run, run.train)[0].backward()
    assert all(
        p.grad is not None and bool(p.grad.any()) for name, p in run.model.named_parameters() if "sketch" in name
    )
    objective = [p for name, p in run.model.body.named_parameters() if "smart_bird.objective" in name]
    assert objective and all(p.grad is not None and bool(p.grad.any()) for p in objective)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"heads": 5}, "task.recommendation.heads: 5 heads do not divide the width of the news' vectors, 32"),
        ({"attention": AttentionConfig(pattern=["smart_bird"])}, r'objective: "token" is not what this stack learns'),
        (
            {"history": 16, "attention": AttentionConfig(pattern=["lsh"])},
            r"task.recommendation.attention.lsh.chunk: 64 is longer than task.recommendation.history = 16",
        ),
    ],
)
def test_an_attention_that_does_not_fit_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        NewsRecommender(our_body(), RecommendationConfig(**settings), HeadConfig(), 0)


TRAINING = {
    "model": {**ENCODER, "layers": 1, "d_model": 32, "d_ff": 32, "dropout": 0.0},
    "task": {"name": "mind", "max_length": 24, "recommendation": {"history": 8, "heads": 4}},
    "head": {"hidden": 16, "dropout": 0.1},
    "training": {"epochs": 0, "steps": 80, "global_batch": 16, "micro_batch": 16},
    "optimizer": {"learning_rate": 5e-3},
    "evaluation": {"every": 80, "batch": 40},
}


@pytest.mark.slow
def test_it_learns_what_a_user_clicks_by_what_they_clicked(tmp_path):
    folder = mind(tmp_path / "mind", 400, 80, each=8, cold=0.0)
    start = opened(tmp_path / "none", folder, **TRAINING)
    predicted = predict_examples(start.model.eval(), start.form, start.validation, start.config, Ranks())
    answers = [
        start.form.answer(*each) for each in zip(start.validation, [own.values for own in predicted], strict=True)
    ]
    before = start.form.measures(start.validation, answers)
    lines = launch(tmp_path / "run", folder, **TRAINING)
    after = {name: lines[-1][f"evaluation/{name}"] for name in ("auc", "mrr", "ndcg5", "ndcg10")}
    assert set(before) == set(after) <= set(METRICS)
    assert 0.3 < before["auc"] < 0.7 and after["auc"] > 0.9
    assert all(after[name] > before[name] for name in after)


def test_a_run_that_was_stopped_goes_on_with_the_same_losses(tmp_path):
    folder = mind(tmp_path / "mind", 30, 8)
    sections: dict[str, Any] = {
        **TRAINING,
        "training": {"epochs": 0, "steps": 8, "global_batch": 8, "micro_batch": 4},
        "evaluation": {"every": 4, "batch": 4},
    }
    assert len(plain(assert_resumes(tmp_path, folder, 5, **sections))) == 8
