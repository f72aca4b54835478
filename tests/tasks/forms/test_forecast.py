"""Forecasting: visible rows, loss, mechanisms, and runs from a table to predictions."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, mean_squared_error

from launch import evaluate
from megasparse.config.attention import MECHANISMS
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.load import build_settings, load_settings
from megasparse.errors import ConfigError
from megasparse.ops.random import RngContext
from megasparse.tasks.forms.forecast import ForecastForm, Windows
from megasparse.tasks.run import TaskRun, read_files, restore_task
from megasparse.tasks.task import split_files
from tests.helpers import finetuning
from tests.helpers.finetuning import COLUMNS, FORECASTER, TASK, numbers, write
from tests.helpers.models import SMALL, can_be_causal, encoder_names

L, OVERLAP, H = 12, 6, 4
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
    train = list(read_files(run.form.task, split_files(run.form.task, file, "train")))[:3]
    for i, example in enumerate(train):
        np.testing.assert_allclose(windows.values[i], example.inputs[0], rtol=1e-6)
        np.testing.assert_allclose(windows.labels[i], example.label, rtol=1e-6)
        assert np.array_equal(windows.labels[i, :, 0], windows.values.new_tensor(example.label[:, 0]))


def test_the_loss_is_the_mean_squared_error(tmp_path, file):
    run = louder(opened(tmp_path, file, attention={"pattern": ["full"]}, source={"attention": {"pattern": ["full"]}}))
    windows = batch(run)
    values = predicted(run, windows)
    assert windows.labels is not None
    objective, result = run.model(windows, RngContext.evaluation(0, 3))
    wanted = mean_squared_error(windows.labels.flatten(), values.flatten())
    assert float(objective.detach()) == pytest.approx(wanted, rel=1e-6)
    assert float(result["nats"] / result["tokens"]) == pytest.approx(wanted, rel=1e-6)
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


@pytest.mark.parametrize("blocks", ["ordinary", "reversible"])
@pytest.mark.parametrize("kind", [name for name in MECHANISMS if name in encoder_names()])
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
    missing = {name for name, p in run.model.named_parameters() if p.grad is None or not p.grad.isfinite().all()}
    assert not missing
    values = predicted(run, windows)
    rng = RngContext(0, -1, torch.tensor([1]), training=False)
    alone = run.model(run.form.collate(run.train[1:2]), rng)[1]["predicted"]
    torch.testing.assert_close(alone[0], values[1], rtol=1e-4, atol=1e-5)


def test_activations_of_both_sides_are_checkpointed(tmp_path, file):
    gradients = []
    for kind in ("stored", "checkpoint"):
        run = opened(tmp_path, file, activations=kind)
        objective, _ = run.model.train()(batch(run), RngContext(0, 1, torch.arange(3), training=True))
        objective.backward()
        gradients.append([weight.grad for weight in run.model.parameters()])
    for one, two in zip(*gradients, strict=True):
        assert torch.equal(one, two)


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"start": {"huggingface": "m"}, "model": None}, r"start: names a pretrained model, but these do not"),
        ({"start": {"checkpoint": "m"}, "model": None}, r"start: names a pretrained model, but these do not"),
        (forecast(overlap=13), r"overlap: 13 rows are more than .* = 12"),
        (forecast(horizon=11), r"model\.max_length: 6 \+ 11 rows of the decoder are more than 16. Set it to 17"),
        ({"task": {**TASK, "max_length": 25}}, r"task\.max_length: 25 tokens are more than model\.source\.length = 24"),
        ({"model": finetuning.ENCODER}, r'model\.kind: "encoder" is not supported by series. Use a model of kind "enc'),
        ({"evaluation": {"metric": "accuracy"}}, r'evaluation\.metric: "accuracy"'),
    ],
)
def test_unsuitable_inputs_are_rejected(tmp_path, file, changes, said):
    with pytest.raises(ConfigError, match=said):
        finetuning.opened(tmp_path / "run", file, **{**sections(), **changes})


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
    with pytest.raises(ConfigError, match=rf'task.forecast.relative: true, but "{COLUMNS[1]}" is predicted and not'):
        finetuning.opened(tmp_path / "refused", file, **values)
