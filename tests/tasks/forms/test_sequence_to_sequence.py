"""The loss against its definition, what padding and batches change (nothing), and searches against whole passes."""

import itertools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megasparse.config.schema import ModelConfig
from megasparse.evaluation.beam import BeamSettings, length_penalty
from megasparse.ops.random import EVALUATION_STEP, RngContext
from megasparse.tasks.forms.texts import EncodedText, TextModel, Texts, side_by_side
from tests.helpers.models import attention, named, small_pair
from tests.helpers.texts import example, logits, text_model

END = 257
RULE = BeamSettings(beams=1, tokens=12, end=END)
NAMES = ("full", "lha", "lsh", "yoso", "smart_bird")
BLOCKS: dict[str, dict[str, Any]] = {
    "reversible": {},
    "ordinary": {"blocks": "ordinary", "activations": "stored"},
}


def pair(name: str = "full", blocks: str = "ordinary", **changes: Any) -> ModelConfig:
    """The mechanism is on both sides; a Smart Bird of the encoder learns from the answer."""
    read = attention(name, smart_bird={"keys": 6, "objective": "answer"}) if name == "smart_bird" else named(name)
    source = {"layers": 2, "attention": read, **changes.pop("source", {})}
    return small_pair(attention=named(name), layers=2, padding_token=None, **BLOCKS[blocks], **changes, source=source)


def sentences(*lengths: tuple[int, int], seed: int = 0) -> list[EncodedText]:
    """Pairs of random tokens, each side with its end."""
    drawn = random.Random(seed)
    sides = [[[*drawn.choices(range(256), k=size - 1), END] for size in each] for each in lengths]
    return [example(source, target, number) for number, (source, target) in enumerate(sides)]


LENGTHS = ((21, 9), (4, 30), (40, 2), (33, 17))


def batch(examples: list[EncodedText], rule: BeamSettings = RULE) -> Texts:
    targets = [each.target for each in examples if each.target is not None]
    predicted = side_by_side(targets) if len(targets) == len(examples) else None
    return Texts(side_by_side([each.source for each in examples]), predicted, rule)


def evaluated(*samples: int) -> RngContext:
    return RngContext(7, EVALUATION_STEP, torch.tensor(samples), training=False)


def trained(*samples: int) -> RngContext:
    return RngContext(7, 3, torch.tensor(samples), training=True)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", ["full", "lha", "lsh", "yoso"])
def test_the_loss_is_the_cross_entropy_of_each_example_alone(name, blocks):
    model, examples = text_model(pair(name, blocks, label_smoothing=0.1)), sentences(*LENGTHS)
    nats, smoothed, correct = list[float](), list[float](), 0
    for rng, kept, smoothing in ((evaluated(0), nats, 0.0), (trained(0), smoothed, 0.1)):
        for each in examples:
            assert each.target is not None
            source, target = each.source.tolist(), each.target.tolist()
            with torch.no_grad():
                odds = logits(model, source, target[:-1], rng)
            wanted = torch.tensor(target)
            kept.append(F.cross_entropy(odds, wanted, reduction="sum", label_smoothing=smoothing).item())
            correct += 0 if smoothing else int((odds.argmax(-1) == wanted).sum())
    count = sum(target for _, target in LENGTHS)
    with torch.no_grad():
        loss, found = model(batch(examples), evaluated(0, 1, 2, 3))
        objective, predicted = model(batch(examples), trained(0, 1, 2, 3))
    assert found["costs"].tolist() == pytest.approx(nats, rel=1e-5)
    assert found["weights"].tolist() == [9, 30, 2, 17] and found["tokens"] == count
    assert found["nats"].item() == pytest.approx(sum(nats), rel=1e-5)
    weight = 0.95 if name == "lha" else 1.0  # its objective is a convex combination of the task's and its own
    assert weight == model.body.task_weight and (name == "lha" or loss.item() == pytest.approx(sum(nats) / count))
    assert found["accuracy"].item() == pytest.approx(correct / count)
    assert "predicted" not in predicted and "costs" not in predicted
    if name == "full":  # the others add losses of their own, or draw anew for each step
        assert objective.item() == pytest.approx(sum(smoothed) / count, rel=1e-5)
        assert abs(sum(smoothed) - sum(nats)) > 0.1


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", NAMES)
def test_neither_padding_nor_the_rest_of_the_batch_changes_a_prediction(name, blocks):
    model, examples = text_model(pair(name, blocks)), sentences(*LENGTHS)
    with torch.no_grad():
        together = model(batch(examples), evaluated(5, 6, 7, 8))[1]
        for row, each in enumerate(examples):
            alone = model(batch([each]), evaluated(5 + row))[1]
            assert alone["costs"].item() == pytest.approx(together["costs"][row].item(), rel=1e-5)
            assert alone["predicted"][0].tolist() == together["predicted"][row].tolist()


def test_draws_go_by_the_sample_and_not_by_the_place_in_the_batch():
    random_keys = attention("smart_bird", smart_bird={"sampling": "random", "keys": 3})
    config = pair().model_copy(update={"attention": random_keys})
    model, (first, second) = text_model(config), sentences((20, 25), (20, 25))
    with torch.no_grad():
        together = model(batch([first, second], BeamSettings(3, 20, END)), evaluated(4, 9))[1]
        alone = model(batch([second], BeamSettings(3, 20, END)), evaluated(9))[1]
        other = model(batch([second], BeamSettings(3, 20, END)), evaluated(0))[1]
    assert alone["costs"].item() == pytest.approx(together["costs"][1].item(), rel=1e-5)
    assert alone["predicted"][0].tolist() == together["predicted"][1].tolist()
    assert abs(other["costs"].item() - alone["costs"].item()) > 1e-2


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", NAMES)
def test_cached_decoding_is_decoding_of_whole_prefixes(name, blocks):
    model, examples = text_model(pair(name, blocks)), sentences(*LENGTHS)
    with torch.no_grad():
        found = model(batch(examples), evaluated(0, 1, 2, 3))[1]["predicted"]
        for row, each in enumerate(examples):
            predicted: list[int] = []
            while len(predicted) < RULE.tokens:
                token = int(logits(model, each.source.tolist(), predicted, evaluated(row))[-1].argmax())
                if token == END:
                    break
                predicted.append(token)
            assert found[row].tolist() == predicted and len(set(predicted)) > 1


@pytest.mark.parametrize("alpha", [0.0, 0.6, 3.0])
def test_a_wide_beam_finds_the_best_of_all_texts(alpha):
    """Enumerated, and scored by teacher forcing."""
    model, end, tokens = text_model(pair(vocabulary=5)), 4, 4
    source = [2, 0, 3, end]
    texts = [list(x) for size in range(tokens) for x in itertools.product(range(end), repeat=size)]
    with torch.no_grad():
        all_of_them = batch([example(source, [*text, end]) for text in texts], BeamSettings(1, 1, end))
        costs = model(all_of_them, evaluated(*[0] * len(texts)))[1]["costs"].tolist()
        scores = [-cost / length_penalty(len(text) + 1, alpha) for text, cost in zip(texts, costs, strict=True)]
        best = texts[max(range(len(texts)), key=lambda i: scores[i])]
        found = model(batch([example(source, None)], BeamSettings(200, tokens, end, alpha)), evaluated(0))[1]
    assert found["predicted"][0].tolist() == best
    assert "costs" not in found and found["nats"] == found["tokens"] == 0


def gradient(model: TextModel, parts: list[tuple[list[EncodedText], list[int]]]) -> torch.Tensor:
    """Gradient of the mean over micro-batches, as an engine accumulates it."""
    model.zero_grad()
    divisor = sum(int(model.count_scored(batch(part))) for part, _ in parts) / len(parts)
    for part, samples in parts:
        (model(batch(part), trained(*samples), divisor)[0] / len(parts)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("blocks", BLOCKS)
def test_every_token_of_unequal_micro_batches_weighs_the_same(blocks):
    config = pair("full", blocks, dropout=0.2, label_smoothing=0.1, tied_embeddings=True)
    model, examples = text_model(config).train(), sentences(*LENGTHS)
    whole = gradient(model, [(examples, [0, 1, 2, 3])])
    parts = gradient(model, [([examples[1], examples[3]], [1, 3]), ([examples[0], examples[2]], [0, 2])])
    assert whole.norm() > 1e-2 and (parts - whole).norm() < 1e-5 * whole.norm()
    assert len(whole) == sum(p.numel() for p in model.parameters())
