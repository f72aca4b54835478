"""The command itself: transformers' Trainer on the settings of a fine-tuning run."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from megasparse.cli.main import door
from megasparse.tasks import build_task
from megasparse.tasks.readers.table import Table
from megasparse.tasks.run import open_run, read_examples
from tests.helpers.commands import refused
from tests.helpers.finetuning import bert, configured, launch, reviews, settings, table

main = door("compare-trainer")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny BERT without dropout, and a table."""
    folder = tmp_path_factory.mktemp("trainer")
    bert(folder / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    reviews(folder / "reviews.csv", 32)
    return folder


def configuration(place: Path, file: Path, **sections: Any) -> Path:
    given = {"start": {"huggingface": str(place / "bert")}, "training": {"steps": 2}, **sections}
    file.write_text(json.dumps(settings(file.with_suffix(""), place / "reviews.csv", **given)))
    return file


@pytest.fixture
def trainers(monkeypatch):
    """The Trainers that are made, each with its TrainingArguments and data."""
    made: list[Any] = []
    init = transformers.Trainer.__init__
    monkeypatch.setattr(
        transformers.Trainer, "__init__", lambda own, *args, **given: made.append(own) or init(own, *args, **given)
    )
    return made


def test_two_steps_beside_ours(place, tmp_path, capsys, trainers):
    given = {"start": {"huggingface": str(place / "bert")}, "training": {"steps": 2}}
    launch(tmp_path / "ours", place / "reviews.csv", **given)
    ours = json.loads((tmp_path / "ours" / "best.json").read_text())
    config = configuration(place, tmp_path / "trainer.json", optimizer={"learning_rate": 3e-3, "weight_decay": 0.25})
    capsys.readouterr()
    files = ["--json", str(tmp_path / "out.json"), "--ours", str(tmp_path / "ours")]
    main(["--config", str(config), "--seeds", "2", "--set", "evaluation.every=1", *files])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["metric"] == "accuracy" and [each["seed"] for each in found["trainer"]] == [0, 1]
    for result in found["trainer"]:
        reported = [each["accuracy"] for each in result["validations"]]
        assert [each["step"] for each in result["validations"]] == [1, 2] and result["steps"] == 2
        assert result["value"] == max(reported) and result["last"] == reported[-1] and result["step"] in (1, 2)
        assert all(each["accuracy"] * 8 in range(9) for each in result["validations"])
    assert found["ours"] == [{"run": str(tmp_path / "ours"), "step": ours["step"], "value": ours["value"]}]
    said = capsys.readouterr().out
    assert f"ours     accuracy {ours['value']:.4f} over 1" in said and "Trainer  accuracy" in said
    assert "Trainer, seed 1: accuracy" in said
    trainer = trainers[0]
    wanted = {
        "learning_rate": 3e-3, "weight_decay": 0.25, "max_steps": 2, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "adam_beta2": 0.999, "max_grad_norm": 1.0, "warmup_steps": 0, "seed": 0,
    }  # fmt: skip
    assert {name: getattr(trainer.args, name) for name in wanted} == wanted
    assert not Path(trainer.args.output_dir).exists()


def test_it_trains_on_our_examples_by_its_own_tokenizer(place, tmp_path, trainers):
    file = configuration(place, tmp_path / "run.json")
    main(["--config", str(file)])
    config = configured(tmp_path / "run", place / "reviews.csv", start={"huggingface": str(place / "bert")})
    train, held_out = read_examples(build_task(config.task), config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "bert")
    (trainer,) = trainers
    for rows, examples in ((trainer.train_dataset, train), (trainer.eval_dataset, held_out)):
        assert len(rows) == len(examples) and [row["label"] for row in rows] == [e.label for e in examples]
        assert [row["input_ids"] for row in rows] == [tokenizer(e.inputs[0])["input_ids"] for e in examples]


def test_the_first_step_is_ours(place, tmp_path, monkeypatch, trainers):
    """On a batch of all the examples, with the same head, loss and gradient norm. Later ones have another learning
    rate: Trainer's first step has that of step 0.
    """
    table(tmp_path / "few.csv", [["the attention", "x"], ["of a model", "y"], ["we go to it", "y"], ["mask", "x"]])
    few = tmp_path / "few.csv"
    given: dict[str, Any] = {
        "start": {"huggingface": str(place / "bert")}, "head": {"pooling": "first", "dropout": 0.0},
        "task": {"source": str(few), "validation": str(few)},
        "training": {"steps": 3, "global_batch": 4, "micro_batch": 4},
        "optimizer": {"schedule": "linear", "warmup_fraction": 0.0, "learning_rate": 1e-3}, "logging": {"every": 1},
    }  # fmt: skip
    ours = launch(tmp_path / "ours", few, **given)
    head = open_run(configured(tmp_path / "again", few, **given), lambda line: None).model.head
    pooler = {"weight": head.dense.weight, "bias": head.dense.bias}
    own = transformers.AutoModelForSequenceClassification.from_pretrained

    def with_our_head(*args: Any, **kwargs: Any) -> Any:
        model = own(*args, **kwargs)
        model.bert.pooler.dense.load_state_dict(pooler)
        model.classifier.load_state_dict({"weight": head.output.weight, "bias": head.output.bias})
        return model

    monkeypatch.setattr(transformers.AutoModelForSequenceClassification, "from_pretrained", with_our_head)
    file = tmp_path / "trainer.json"
    file.write_text(json.dumps(settings(tmp_path / "run", few, **given)))
    main(["--config", str(file)])
    reported = [entry for entry in trainers[0].state.log_history if "loss" in entry]
    assert len(reported) == len(ours) == 3
    assert reported[0]["loss"] == pytest.approx(ours[0]["train/loss"], rel=1e-4)
    assert reported[0]["grad_norm"] == pytest.approx(ours[0]["optimizer/gradient_norm"], rel=1e-4)


def test_numbers(place, tmp_path):
    rows = [[f"{'the ' * (i + 1)}model", f"{i / 2}"] for i in range(12)]
    source = table(tmp_path / "numbers.csv", rows)
    file = configuration(place, tmp_path / "run.json", task={"labels": [], "source": str(source)})
    main(["--config", str(file), "--json", str(tmp_path / "out.json")])
    (found,) = json.loads((tmp_path / "out.json").read_text())["trainer"]
    assert set(found["validations"][0]) == {"step", "pearson", "spearman", "loss"} and -1 <= found["value"] <= 1


def test_replaced_attention_is_left_out_and_told(place, tmp_path, capsys):
    start = {"huggingface": str(place / "bert"), "attention": {"pattern": ["lha"], "lha": {"chunk": 8}}}
    main(["--config", str(configuration(place, tmp_path / "run.json", start=start))])
    assert "start.attention is left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["start.huggingface=null", "start.checkpoint=x"], "start.huggingface: null"),
        (["start.huggingface=nowhere"], "nowhere: is no folder"),
        (["optimizer.schedule=cosine"], "optimizer.schedule: is set to"),
        (["task.too_long=refuse"], "task.too_long: is set to"),
        (["evaluation.patience=2"], "--set evaluation.patience=0"),
        (["evaluation.metric=f2"], 'evaluation.metric: "f2"'),
        (["task.max_length=65"], "task.max_length: 65 tokens are more than the 64"),
        (["task.name=listops"], "task.name:"),
    ],
)
def test_what_is_refused(place, tmp_path, overrides, said, capsys):
    file = configuration(place, tmp_path / "run.json")
    sets = [word for each in overrides for word in ("--set", each)]
    with pytest.raises(SystemExit, match="2"):
        main(["--config", str(file), *sets])
    last = capsys.readouterr().err.splitlines()[-1]  # transformers may have warned before it
    assert last.startswith("error: ") and said in last


def test_a_task_of_another_form_is_refused(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Table, "form", "texts")
    said = refused(capsys, main, "--config", configuration(place, tmp_path / "run.json"))
    assert 'task.name: "table" predicts neither classes nor numbers. Give a task' in said


@pytest.mark.parametrize("content", [None, "{", "[]", '{"metric": "evaluation/f1", "value": 0.5, "step": 1}'])
def test_a_run_of_ours_that_cannot_be_compared(place, tmp_path, content, capsys):
    (tmp_path / "ours").mkdir()
    if content is not None:
        (tmp_path / "ours" / "best.json").write_text(content)
    words = ["--config", configuration(place, tmp_path / "run.json"), "--ours", tmp_path / "ours"]
    assert "best.json" in refused(capsys, main, *words)
