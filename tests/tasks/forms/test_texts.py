"""Texts to tokens and back, what the form refuses, and runs of launch/finetune.py on them, resumed and restored."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megasparse.errors import ConfigError
from megasparse.ops.random import RngContext
from megasparse.tasks.evaluate import answers, predict_examples, predict_texts
from megasparse.tasks.form import Form
from megasparse.tasks.forms.texts import TextModel
from megasparse.tasks.run import TaskRun, restore_task
from megasparse.tasks.task import Example, SourceLocation
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.ranks import Ranks
from tests.helpers.finetuning import assert_resumes, opened
from tests.helpers.hub import checkpoint
from tests.helpers.models import attention, small_pair
from tests.helpers.texts import parallel, sections

END = 259
"""Id of the end in a vocabulary of bytes."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return parallel(tmp_path_factory.mktemp("texts") / "data")


def run_of(data: Path, tmp_path: Path, **changes: Any) -> TaskRun:
    return opened(tmp_path / "run", data, **sections(**changes))


def encoded(run: TaskRun, *pairs: tuple[str, str | None]) -> tuple[list[Any], list[str]]:
    """The examples as the run reads them, and the lines that it prints."""
    encoder = run.form.encoder(run.start)
    given = [
        Example((text,), answer, SourceLocation(Path("x.en"), n), str(n)) for n, (text, answer) in enumerate(pairs, 1)
    ]
    found = list(encoder.encode(given))
    return found, encoder.counts.lines("new", run.config.task.max_length)


def test_both_sides_end_with_the_separator(data, tmp_path):
    run = run_of(data, tmp_path)
    (first, second), lines = encoded(run, ("ab é", "AB"), ("c", None))
    assert first.source.tolist() == [*"ab é".encode(), END] and first.target.tolist() == [*b"AB", END]
    assert first.length == 6  # the source's
    assert (first.label, str(first.location), first.name) == ("AB", "x.en:1", "1")
    assert second.source.tolist() == [*b"c", END] and second.target is None
    assert lines == ["new: 2 examples, the longest of 6 tokens; 1 answers, the longest of 3 tokens"]


def test_what_is_cut_is_counted(data, tmp_path):
    run = run_of(data, tmp_path, task={"max_length": 4, "generation": {"target_length": 3}})
    (first, second), lines = encoded(run, ("abc", "AB"), ("abcd", "ABC"))
    assert first.source.tolist() == [*b"abc", END] and first.target.tolist() == [*b"AB", END]
    assert second.source.tolist() == [*b"abc", END] and second.target.tolist() == [*b"ABC"]
    assert lines[0].endswith("2 examples, the longest of 5 tokens; 2 answers, the longest of 4 tokens")
    assert lines[1].startswith("new: 1 inputs of more than 4 tokens") and "x.en:2" in lines[1]
    assert lines[2].startswith("new: 1 answers of more than 3 tokens keep only their beginning, the first in x.en:2")


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"task": {"tokenizer": "pixels"}}, r'task\.tokenizer: "pixels" has no special tokens'),
        ({"model": {"vocabulary": 259}}, r"model\.vocabulary: 259 ids, and its tokenizer has 260"),
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
def test_what_does_not_fit_is_refused(data, tmp_path, changes, problem):
    changes = {"run": {"directory": str(tmp_path / "run")}, **changes}
    with pytest.raises(ConfigError, match=f"^{problem}"):
        run_of(data, tmp_path, **changes).batches(Ranks(), 0)


def test_batches_are_padded_to_their_longest_and_predicted_without_answers_too(data, tmp_path):
    run = run_of(data, tmp_path)
    found, _ = encoded(run, ("ab", "ABC"), ("abcde", "A"))
    batch = run.form.collate(found)
    assert batch.source.tokens.tolist() == [[97, 98, END, 0, 0, 0], [*b"abcde", END]]
    assert batch.target.tokens.tolist() == [[*b"ABC", END], [65, END, 0, 0]]
    assert batch.numel() == 15 and (batch.rule.end, batch.rule.vocabulary, batch.rule.beams) == (END, 256, 2)
    assert run.form.collate(encoded(run, ("ab", "A"), ("b", None))[0]).target is None
    made = run.form.dummy_batch(run.model.body, 3, 16)
    assert made.source.tokens.shape == (3, 16) and made.target.tokens.shape == (3, 24)
    assert made.source.mask is not None and made.target.mask is not None


def test_answers_are_texts(data, tmp_path):
    run = run_of(data, tmp_path)
    form: Form = run.form
    (only,), _ = encoded(run, ("ab", "AB é"))
    predicted = np.array([*" x\né".encode()], dtype=np.float64)
    assert form.answer(only, predicted) == "x\né" and form.answer(only, np.array([np.nan])) == ""
    assert form.answer(only, np.array([0xC3, 65.0])) == "\ufffdA" and form.answer(only, np.array([])) == ""
    row = form.row(only, predicted)
    assert row == {"label": "AB é", "predicted": "x\né"} and form.line(row) == "x é"
    assert form.example(["a text"]).inputs == ("a text",)
    with pytest.raises(ConfigError, match=r"--text: 2 given"):
        form.example(["a", "b"])


def test_epochs_of_tokens_decide_the_steps(data, tmp_path):
    training = {"batch_unit": "tokens", "micro_batch": 128, "global_batch": 256, "epochs": 2.0}
    run = run_of(data, tmp_path, training=training)
    made, steps = run.batches(Ranks(), 0), 0
    while next(made).position < 2 * len(run.train):
        steps += 1
    assert abs(run.config.training.steps - (steps + 1)) <= 1  # the second epoch may have other packs
    assert run.config.evaluation.every == 2  # as it is given


UNITS: dict[str, dict[str, Any]] = {
    "examples": {},
    "tokens": {"batch_unit": "tokens", "micro_batch": 128, "global_batch": 256},
}


@pytest.mark.parametrize("unit", UNITS)
def test_a_resumed_run_is_the_same_to_the_bit_and_is_restored(data, tmp_path, unit):
    given = sections(training=UNITS[unit], checkpoint={"keep": 9})
    straight = assert_resumes(tmp_path, data, 3, **given)
    path = tmp_path / "straight" / "checkpoints" / "00000006"
    assert (unit == "tokens") == (Checkpoint.open(path).sequences != 48)

    found = restore_task(path)
    assert isinstance(found.model, TextModel)
    read = list(found.encoder.encode(found.task.read(data / "val.en")))
    with torch.no_grad():
        predicted = predict_examples(found.model, found.form, read, found.config, found.ranks)
    loss = sum(each.cost for each in predicted) / sum(each.weight for each in predicted)
    assert loss == pytest.approx(straight[-1]["evaluation/loss"], rel=1e-6)
    assert found.form.measures(read, answers(found.form, read, predicted))["chrf"] == straight[-1]["evaluation/chrf"]
    text = predict_texts(found, [read[0].label.lower()], lambda line: None)
    assert isinstance(text["predicted"], str) and text["label"] is None


def test_a_pretrained_encoder_decoder_is_what_a_run_starts_from(data, tmp_path):
    model, path = checkpoint(small_pair(attention=attention("full")), tmp_path / "pretrained")
    given = sections(start={"checkpoint": str(path)})
    run = opened(tmp_path / "run", data, **{**given, "model": None})
    assert run.config.start.sha256 == json.loads((path / "manifest.json").read_text())["sha256"]
    for name, weight in model.named_parameters():
        assert torch.equal(dict(run.model.body.stack.named_parameters())[name], weight)


def test_a_decoders_sketch_learns_the_predicted_tokens(data, tmp_path):
    """And not a class, which a text has none of."""
    run = run_of(data, tmp_path, model={"attention": {"pattern": ["smart_bird"], "smart_bird": {"keys": 3}}})
    objective, _ = run.model.train()(run.form.collate(run.train[:4]), RngContext(0, 1, torch.arange(4), training=True))
    objective.backward()
    sketches = {name: weight.grad for name, weight in run.model.named_parameters() if "smart_bird" in name}
    assert sketches and all(gradient is not None and gradient.any() for gradient in sketches.values())
