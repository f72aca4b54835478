"""The report of a stage, written after each result, and the table that all of them end in."""

import json
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megasparse.data.files import replacing


class Skipped(Exception):
    """Reason that a stage has nothing to do here."""


@dataclass
class Row:
    """One result. right: whether it is; None where nothing can be wrong. error: the largest relative one. seconds: of
    the measured pass. flash: how many times faster than torch's flash attention. roofline: the share of the least time
    that this GPU needs. counted: seconds by count; launches and counted_launches: of a pass. peak and counted_peak:
    bytes. kernels: the kernels that took longest, as (name, launches, seconds).
    """

    what: str
    right: bool | None = None
    error: float | None = None
    seconds: float | None = None
    flash: float | None = None
    roofline: float | None = None
    counted: float | None = None
    launches: int | None = None
    counted_launches: int | None = None
    peak: int | None = None
    counted_peak: int | None = None
    note: str = ""
    kernels: list[tuple[str, int, float]] = field(default_factory=list)


@dataclass
class Report:
    """What a stage found. state: "running", "done", "skipped: ...", "failed: ..." or "over its limit of N s"."""

    path: Path
    stage: str
    state: str = "running"
    seconds: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    log: str = ""

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    def attempt(self, what: str, run: Callable[..., Row | tuple[bool, float, str]], *arguments: Any) -> None:
        """Add the result of run(*arguments), a row or (right, error, note). An exception is a result that is wrong; the
        stage goes on, unless the GPU itself is out of order then.
        """
        try:
            found = run(*arguments)
        except Exception as error:
            self.log += traceback.format_exc()[-4000:]
            self.add(Row(what, right=False, note=_first_line(error)))
            if "CUDA error" in str(error):  # no later call would succeed
                raise
            return
        self.add(found if isinstance(found, Row) else Row(what, found[0], found[1], note=found[2]))

    def write(self) -> None:
        with replacing(self.path) as file:
            file.write(json.dumps({**asdict(self), "path": None}, indent=1).encode() + b"\n")

    @staticmethod
    def read(path: Path) -> "Report":
        values = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row(**row) for row in values.pop("rows")]
        return Report(**{**values, "path": path, "rows": rows})

    @property
    def right(self) -> bool:
        """Whether nothing is known to be wrong."""
        fails = self.state.startswith(("failed", "over"))
        return not fails and all(row.right is not False for row in self.rows)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def failed(error: BaseException) -> str:
    """The state of a stage that an exception ended."""
    return f"skipped: {error}" if isinstance(error, Skipped) else f"failed: {_first_line(error)}"


def table(reports: list[Report]) -> Iterator[str]:
    """All results as one Markdown table; of the stages that only compare, what is wrong and how many are right."""
    about = next((report.about for report in reports if report.about), {})
    yield ", ".join(f"{name} {about[name]}" for name in ("device", "torch", "triton", "python") if name in about)
    yield ""
    yield (
        "| stage | result | right | largest error | ms | × flash | of the roofline | counted ms | launches, counted "
        "| peak GB, counted | note |"
    )
    yield "|" + "---|" * 11
    for report in reports:
        rows, right = report.rows, sum(row.right is True for row in report.rows)
        compares = len(rows) > 4 and all(row.right is not None and row.flash is None for row in rows)
        what = f"{right} of {len(rows)} right" if compares else ""
        errors = [row.error for row in rows if row.error is not None]
        worst = f"{max(errors):.2g}" if compares and errors else ""
        state = f"{report.state}, {report.seconds:.0f} s"
        yield f"| **{report.stage}** | {what} | {_word(report.right)} | {worst} |  |  |  |  |  |  | {state} |"
        for row in rows:
            if not compares or row.right is False:
                yield _line(row)


def _line(row: Row) -> str:
    cells = [
        row.what,
        _word(row.right),
        _number(row.error),
        _number(row.seconds, 1e3),
        _number(row.flash),
        "" if row.roofline is None else f"{100 * row.roofline:.0f} %",
        _number(row.counted, 1e3),
        _pair(row.launches, row.counted_launches),
        _pair(row.peak, row.counted_peak, 1e9),
        row.note.replace("|", "/"),
    ]
    return f"|  | {' | '.join(cells)} |"


def _word(right: bool | None) -> str:
    return "" if right is None else "right" if right else "WRONG"


def _number(value: float | None, factor: float = 1.0) -> str:
    return "" if value is None else f"{factor * value:.3g}"


def _pair(measured: float | None, counted: float | None, unit: float = 1.0) -> str:
    shown = [_number(value, 1 / unit) or "–" for value in (measured, counted)]
    return "" if shown == ["–", "–"] else ", ".join(shown)
