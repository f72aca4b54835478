"""Forecasting: windows of tables by date, visible rows, loss, mechanisms, and runs from a table to predictions."""

import csv
import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, mean_squared_error
from sklearn.preprocessing import StandardScaler

from launch import evaluate
from megasparse.config.attention import MECHANISMS
from megasparse.config.finetuning import FinetuneConfig, TaskConfig
from megasparse.errors import ConfigError, DataError
from megasparse.ops.random import RngContext
from megasparse.settings.load import build_settings, load_settings
from megasparse.tasks.catalog import build_task
from megasparse.tasks.forms.forecast import ForecastForm, Windows
from megasparse.tasks.readers.series import Series, time_features
from megasparse.tasks.run import TaskRun, read_files, restore_task
from megasparse.tasks.task import Example, split_files
from tests.helpers import finetuning
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.finetuning import COLUMNS, FORECASTER, HOUR, START, TASK, numbers, series, write
from tests.helpers.models import SMALL, can_be_causal, encoder_names

ROWS = 100
"""70 to train on, 10 to validate, 20 to test."""
L, OVERLAP, H = 12, 6, 4


@pytest.fixture
def made(tmp_path):
    return write(tmp_path / "series.csv", numbers(ROWS))


def by_hand(made: Path) -> tuple[list[datetime], np.ndarray]:
    with open(made, newline="") as stream:
        rows = list(csv.DictReader(stream))
    values = np.array([[float(row[column]) for column in COLUMNS] for row in rows])
    return [datetime.strptime(row["date"], "%Y-%m-%d %H:%M:%S") for row in rows], values


def part(task: Series, made: Path, split: str) -> list[Example]:
    (one,) = split_files(task, made, split)
    return list(task.read(one))


@pytest.mark.parametrize(
    ("split", "predicted"),
    [("train", range(L, 70 - H + 1)), ("validation", range(70, 80 - H + 1)), ("test", range(80, 100 - H + 1))],
)
def test_windows_of_a_split(made, split, predicted):
    """Windows start at the expected rows; predicted: the first predicted row of each window."""
    task = series(made)
    dates, values = by_hand(made)
    scaled = StandardScaler().fit(values[:70]).transform(values)
    result = part(task, made, split)
    assert len(result) == len(predicted)
    for example, now in zip(result, predicted, strict=True):
        read, marks = example.inputs
        np.testing.assert_allclose(read, scaled[now - L : now], rtol=1e-12)
        np.testing.assert_allclose(example.label, scaled[now : now + H], rtol=1e-12)
        expected = time_features(np.array(dates[now - L : now + H], dtype="datetime64[us]"), 3600.0)
        np.testing.assert_array_equal(marks, expected)
        assert example.name == str(dates[now])
        assert str(example.location) == f"{made}:{now + 1}"  # of the last row read, under the line of names


def test_columns_by_name(made):
    task = series(made, inputs=["wind", "load"], targets=["OT", "wind"])
    assert task.columns == ["wind", "load", "OT"]
    scaled = StandardScaler().fit(by_hand(made)[1][:70]).transform(by_hand(made)[1])
    first = part(task, made, "train")[0]
    np.testing.assert_allclose(first.inputs[0], scaled[:L][:, [1, 0, 2]], rtol=1e-12)
    np.testing.assert_allclose(first.label, scaled[L : L + H][:, [2, 1]], rtol=1e-12)
    assert series(made).config.forecast.targets == list(COLUMNS)


def test_a_resolved_task_needs_no_training_file(made, tmp_path):
    settings = json.loads(series(made).config.model_dump_json())
    before = part(series(made), made, "test")
    new = write(tmp_path / "new.csv", by_hand(made)[1][60:97].tolist(), START + 60 * HOUR)
    made.unlink()
    (result,) = build_task(TaskConfig(**{**settings, "name": "series"})).read(new)
    assert result.label is None and str(result.location) == f"{new}:38" and result.name == str(START + 97 * HOUR)
    expected = next(each for each in before if each.name == str(START + 96 * HOUR)).inputs
    np.testing.assert_array_equal(result.inputs[0][:-1], expected[0][1:])  # one row later
    np.testing.assert_array_equal(result.inputs[1][:-1], expected[1][1:])
    later = time_features(np.array([START + (97 + H - 1) * HOUR], dtype="datetime64[us]"), 3600.0)
    np.testing.assert_array_equal(result.inputs[1][-1:], later)


@pytest.fixture(scope="module")
def etth1(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ett")
    with open(folder / "ETTh1.csv", "w") as out:
        out.write("date,HUFL,OT\n")
        for i in range(17420):
            out.write(f"{datetime(2016, 7, 1) + i * HOUR},{i},{-i}\n")
    return folder


@pytest.mark.parametrize(("horizon", "counts"), [(24, (8521, 2857, 2857)), (168, (8377, 2713, 2713))])
def test_official_splits_of_etth1(etth1, horizon, counts):
    """12, 4 and 4 months of 30 days; Informer's counts of windows that read 96 rows."""
    settings = {"name": "etth1", "source": str(etth1), "max_length": 96, "forecast": {"horizon": horizon}}
    task = build_task(TaskConfig.model_validate(settings))
    assert isinstance(task, Series)
    mean, scale = task.mean[0], task.scale[0]
    assert mean == pytest.approx(8639 / 2) and scale == pytest.approx(((8640**2 - 1) / 12) ** 0.5)
    for split, count, first in zip(("train", "validation", "test"), counts, (96, 8640, 11520), strict=True):
        result = part(task, etth1, split)
        rows = [round(float(example.label[0, 0] * scale + mean)) for example in result]
        assert rows == list(range(first, first + count))
        last = float(result[-1].label[-1, 0] * scale + mean)
        assert round(last) == {"train": 8639, "validation": 11519, "test": 14399}[split]


@pytest.mark.parametrize(
    ("line", "text", "said"),
    [
        (1, "time,load,wind,OT", r'series\.csv:2: missing column "date"'),
        (5, "2019-12-30 08:00:00,1,2,", r'csv:5: "" in the column "OT" is not a float32 number. Write one,'),
        (5, "2019-12-30 08:00:00,1,1e39,3", r'series\.csv:5: "1e39" in the column "wind" is not a float32'),
        (5, "2019-12-30 08:00:00,nan,2,3", r'series\.csv:5: "nan" in the column "load" is not a float32'),
        (5, "2019-12-30 08:00:00,1,2", r"series\.csv:5: 3 fields instead of 4"),
        (5, "now,1,2,3", r'series\.csv:5: "now" is not a date and time'),
        (5, "2019-12-30 09:00:00,1,2,3", r"series\.csv:5: .* is 2:00:00 after the previous row"),
        (5, "2019-12-30 06:00:00,1,2,3", r"series\.csv:5: .* follows 2019-12-30 07:00:00, but is not later"),
        (None, "date,load,wind,OT\n", r"series\.csv: no rows below"),
        (None, "", r"series\.csv: is empty"),
        (None, "date\n2020-01-01\n2020-01-02\n", r'series\.csv: no columns apart from "date"'),
    ],
)
def test_a_bad_line_is_named(made, line, text, said):
    if line is None:
        made.write_text(text)
    else:
        lines = made.read_text().splitlines()
        made.write_text("\n".join([*lines[: line - 1], text, *lines[line:]]) + "\n")
    refusal(lambda: series(made), match=said)


def test_too_few_rows_are_rejected(tmp_path):
    made = write(tmp_path / "short.csv", numbers(20))
    refusal(lambda: series(made), match=r"short\.csv: 14 rows of the train split are too few to read 12 and predict 4")
    made = write(tmp_path / "short.csv", numbers(30))  # 21, 3 and 6
    with pytest.raises(DataError, match=r"short\.csv: 3 rows of the validation split"):
        part(series(made), made, "validation")
    new = write(tmp_path / "new.csv", numbers(11))
    with pytest.raises(DataError, match=r"new\.csv: contains 11 rows, but a forecast reads 12"):
        list(series(made).read(new))


@pytest.mark.parametrize("minutes", [15, 60, 24 * 60, 7 * 60 + 13])
def test_features_equal_datetime(minutes):
    for start in (datetime(2016, 2, 27, 21, 30), datetime(1968, 12, 30, 3), datetime(2023, 12, 31, 23, 45)):
        dates = [start + i * timedelta(minutes=minutes) for i in range(400)]
        result = time_features(np.array(dates, dtype="datetime64[us]"), minutes * 60.0)
        expected = []
        for one in dates:
            day = [one.hour / 23, one.weekday() / 6, (one.day - 1) / 30, (one.timetuple().tm_yday - 1) / 365]
            expected.append([one.minute / 59, *day] if minutes % 60 else day)
        np.testing.assert_allclose(result, np.array(expected) - 0.5, rtol=0, atol=1e-15)
        assert np.abs(result).max() <= 0.5


ROOT = Path(__file__).parents[3]


def sections(**changes: Any) -> dict[str, Any]:
    """Sections of a run. changes: of its model, source: of the encoder."""
    source = {**FORECASTER["source"], **changes.pop("source", {})}
    return {"model": {**FORECASTER, **changes, "source": source}, "task": TASK}


def forecast(**changes: Any) -> dict[str, Any]:
    return {"task": {**TASK, "forecast": {**TASK["forecast"], **changes}}}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("series") / "series.csv", numbers(120))


def opened(folder: Path, file: Path, **changes: Any) -> TaskRun:
    return finetuning.opened(folder / "run", file, **sections(**changes))


def batch(run: TaskRun, size: int = 3) -> Windows:
    return run.form.collate(run.train[:size])


def louder(run: TaskRun) -> TaskRun:
    """Initial weights hardly attend."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in run.model.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return run


def predicted(run: TaskRun, windows: Windows) -> torch.Tensor:
    run.model.eval()
    with torch.no_grad():
        return run.model(windows, RngContext.evaluation(0, len(windows.values)))[1]["predicted"]


def test_a_batch_is_the_rows_of_the_windows(tmp_path, file):
    run = opened(tmp_path, file)
    windows = batch(run)
    assert windows.values.shape == (3, L, 3) and windows.marks.shape == (3, L + H, 4)
    assert windows.labels is not None and windows.labels.shape == (3, H, 1) and windows.numel() == 3 * L
    for i, example in enumerate(list(read_files(run.form.task, split_files(run.form.task, file, "train")))[:3]):
        np.testing.assert_allclose(windows.values[i], example.inputs[0], rtol=1e-6)
        np.testing.assert_allclose(windows.labels[i], example.label, rtol=1e-6)
        assert np.array_equal(windows.labels[i, :, 0], windows.values.new_tensor(example.label[:, 0]))


def test_the_loss_is_the_mean_squared_error(tmp_path, file):
    run = louder(opened(tmp_path, file, attention={"pattern": ["full"]}, source={"attention": {"pattern": ["full"]}}))
    windows = batch(run)
    values = predicted(run, windows)
    assert windows.labels is not None
    objective, result = run.model(windows, RngContext.evaluation(0, 3))
    expected = mean_squared_error(windows.labels.flatten(), values.flatten())
    assert float(objective.detach()) == pytest.approx(expected, rel=1e-6)
    assert float(result["nats"] / result["tokens"]) == pytest.approx(expected, rel=1e-6)
    each = [float(((values[i] - windows.labels[i]) ** 2).sum()) for i in range(3)]
    assert result["costs"].tolist() == pytest.approx(each, rel=1e-6) and result["weights"].tolist() == [H] * 3
    _, result = run.model(Windows(windows.values, windows.marks, None), RngContext.evaluation(0, 3))
    assert "costs" not in result and torch.equal(result["predicted"], values)


@pytest.mark.parametrize("shared", [True, False])
def test_nothing_of_the_future_is_seen(tmp_path, file, shared):
    run = louder(opened(tmp_path, file, source={"shared_embedding": shared}, attention={"pattern": ["full"]}))
    form, example = run.form, run.train[5]
    before = predicted(run, form.collate([example]))
    lines = file.read_text().splitlines()
    first = 1 + 5 + L  # below the names
    changed = [*lines[:first], *(f"{line.split(',')[0]},1e3,1e3,1e3" for line in lines[first:])]
    other = tmp_path / "other.csv"
    other.write_text("\n".join(changed) + "\n")
    again = next(each for each in run.form.task.read(Path(f"{other}#train")) if each.name == example.name)
    (encoded,) = form.encode([again])
    windows = form.collate([encoded])
    assert windows.labels is not None and windows.labels.min() > 50
    assert torch.equal(predicted(run, windows), before)
    for name in ("values", "marks"):
        for place in (0, L - 1):
            moved = {"values": windows.values.clone(), "marks": windows.marks.clone()}
            moved[name][:, place] += 1.0
            assert not torch.equal(predicted(run, Windows(**moved, labels=None)), before)
    later = windows.marks.clone()
    later[:, -1] += 1.0  # the last date to predict moves only its own prediction: the decoder is causal
    moved_predicted = predicted(run, Windows(windows.values, later, None))
    assert torch.equal(moved_predicted[:, :-1], before[:, :-1])
    assert not torch.equal(moved_predicted[:, -1], before[:, -1])


def test_the_decoder_sees_the_last_rows_and_then_zeros(tmp_path, file):
    run = opened(tmp_path, file)
    given: list[Any] = []
    for stack in (run.model.body.stack.encoder, run.model.body.stack):
        stack.embedding.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    windows = batch(run)
    predicted(run, windows)
    read, seen = given
    assert torch.equal(read, torch.cat([windows.values, windows.marks[:, :L]], -1))
    assert seen.shape == (3, OVERLAP + H, 3 + 4) and not seen[:, OVERLAP:, :3].any()
    assert torch.equal(seen[:, :OVERLAP, :3], windows.values[:, L - OVERLAP :])
    assert torch.equal(seen[..., 3:], windows.marks[:, L - OVERLAP :])


@pytest.mark.parametrize(
    "kind,blocks",
    [(name, ["ordinary", "reversible"][n % 2]) for n, name in enumerate(MECHANISMS) if name in encoder_names()],
)
def test_every_mechanism_learns_on_both_sides(tmp_path, file, kind, blocks):
    small = SMALL.get(kind, {}) | ({"chunk": 4} if "chunk" in SMALL.get(kind, {}) else {})
    objective = {"objective": "answer"} if kind == "smart_bird" else {}
    attention = {"pattern": [kind], kind: small}
    changes: dict[str, Any] = {"source": {"attention": {"pattern": [kind], kind: small | objective}}}
    if can_be_causal(kind):
        changes["attention"] = attention
    changes |= {"blocks": blocks, "activations": "stored" if blocks == "ordinary" else blocks}
    run = opened(tmp_path, file, **changes)
    windows = batch(run)
    objective, result = run.model.train()(windows, RngContext(0, 1, torch.arange(3), training=True))
    objective.backward()
    assert torch.isfinite(objective) and "predicted" not in result
    assert not {name for name, p in run.model.named_parameters() if p.grad is None or not p.grad.isfinite().all()}
    values = predicted(run, windows)
    rng = RngContext(0, -1, torch.tensor([1]), training=False)
    alone = run.model(run.form.collate(run.train[1:2]), rng)[1]["predicted"]
    torch.testing.assert_close(alone[0], values[1], rtol=1e-4, atol=1e-5)


def test_answers_are_scaled_and_rows_in_units(tmp_path, file):
    run = opened(tmp_path, file)
    form = run.form
    assert isinstance(form, ForecastForm)
    example, flat = run.validation[0], np.arange(4.0)
    assert form.answer(example, flat).tolist() == [[0.0], [1.0], [2.0], [3.0]]
    with open(file, newline="") as stream:
        rows = list(csv.DictReader(stream))
    ot = np.array([float(row["OT"]) for row in rows])
    row = form.row(example, flat)
    np.testing.assert_allclose(row["label"]["OT"], ot[84:88], rtol=1e-12)
    np.testing.assert_allclose(row["predicted"]["OT"], ot[:84].mean() + flat * ot[:84].std(), rtol=1e-12)
    labels = [each.label for each in run.validation[:2]]
    made = form.measures(run.validation[:2], [labels[0] + 1.0, labels[1] - 2.0])
    assert made == pytest.approx({"mse": (1 + 4) / 2, "mae": 1.5})


@pytest.mark.slow
def test_a_run_resumes_bit_identically_and_is_restored_without_its_table(tmp_path):
    file = write(tmp_path / "series.csv", numbers(120))
    straight = finetuning.assert_resumes(tmp_path, file, 3, **sections())
    assert len(finetuning.plain(straight)) == 6
    best = json.loads((tmp_path / "straight" / "best.json").read_text())
    errors = {line["step"]: line["evaluation/mse"] for line in straight if "evaluation/mse" in line}
    assert best["step"] == min(errors, key=lambda step: errors[step])  # an error: lower is better

    copy = file.rename(tmp_path / "moved.csv")
    out, rows_file = tmp_path / "validation.json", tmp_path / "validation.jsonl"
    common = ["--checkpoint", str(tmp_path / "straight"), "--source", f"{copy}#validation"]
    finetuning.typed(evaluate, "--task", "series", *common, "--json", str(out), "--predictions", str(rows_file))
    result = json.loads(out.read_text())
    assert result["metrics"]["mse"]["value"] == best["scalars"]["evaluation/mse"]
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    scale = restore_task(tmp_path / "straight").config.task.forecast.scale
    assert scale is not None and len(rows) == 9
    labels, answers = (np.array([row[name]["OT"] for row in rows]) / scale["OT"] for name in ("label", "predicted"))
    assert result["metrics"]["mse"]["value"] == pytest.approx(mean_squared_error(labels, answers), rel=1e-9)
    assert result["metrics"]["mae"]["value"] == pytest.approx(mean_absolute_error(labels, answers), rel=1e-9)


@together(
    ("changes", "said"),
    [
        ({"start": {"huggingface": "m"}, "model": None}, r"start: pretrained models do not"),
        ({"start": {"checkpoint": "m"}, "model": None}, r"start: pretrained models do not"),
        (forecast(overlap=13), r"overlap: 13 is above task.max_length"),
        (forecast(horizon=11), r"model\.max_length: 16 is below overlap \+ horizon = 17"),
        ({"task": {**TASK, "max_length": 25}}, r"task\.max_length: 25 tokens are more than model\.source\.length = 24"),
        ({"model": finetuning.ENCODER}, r'model\.kind: "encoder" is not supported by series. Use a model of kind "enc'),
        ({"evaluation": {"metric": "accuracy"}}, r'evaluation\.metric: "accuracy"'),
    ],
)
def test_unsuitable_inputs_are_rejected(tmp_path, file, changes, said):
    refusal(lambda: finetuning.opened(tmp_path / "run", file, **{**sections(), **changes}), ConfigError, said)


@pytest.mark.parametrize("name", ["etth1_24", "etth1_168", "ettm1_96"])
def test_shipped_configurations_fit_their_windows(name, tmp_path, file):
    """On another table, with few rows to read and narrow layers: heads, patterns and lengths are their own."""
    values = load_settings(ROOT / "configs" / "finetune" / f"{name}.json", [], FinetuneConfig).model_dump(mode="json")
    forecast, model = values["task"]["forecast"], values["model"]
    assert model["max_length"] == forecast["overlap"] + forecast["horizon"]
    assert model["source"]["length"] == values["task"]["max_length"]
    assert forecast["targets"] == [COLUMNS[2]]
    values["task"] |= {"name": "series", "source": str(file), "max_length": L}
    forecast |= {"horizon": H, "overlap": OVERLAP}
    model |= {"d_model": 2 * model["heads"], "d_ff": 8}
    values["run"] = {"directory": str(tmp_path), "engine": "torch", "device": "cpu"}
    run = finetuning.open_run(build_settings(values, [], FinetuneConfig), lambda line: None)
    objective, _ = run.model.train()(batch(run), RngContext(0, 1, torch.arange(3), training=True))
    objective.backward()
    assert torch.isfinite(objective)


def test_relative_forecasts_are_differences_from_the_last_row_read(tmp_path, file):
    """A forecast x̂ = level + f(x − level), so that a series moved by a number is forecast moved by it."""
    runs = []
    for relative in (False, True):
        task = forecast(inputs=list(COLUMNS), targets=[COLUMNS[2], COLUMNS[0]], relative=relative)
        runs.append(louder(finetuning.opened(tmp_path / str(relative), file, **sections() | task)))
    windows = batch(runs[0])
    level = windows.values[:, -1:]
    below = replace(windows, values=windows.values - level)
    assert torch.equal(predicted(runs[1], windows), predicted(runs[0], below) + level[..., [2, 0]])
    moved = torch.tensor([1.0, 2.0, -3.0])[: len(COLUMNS)]
    above = predicted(runs[1], replace(windows, values=windows.values + moved))
    assert above == pytest.approx(predicted(runs[1], windows) + moved[[2, 0]], abs=1e-4)
    values = sections() | forecast(inputs=[COLUMNS[0]], targets=[COLUMNS[1]], relative=True)
    with pytest.raises(ConfigError, match=rf'task.forecast.relative: true, but "{COLUMNS[1]}" is not read'):
        finetuning.opened(tmp_path / "refused", file, **values)
