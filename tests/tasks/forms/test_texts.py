"""Sequence to sequence: losses and searches against their definitions, batches of tokens, texts and runs."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megasparse.config.schema import ModelConfig
from megasparse.errors import ConfigError
from megasparse.evaluation.generate import BeamSettings
from megasparse.ops.random import EVALUATION_STEP, RngContext
from megasparse.tasks.form import Form
from megasparse.tasks.forms.texts import EncodedText, TextModel, Texts, padded
from megasparse.tasks.run import TaskRun, answers, predict_examples, predict_texts, restore_task
from megasparse.tasks.task import Example, SourceLocation
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.ranks import Ranks
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.finetuning import assert_resumes, opened
from tests.helpers.hub import checkpoint
from tests.helpers.models import attention, named, small_pair
from tests.helpers.texts import example, logits, parallel, sections, text_model

END = 259
"""Id of the end in a vocabulary of bytes."""
TOKENS: dict[str, Any] = {"batch_unit": "tokens", "micro_batch": 128, "global_batch": 256}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return parallel(tmp_path_factory.mktemp("texts") / "data")


def run_of(data: Path, tmp_path: Path, **changes: Any) -> TaskRun:
    return opened(tmp_path / "run", data, **sections(**changes))


def encoded(run: TaskRun, *pairs: tuple[str, str | None]) -> tuple[list[Any], list[str]]:
    lines = [SourceLocation(Path("x.en"), n) for n, _ in enumerate(pairs, 1)]
    given = [Example((text,), answer, at, str(at.line)) for (text, answer), at in zip(pairs, lines, strict=True)]
    return list(run.form.encode(given)), run.form.lines("new")


def test_both_sides_end_with_the_separator_unless_an_answer_is_cut(data, tmp_path):
    (first, second), lines = encoded(run_of(data, tmp_path), ("ab é", "AB"), ("c", None))
    assert first.source.tolist() == [*"ab é".encode(), END] and first.target.tolist() == [*b"AB", END]
    assert (first.length, first.label, str(first.location), first.name) == (6, "AB", "x.en:1", "1")  # the source's
    assert second.source.tolist() == [*b"c", END] and second.target is None
    assert lines == ["new: 2 examples, the longest of 6 tokens; 1 answers, the longest of 3 tokens"]
    run = run_of(data, tmp_path, task={"max_length": 4, "generation": {"target_length": 3}})
    (first, second), lines = encoded(run, ("abc", "AB"), ("abcd", "ABC"))
    assert first.source.tolist() == second.source.tolist() == [*b"abc", END]
    assert first.target.tolist() == [*b"AB", END] and second.target.tolist() == [*b"ABC"]
    assert lines[0].endswith("2 examples, the longest of 5 tokens; 2 answers, the longest of 4 tokens")
    assert lines[1].startswith("new: 1 inputs of more than 4 tokens") and "x.en:2" in lines[1]
    assert lines[2].startswith("new: 1 answers of more than 3 tokens are truncated to their start, the first in x.en:2")


@together(
    "changes, problem",
    [
        ({"task": {"tokenizer": "pixels"}}, r'task\.tokenizer: "pixels" lacks special tokens'),
        ({"model": {"vocabulary": 259}}, r"model\.vocabulary: 259 ids, but its tokenizer has 260"),
        ({"task": {"generation": {"target_length": 33}}}, r"task\.generation\.target_length: 33 .* Set it to 32"),
        (
            {"run": {"engine": "deepspeed"}, "deepspeed": {"zero_optimization": {"stage": 3}}},
            r"deepspeed\.zero_optimization\.stage: 3 .* Set it to 2",
        ),
        (
            {"model": {"attention": {"pattern": ["lsh"], "lsh": {"window": "chunk", "chunk": 8}}}},
            r"model\.attention: not strictly causal \(layer 0",
        ),
        ({"task": {"name": "sts_benchmark"}, "training": {"batch_unit": "tokens"}}, r"training\.batch_unit"),
        ({"training": {"batch_unit": "tokens", "micro_batch": 96, "global_batch": 100}}, r"training\.global_batch"),
    ],
)
def test_unsuitable_inputs_are_rejected(data, tmp_path, changes, problem):
    changes = {"run": {"directory": str(tmp_path / "run")}, **changes}
    refusal(lambda: run_of(data, tmp_path, **changes).batches(Ranks(), 0), ConfigError, f"^{problem}")


def test_batches_are_padded_to_their_longest_and_predicted_without_answers_too(data, tmp_path):
    run = run_of(data, tmp_path)
    result, _ = encoded(run, ("ab", "ABC"), ("abcde", "A"))
    batch = run.form.collate(result)
    assert batch.source.tokens.tolist() == [[97, 98, END, 0, 0, 0], [*b"abcde", END]]
    assert batch.target.tokens.tolist() == [[*b"ABC", END], [65, END, 0, 0]]
    assert batch.numel() == 15 and (batch.rule.ends, batch.rule.vocabulary, batch.rule.beams) == ({END}, 256, 2)
    assert run.form.collate(encoded(run, ("ab", "A"), ("b", None))[0]).target is None


def test_answers_are_texts(data, tmp_path):
    run = run_of(data, tmp_path)
    form: Form = run.form
    (only,), _ = encoded(run, ("ab", "AB é"))
    predicted = np.array([*" x\né".encode()], dtype=np.float64)
    assert form.answer(only, predicted) == "x\né" and form.answer(only, np.array([np.nan])) == ""
    assert form.answer(only, np.array([0xC3, 65.0])) == "\ufffdA" and form.answer(only, np.array([])) == ""
    assert form.row(only, predicted) == {"label": "AB é", "predicted": "x\né"}
    assert form.example(["a text"]).inputs == ("a text",)
    refusal(lambda: form.example(["a", "b"]), ConfigError, r"--text: 2 given")


def test_epochs_of_tokens_decide_the_steps(data, tmp_path):
    run = run_of(data, tmp_path, training={**TOKENS, "epochs": 2.0})
    made, steps = run.batches(Ranks(), 0), 0
    while next(made).position < 2 * len(run.train):
        steps += 1
    assert abs(run.config.training.steps - (steps + 1)) <= 1  # the second epoch may have other packs
    assert run.config.evaluation.every == 2  # as it is given


@pytest.mark.parametrize("unit", ["examples", "tokens"])
def test_a_resumed_run_is_bit_identical_and_is_restored(data, tmp_path, unit):
    given = sections(training=TOKENS if unit == "tokens" else {}, checkpoint={"keep": 9})
    straight = assert_resumes(tmp_path, data, 3, **given)
    path = tmp_path / "straight" / "checkpoints" / "00000006"
    assert (unit == "tokens") == (Checkpoint.open(path).sequences != 48)

    result = restore_task(path)
    assert isinstance(result.model, TextModel)
    read = list(result.form.encode(result.form.task.read(data / "val.en")))
    with torch.no_grad():
        predicted = predict_examples(result.model, result.form, read, result.config, result.ranks)
    loss = sum(each.cost for each in predicted) / sum(each.weight for each in predicted)
    assert loss == pytest.approx(straight[-1]["evaluation/loss"], rel=1e-6)
    assert result.form.measures(read, answers(result.form, read, predicted))["chrf"] == straight[-1]["evaluation/chrf"]
    text = predict_texts(result, [read[0].label.lower()], lambda line: None)
    assert isinstance(text["predicted"], str) and text["label"] is None


def test_a_run_starts_from_a_pretrained_encoder_decoder(data, tmp_path):
    model, path = checkpoint(small_pair(attention=attention("full")), tmp_path / "pretrained")
    run = opened(tmp_path / "run", data, **{**sections(start={"checkpoint": str(path)}), "model": None})
    assert run.config.start.sha256 == json.loads((path / "manifest.json").read_text())["sha256"]
    for name, weight in model.named_parameters():
        assert torch.equal(dict(run.model.body.stack.named_parameters())[name], weight)


def test_a_decoders_sketch_learns_the_predicted_tokens(data, tmp_path):
    run = run_of(data, tmp_path, model={"attention": {"pattern": ["smart_bird"], "smart_bird": {"keys": 3}}})
    objective, _ = run.model.train()(run.form.collate(run.train[:4]), RngContext(0, 1, torch.arange(4), training=True))
    objective.backward()
    sketches = {name: weight.grad for name, weight in run.model.named_parameters() if "smart_bird" in name}
    assert sketches and all(gradient is not None and gradient.any() for gradient in sketches.values())


STOP = 257
RULE = BeamSettings(beams=1, tokens=12, ends={STOP})
NAMES = ("full", "lha", "lsh", "yoso", "smart_bird")
BLOCKS: dict[str, dict[str, Any]] = {"reversible": {}, "ordinary": {"blocks": "ordinary", "activations": "stored"}}


def pair(name: str = "full", blocks: str = "ordinary", **changes: Any) -> ModelConfig:
    """The mechanism is on both sides; a Smart Bird of the encoder learns from the answer."""
    read = attention(name, smart_bird={"keys": 6, "objective": "answer"}) if name == "smart_bird" else named(name)
    source = {"layers": 2, "attention": read, **changes.pop("source", {})}
    return small_pair(attention=named(name), layers=2, padding_token=None, **BLOCKS[blocks], **changes, source=source)


def sentences(*lengths: tuple[int, int], seed: int = 0) -> list[EncodedText]:
    drawn = random.Random(seed)
    sides = [[[*drawn.choices(range(256), k=size - 1), STOP] for size in each] for each in lengths]
    return [example(source, target, number) for number, (source, target) in enumerate(sides)]


LENGTHS = ((21, 9), (4, 30), (40, 2), (33, 17))


def batch(examples: list[EncodedText], rule: BeamSettings = RULE) -> Texts:
    targets = [each.target for each in examples if each.target is not None]
    predicted = padded(targets) if len(targets) == len(examples) else None
    return Texts(padded([each.source for each in examples]), predicted, rule)


def evaluated(*samples: int) -> RngContext:
    return RngContext(7, EVALUATION_STEP, torch.tensor(samples), training=False)


def trained(*samples: int) -> RngContext:
    return RngContext(7, 3, torch.tensor(samples), training=True)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", ["full", "lha", "lsh", "yoso"])
def test_the_loss_is_the_cross_entropy_of_separate_examples(name, blocks):
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
        loss, result = model(batch(examples), evaluated(0, 1, 2, 3))
        objective, predicted = model(batch(examples), trained(0, 1, 2, 3))
    assert result["costs"].tolist() == pytest.approx(nats, rel=1e-5)
    assert result["weights"].tolist() == [9, 30, 2, 17] and result["tokens"] == count
    assert result["nats"].item() == pytest.approx(sum(nats), rel=1e-5)
    weight = 0.95 if name == "lha" else 1.0  # its objective is a convex combination of the task's and its own
    assert weight == model.body.task_weight and (name == "lha" or loss.item() == pytest.approx(sum(nats) / count))
    assert result["accuracy"].item() == pytest.approx(correct / count)
    assert "predicted" not in predicted and "costs" not in predicted
    if name == "full":  # the others add losses of their own, or draw anew for each step
        assert objective.item() == pytest.approx(sum(smoothed) / count, rel=1e-5)
        assert abs(sum(smoothed) - sum(nats)) > 0.1


def test_draws_go_by_the_sample_and_not_by_the_place_in_the_batch():
    random_keys = attention("smart_bird", smart_bird={"sampling": "random", "keys": 3})
    config = pair().model_copy(update={"attention": random_keys})
    model, (first, second) = text_model(config), sentences((20, 25), (20, 25))
    with torch.no_grad():
        together = model(batch([first, second], BeamSettings(3, 20, {STOP})), evaluated(4, 9))[1]
        alone = model(batch([second], BeamSettings(3, 20, {STOP})), evaluated(9))[1]
        other = model(batch([second], BeamSettings(3, 20, {STOP})), evaluated(0))[1]
    assert alone["costs"].item() == pytest.approx(together["costs"][1].item(), rel=1e-5)
    assert alone["predicted"][0].tolist() == together["predicted"][1].tolist()
    assert abs(other["costs"].item() - alone["costs"].item()) > 1e-2


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", NAMES)
def test_cached_decoding_is_decoding_of_whole_prefixes(name, blocks):
    model, examples = text_model(pair(name, blocks)), sentences(*LENGTHS)
    with torch.no_grad():
        result = model(batch(examples), evaluated(0, 1, 2, 3))[1]["predicted"]
        for row, each in enumerate(examples):
            predicted: list[int] = []
            while len(predicted) < RULE.tokens:
                token = int(logits(model, each.source.tolist(), predicted, evaluated(row))[-1].argmax())
                if token == STOP:
                    break
                predicted.append(token)
            assert result[row].tolist() == predicted and len(set(predicted)) > 1
        unlabelled = model(batch([example(examples[0].source.tolist(), None)]), evaluated(0))[1]
    assert unlabelled["predicted"][0].tolist() == result[0].tolist()
    assert "costs" not in unlabelled and unlabelled["nats"] == unlabelled["tokens"] == 0


def gradient(model: TextModel, parts: list[tuple[list[EncodedText], list[int]]]) -> torch.Tensor:
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
