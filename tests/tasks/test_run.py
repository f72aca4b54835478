"""Runs of launch/finetune.py: data, bit-identical resume, early stopping, the best checkpoint, initial weights; and a
task defined only in this file, one row of the catalog, as CONTRIBUTING.md describes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.batches import EncodedExample, fingerprint
from megasparse.tasks.catalog import TASKS, Entry, build_task
from megasparse.tasks.metrics import METRICS
from megasparse.tasks.run import open_run, read_files, restore_task
from megasparse.tasks.task import split_files
from megasparse.training.checkpoints.manifest import list_checkpoints
from tests.helpers import finetuning
from tests.helpers.finetuning import ENCODER, assert_resumes, bert, configured, launch, opened, plain, reviews, table

STEPS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny BERT with dropout, and 40 reviews, of which 10 are held out: epochs of 30 examples."""
    folder = tmp_path_factory.mktemp("finetuning")
    bert(folder / "bert", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
    reviews(folder / "reviews.csv", 40)
    return folder


@pytest.mark.parametrize("name", ["ours", "bert"])
def test_a_stopped_run_resumes_bit_identically(name, place, tmp_path):
    attention = {"pattern": ["lsh"], "lsh": {"chunk": 8}}
    sections: dict[str, Any] = {"start": {"huggingface": str(place / "bert"), "attention": attention}}
    if name == "ours":
        sections = {"model": ENCODER, "task": {"max_length": 128}}
    assert len(plain(assert_resumes(tmp_path, place / "reviews.csv", 3, **sections))) == STEPS
    assert json.loads((tmp_path / "straight" / "best.json").read_text())["step"] in (2, 4, 6)


@pytest.fixture
def given_metrics(monkeypatch):
    """Accuracies of successive validations, in place of measured ones."""
    values: list[float] = []
    monkeypatch.setitem(METRICS, "accuracy", lambda labels, predicted: values.pop(0))
    yield values


def steps_of(run: Path) -> list[int]:
    return [int(path.name) for path in list_checkpoints(run / "checkpoints")]


TINY: dict[str, Any] = {
    "model": {**ENCODER, "layers": 1}, "task": {"max_length": 128},
    "training": {"steps": 8, "global_batch": 4}, "evaluation": {"every": 1}, "checkpoint": {"keep": 2, "every": 1},
}  # fmt: skip


@pytest.mark.parametrize("stop", [None, 3], ids=["straight", "resumed"])
def test_the_best_checkpoint_is_kept_although_it_is_old(place, tmp_path, given_metrics, stop):
    given_metrics += [0.1, 0.6, 0.3, 0.6, 0.5, 0.2, 0.1, 0.0]
    if stop:
        launch(tmp_path / "run", place / "reviews.csv", "--stop-at", str(stop), **TINY)
    launch(tmp_path / "run", place / "reviews.csv", **TINY)
    result = json.loads((tmp_path / "run" / "best.json").read_text())
    assert (result["metric"], result["step"], result["value"]) == ("evaluation/accuracy", 2, 0.6)
    assert result["scalars"]["evaluation/accuracy"] == 0.6 and "evaluation/macro_f1" in result["scalars"]
    assert steps_of(tmp_path / "run") == [2, 7, 8] and not given_metrics
    assert restore_task(tmp_path / "run").checkpoint.step == 2


def test_patience_ends_a_run_early_and_it_stays_ended(place, tmp_path, given_metrics, capfd):
    given_metrics += [0.1, 0.6, 0.3, 0.6, 9.0]
    sections = {**TINY, "evaluation": {"every": 1, "patience": 2}}
    lines = launch(tmp_path / "run", place / "reviews.csv", **sections)
    assert given_metrics == [9.0] and steps_of(tmp_path / "run") == [2, 3, 4]
    result = json.loads((tmp_path / "run" / "best.json").read_text())
    assert result["step"] == 2 and "done early, after step 4 of 8" in capfd.readouterr().err
    (tmp_path / "run" / "best.json").unlink()
    again = launch(tmp_path / "run", place / "reviews.csv", **sections)
    assert given_metrics == [9.0] and plain(again) == plain(lines) and steps_of(tmp_path / "run") == [2, 3, 4]
    assert "nothing left to do" in capfd.readouterr().err
    assert json.loads((tmp_path / "run" / "best.json").read_text()) == result


def texts(encoded: list[EncodedExample]) -> list[bytes]:
    return [each.sequences[0].tokens.tobytes() for each in encoded]


def made(place: Path, source: Path | None = None, **sections: Any) -> Any:
    return opened(place / "none", source or place / "reviews.csv", **{"model": ENCODER, "task": {"max_length": 128},
                                                                     **sections})  # fmt: skip


def test_the_seed_chooses_the_held_out_examples_and_a_limit_those_to_train_on(place):
    one, same, other = (made(place, run={"seed": seed}) for seed in (0, 0, 1))
    assert len(one.train) == 30 and len(one.validation) == 10
    assert texts(one.train) == texts(same.train) and texts(one.validation) == texts(same.validation)
    assert texts(one.validation) != texts(other.validation) and fingerprint(one.train) == fingerprint(same.train)
    assert fingerprint(one.train) != fingerprint(other.train)
    names = [each.name for each in one.train], [each.name for each in one.validation]
    assert sorted(map(int, names[0] + names[1])) == list(range(40))
    assert all(part == sorted(part, key=int) for part in names)
    few, all_of_them = (made(place, task={"max_length": 128, "limit": limit}) for limit in (7, 1000))
    assert len(few.train) == 7 and set(texts(few.train)) <= set(texts(one.train)) and len(all_of_them.train) == 30
    assert texts(few.validation) == texts(one.validation)


def test_steps_and_warm_up_follow_from_epochs(place):
    training = {"steps": 6, "global_batch": 8, "micro_batch": 4}
    plain_run = made(place, training={**training, "epochs": 0}).config
    assert plain_run.training.steps == 6 and plain_run.optimizer.warmup_steps == round(0.1 * 6)
    result = made(place, training={**training, "epochs": 2.5}, optimizer={"warmup_fraction": 0.2},
                 evaluation={"every": 0}).config  # fmt: skip
    assert result.training.steps == math.ceil(2.5 * 30 / 8) == 10
    assert (result.optimizer.warmup_steps, result.evaluation.every) == (2, 4)  # an epoch is begun four times
    assert result.evaluation.metric == "accuracy" and result.task.labels == ["bad", "good"]
    assert made(place, optimizer={"warmup_fraction": 0.0, "warmup_steps": 5}).config.optimizer.warmup_steps == 5


@pytest.mark.parametrize(
    ("sections", "kind", "said"),
    [
        ({"evaluation": {"metric": "acuracy"}}, ConfigError, 'evaluation.metric: "acuracy".*Did you mean "accuracy"'),
        ({"task": {"name": "tabel"}}, ConfigError, 'task.name: unknown task "tabel".*"table"'),
        ({"task": {"validation_fraction": 0.99}}, DataError, "too few to hold some out"),
        ({"model": {**ENCODER, "vocabulary": 200}}, ConfigError, "model.vocabulary: 200 ids.*256 or more"),
    ],
)
def test_invalid_settings_are_rejected(sections, kind, said, place):
    with pytest.raises(kind, match=said):
        made(place, **{name: {"max_length": 128, **s} if name == "task" else s for name, s in sections.items()})


def test_a_changed_table_is_not_gone_on_with(place, tmp_path, capfd):
    source = reviews(tmp_path / "table.csv", 40)
    launch(tmp_path / "run", source, "--stop-at", "2", **TINY)
    source.write_text(source.read_text().replace(*finetuning.WORDS[:2]))
    with pytest.raises(SystemExit) as caught:
        launch(tmp_path / "run", source, **TINY)
    assert caught.value.code == 2 and "data" in capfd.readouterr().err


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_more_epochs_are_gone_on_with_although_the_warm_up_follows_from_them(place, tmp_path, capfd, schedule):
    sections = {**TINY, "optimizer": {"schedule": schedule, "warmup_fraction": 0.5}, "evaluation": {"every": 0}}
    for epochs, steps in ((0.5, 4), (1.0, 8)):
        sections["training"] = {"epochs": epochs, "global_batch": 4}
        assert len(plain(launch(tmp_path / "run", place / "reviews.csv", **sections))) == steps
    steps = "; training.steps: 4 -> 8" * (schedule == "linear")
    assert f"optimizer.warmup_steps: 2 -> 4{steps}; the {schedule} schedule changes with it" in capfd.readouterr().err
    sections["optimizer"]["warmup_fraction"] = 0.25
    with pytest.raises(SystemExit):
        launch(tmp_path / "run", place / "reviews.csv", **sections)
    assert "optimizer.warmup_fraction: 0.5 -> 0.25" in capfd.readouterr().err


def test_labels_that_look_like_a_mistake_are_reported(tmp_path, monkeypatch):
    rows = [(f"text {number}", f"{number % 3}.5") for number in range(20)]
    monkeypatch.setattr("megasparse.config.files.PACKAGE", tmp_path)
    (tmp_path / "configs").mkdir()
    table(tmp_path / "configs" / "held_out.csv", [("x", "7.5"), ("y", "0.5")])
    source, reported = table(tmp_path / "table.csv", rows), []
    task = {"validation": "configs/held_out.csv", "labels": ["0.5", "1.5", "2.5", "7.5"], "max_length": 128}
    open_run(configured(tmp_path / "run", source, model=ENCODER, task=task), reported.append)
    assert reported[-2].startswith('warning: the 4 real numbers in the column "label" are treated as classes: task.l')
    assert reported[-1] == "warning: the training data contains no examples of 7.5, unlike the validation data"
    reported.clear()
    open_run(configured(tmp_path / "run", reviews(tmp_path / "table.csv", 40), model=ENCODER), reported.append)
    assert not any("warning" in line for line in reported)


SHOUTING = Entry(
    files=({"train": "train.csv", "validation": "dev.csv"},), rows="comma_separated()", text=("line",), label="mood",
    classes=("calm", "loud"),
)  # fmt: skip


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setitem(TASKS, "shouting", SHOUTING)
    for name, count in (("train.csv", 64), ("dev.csv", 16)):
        words = [f"word {number} of many" for number in range(count)]
        lines = [f"loud,{word.upper()}" if number % 2 else f"calm,{word}" for number, word in enumerate(words)]
        (tmp_path / name).write_text("\n".join(["mood,line", *lines]) + "\n")
    return tmp_path


def test_it_is_read_and_learned(folder):
    shouting = build_task(TaskConfig(name="shouting"))
    examples = list(read_files(shouting, split_files(shouting, folder, "validation")))
    assert [(x.inputs, x.label) for x in examples[:2]] == [(("word 0 of many",), 0), (("WORD 1 OF MANY",), 1)]
    task = {"name": "shouting", "source": str(folder), "max_length": 32}
    model, training = {**ENCODER, "dropout": 0.0}, {"steps": 30}
    lines = launch(folder / "run", folder, task=task, model=model, head={"dropout": 0.0}, training=training)
    assert lines[-1]["evaluation/accuracy"] == 1.0
