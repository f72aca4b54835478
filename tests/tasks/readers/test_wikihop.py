"""QAngaroo's files: reading, errors, training, resume, evaluation and answers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks.catalog import build_task
from megasparse.training.checkpoints.checkpoint import Checkpoint
from tests.helpers.commands import refusal
from tests.helpers.finetuning import ENCODER, assert_resumes, bert_tokenizer, plain
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
    supports = ("Tallinn is a city.", "It is in Estonia .")
    assert first.inputs == ("country of tallinn", ("latvia", "estonia"), supports)
    assert (first.label, first.name, str(first.location)) == (1, "WH_dev_0", f"{file}:1")
    assert second.inputs == ("genre jaws", ("thriller", "a", "b"), ())
    assert (second.label, second.name, second.location.line) == (None, "WH_dev_1", 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"query": None}, ": query: Input should be a valid string (null)"),
        ({"query": " "}, ": query: String should match pattern"),
        ({"id": 7}, ": id: Input should be a valid string (7)"),
        ({"candidates": "ann"}, ': candidates: Input should be a valid list ("ann")'),
        ({"candidates": []}, ": candidates: List should have at least 1 item"),
        ({"candidates": ["a", 3]}, ": candidates.1: Input should be a valid string (3)"),
        ({"candidates": ["a", " "]}, ": candidates.1: String should match pattern"),
        ({"candidates": ["estonia", "b", "estonia"]}, ' ("WH_dev_0"): "estonia" occurs twice among the candidates.'),
        ({"supports": ["a", None]}, ": supports.1: Input should be a valid string (null)"),
        ({"answer": "Estonia"}, ' ("WH_dev_0"): the answer "Estonia" is not among the candidates. Its candidates are'),
        ({"answer": 1}, ": answer: Input should be a valid string (1)"),
    ],
)
def test_a_malformed_example_is_named_by_file_number_and_key(changes, said, tmp_path):
    file = written_rows(tmp_path / "dev.json", [ROWS[1], {**ROWS[0], **changes}])
    assert refusal(lambda: read(file)).startswith(f"{file}:2: example 2{said}")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'[{"id": "a",\n "query": "b', ": not JSON (Unterminated string starting at: line 2 column 11 (char 23)"),
        (b"", ": not JSON"),
        (b"[" * 200_000, ": not JSON (maximum recursion depth exceeded"),
        (b'["\xff"]', ": not UTF-8 (byte 0xff in column 3)"),
        (b'{"id": "a"}', ": not a JSON array of examples"),
        (b'["a"]', ":1: example 1: it: Input should be a valid dictionary"),
        (json.dumps([ROWS[0], ROWS[0]]).encode(), ':2: example 2 ("WH_dev_0"): the id occurs twice'),
    ],
    ids=["cut off", "empty", "deep", "latin", "object", "text", "same id"],
)
def test_a_malformed_file_is_rejected(data, said, tmp_path):
    file = tmp_path / "train.json"
    file.write_bytes(data)
    assert refusal(lambda: read(file)).startswith(f"{file}{said}")


def test_a_stopped_run_resumes_bit_identically(tmp_path):
    drawn = random.Random(0)
    for name, number in (("train", 60), ("dev", 20)):
        rows = []
        for i in range(number):
            candidates = drawn.sample("klmnop", drawn.randint(3, 4))
            answer = drawn.choice(candidates)
            row = {"id": f"q{i}", "query": "b", "answer": answer, "candidates": candidates, "supports": [f"b {answer}"]}
            rows.append(row)
        written_rows(tmp_path / "data" / f"{name}.json", rows)
    attention = {"pattern": ["lsh"], "lsh": {"chunk": 4}}
    settings = {
        "task": {"name": "wikihop", "max_length": 24, "tokenizer": str(written(tmp_path, bert_tokenizer()))},
        "model": {**ENCODER, "max_length": 24, "attention": attention}, "head": {"dropout": 0.2},
    }  # fmt: skip
    assert len(plain(assert_resumes(tmp_path, tmp_path / "data", 4, **settings))) == 6
    weights = Checkpoint.open(tmp_path / "straight" / "checkpoints" / "00000006").manifest["tensors"]["weight"]
    assert "output.weight" in weights
