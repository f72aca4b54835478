"""The numbers and tables of a run's report, as HTML."""

import json
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from statistics import median
from typing import Any

import numpy as np

from megasparse.report.chart import number_text
from megasparse.report.run import Run, kind_of
from megasparse.report.series import HUGE

Tile = tuple[str, str, str]
"""Label, value, and a note."""
MOST_ROWS = 200


def headline(run: Run) -> list[Tile]:
    """The most important numbers of a run; only those that it has."""
    planned = run.planned
    share = f" of {planned:,}" if planned else ""
    found: list[Tile] = [("steps", f"{run.steps:,}{share}", _state(run))]
    unit = "an example" if run.finetuning else "a token"
    for name, label, what in (
        ("train/loss", "training loss", f"nats {unit}, mean of the last steps"),
        ("train/bits_per_dim", "training bits/dim", "mean of the last steps"),
    ):
        if len(finite := run.finite(name)):
            recent = finite[-max(1, min(100, len(finite) // 20)) :]
            found.append((label, f"{recent.mean():.4g}", what))
    for name, label in (("evaluation/bits_per_dim", "held-out bits/dim"), ("evaluation/loss", "held-out loss")):
        if len(run.finite(name)):
            own = run.series[name]
            lowest = int(np.nanargmin(own.values))
            found.append((label, f"{run.last(name):.4g}", f"best {own.values[lowest]:.4g}, step {own.steps[lowest]:,}"))
            break
    if _numeric(run.best, ("value",)):
        metric = str(run.best.get("metric", "")).removeprefix("evaluation/")
        found.append((f"best {metric}", f"{run.best['value']:.4g}", f"step {run.best.get('step')}"))
    return [*found, *_speed(run), *_trouble(run)]


def _state(run: Run) -> str:
    if run.alive():
        return "running"
    return "done" if run.planned and run.steps >= run.planned else "not running"


def _speed(run: Run) -> list[Tile]:
    rate, seconds = run.finite("speed/tokens_per_second"), run.finite("speed/step_seconds")
    if not len(rate) or not len(seconds):
        return []
    each = run.last("speed/tokens_per_second_per_device")
    more = f"{number_text(each)} a device in the last step" if each is not None else "median"
    found: list[Tile] = [("tokens/s, median", number_text(float(np.median(rate))), more)]
    kinds = {"MFU": "speed/model_flops_utilisation", "HFU": "speed/hardware_flops_utilisation"}
    shares = {name: f"{np.median(known):.1%}" for name, key in kinds.items() if len(known := run.finite(key))}
    if shares:
        found.append((" / ".join(shares), " / ".join(shares.values()), "of the devices' peak, median"))
    total = float(seconds.sum())
    tokens = float((rate * seconds).sum()) if len(rate) == len(seconds) else 0.0
    found.append(("time in steps", _clock(total), f"{number_text(tokens)} tokens read"))
    for label, key in (
        ("waiting for data", "speed/data_wait_seconds"),
        ("exposed communication", "speed/exposed_communication_seconds"),
    ):
        if key in run.series and total > 0:
            found.append((label, f"{run.finite(key).sum() / total:.1%}", "of the time in steps"))
    peak = run.last("memory/peak_bytes")
    if peak is not None:
        found.append(("peak memory", f"{number_text(peak)}B", "of rank 0"))
    return found


def _trouble(run: Run) -> list[Tile]:
    kinds = [kind_of(event) for event in run.events]
    skipped = int(run.last("train/skipped_steps") or 0)
    others = {"restart": "restarts", "straggler": "stragglers", "spike": "loss spikes", "damaged": "damaged data"}
    counts = ", ".join(f"{kinds.count(kind)} {label}" for kind, label in others.items() if kinds.count(kind))
    return [("skipped steps", f"{skipped:,}", counts or "no incidents" if not kinds or counts else "see the incidents")]


def tiles(found: Iterable[Tile]) -> str:
    cells = [f"<div>{escape(a)}<b>{escape(b)}</b><span>{escape(c)}</span></div>" for a, b, c in found]
    return f'<div class="tiles">{"".join(cells)}</div>'


def incidents(run: Run) -> str:
    if not run.events:
        return '<p class="dim">None: nothing was skipped, damaged, slow or started again.</p>'
    rows = [
        [f'<span class="dot {kind_of(e)}"></span>{escape(str(e.get("step", "")))}', *_cells(e, ("time", "message"))]
        for e in run.events[-MOST_ROWS:]
    ]
    earlier = len(run.events) - len(rows)
    note = f'<p class="dim">{earlier:,} earlier ones are in events.jsonl.</p>' if earlier else ""
    return note + table(("step", "time", "what happened"), rows)


def _cells(values: dict[str, Any], keys: Sequence[str]) -> list[str]:
    return [escape(str(values.get(key, ""))[:600]) for key in keys]


def ranks(run: Run) -> str:
    """A table of the seconds of each rank's step, the slowest first, with where it runs and what it last seconds_of."""
    beats = {beat["rank"]: beat for beat in run.heartbeats if isinstance(beat.get("rank"), int)}
    known = run.ranks.get("ranks")
    spent = [row for row in known if isinstance(row, dict)] if isinstance(known, list) else []
    if not spent and len(beats) < 2:
        return ""
    rows = spent or [{"rank": rank} for rank in beats]
    numbers = ("data", "forward", "communication")
    own = [sum(row[key] for key in numbers[:2]) if _numeric(row, numbers) else 0.0 for row in rows]
    cells, other = [], median(own) if own else 1.0
    for row, seconds in sorted(zip(rows, own, strict=True), key=lambda one: -one[1])[:MOST_ROWS]:
        beat = beats[row["rank"]] if _numeric(row, ("rank",)) and row["rank"] in beats else {}
        seconds_of = [f"{row[key]:.3g}" if _numeric(row, (key,)) else "" for key in numbers]
        ratio = f"{seconds / other:.2f}" if seconds else ""
        cells.append([escape(str(row.get("rank"))), *seconds_of, ratio, *_cells(beat, ("host", "pid", "doing"))])
    heads = ("rank", "data, s", "forward, s", "exposed communication, s", "own part", "host", "process", "last report")
    note = (
        f"Medians of the {run.ranks.get('steps')} steps up to {run.ranks.get('step')}, the slowest first; own part: "
        "waiting for data and forward, against the median rank's (of two, the other's)."
    )
    return (f'<p class="dim">{escape(note)}</p>' if spent else "") + table(heads, cells, numeric=(1, 2, 3, 4))


def _numeric(row: dict[str, Any], keys: Sequence[str]) -> bool:
    return all(isinstance(row.get(key), int | float) and abs(row[key]) < HUGE for key in keys)


def checkpoints(run: Run) -> str:
    best = run.best.get("step")
    rows = []
    for name, size, written in run.checkpoints:
        when = datetime.fromtimestamp(written, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        mark = '<span class="dot good"></span>best' if int(name) == best else ""
        rows.append([escape(name), f"{number_text(size)}B", f"{when} UTC", mark])
    found = table(("checkpoint", "size", "written", ""), rows, numeric=(1,)) if rows else ""
    if run.traces:
        found += f"<p>Traces (open them at ui.perfetto.dev): {escape(', '.join(run.traces[:40]))}</p>"
    return found or '<p class="dim">None yet.</p>'


def configuration(run: Run) -> str:
    """A table of the settings that differ from the defaults, and, folded away, of all."""
    if not run.config:
        return '<p class="dim">config.json is missing or broken.</p>'
    changed = [key for key, value in run.config.items() if run.defaults.get(key) != value or key not in run.defaults]
    own, default = _values(run.config), _values(run.defaults)
    differing = [[_code(key), own[key], default.get(key, _code("—"))] for key in changed]
    whole = [[_code(key), value] for key, value in own.items()]
    marks = [key in changed for key in run.config]
    return (
        f"<p>{len(changed)} settings differ from the defaults:</p>{table(('key', 'value', 'default'), differing)}"
        f"<details><summary>All {len(whole)} settings</summary>{table(('key', 'value'), whole, marks=marks)}</details>"
    )


def _values(settings: dict[str, Any]) -> dict[str, str]:
    """Key -> HTML of its value."""
    return {key: _code(json.dumps(value, ensure_ascii=False)[:600]) for key, value in settings.items()}


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = (), marks: Sequence[bool] = ()
) -> str:
    """An HTML table, whose cells are HTML already. marks: rows to highlight."""
    kind = [' class="n"' if column in numeric else "" for column in range(len(heads))]
    top = "".join(f"<th{kind[column]}>{escape(head)}</th>" for column, head in enumerate(heads))
    body = []
    for number, row in enumerate(rows):
        changed = ' class="changed"' if marks and marks[number] else ""
        cells = "".join(f"<td{kind[column]}>{cell}</td>" for column, cell in enumerate(row))
        body.append(f"<tr{changed}>{cells}</tr>")
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{time.strftime('%M:%S', time.gmtime(seconds % 3600))}"
