"""Forecasts beside their baselines: errors by hand, pictures, and what is refused."""

import json
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megasparse.cli.main import door
from megasparse.tasks import forecast_plots
from megasparse.tasks.forms.forecast import ForecastForm, Window
from tests.helpers import finetuning
from tests.helpers.commands import refused
from tests.helpers.series import FORECASTER, TASK, numbers, write

main = door("plot-forecasts")

SIX_HOURS = timedelta(hours=6)
"""A day is 4 rows."""
ROWS = 120
TWO = {**TASK, "forecast": {"horizon": 6, "overlap": 6, "targets": ["OT", "load"]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of series.csv and run/, whose model predicts two columns."""
    folder = tmp_path_factory.mktemp("plots")
    file = write(folder / "series.csv", numbers(ROWS), step=SIX_HOURS)
    finetuning.launch(folder / "run", file, model=FORECASTER, task=TWO, training={"steps": 2, "epochs": 0})
    return folder


def table(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """All rows of OT and load, scaled, and the first predicted rows of the test split."""
    values = np.array(numbers(ROWS))[:, [2, 0]]
    train = values[: int(0.7 * ROWS)]
    return (values - train.mean(0)) / train.std(0), np.arange(96, ROWS - 6 + 1)


def test_errors_and_pictures(folder, capsys):
    out = folder / "out"
    main([str(folder / "run"), "--output", str(out), "--windows", "3"])
    result = json.loads((out / "forecasts.json").read_text())
    values, firsts = table(folder)
    truth = np.stack([values[now : now + 6] for now in firsts])
    last = np.stack([[values[now - 1]] * 6 for now in firsts])
    days = [now - 4 + np.array([0, 1, 2, 3, 0, 1]) for now in firsts]
    seasonal = np.stack([values[day] for day in days])
    for name, own in (("last value", last), ("seasonal", seasonal)):
        assert result["errors"][name]["mse"] == pytest.approx(((own - truth) ** 2).mean(), rel=1e-9)
        assert result["errors"][name]["mae"] == pytest.approx(np.abs(own - truth).mean(), rel=1e-9)
    assert result["windows"] == len(firsts) and result["horizon"] == 6 and result["targets"] == ["OT", "load"]
    printed, kept = capsys.readouterr().out, (out / "forecasts.md").read_text()
    assert printed.endswith(kept)
    (line,) = [line for line in kept.splitlines() if line.startswith("| seasonal")]
    seasonal = [round(result["errors"]["seasonal"][metric], 4) for metric in ("mse", "mae")]
    assert [float(cell) for cell in line.split("|")[2:4]] == seasonal
    assert sorted(file.name for file in out.glob("*.png")) == ["00_OT.png", "01_load.png"]
    with Image.open(out / "00_OT.png") as picture:
        assert picture.size[0] > 800 and len(picture.convert("L").getcolors(1 << 20) or []) > 10


def test_the_models_errors_are_those_of_evaluation(folder):
    out = folder / "validation"
    main([str(folder / "run"), "--split", "validation", "--output", str(out)])
    best = json.loads((folder / "run" / "best.json").read_text())["scalars"]
    found = json.loads((out / "forecasts.json").read_text())["errors"]["model"]
    assert found == {metric: pytest.approx(best[f"evaluation/{metric}"], rel=1e-9) for metric in ("mse", "mae")}


def test_lines_of_a_picture_are_history_truth_and_forecast(folder):
    run = finetuning.opened(folder / "x", folder / "series.csv", model=FORECASTER, task=TWO)
    form, window = run.form, run.validation[0]
    assert isinstance(form, ForecastForm) and isinstance(window, Window)
    made = forecast_plots.picture(forecast_plots._figure_class(), form, 1, [(window, window.label + 1.0)])
    (axes,) = made.axes
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    load = np.array(numbers(ROWS))[:, 0]
    np.testing.assert_allclose(lines["read"], load[84 - 12 : 84], rtol=1e-9)
    np.testing.assert_allclose(lines["truth"], load[84:90], rtol=1e-9)
    np.testing.assert_allclose(lines["forecast"], load[84:90] + load[:84].std(), rtol=1e-9)
    dates = {line.get_label(): line.get_xdata() for line in axes.get_lines()}
    assert dates["read"][-1] + SIX_HOURS == dates["truth"][0] == dates["forecast"][0]
    assert str(dates["truth"][0]) == window.name


def test_no_seasonal_baseline_where_no_day_was_read(folder, tmp_path):
    file = write(tmp_path / "hourly.csv", numbers(ROWS))  # 12 of a day's 24 rows are read
    run = finetuning.opened(tmp_path / "x", file, model=FORECASTER, task=TASK)
    assert isinstance(run.form, ForecastForm)
    windows = [each for each in run.validation if isinstance(each, Window)]
    assert list(forecast_plots.baselines(run.form, windows)) == ["last value"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--windows", "0"], "--windows: 0. Give 1 or more"),
        (["--split", "dev"], 'holds no "dev" split of series. It has: train, validation, test'),
        (["--source", "missing.csv"], "missing.csv: no such file"),
    ],
)
def test_what_is_refused(folder, arguments, said, capsys):
    assert said in refused(capsys, main, folder / "run", "--output", folder / "refused", *arguments)


def test_a_run_of_texts_is_refused(tmp_path, capsys):
    run = tmp_path / "run"
    finetuning.launch(run, finetuning.reviews(tmp_path / "a.csv", 12), model=finetuning.ENCODER, training={"steps": 1})
    assert '"table" forecasts nothing' in refused(capsys, main, run, "--output", tmp_path / "out")
