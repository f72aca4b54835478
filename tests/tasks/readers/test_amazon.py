"""Amazon's reviews of electronics in the form of the official file."""

import gzip
import json

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks import build_task
from megasparse.tasks.task import split_files


def test_the_compressed_file_reads_the_same(task, tmp_path):
    plain, packed = (tmp_path / f"reviews_Electronics_5.json{end}" for end in ("", ".gz"))
    plain.write_text(
        "".join(json.dumps({"reviewText": f"Review {n}", "overall": n % 5 + 1.0}) + "\n" for n in range(50))
    )
    before = [[(each.inputs, each.label) for each in task.read(file)] for file in task.files(tmp_path)["train"]]
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    (file,) = task.files(tmp_path)["train"]
    found = list(task.read(file))
    assert [[(each.inputs, each.label) for each in found]] == before
    assert str(found[0].location) == f"{packed}:3"


def test_the_sample_is_every_33rd_review_in_parts_of_eight_one_and_one(tmp_path, monkeypatch):
    rows = (json.dumps({"reviewText": f"text {n}", "overall": 1.0}) for n in range(33 * 25))
    (tmp_path / "reviews_Electronics_5.json").write_text("\n".join(rows))
    task = build_task(TaskConfig(name="amazon_50k"))
    monkeypatch.setattr(type(task), "most", 20)
    splits = ("train", "validation", "test")
    found = {s: [int(e.name) for f in split_files(task, tmp_path, s) for e in task.read(f)] for s in splits}
    train = [33 * n for n in range(20) if n % 10 > 1]
    assert found == {"train": train, "validation": [33, 363], "test": [0, 330]}
