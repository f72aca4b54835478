"""Fine-tune, evaluate, predict: by the commands that a user types."""

import csv
import hashlib
import json
import statistics

import pytest
from datasets import ClassLabel, Dataset, DatasetDict
from sklearn.metrics import accuracy_score, f1_score

from launch import evaluate, finetune, predict
from megasparse.cli.evaluation import OF_PRETRAINED
from tests.helpers.finetuning import ENCODER, bert, launch, reviews, table, typed
from tests.helpers.hub import checkpoint, encoder

LSH = {**ENCODER, "attention": {"pattern": ["lsh"], "lsh": {"chunk": 4, "rounds": 1, "buckets": 8}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launchers")
    train = reviews(folder / "train.csv", 48)
    reviews(folder / "test.csv", 30, seed=1)
    for seed in range(3):
        run = {"directory": str(folder / f"run_{seed}"), "engine": "torch", "device": "cpu", "seed": seed}
        launch(folder / f"run_{seed}", train, model=LSH, run=run)
    return folder


def refused(capsys, launcher, *arguments):
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        typed(launcher, *arguments)
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert (caught.value.code, captured.out, captured.err.count("error")) == (2, "", 1)
    assert last.startswith("error: ") and "Traceback" not in captured.err
    return last


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_from_a_table_to_a_score_and_predictions(folder, capsys):
    test, out, each = folder / "test.csv", folder / "out" / "test.json", folder / "out" / "test.jsonl"
    common = ["--task", "table", "--checkpoint", folder / "run_0", "--source", test]
    typed(evaluate, *common, "--json", out, "--predictions", each)
    said = capsys.readouterr()
    result, rows = json.loads(out.read_text()), lines(each)
    with open(test, newline="") as stream:
        official = list(csv.DictReader(stream))
    assert [row["label"] for row in rows] == [row["label"] for row in official]
    assert [(row["name"], row["line"], row["file"]) for row in rows] == [(str(i), i + 2, str(test)) for i in range(30)]
    assert all(sum(row["probabilities"].values()) == pytest.approx(1) for row in rows)
    assert all(row["predicted"] == max(row["probabilities"], key=row["probabilities"].get) for row in rows)
    labels, answers = [row["label"] for row in rows], [row["predicted"] for row in rows]
    accuracy, macro = (result["metrics"][name] for name in ("accuracy", "macro_f1"))
    assert accuracy["value"] == accuracy_score(labels, answers)
    assert macro["value"] == pytest.approx(f1_score(labels, answers, average="macro"), rel=1e-12)
    assert all(actual["low"] <= actual["value"] <= actual["high"] for actual in (accuracy, macro))
    assert accuracy["low"] < accuracy["high"] and accuracy["standard_deviation"] is None
    (only,) = result["runs"]
    best = json.loads((folder / "run_0" / "best.json").read_text())["step"]
    assert (only["step"], only["seed"], only["attention"]["pattern"]) == (best, 0, ["lsh"])
    assert only["checkpoint"] == str(folder / "run_0" / "checkpoints" / f"{best:08d}")
    lengths = [len(row["text"].encode()) + 2 for row in official]  # between a begin and a separator
    cut = sum(length > 48 for length in lengths)
    assert only["inputs"]["cut"] == cut > 0 and only["inputs"]["longest"] == max(lengths)
    assert result["files"] == [{"file": str(test), "sha256": hashlib.sha256(test.read_bytes()).hexdigest()}]
    assert (result["task"], result["split"], result["examples"]) == ("table", None, 30)
    assert {"torch", "scipy", "scikit-learn", "megasparse", "python"} <= result["versions"].keys()
    assert f"accuracy {accuracy['value']:.4f} (95 %" in said.out
    assert f"given: {cut:,} inputs of more than 48 tokens are truncated to their start" in said.err

    new = table(folder / "new.csv", [[row["text"]] for row in official], ("text",))
    typed(predict, "--checkpoint", folder / "run_0", "--source", new, test, "--output", folder / "out" / "new.jsonl")
    again = lines(folder / "out" / "new.jsonl")
    expected = [(str(new), None)] * 30 + [(str(test), label) for label in labels]
    assert [(row["file"], row["label"]) for row in again] == expected
    typed(predict, "--checkpoint", folder / "run_0", "--source", new, "--output", folder / "out" / "new.tsv")
    header, *submitted = (folder / "out" / "new.tsv").read_text().splitlines()
    assert (header, submitted) == ("index\tprediction", [f"{i}\t{answer}" for i, answer in enumerate(answers)])
    text = official[0]["text"]
    capsys.readouterr()
    typed(predict, "--checkpoint", folder / "run_0", "--text", text)
    line = json.loads(capsys.readouterr().out)
    assert line["predicted"] == rows[0]["predicted"] and not {"name", "file", "line", "label"} & line.keys()
    assert line["probabilities"] == pytest.approx(rows[0]["probabilities"], rel=1e-5)  # the same draws: both are first


def test_several_seeds_give_a_mean_with_students_interval(folder, capsys):
    runs = [folder / f"run_{seed}" for seed in range(3)]
    common = ["--task", "table", "--source", folder / "test.csv", "--json", folder / "out" / "seeds.json"]
    typed(evaluate, *common, "--checkpoint", runs[0], runs[1], "--checkpoint", runs[2])
    printed, result = capsys.readouterr().out, json.loads((folder / "out" / "seeds.json").read_text())
    each = []
    for path in runs:
        typed(evaluate, *common[:4], "--checkpoint", path, "--predictions", folder / "out" / "one.jsonl")
        rows = lines(folder / "out" / "one.jsonl")
        each.append(accuracy_score([row["label"] for row in rows], [row["predicted"] for row in rows]))
    actual = result["metrics"]["accuracy"]
    assert [(one["seed"], one["metrics"]["accuracy"]) for one in result["runs"]] == list(enumerate(each))
    assert (actual["value"], actual["standard_deviation"]) == pytest.approx((sum(each) / 3, statistics.stdev(each)))
    half = 4.302653 * statistics.stdev(each) / 3**0.5  # t(0.975; 2) by the tables
    assert (actual["low"], actual["high"]) == pytest.approx((sum(each) / 3 - half, sum(each) / 3 + half), rel=1e-5)
    assert "Student's t over 3 runs" in printed and "3 runs, seeds 0, 1, 2" in printed


def test_a_bert_of_pairs_on_official_files(tmp_path, capsys):
    for name, number, seed in (("train", 16, 0), ("dev", 6, 1)):
        rows = ["index\tsentence1\tsentence2\tlabel"]
        for i in range(number):
            rows.append(f"{i + seed}\tthe model {'of a' if i % 2 else 'we go'}\tit is\t{['not_', ''][i % 2]}entailment")
        (tmp_path / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    (tmp_path / "test.tsv").write_text("index\tsentence1\tsentence2\n31\tthe model\twe go\n17\ta mask\tit\n")
    task = {"name": "rte", "source": str(tmp_path)}
    launch(tmp_path / "run", tmp_path, start={"huggingface": str(bert(tmp_path / "bert"))}, task=task)
    there = ["--checkpoint", tmp_path / "run"]
    typed(evaluate, *there, "--task", "rte", "--source", tmp_path, "--json", tmp_path / "dev.json")
    result = json.loads((tmp_path / "dev.json").read_text())
    assert result["split"] == "validation" and result["runs"][0]["attention"] is None  # the test file has no labels
    known = json.loads((tmp_path / "run" / "best.json").read_text())["scalars"]["evaluation/accuracy"]
    assert result["metrics"]["accuracy"]["value"] == known
    assert "rte, validation: 6 examples" in capsys.readouterr().out
    message = refused(capsys, evaluate, *there, "--task", "rte", "--source", tmp_path, "--split", "test")
    assert f"{tmp_path / 'test.tsv'}:2: lacks a label" in message
    typed(predict, *there, "--source", tmp_path, "--output", tmp_path / "RTE.tsv")
    assert capsys.readouterr().err.startswith("test: 2 examples")
    submitted = [line.split("\t") for line in (tmp_path / "RTE.tsv").read_text().splitlines()]
    assert [row[0] for row in submitted] == ["index", "31", "17"]
    assert {row[1] for row in submitted[1:]} <= {"entailment", "not_entailment"}
    assert '1 given, but an example of "rte" needs 2' in refused(capsys, predict, *there, "--text", "the model")
    typed(predict, *there, "--text", "the model", "--text", "we go")
    assert json.loads(capsys.readouterr().out)["predicted"] == submitted[1][1]
    new = table(tmp_path / "own.csv", [["the model", "we go", "entailment"]], ("premise", "claim", "label"))
    other = ["--task", "table", "--source", new, "--set", 'task.text=["premise", "claim"]']
    typed(evaluate, *there, *other, "--json", tmp_path / "own.json")
    metric = json.loads((tmp_path / "own.json").read_text())["metrics"]["accuracy"]  # one example has no interval
    assert (metric["value"], metric["low"]) == (float(submitted[1][1] == "entailment"), None)


def test_a_dataset_of_the_hub_is_named_as_there_and_read_from_a_folder(tmp_path, capsys):
    rows = {"sentence": [f"a {word} model" for word in ("good", "bad") * 8], "label": [1, 0] * 8}
    data = Dataset.from_dict(rows).cast_column("label", ClassLabel(names=["negative", "positive"]))
    DatasetDict(train=data, validation=data.select(range(4))).save_to_disk(str(tmp_path / "sst2"))
    DatasetDict(train=Dataset.from_dict(rows)).save_to_disk(str(tmp_path / "one"))
    changes = {"start.huggingface": str(bert(tmp_path / "bert")), "run.directory": str(tmp_path / "run"),
               "run.device": "cpu", "run.engine": "torch", "task.max_length": 16, "training.epochs": 1,
               "training.precision": "fp32"}  # fmt: skip
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    typed(finetune, "glue/sst2", "--source", tmp_path / "sst2", *words)
    assert lines(tmp_path / "run" / "metrics.jsonl")[-1]["evaluation/accuracy"] >= 0
    typed(evaluate, "--task", "sst2", "--checkpoint", tmp_path / "run", "--source", tmp_path / "sst2")
    assert "sst2, validation: 4 examples" in capsys.readouterr().out
    one = ["--checkpoint", tmp_path / "run", "--source", tmp_path / "one", "--set", 'task.text=["sentence"]']
    message = refused(capsys, evaluate, *one, "--task", "table")
    assert message.endswith("split of table. Select one with --split: train. See docs/reference/tasks.md")
    for command in ([evaluate, *one, "--task", "table", "--split", "train"], [predict, *one]):
        typed(*command)
        assert "train: 16 examples" in capsys.readouterr().err


def test_mistakes_are_one_line_and_leave_nothing(folder, capsys, tmp_path):
    there = ["--checkpoint", folder / "run_0"]
    scored = [*there, "--task", "table", "--json", tmp_path / "out.json", "--predictions", tmp_path / "out.jsonl"]
    predicted = [*there, "--output", tmp_path / "out.csv"]
    wrong = table(folder / "wrong.csv", [["the mask", "good"]], ("txt", "label"))
    label = table(folder / "label.csv", [["the mask", "good"], ["we go", "awful"]])
    empty = table(folder / "empty.csv", [["the mask", "good"], ["", "bad"]])
    unlabelled = table(folder / "unlabelled.csv", [["the mask"]], ("text",))
    headed = table(folder / "headed.csv", [])
    for source, message in (
        (folder / "none.csv", f"{folder / 'none.csv'}: no such file or folder"),
        (wrong, f'{wrong}:2: missing column "text". Did you mean "txt"?'),
        (folder, f"{folder}: is a folder without splits of table"),
        (headed, f"{headed}: contains no"),
    ):
        assert message in refused(capsys, evaluate, *scored, "--source", source)
        assert message in refused(capsys, predict, *predicted, "--source", source)
    for source, message in ((label, f'{label}:3: "awful" is not a label of table'), (empty, f"{empty}:3: empty")):
        assert message in refused(capsys, evaluate, *scored, "--source", source)
    assert f"{unlabelled}:2: lacks a label" in refused(capsys, evaluate, *scored, "--source", unlabelled)
    cut = ["--set", "task.too_long=refuse", "--set", "task.max_length=4"]
    assert f"{unlabelled}:2: 10 tokens are more" in refused(capsys, predict, *predicted, *cut, "--source", unlabelled)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("label", ["", "awful", None])
def test_a_prediction_needs_no_labels_takes_empty_texts_and_carries_ids(folder, capsys, tmp_path, label):
    rows = [["a1", "the mask", "good"], ["b2", "", label or ""], ["c3", "we go", label]]
    source = table(tmp_path / f"new.{'jsonl' if label is None else 'csv'}", rows, ("id", "text", "label"))
    typed(predict, "--checkpoint", folder / "run_0", "--source", source, "--output", tmp_path / "out.jsonl")
    result = lines(tmp_path / "out.jsonl")
    assert [(row["name"], row["label"]) for row in result] == [("a1", "good"), ("b2", None), ("c3", None)]
    assert "new: 1 inputs are empty, the first in" in capsys.readouterr().err


def test_incompatible_options_of_a_launcher_are_rejected(folder, capsys, tmp_path):
    there = ["--checkpoint", folder / "run_0"]
    tasks = [*there, "--task", "table", "--source", folder / "test.csv"]
    for option in OF_PRETRAINED:
        given = [f"--{option.replace('_', '-')}", *([] if option.startswith("allow") else ["1"])]
        assert "not supported for a fine-tuned model" in refused(capsys, evaluate, *tasks, *given)
    assert "--source: not supported for a pretrained" in refused(capsys, evaluate, *there, "--source", folder)
    assert "--source: is missing" in refused(capsys, evaluate, *there, "--task", "table")
    assert "--split: " in refused(capsys, evaluate, *tasks, "--split", "test")
    assert "is given twice" in refused(capsys, evaluate, *tasks, "--checkpoint", folder / "run_0" / "checkpoints")
    assert "does not end in .jsonl" in refused(capsys, evaluate, *tasks, "--predictions", tmp_path / "x.csv")
    several = [*tasks, "--predictions", tmp_path / "x.jsonl"]
    assert "needs a single checkpoint" in refused(capsys, evaluate, *several, "--checkpoint", folder / "run_1")
    assert "2 pretrained models" in refused(capsys, evaluate, *there, folder / "run_1")
    assert "Use megasparse evaluate --task" in refused(capsys, evaluate, *there)
    assert "is an input file" in refused(capsys, evaluate, *tasks, "--json", folder / "test.csv")
    new = ["--source", folder / "test.csv", "--output"]
    assert "is an input file" in refused(capsys, predict, *there, *new, folder / "test.csv")
    assert "is not a format" in refused(capsys, predict, *there, *new, tmp_path / "x.xml")
    assert "--split: " in refused(capsys, predict, *there, "--text", "the mask", "--split", "test")
    checkpoint(encoder("full"), tmp_path / "pretrained")
    other = ["--checkpoint", tmp_path / "pretrained"]
    assert "or use --data" in refused(capsys, evaluate, *tasks[2:], *other)
    assert "or use --data" in refused(capsys, predict, *other, "--text", "the mask")
