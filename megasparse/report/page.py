"""One HTML page of one run or several, which needs nothing but itself. All text from files is escaped."""

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape

from megasparse.report import chart as edges
from megasparse.report.chart import Line, Mark, chart
from megasparse.report.facts import checkpoints, configuration, headline, incidents, ranks, tiles
from megasparse.report.layout import Plan, plan
from megasparse.report.pictures import Shown
from megasparse.report.run import Run
from megasparse.report.style import SCRIPT, STYLE

POINTS = 150_000
"""Points of all curves together, which take about 2 MB."""
MOST_POINTS = 1000
"""Points of one curve."""
MOST_CHARTS = 150
PICTURE_BYTES = 1_800_000
"""Bytes of all pictures together, a third less than they take in the page."""
SHOWN = 4
"""Pictures or texts of a kind at most, from first to last."""
TEXT = 3000
"""Characters of a text."""
WRITTEN_ELSEWHERE = {"events", "ranks"}
"""Texts of TensorBoard's that the page has from files of their own."""


def page(runs: Sequence[Run]) -> str:
    """The page's HTML. Curves of several runs share their charts; the rest follows run by run."""
    title = ", ".join(labels(runs))
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">Written {datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")} UTC</p>',
    ]
    for label, run in zip(labels(runs), runs, strict=True):
        heading = f"<h2>{escape(label)}</h2>" if len(runs) > 1 else ""
        parts += [heading, tiles(headline(run))]
    parts += curves(runs)
    for label, run in zip(labels(runs), runs, strict=True):
        of = f" of {escape(label)}" if len(runs) > 1 else ""
        for heading, content in (
            ("Attention maps and samples", shown(run, PICTURE_BYTES // len(runs))),
            ("Incidents", incidents(run)),
            ("Ranks", ranks(run)),
            ("Checkpoints and traces", checkpoints(run)),
            ("Configuration", configuration(run)),
        ):
            if content:
                parts.append(f"<h2>{heading}{of}</h2>{content}")
    return document(title, "\n".join(parts))


def document(title: str, body: str) -> str:
    """A whole HTML file, whose policy lets only the page's own script run and nothing be fetched."""
    script = SCRIPT
    places = {"LEFT": edges.LEFT, "RIGHT": edges.WIDTH - edges.RIGHT, "TOP": edges.TOP}
    for name, place in (places | {"BOTTOM": edges.HEIGHT - edges.BOTTOM}).items():
        script = script.replace(name, str(place))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{escape(title)}</title><style>{STYLE}</style></head>\n'
        f"<body>\n{body}\n<script>{script}</script></body></html>\n"
    )


def labels(runs: Sequence[Run]) -> list[str]:
    """The folders' names, or their paths where two have the same name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def curves(runs: Sequence[Run]) -> list[str]:
    """All charts, by section, with the incidents of a single run."""
    names = {name for run in runs for name, own in run.series.items() if len(own.finite)}
    if not names:
        return ['<h2>Curves</h2><p class="dim">No step has been logged yet.</p>']
    zero = {name for name in names if not any(run.finite(name).any() for run in runs)}
    sections = plan(names - zero, any(run.finetuning for run in runs))
    count = sum(len(each.names) for charts in sections.values() for each in charts) * len(runs)
    points = max(60, min(MOST_POINTS, POINTS // max(1, count)))
    marks = runs[0].marks() if len(runs) == 1 else []
    parts, left = [_meaning(marks)], MOST_CHARTS
    for section, charts in sections.items():
        drawn = [
            chart(each.title, each.unit, _lines(runs, each), marks, points, not each.linear) for each in charts[:left]
        ]
        left -= len(drawn)
        if any(drawn):
            parts.append(f'<h2>{escape(section)}</h2><div class="charts">{"".join(drawn)}</div>')
    left_out = sum(map(len, sections.values())) - MOST_CHARTS
    if left_out > 0:
        parts.append(f'<p class="dim">{left_out} more charts are left out: metrics.jsonl has every number.</p>')
    if zero:
        parts.append(f'<p class="dim">0 in every step: {escape(", ".join(sorted(zero)[:40]))}</p>')
    return parts


def _meaning(marks: Sequence[Mark]) -> str:
    """What the marks in the charts stand for."""
    kinds = sorted({mark.kind for mark in marks})
    legend = "".join(f'<span class="dot {kind}"></span>{kind} &ensp;' for kind in kinds)
    return f'<p class="dim">Marked in the charts: {legend}</p>' if legend else ""


def _lines(runs: Sequence[Run], plan: Plan) -> list[Line]:
    found = []
    for run_label, run in zip(labels(runs), runs, strict=True):
        for name, label in plan.names.items():
            if name in run.series:
                whole = label if len(runs) == 1 else f"{run_label}: {label}" if len(plan.names) > 1 else run_label
                found.append(Line(whole, run.series[name], label == "held-out" and len(plan.names) > 1))
    return found


def shown(run: Run, budget: int) -> str:
    """Pictures and texts from TensorBoard, some of each tag, the newest kept first. budget: bytes of all pictures."""
    parts = []
    tags = {tag: _spread(every) for tag, every in run.board.items() if tag not in WRITTEN_ELSEWHERE}
    drawn = sum(isinstance(every[-1].content, bytes) for every in tags.values())
    for tag, every in tags.items():
        left = budget // max(1, drawn)
        kept: list[Shown] = []
        for each in reversed(every):
            left -= len(each.content) if isinstance(each.content, bytes) else 0
            if left >= 0:
                kept.insert(0, each)
        if not kept:
            parts.append(f'<h3>{escape(tag)}</h3><p class="dim">Too large for a page; TensorBoard has it.</p>')
            continue
        note = ""
        if tag.startswith("quality/") and tag.endswith("/maps"):
            note = '<p class="dim">Left: full attention of the same queries and keys. Right: the mechanism\'s own.</p>'
        parts.append(f'<h3>{escape(tag)}</h3>{note}<div class="shown">{"".join(map(_content, kept))}</div>')
    return "".join(parts)


def _spread(every: Sequence[Shown]) -> list[Shown]:
    last = len(every) - 1
    places = sorted({round(number * last / (SHOWN - 1)) for number in range(SHOWN)})
    return [every[place] for place in places]


def _content(shown: Shown) -> str:
    heading = f"<figcaption>step {shown.step:,}</figcaption>"
    if isinstance(shown.content, bytes):
        data = base64.b64encode(shown.content).decode()
        small = ' class="small"' if int.from_bytes(shown.content[16:20], "big") < 200 else ""
        return f'<figure>{heading}<img alt="step {shown.step}"{small} src="data:image/png;base64,{data}"></figure>'
    more = "…" if len(shown.content) > TEXT else ""
    return f'<figure class="text">{heading}<pre>{escape(shown.content[:TEXT])}{more}</pre></figure>'
