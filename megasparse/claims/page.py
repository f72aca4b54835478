"""The report of the claims: one page in Markdown and in HTML, a picture of each claim, and all numbers as JSON."""

import json
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

from megasparse.claims.claim import Claim
from megasparse.evaluation.figure import COLOURS, new_figure, save_figure

STATUSES = {"verified": "✓", "refuted": "✗", "not attempted": "–"}
WRITTEN_FIRST = "Rules and budgets were written before the trials."
WIDTH = 118
"""Characters of a line of Markdown."""
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse}td,th{padding:.2rem .7rem;border-bottom:1px solid #8885;text-align:left}"
    "figure{margin:1rem 0}svg{max-width:100%;height:auto}.refuted{color:#c0466b}.verified{color:#2f9e6e}"
)


def write_page(claims: Sequence[Claim], found: Sequence[dict[str, Any]], output: Path) -> list[Path]:
    """Write OUTPUT/claims.json, claims.md and claims.html, and CLAIM.svg of each claim that was tried."""
    output.mkdir(parents=True, exist_ok=True)
    for claim, known in zip(claims, found, strict=True):
        if claim.draw is not None and known["status"] != "not attempted":
            draw(claim, [trial["numbers"] for trial in known["trials"]], output / f"{claim.name}.svg")
            known["picture"] = f"{claim.name}.svg"
    numbers = json.dumps(found, indent=1)
    texts = {"claims.json": numbers, "claims.md": markdown(found), "claims.html": html(found, output)}
    for name, text in texts.items():
        (output / name).write_text(text.rstrip() + "\n", encoding="utf-8")
    return [output / name for name in texts]


def draw(claim: Claim, runs: Sequence[Any], path: Path) -> None:
    assert claim.draw is not None
    picture = claim.draw(runs)
    figure, (axes,) = new_figure(1)
    for number, curve in enumerate(picture.curves):
        axes.plot(curve.x, curve.y, marker=".", color=COLOURS[number % len(COLOURS)], label=curve.label)
    axes.set(title=picture.title, xlabel=picture.x, ylabel=picture.y)
    for axis in picture.log:
        if axis in "xy":
            axes.set(**{f"{axis}scale": "log"})
    save_figure(figure, path)


def counts(found: Sequence[dict[str, Any]]) -> str:
    numbers = {status: sum(known["status"] == status for known in found) for status in STATUSES}
    return ", ".join(f"{number} {status}" for status, number in numbers.items())


def effort(known: dict[str, Any]) -> str:
    """Seeds, seconds, commit and machine of a claim's trials."""
    trials = known["trials"]
    seconds = statistics.mean(trial["seconds"] for trial in trials)
    commits = sorted({str(trial["commit"]) for trial in trials})
    machines = sorted({trial["machine"]["device"] for trial in trials})
    seeds = ", ".join(str(trial["seed"]) for trial in trials)
    where = f"commit {', '.join(commits)}; {', '.join(machines)}"
    return f"{'seeds' if len(trials) > 1 else 'seed'} {seeds}; {seconds:.0f} s each; {where}"


def markdown(found: Sequence[dict[str, Any]]) -> str:
    lines = ["# Claims", "", f"{counts(found)}. {WRITTEN_FIRST}", ""]
    lines += ["| | claim | paper | found |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row(known))} |" for known in found]
    for known in (known for known in found if known["trials"]):
        lines += [
            "",
            f"## {known['name']}: {known['status']}",
            "",
            *wrap(f"*{known['paper']}.* {known['says']}", WIDTH),
            "",
        ]
        for name, text in facts(known).items():
            lines += wrap(f"- {name}: {text}", WIDTH, subsequent_indent="  ")
        if known.get("table"):
            head, *rows = known["table"]
            lines += ["", *(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))]
        if "picture" in known:
            lines += ["", f"![{known['name']}]({known['picture']})"]
    return "\n".join(lines)


def html(found: Sequence[dict[str, Any]], output: Path) -> str:
    """The page as HTML with its pictures inside, so that one file can be sent."""
    parts = [f"<h1>Claims</h1><p>{counts(found)}. {WRITTEN_FIRST}</p>", _table(map(row, found))]
    for known in (known for known in found if known["trials"]):
        title = f'{known["name"]}: <span class="{known["status"]}">{known["status"]}</span>'
        parts.append(f"<h2>{title}</h2><p><i>{escape(known['paper'])}.</i> {escape(known['says'])}</p>")
        parts += ["<ul>", *(f"<li>{name}: {escape(text)}</li>" for name, text in facts(known).items()), "</ul>"]
        parts.append(_table(known.get("table", [])))
        if "picture" in known:
            drawn = (output / known["picture"]).read_text(encoding="utf-8")
            parts.append(f"<figure>{drawn[drawn.index('<svg') :]}</figure>")
    return f'<!doctype html><meta charset="utf-8"><title>Claims</title><style>{STYLE}</style>{"".join(parts)}'


def row(known: dict[str, Any]) -> list[str]:
    """A claim's row of the table."""
    said = known.get("sentence") or f"not attempted: {known['missing']}"
    return [STATUSES[known["status"]], known["name"], known["paper"], said]


def facts(known: dict[str, Any]) -> dict[str, str]:
    return {"Rule": known["rule"], "Found": known.get("sentence", known["missing"]), "Trials": effort(known)}


def _table(rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in cells) for cells in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>" if lines else ""
