"""Forecasts of a fine-tuned model beside simple baselines: pictures, and errors on all windows of a split.

H horizon in steps, T target columns.
"""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from megasparse.errors import ConfigError, UserError
from megasparse.evaluation.figure import COLOURS, GREY, style
from megasparse.evaluation.outputs import require_writable, whole_file, write_json
from megasparse.tasks.forms.forecast import ForecastForm, Window
from megasparse.tasks.metrics import METRICS
from megasparse.tasks.predictions import predicted, read
from megasparse.tasks.readers.calendar import season
from megasparse.tasks.restore import restore_task
from megasparse.tasks.run import read_split
from megasparse.tasks.scoring import answers

Forecasts = dict[str, list[np.ndarray]]
"""Model or baseline -> the forecast of each window, (H, T), scaled."""


def plot_forecasts(
    run: str,
    output: Path,
    source: str | None = None,
    split: str = "test",
    windows_shown: int = 4,
    overrides: Sequence[str] = (),
) -> list[str]:
    """Write a picture for each target column, forecasts.json and forecasts.md. Returns the lines of the latter.

    run: a run's folder or a checkpoint. source: the folder of the official files, or a CSV file, by default the run's.
    Raises ConfigError for a run that forecasts nothing, UserError for files that cannot be written.
    """
    figure = _figure_class()
    if windows_shown < 1:
        raise ConfigError("--windows", f"{windows_shown}", "Give 1 or more")
    require_writable(output / "forecasts.json")
    found = restore_task(run, overrides)
    form = found.form
    if not isinstance(form, ForecastForm):
        raise ConfigError("RUN", f'"{found.task.name}" forecasts nothing', "Give a run of series, etth1 or ettm1")
    examples = read_split(found.task, Path(source or found.config.task.source), split)
    encoded = read(found, examples, split, print)
    windows = [each for each in encoded if isinstance(each, Window)]
    forecasts = {"model": answers(form, encoded, predicted(found, encoded)), **baselines(form, windows)}
    labels = np.stack([each.label for each in windows])
    errors = {
        name: {metric: METRICS[metric](labels, np.stack(own)) for metric in found.task.metrics}
        for name, own in forecasts.items()
    }
    result = {
        "run": str(found.checkpoint.path),
        "task": found.task.name,
        "split": split,
        "windows": len(windows),
        "rows_read": found.config.task.max_length,
        "horizon": form.shape[0],
        "targets": form.series.targets,
        "errors": errors,
    }
    write_json(output / "forecasts.json", result)
    lines = table(result)
    with whole_file(output / "forecasts.md") as out:
        out.write(("\n".join(lines) + "\n").encode())
    chosen = sorted({round(i) for i in np.linspace(0, len(windows) - 1, windows_shown)})
    for number, column in enumerate(form.series.targets):
        file = output / f"{number:02d}_{re.sub(r'[^A-Za-z0-9.-]', '_', column)[:80]}.png"
        with whole_file(file) as out:
            picture(figure, form, number, [(windows[i], forecasts["model"][i]) for i in chosen]).savefig(
                out, transparent=True
            )
    return lines


def baselines(form: ForecastForm, windows: Sequence[Window]) -> Forecasts:
    """What is forecast without learning anything."""
    horizon, places = form.shape[0], form.series.target_places
    read = [window.values[:, places] for window in windows]
    found = {"last value": [np.repeat(rows[-1:], horizon, axis=0) for rows in read]}
    day = season(form.series.step)
    if day is not None and day <= form.config.task.max_length:
        found["seasonal"] = [rows[len(rows) - day + np.arange(horizon) % day] for rows in read]
    return found


def table(result: dict[str, Any]) -> list[str]:
    """The errors in Markdown."""
    lines = [
        f"{result['task']}, {result['split']}: {result['windows']:,} windows of {result['rows_read']} rows, "
        f"{result['horizon']} rows of {', '.join(result['targets'])} forecast",
        "",
    ]
    metrics = list(result["errors"]["model"])
    rows = [["", *metrics], ["---"] * (1 + len(metrics))]
    rows += [[name, *(f"{own[each]:.4f}" for each in metrics)] for name, own in result["errors"].items()]
    return [*lines, *(f"| {' | '.join(f'{cell:10}' for cell in row)} |" for row in rows)]


def picture(figure: Any, form: ForecastForm, number: int, chosen: Sequence[tuple[Window, np.ndarray]]) -> Any:
    """One target of some windows, each with its forecast."""
    found = figure(figsize=(11, 2.6 * len(chosen)), layout="constrained", dpi=110)
    column, step = form.series.targets[number], timedelta(seconds=form.series.step)
    for axes, (window, forecast) in zip(found.subplots(len(chosen), squeeze=False)[:, 0], chosen, strict=True):
        first = datetime.fromisoformat(window.name)
        history = window.values[:, form.series.target_places]
        before = [first + step * i for i in range(-len(history), 0)]
        after = [first + step * i for i in range(len(forecast))]
        for label, dates, values, look in (
            ("read", before, history, {"color": GREY}),
            ("truth", after, window.label, {"color": COLOURS[3]}),
            ("forecast", after, forecast, {"color": COLOURS[1], "linestyle": "--"}),
        ):
            axes.plot(dates, form.in_units(values)[column], label=label, **look)
        axes.axvline(first, color=GREY, linewidth=1)
        axes.set_title(f"{column}, from {window.name}", loc="left", fontsize=10, color=GREY)
    style(found, loc="upper left", ncols=3)
    return found


def _figure_class() -> Any:
    """Matplotlib's figure class, drawn without a screen. Raises UserError where it is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: F401
        from matplotlib.figure import Figure
    except ImportError:
        hint = 'Install what fine-tuning needs: pip install "megasparse[tasks]"'
        raise UserError(f"matplotlib: is not installed, and draws the forecasts. {hint}") from None
    return Figure
