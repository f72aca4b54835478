"""A restored model predicts what it predicted in training's validation; anything else is refused."""

import json

import pytest
import torch

from megasparse.errors import CheckpointError, ConfigError
from megasparse.tasks.evaluate import answers, predicted, read
from megasparse.tasks.run import restore_task
from tests.helpers.finetuning import ENCODER, bert, launch, reviews
from tests.helpers.hub import checkpoint, encoder


def scores(run, file):
    found = restore_task(run)
    examples = read(found, list(found.task.read(file)), "new", lambda line: None)
    return found, found.form.measures(examples, answers(found.form, examples, predicted(found, examples)))


def files(folder):
    return reviews(folder / "train.csv", 24), reviews(folder / "validation.csv", 13, seed=1)


def best(run):
    return json.loads((run / "best.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with run/ of a model of ours with LSH, on texts of two classes."""
    folder = tmp_path_factory.mktemp("restore")
    train, validation = files(folder)
    attention = {"pattern": ["lsh"], "lsh": {"chunk": 8}}
    task = {"validation": str(validation)}
    launch(folder / "run", train, model={**ENCODER, "attention": attention}, task=task)
    return folder


def test_a_model_of_ours_predicts_what_it_did_in_training(trained):
    found, values = scores(trained / "run", trained / "validation.csv")
    known = best(trained / "run")
    assert {name: known["scalars"][f"evaluation/{name}"] for name in values} == values
    assert found.checkpoint.step == known["step"]
    assert not found.model.training
    attention = found.model.body.attention()
    assert (attention["pattern"], attention["lsh"]["chunk"]) == (["lsh"], 8)
    assert attention["evaluation_rounds"] == {"lsh": attention["lsh"]["rounds"]}
    assert "yoso" not in attention


@pytest.mark.parametrize(
    "sections",
    [
        {"start": {"attention": {"pattern": ["yoso"], "yoso": {"hashes": 4}}}},
        {"training": {"precision": "bf16"}},
        {"lora": {"rank": 2}},
    ],
    ids=["replaced", "bf16", "lora"],
)
def test_a_bert_predicts_what_it_did_in_training(tmp_path, sections):
    train, validation = files(tmp_path)
    start = {"huggingface": str(bert(tmp_path / "bert")), **sections.pop("start", {})}
    task = {"validation": str(validation)}
    launch(tmp_path / "run", train, start=start, task=task, **sections)
    found, values = scores(tmp_path / "run", validation)
    known = best(tmp_path / "run")["scalars"]
    assert {name: known[f"evaluation/{name}"] for name in values} == values
    dtype = torch.bfloat16 if "training" in sections else torch.float32
    assert found.model.head.dense.weight.dtype == dtype
    assert (found.model.body.attention() or {}).get("pattern") == start.get("attention", {}).get("pattern")
    (tmp_path / "run" / "start" / "tokenizer.json").write_bytes(
        (tmp_path / "bert" / "tokenizer.json").read_bytes() + b"\n"
    )
    with pytest.raises(CheckpointError, match="does not have the tokenizer"):
        restore_task(tmp_path / "run")


def test_the_best_checkpoint_of_a_run_is_taken_and_any_one_by_name(tmp_path):
    train, validation = files(tmp_path)
    launch(  # nothing is learned, so no validation is better than the first one
        tmp_path / "run", train, model=ENCODER, task={"validation": str(validation)},
        optimizer={"learning_rate": 1e-30}, evaluation={"every": 2, "batch": 4, "patience": 2},
    )  # fmt: skip
    assert restore_task(tmp_path / "run").checkpoint.step == 2
    assert restore_task(tmp_path / "run" / "checkpoints").checkpoint.step == 2
    assert restore_task(tmp_path / "run" / "checkpoints" / "00000006").checkpoint.step == 6
    for file in (tmp_path / "run" / "checkpoints" / "00000002").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match="00000002"):
        restore_task(tmp_path / "run")


def test_what_is_no_fine_tuned_model_is_refused(tmp_path, trained):
    checkpoint(encoder("full"), tmp_path / "pretrained")
    with pytest.raises(CheckpointError, match=r"is of a pretrained model.*megasparse evaluate --data"):
        restore_task(tmp_path / "pretrained")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        restore_task(tmp_path)
    record = trained / "run" / "start" / "body.json"
    text = record.read_text()
    record.unlink()
    with pytest.raises(CheckpointError, match=r"body.json: cannot be read"):
        restore_task(trained / "run")
    record.write_text(text)


def test_another_task_takes_its_place_only_with_the_same_classes(trained):
    assert restore_task(trained / "run", task="table").task.classes == ("bad", "good")
    other = r'--task: "rte" has entailment, not_entailment; the model was trained on "table", bad, good\. Give --task'
    with pytest.raises(ConfigError, match=other):
        restore_task(trained / "run", task="rte")
    with pytest.raises(ConfigError, match="--task"):
        restore_task(trained / "run", task="listops")
    with pytest.raises(ConfigError, match='no task "tabel"'):
        restore_task(trained / "run", task="tabel")


def test_overrides_are_checked(trained):
    assert restore_task(trained / "run", ["task.max_length=16"]).encoder.config.max_length == 16
    with pytest.raises(ConfigError, match=r"task.max_length: 129 tokens are more than"):
        restore_task(trained / "run", ["task.max_length=129"])
    with pytest.raises(ConfigError, match="max_lenght"):
        restore_task(trained / "run", ["task.max_lenght=1"])
    with pytest.raises(ConfigError, match="model: a fine-tuned model is read as it was trained"):
        restore_task(trained / "run", ["model.attention.lsh.chunk=4"])
    with pytest.raises(CheckpointError, match="shape"):
        restore_task(trained / "run", ["head.hidden=5"])
