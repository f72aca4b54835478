"""QAngaroo's files: read, refused, learned from, resumed, evaluated and answered."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from sklearn.metrics import accuracy_score

from launch import evaluate, predict
from megasparse.config.finetuning import TaskConfig
from megasparse.tasks import build_task
from megasparse.tasks.forms.choice import Choice
from megasparse.training.checkpoints.checkpoint import Checkpoint
from tests.helpers.finetuning import ENCODER, assert_resumes, bert_tokenizer, launch, plain, typed
from tests.helpers.refusals import refusal
from tests.helpers.tokenizers import written

ROWS: list[dict[str, Any]] = [
    {
        "id": "WH_dev_0", "query": "country of tallinn", "answer": "estonia",
        "candidates": ["latvia", "estonia"],
        "supports": ["Tallinn is a city.", "It is in Estonia ."], "annotations": [],
    },
    {"id": "WH_dev_1", "query": "genre jaws", "candidates": ["thriller", "a", "b"], "supports": []},
]  # fmt: skip


def written_rows(file: Path, rows: Any) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(rows))
    return file


def read(file: Path) -> list[Any]:
    return list(build_task(TaskConfig(name="wikihop")).read(file))


def test_examples_of_a_file(tmp_path):
    file = written_rows(tmp_path / "dev.json", ROWS)
    first, second = read(file)
    assert isinstance(first, Choice) and first.candidates == 2 and second.candidates == 3
    assert first.inputs == ("country of tallinn", "latvia", "estonia", "Tallinn is a city.", "It is in Estonia .")
    assert (first.label, first.name, str(first.location)) == (1, "WH_dev_0", f"{file}:1")
    assert second.inputs == ("genre jaws", "thriller", "a", "b")
    assert (second.label, second.name, second.location.line) == (None, "WH_dev_1", 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"query": None}, '"query" is no text but null'),
        ({"query": " "}, '"query" is empty'),
        ({"id": 7}, '"id" is no text but 7'),
        ({"id": ""}, '"id" is empty'),
        ({"candidates": "ann"}, '"candidates" is no list of texts but "ann"'),
        ({"candidates": []}, '"candidates" is empty: there is nothing to choose from'),
        ({"candidates": ["a", 3]}, '"candidates" has 3, which is no text'),
        ({"candidates": ["a", " "]}, "one of the candidates is empty"),
        ({"candidates": ["estonia", "b", "estonia"]}, '"estonia" is twice among the candidates. Remove one'),
        ({"supports": ["a", None]}, '"supports" has null, which is no text'),
        ({"answer": "Estonia"}, 'the answer "Estonia" is not among the candidates. Its candidates are: latvia, est'),
        ({"answer": 1}, "the answer 1 is not among the candidates"),
    ],
)
def test_a_malformed_example_is_named_by_file_number_and_id(changes, said, tmp_path):
    file = written_rows(tmp_path / "dev.json", [ROWS[1], {**ROWS[0], **changes}])
    which = "" if isinstance(changes.get("id"), int) else f' ("{changes.get("id", "WH_dev_0")}")'
    assert refusal(lambda: read(file)).startswith(f"{file}:2: example 2{which}: {said}")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'[{"id": "a",\n "query": "b', ":2: is no JSON (Unterminated string starting at, in column 11, 23 characters"),
        (b"", ":1: is no JSON"),
        (b"[" * 200_000, ": is nested too deeply"),
        (b'["\xff"]', ": is no UTF-8 (byte 0xff)"),
        (b'{"id": "a"}', ": is no JSON array of examples"),
        (b'["a"]', ':1: example 1: "a" is no object'),
        (json.dumps([ROWS[0], ROWS[0]]).encode(), ':2: example 2: the id "WH_dev_0" is another example\'s too'),
    ],
    ids=["cut off", "empty", "deep", "latin", "object", "text", "same id"],
)
def test_a_malformed_file_is_refused(data, said, tmp_path):
    file = tmp_path / "train.json"
    file.write_bytes(data)
    assert refusal(lambda: read(file)).startswith(f"{file}{said}")


# Runs.


def questions(number: int, seed: int) -> list[dict[str, Any]]:
    """The answer is the candidate that a paragraph names beside the question."""
    drawn, rows = random.Random(seed), []
    for i in range(number):
        question, other = drawn.sample("bcd", 2)
        candidates = drawn.sample("klmnop", drawn.randint(3, 4))
        answer = drawn.choice(candidates)
        supports = [f"{question} {answer}", *[f"{other} {other}"] * drawn.randint(0, 1)]
        row = {"id": f"q{seed}_{i}", "query": question, "answer": answer, "candidates": candidates}
        rows.append({**row, "supports": supports})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wikihop")
    for name, number, seed in (("train", 1500, 0), ("dev", 80, 1), ("test", 30, 2)):
        written_rows(folder / f"{name}.json", questions(number, seed))
    written(folder, bert_tokenizer())
    return folder


def sections(folder: Path, steps: int) -> dict[str, Any]:
    task = {"name": "wikihop", "max_length": 24, "tokenizer": str(folder / "tokenizer.json")}
    return {
        "model": {**ENCODER, "max_length": 24, "dropout": 0.0}, "task": task,
        "training": {"steps": steps, "global_batch": 32, "micro_batch": 32},
        "optimizer": {"learning_rate": 3e-3, "schedule": "constant", "weight_decay": 0.0},
        "head": {"dropout": 0.0}, "evaluation": {"every": steps // 2, "batch": 40},
    }  # fmt: skip


@pytest.mark.slow
def test_it_learns_and_is_evaluated_and_answers(folder, capsys):
    run, out = folder / "run", folder / "out"
    lines = launch(run, folder, **sections(folder, 240))
    best = json.loads((run / "best.json").read_text())
    assert best["metric"] == "evaluation/accuracy" and best["value"] > 0.8  # chance is 0.29
    assert all(line["train/loss"] >= 0 for line in lines if "train/loss" in line)

    common = ["--task", "wikihop", "--checkpoint", run, "--source", folder, "--json", out / "test.json"]
    typed(evaluate, *common, "--predictions", out / "test.jsonl")
    result = json.loads((out / "test.json").read_text())
    rows = [json.loads(line) for line in (out / "test.jsonl").read_text().splitlines()]
    official = questions(30, 2)
    assert (result["split"], result["examples"]) == ("test", 30)
    assert [row["label"] for row in rows] == [row["answer"] for row in official]
    assert [list(row["scores"]) for row in rows] == [row["candidates"] for row in official]
    assert all(row["predicted"] == max(row["scores"], key=row["scores"].get) for row in rows)
    right = accuracy_score([row["label"] for row in rows], [row["predicted"] for row in rows])
    assert result["metrics"]["accuracy"]["value"] == right > 0.6

    new = [{key: value for key, value in row.items() if key != "answer"} for row in official]
    written_rows(folder / "new.json", new)
    typed(predict, "--checkpoint", run, "--source", folder / "new.json", "--output", out / "submission.json")
    submission = json.loads((out / "submission.json").read_text())
    assert submission == {row["name"]: row["predicted"] for row in rows}
    for name in ("new.jsonl", "new.csv"):
        typed(predict, "--checkpoint", run, "--source", folder / "new.json", "--output", out / name)
    assert {json.loads(line)["label"] for line in (out / "new.jsonl").read_text().splitlines()} == {None}
    capsys.readouterr()
    with pytest.raises(SystemExit):
        typed(predict, "--checkpoint", run, "--text", "who?")
    assert 'error: --text: "wikihop" reads no texts. Give --source FILE' in capsys.readouterr().err


def test_a_run_that_stopped_goes_on_to_the_bit(folder, tmp_path):
    """Dropout and drawn hashes are on."""
    settings = sections(folder, 6)
    lsh = {"pattern": ["lsh"], "lsh": {"chunk": 4}}
    settings |= {"model": {**ENCODER, "max_length": 24, "attention": lsh}, "head": {"dropout": 0.2}}
    settings["training"] |= {"global_batch": 8, "micro_batch": 4}
    assert len(plain(assert_resumes(tmp_path, folder, 4, **settings))) == 6
    weights = Checkpoint.open(tmp_path / "straight" / "checkpoints" / "00000006").manifest["tensors"]["weight"]
    assert "output.weight" in weights
