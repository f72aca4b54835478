"""An HTML report about one or several runs: the held-out result, losses and speed; folded, everything else.

Runs that are still training or have crashed are reported up to their last step; missing or damaged parts of their files
are skipped. All text from files is escaped, and the page contains no scripts and loads nothing.
"""

import base64
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from html import escape
from itertools import chain, cycle, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from megasparse.errors import DataError
from megasparse.files import json_object, open_file, read_file
from megasparse.training.checkpoints.manifest import flatten, list_checkpoints

HUGE = 1e300
"""Largest value accepted as a measurement; the square of a larger one is not finite."""
MOST_CHARTS, MOST_ROWS, MOST_SHOWN, MOST_TEXT = 150, 200, 4, 3000
"""Most charts per page, rows per table, samples per tag, and characters per text."""
PNG = b"\x89PNG\r\n\x1a\n"
STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:1rem auto;"
    "padding:0 1rem;overflow-wrap:anywhere}h1{font-size:1.5rem}h2{font-size:1.05rem}summary{cursor:pointer;"
    "padding:.4rem 0;font-weight:600}table{border-collapse:collapse;display:block;overflow-x:auto}td,th{padding:.15rem "
    ".7rem .15rem 0;text-align:left;border-bottom:1px solid #8885}.bars i{display:block;height:.8rem;"
    "width:calc(min(14rem,40vw)*var(--share));background:#3b82c4}.bars .run{background:#2f9e6e}"
    ".charts{display:grid;gap:1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,21rem),1fr))}"
    "figure{margin:.5rem 0;max-width:40rem}"
    "svg{width:100%;display:block}svg text{fill:currentColor;font-size:11px;text-anchor:end}"
    "svg .step{text-anchor:middle}b{white-space:nowrap}"
    "polyline{fill:none;stroke-width:1.3;stroke-linecap:round}.grid{stroke:#8886}"
    ".mark{stroke:#c04;stroke-width:.5}img{max-width:100%}pre{white-space:pre-wrap}"
)


class Run(NamedTuple):
    """Contents of a run's folder. config, defaults: dotted key -> value. series: scalar -> (steps, values). board: tag
    -> step -> text or PNG file.
    """

    path: Path
    config: dict[str, Any]
    defaults: dict[str, Any]
    series: dict[str, tuple[np.ndarray, np.ndarray]]
    events: list[dict[str, Any]]
    best: dict[str, Any]
    board: dict[str, dict[int, str | bytes]]


def read_run(path: Path) -> Run:
    """Read the folder of a run in any state."""
    if not any((path / name).is_file() for name in ("config.json", "metrics.jsonl")):
        reason = "contains neither config.json nor metrics.jsonl" if path.is_dir() else "is not a folder"
        raise DataError(path, f"not a run: it {reason}", "Give the run.directory of a pretraining or fine-tuning run")
    import megasparse.attention  # noqa: F401  (registers the mechanisms, whose defaults are compared too)
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
        raise DataError(error.filename or path, f"cannot be read ({error.strerror})", "Make it readable") from None
    return Run(path, flatten(config) if config else {}, flatten(defaults), series, events, best, board)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, if it can be read."""
    with suppress(OSError):
        return json_object(read_file(path))
    return {}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a JSONL file, if it exists, skipping other lines."""
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
            if value is None or is_number(value):
                points[name][step] = math.nan if value is None else float(value)
    steps = {name: sorted(values) for name, values in points.items()}
    return {name: (np.array(steps[name]), np.array([points[name][step] for step in steps[name]])) for name in points}


def read_board(folder: Path) -> dict[str, dict[int, str | bytes]]:
    """Return the texts and pictures in TensorBoard's files. Records of scalars, possibly millions, are not decoded;
    unreadable ones are skipped.
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
    names = [run.path.resolve().name for run in runs]
    labels = names if len(set(names)) == len(names) else [str(run.path) for run in runs]
    title = escape(", ".join(labels))
    speeds = [dict(speed(run)) for run in runs]
    rows = [[name, *(cells.get(name, "") for cells in speeds)] for name in dict.fromkeys(chain(*speeds))]
    parts = [f"<h1>{title}</h1>", held_out(runs, labels), losses(runs, labels)]
    parts += [table(["", *map(escape, labels)], rows), folded("All curves", curves(runs, labels))]
    for label, run in zip(labels, runs, strict=True):
        for heading, content in (
            ("Attention maps and samples", samples(run)),
            (f"{len(run.events):,} incidents", incidents(run)),
            ("Checkpoints", checkpoints(run)),
            ("Configuration", configuration(run)),
        ):
            parts.append(folded(f"{heading} of {label}" if len(runs) > 1 else heading, content))
    parts.append(f"<p>Written {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}</p>")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>{''.join(parts)}</body></html>\n"
    )


def folded(heading: str, content: str) -> str:
    return f"<details><summary>{escape(heading)}</summary>{content}</details>"


def is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) < HUGE


def quantity(name: str, value: float) -> str:
    """Return a number with separators of thousands, and a number of bytes with its unit."""
    if not name.endswith("bytes"):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    power = min(int(math.log10(max(1, abs(value))) // 3), 4)
    return f"{value / 1000**power:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


MEASURES = {"bits_per_dim": "bits/dim", "bits_per_token": "bits/token", "loss": "nats/token"}
"""Measures of `megasparse evaluate`, the first of which is shown, and their units."""


def held_out(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Return the held-out results, next to the compressors of the quickstart, as bars."""
    bars: dict[str, dict[str, float]] = {}
    notes = []
    for label, run in zip(labels, runs, strict=True):
        if is_number(value := run.best.get("value")):
            name = str(run.best.get("metric")).removeprefix("evaluation/")
            notes.append(f"{label}: best validation {name} {quantity(name, value)}, step {run.best.get('step')}")
        notes += (tasks := [f"{label}: {line}" for line in task_results(run)])
        if (result := best_result(run)) is None:
            if tasks:
                continue
            task = " --task NAME --source FILES" if "task.name" in run.config else ""
            command = f"megasparse evaluate{task} --checkpoint {run.path} --json {run.path / 'evaluation.json'}"
            notes.append(f"No held-out result of {label} yet: {command}")
            continue
        measure = next(name for name in MEASURES if is_number(result.get(name)))
        bars.setdefault(measure, {})[label] = result[measure]
        summary = read_object(run.path / "summary.json")
        if summary.get("bits_per_dim") == result[measure]:  # of the same bytes
            others = {name.removesuffix("_bits_per_dim"): value for name, value in summary.items() if is_number(value)}
            bars[measure] |= {OTHERS[name]: value for name, value in others.items() if name in OTHERS}
        protocol, dims = result["protocol"], result.get("dims")
        whole = protocol.get("split_dims", protocol.get("split_tokens"))
        part = f"{dims:,}" if is_number(dims) else "?"
        part += f" of {whole:,}" if is_number(whole) and whole != dims else ""
        split, step = protocol.get("split"), protocol.get("checkpoint_step")
        notes.append(f"{label}: {part} tokens of the split {split}, checkpoint of step {step}")
    parts = []
    for measure, values in bars.items():
        most = max(values.values(), default=0) or 1
        rows = []
        for name, value in sorted(values.items(), key=itemgetter(1)):
            kind, share = "run" if name in labels else "", max(0, value / most)
            bar = f'<i class="{kind}" style="--share:{share:.3f}"></i>'
            rows.append([escape(name), f"<b>{value:.3f}</b>", bar])
        parts.append(f"<h2>Held-out {MEASURES[measure]}, less is better</h2>{table([], rows)}")
    return f'<div class="bars">{"".join(parts)}</div>{"".join(f"<p>{escape(note)}</p>" for note in notes)}'


OTHERS = {
    "gzip": "gzip -9",
    "xz": "xz -9",
    "primed_xz": "xz -9, after the training text",
    "bzip2": "bzip2 -9",
    "file": "the model's compressed file",
}
"""Name in the quickstart's summary.json -> label."""


def best_result(run: Run) -> dict[str, Any] | None:

    def order(result: dict[str, Any]) -> list[float]:
        values = (result["protocol"].get("checkpoint_step"), result.get("dims"))
        return [value if is_number(value) else 0 for value in values]

    valid = [
        result
        for result in results(run)
        if isinstance(result.get("protocol"), dict) and any(is_number(result.get(name)) for name in MEASURES)
    ]
    return max(valid, key=order, default=None)


def task_results(run: Run) -> Iterator[str]:
    """Yield a line for each result of `megasparse evaluate --task`."""
    for result in results(run):
        metrics = result.get("metrics")
        parts = []
        for name, metric in metrics.items() if isinstance(metrics, dict) else ():
            if isinstance(metric, dict) and is_number(metric.get("value")):
                low, high = metric.get("low"), metric.get("high")
                interval = f" ({low:.4f} to {high:.4f})" if is_number(low) and is_number(high) else ""
                parts.append(f"{name} {metric['value']:.4f}{interval}")
        if parts:
            yield f"{result.get('task')}, {result.get('examples')} held-out examples: {', '.join(parts)}"


def results(run: Run) -> list[dict[str, Any]]:
    return [read_object(file) for file in sorted(run.path.glob("*.json"))]


LOSSES = {"train/loss": "train", "evaluation/loss": "validation"}


def losses(runs: Sequence[Run], labels: Sequence[str]) -> str:
    lines = [
        (", ".join(filter(None, (label * (len(runs) > 1), kind))), run.series[name])
        for run, label in zip(runs, labels, strict=True)
        for name, kind in LOSSES.items()
        if name in run.series and np.isfinite(run.series[name][1]).any()
    ]
    return chart("loss, nats/token", lines, incident_steps(runs)) if lines else "<p>No step has been logged yet.</p>"


def speed(run: Run) -> Iterator[tuple[str, str]]:
    planned = run.config.get("training.steps")
    steps = max((int(steps[-1]) for steps, _ in run.series.values()), default=0)
    yield "steps", f"{steps:,} of {planned:,}" if isinstance(planned, int) and planned else f"{steps:,}"
    for name, label, pick in (
        ("speed/tokens_per_second", "tokens per second, median", np.median),
        ("speed/step_seconds", "seconds per step, median", np.median),
        ("speed/step_seconds", "minutes of training", lambda values: values.sum() / 60),
        ("speed/model_flops_utilisation", "model FLOPs utilisation, median", np.median),
        ("memory/peak_bytes", "peak memory per rank", np.max),
        ("train/skipped_steps", "skipped steps", lambda values: values[-1]),
    ):
        _, values = run.series.get(name, ((), np.empty(0)))
        if len(values := values[np.isfinite(values)]):
            yield label, quantity(name, float(pick(values)))


def incident_steps(runs: Sequence[Run]) -> list[int]:
    return [event["step"] for event in runs[0].events if type(event.get("step")) is int] if len(runs) == 1 else []


def curves(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Return a chart of each further scalar, its layers included, with a line for each run. A scalar that is constant,
    or a multiple of an earlier one, gets a line of text.
    """
    charts: defaultdict[str, set[str]] = defaultdict(set)
    for run in runs:
        for name, (_, values) in run.series.items():
            if np.isfinite(values).any():
                charts[name.rpartition("/layer_")[0] or name].add(name)
    group = lambda name: name.partition("/")[0]  # noqa: E731
    ranked = sorted(charts, key=lambda name: (name not in LOSSES, group(name) not in ("train", "evaluation"), name))
    parts, flat, shapes = [], [], dict[bytes, str]()
    for title in ranked[:MOST_CHARTS]:
        lines, shape = [], b""
        for name in sorted(charts[title], key=lambda name: (len(name), name)):
            for run, label in zip(runs, labels, strict=True):
                if name in run.series:
                    layer = name.removeprefix(title).strip("/").replace("_", " ")
                    lines.append((", ".join(filter(None, (label * (len(runs) > 1), layer))), run.series[name]))
                    steps, values = run.series[name]
                    largest = np.nanmax(np.abs(values)) or 1.0
                    shape += steps.tobytes() + np.round(values / largest, 5).tobytes()
        values = np.concatenate([values for _, (_, values) in lines])
        if len(lines) == 1 and np.ptp(values) == 0:
            flat.append(f"{title}: {quantity(title, values[0])} in all steps")
        elif (other := shapes.setdefault(shape, title)) != title:
            flat.append(f"{title}: the curve of {other} in another unit")
        elif title not in LOSSES:
            parts.append(chart(title, lines, incident_steps(runs)))
    if len(ranked) > MOST_CHARTS:
        flat.append(f"{len(ranked) - MOST_CHARTS} more charts omitted; metrics.jsonl contains all numbers.")
    return f'<div class="charts">{"".join(parts)}</div><p>{"</p><p>".join(map(escape, flat))}</p>'


LEFT, RIGHT, TOP, BOTTOM = 56, 460, 8, 216
"""Edges of a chart's axes, in an SVG of 480 × 240 units."""
BUCKETS = 200
"""A longer line is drawn from the least and largest value of each of this number of parts."""


def chart(title: str, lines: Sequence[tuple[str, tuple[np.ndarray, np.ndarray]]], marks: Sequence[int]) -> str:
    """Return a figure with an SVG, in the page's text colour. lines: label and (steps, values)."""
    from megasparse.evaluation.outputs import COLOURS

    lines = [(label, (steps[np.isfinite(values)], values[np.isfinite(values)])) for label, (steps, values) in lines]
    bounds = []
    for numbers in map(np.concatenate, zip(*(line for _, line in lines), strict=True)):
        least, most = float(numbers.min()), float(numbers.max())
        bounds.append((least, most if most > least else least + (abs(least) or 1)))
    (left, right), (low, high) = bounds
    across = lambda step: round(LEFT + (step - left) / (right - left) * (RIGHT - LEFT), 1)  # noqa: E731
    down = lambda value: round(BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP), 1)  # noqa: E731
    parts, legend = [], []
    for value in ticks(low, high):
        y, text = down(value), escape(quantity(title, value))
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/><text x="{LEFT - 4}" y="{y + 4}">{text}</text>')
    for step in ticks(left, right):
        parts.append(f'<text class="step" x="{across(step)}" y="232">{step:,.0f}</text>')
    for mark in [mark for mark in marks[-MOST_ROWS:] if left <= mark <= right]:
        parts.append(f'<path class="mark" d="M{across(mark)} {TOP}V{BOTTOM}"/>')
    for (label, (steps, values)), colour in zip(lines, cycle(COLOURS), strict=False):
        chosen = thinned(values)
        points = " ".join(f"{across(steps[i])},{down(values[i])}" for i in chosen)
        parts.append(f'<polyline stroke="{colour}" points="{points} {points.rpartition(" ")[2]}"/>')  # shows one point
        if label:
            legend.append(f'<span><b style="color:{colour}">—</b> {escape(label)}</span>')
    return (
        f"<figure><figcaption>{escape(title[:100])} {' '.join(legend)}</figcaption>"
        f'<svg viewBox="0 0 480 240" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )


def thinned(values: np.ndarray) -> list[int]:
    if len(values) <= 2 * BUCKETS:
        return list(range(len(values)))
    edges = np.linspace(0, len(values), BUCKETS + 1).astype(int)
    pairs = ((start + values[start:end].argmin(), start + values[start:end].argmax()) for start, end in pairwise(edges))
    return sorted({int(index) for pair in pairs for index in pair})


def ticks(low: float, high: float) -> list[float]:
    power = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = next(power * factor for factor in (5, 2, 1) if power * factor <= (high - low) / 3)
    first = math.ceil(low / step)
    return [number * step for number in range(first, min(math.floor(high / step), first + 9) + 1)]


def samples(run: Run) -> str:
    """Return a few pictures or texts per tag, evenly spread from the first to the last."""
    parts = []
    for tag, entries in run.board.items():
        parts.append(f"<h3>{escape(tag)}</h3>")
        steps = [*entries]
        for step in sorted({steps[round(n * (len(steps) - 1) / (MOST_SHOWN - 1))] for n in range(MOST_SHOWN)}):
            content = entries[step]
            if isinstance(content, bytes):
                picture = base64.b64encode(content).decode()
                body = f'<img alt="step {step}" src="data:image/png;base64,{picture}">'
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
            rows.append([escape(folder.name), quantity("bytes", size), written, best])
    return table(["checkpoint", "size", "written", ""], rows) if rows else "<p>None yet.</p>"


def configuration(run: Run) -> str:
    if not run.config:
        return "<p>config.json is missing or damaged.</p>"
    parts: dict[bool, list[list[str]]] = {True: [], False: []}
    for key, value in run.config.items():
        changed = key not in run.defaults or run.defaults[key] != value
        default = json.dumps(run.defaults[key]) if changed and key in run.defaults else ""
        parts[changed].append([escape(text[:600]) for text in (key, json.dumps(value), default)])
    body = table(["key", "value", "default"], parts[True] + parts[False])
    return f"<p>{len(parts[True])} of {len(run.config)} settings differ from the defaults, listed first.</p>{body}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table of escaped HTML."""
    lines = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows]
    head = f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>" if heads else ""
    return f"<table>{head}{''.join(lines)}</table>"
