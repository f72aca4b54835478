"""An HTML report about one or several runs: curves, incidents, samples, checkpoints and the configuration.

Runs that are still training or have crashed are reported up to their last step; missing or damaged parts of their files
are skipped. All text from files is escaped, and the page contains no scripts and loads nothing.
"""

import base64
import io
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megasparse.errors import DataError
from megasparse.files import json_object, open_file, read_file
from megasparse.training.checkpoints.manifest import flatten, list_checkpoints

HUGE = 1e300
"""Largest value accepted as a measurement; the square of a larger one is not finite."""
MOST_CHARTS, MOST_ROWS, MOST_SHOWN, MOST_TEXT = 150, 200, 4, 3000
"""Most charts per page, rows per table, samples or pictures per tag, and characters per text."""
PNG = b"\x89PNG\r\n\x1a\n"
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}td,th{padding:.15rem .7rem;text-align:left;"
    "border-bottom:1px solid #8885}img{max-width:100%}figure{display:inline-block;margin:.4rem;vertical-align:top}"
    "figcaption{color:#777}pre{max-width:36rem;white-space:pre-wrap}"
)


class Run(NamedTuple):
    """Contents of a run's folder. config, defaults: dotted key -> value. series: scalar -> (steps, values), NaN if not
    finite. board: tag -> step -> text or PNG file of TensorBoard.
    """

    path: Path
    config: dict[str, Any]
    defaults: dict[str, Any]
    series: dict[str, tuple[np.ndarray, np.ndarray]]
    events: list[dict[str, Any]]
    best: dict[str, Any]
    board: dict[str, dict[int, str | bytes]]


def read_run(path: Path) -> Run:
    """Read the folder of a run in any state. Raises DataError if it is not a run or cannot be read."""
    if not any((path / name).is_file() for name in ("config.json", "metrics.jsonl")):
        reason = "contains neither config.json nor metrics.jsonl" if path.is_dir() else "is not a folder"
        raise DataError(path, f"not a run: it {reason}", "Give the run.directory of a pretraining or fine-tuning run")
    from megasparse.config.finetuning import FinetuneConfig
    from megasparse.config.schema import Config, ModelConfig

    config = read_object(path / "config.json")
    defaults = (FinetuneConfig if "task" in config else Config)().model_dump(mode="json")
    if config.get("model"):
        defaults["model"] = ModelConfig().model_dump(mode="json")
    try:
        series, events = read_series(path / "metrics.jsonl"), list(read_lines(path / "events.jsonl"))
        best, board = read_object(path / "best.json"), read_board(path / "tensorboard")
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise DataError(error.filename or path, reason, "Make it readable, and try again") from None
    return Run(path, flatten(config) if config else {}, flatten(defaults), series, events, best, board)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if it cannot be read."""
    with suppress(OSError):
        return json_object(read_file(path))
    return {}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a JSONL file, skipping other lines; nothing if the file does not exist."""
    if not path.exists():
        return
    with open_file(path) as file:
        yield from filter(None, map(json_object, file))


def read_series(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return name -> (steps, values) of a metrics.jsonl. Steps ascend; the last line of a repeated step is used."""
    points: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for line in read_lines(path):
        step = line.pop("step", None)
        if not isinstance(step, int) or not 0 <= step < 1 << 62:
            continue
        for name, value in line.items():
            if value is None or (type(value) in (int, float) and abs(value) < HUGE):
                points[name][step] = math.nan if value is None else float(value)
    steps = {name: sorted(values) for name, values in points.items()}
    return {name: (np.array(steps[name]), np.array([points[name][step] for step in steps[name]])) for name in points}


def read_board(folder: Path) -> dict[str, dict[int, str | bytes]]:
    """Return the texts and pictures in TensorBoard's files. Records of scalars, possibly millions, are not decoded;
    unreadable records, such as the end of a file that is being written, are skipped.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    board: defaultdict[str, dict[int, str | bytes]] = defaultdict(dict)
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for record in RawEventFileLoader(str(file)).Load():
            if b"text" not in record and PNG not in record:
                continue
            try:
                event: Any = Event.FromString(record)
            except DecodeError:
                continue
            for value in event.summary.value:
                if value.image.encoded_image_string.startswith(PNG):
                    board[value.tag][event.step] = value.image.encoded_image_string
                elif value.metadata.plugin_data.plugin_name == "text" and value.tensor.string_val:
                    text = b"\n".join(value.tensor.string_val).decode(errors="replace")
                    tag = value.tag.removesuffix("/text_summary")
                    board[tag][event.step] = text.removeprefix("```\n").removesuffix("\n```")
    return {tag: dict(sorted(steps.items())) for tag, steps in sorted(board.items()) if tag != "events"}


def page(runs: Sequence[Run]) -> str:
    """Return the page's HTML. Runs share the charts of curves; the other sections are written per run."""
    names = [run.path.resolve().name for run in runs]
    labels = names if len(set(names)) == len(names) else [str(run.path) for run in runs]
    title = escape(", ".join(labels))
    parts = [f"<h1>{title}</h1><p>Written {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}</p>"]
    for label, run in zip(labels, runs, strict=True):
        parts.append(table(["", escape(label)], [[escape(key), escape(value)] for key, value in headline(run)]))
    parts.append(curves(runs, labels))
    for label, run in zip(labels, runs, strict=True):
        suffix = f" of {escape(label)}" if len(runs) > 1 else ""
        for heading, content in (
            ("Attention maps and samples", samples(run)),
            ("Incidents", incidents(run)),
            ("Checkpoints", checkpoints(run)),
            ("Configuration", configuration(run)),
        ):
            parts.append(f"<h2>{heading}{suffix}</h2>{content}")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>{''.join(parts)}</body></html>\n"
    )


def headline(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the label and value of a run's most important numbers, if logged."""
    planned = run.config.get("training.steps")
    steps = max((int(steps[-1]) for steps, _ in run.series.values()), default=0)
    yield "steps", f"{steps:,} of {planned:,}" if isinstance(planned, int) and planned else f"{steps:,}"
    finite = {name: part for name, (_, values) in run.series.items() if len(part := values[np.isfinite(values)])}
    for name in ("train/loss", "train/bits_per_dim"):
        if name in finite:
            recent = finite[name][-max(1, min(100, len(finite[name]) // 20)) :]
            yield f"{name}, mean of the last {len(recent)}", f"{recent.mean():.4g}"
    for name in ("evaluation/bits_per_dim", "evaluation/loss"):
        if name in finite:
            yield f"{name}, last and least", f"{finite[name][-1]:.4g}, {finite[name].min():.4g}"
    best, value = run.best, run.best.get("value")
    if isinstance(value, int | float) and abs(value) < HUGE:
        yield f"best {str(best.get('metric', '')).removeprefix('evaluation/')}", f"{value:.4g}, step {best.get('step')}"
    for name in ("speed/tokens_per_second", "speed/model_flops_utilisation", "speed/step_seconds"):
        if name in finite:
            yield f"{name}, median", f"{np.median(finite[name]):.4g}"
    for name in ("memory/peak_bytes", "train/skipped_steps"):
        if name in finite:
            yield name, f"{finite[name][-1]:,.0f}"


def curves(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Return a chart per scalar with one line per run. The layers of a scalar share a chart, and the incidents of a
    single run are marked.
    """
    charts: defaultdict[str, set[str]] = defaultdict(set)
    for run in runs:
        for name, (_, values) in run.series.items():
            if np.isfinite(values).any():
                charts[name.rpartition("/layer_")[0] or name].add(name)
    if not charts:
        return "<h2>Curves</h2><p>No step has been logged yet.</p>"
    ranked = sorted(charts, key=lambda name: (name.split("/")[0] not in ("train", "evaluation"), name))
    marks = [event["step"] for event in runs[0].events if type(event.get("step")) is int] if len(runs) == 1 else []
    parts, section = [], None
    for title in ranked[:MOST_CHARTS]:
        if (group := title.split("/")[0]) != section:
            section = group
            parts.append(f"<h2>{escape(group)}</h2>")
        lines = []
        for name in sorted(charts[title], key=lambda name: (len(name), name)):
            for run, label in zip(runs, labels, strict=True):
                if name in run.series:
                    layer = name.removeprefix(title).strip("/").replace("_", " ")
                    lines.append((", ".join(filter(None, (label * (len(runs) > 1), layer))), run.series[name]))
        parts.append(f'<figure><img alt="{escape(title)}" src="{chart(title, lines, marks)}"></figure>')
    if len(ranked) > MOST_CHARTS:
        parts.append(f"<p>{len(ranked) - MOST_CHARTS} more charts omitted; metrics.jsonl contains all numbers.</p>")
    return "".join(parts)


def chart(title: str, lines: Sequence[tuple[str, tuple[np.ndarray, np.ndarray]]], marks: Sequence[int]) -> str:
    """Return a chart as a data URL of a PNG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False, "font.size": 8, "agg.path.chunksize": 10_000}):
        figure = Figure(figsize=(4.6, 2.5), layout="constrained")
        axes = figure.subplots()
        for label, (steps, values) in lines:
            axes.plot(steps, values, linewidth=0.9, marker="." if len(steps) < 30 else None, label=f" {label}")
        low, high = axes.get_xlim()
        visible = [mark for mark in marks[-MOST_ROWS:] if low <= mark <= high]
        axes.vlines(visible, *axes.get_ylim(), color="#c04", lw=0.4)
        axes.set(title=title[:70], xlabel="step")
        if any(label for label, _ in lines):
            axes.legend(fontsize=6, ncols=1 + len(lines) // 8)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=100)
    return url(file.getvalue())


def url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def samples(run: Run) -> str:
    """Return a few pictures or texts per tag of TensorBoard, evenly spread from the first to the last."""
    parts = []
    for tag, entries in run.board.items():
        parts.append(f"<h3>{escape(tag)}</h3>")
        steps = [*entries]
        for step in sorted({steps[round(n * (len(steps) - 1) / (MOST_SHOWN - 1))] for n in range(MOST_SHOWN)}):
            content = entries[step]
            if isinstance(content, bytes):
                body = f'<img alt="step {step}" src="{url(content)}">'
            else:
                body = f"<pre>{escape(content[:MOST_TEXT])}</pre>" if content else ""
            parts.append(f"<figure><figcaption>step {step:,}</figcaption>{body}</figure>")
    return "".join(parts) or "<p>None.</p>"


def incidents(run: Run) -> str:
    rows = [[escape(str(event.get(key, ""))[:600]) for key in ("step", "time", "message")] for event in run.events]
    note = f"<p>{len(rows) - MOST_ROWS:,} earlier incidents are in events.jsonl.</p>" if len(rows) > MOST_ROWS else ""
    return note + table(["step", "time", "message"], rows[-MOST_ROWS:]) if rows else "<p>None.</p>"


def checkpoints(run: Run) -> str:
    rows = []
    for folder in list_checkpoints(run.path / "checkpoints"):
        with suppress(FileNotFoundError):  # the run has just deleted it
            size = sum(file.stat().st_size for file in folder.iterdir())
            written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(folder.stat().st_mtime))
            best = "best" if int(folder.name) == run.best.get("step") else ""
            rows.append([escape(folder.name), f"{size:,}", written, best])
    return table(["checkpoint", "bytes", "written", ""], rows) if rows else "<p>None yet.</p>"


def configuration(run: Run) -> str:
    """Return a table of all settings, those that differ from the defaults first."""
    if not run.config:
        return "<p>config.json is missing or damaged.</p>"
    rows = []
    for key, value in run.config.items():
        changed = key not in run.defaults or run.defaults[key] != value
        default = json.dumps(run.defaults[key]) if changed and key in run.defaults else ""
        rows.append((not changed, [escape(text[:600]) for text in (key, json.dumps(value), default)]))
    rows.sort(key=lambda row: row[0])
    count = sum(not same for same, _ in rows)
    body = table(["key", "value", "default"], [row for _, row in rows])
    return f"<p>{count} of {len(rows)} settings differ from the defaults and are listed first.</p>{body}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table; cells must be escaped HTML."""
    lines = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{''.join(lines)}</table>"
