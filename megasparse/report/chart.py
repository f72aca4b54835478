"""Curves as SVG: axes with ticks, a unit, incidents as marks. All text that comes in is escaped."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from megasparse.report.series import Series, decimated, smoothed

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 8, 26
COLOURS = 10
LEGEND = 14
"""Names below a chart at most."""
NOISY = 100
"""Points from which on a curve is drawn faint, with its running mean."""
LOG_FROM = 30.0
"""Ratio of greatest to least value from which on the axis is logarithmic."""


class Line(NamedTuple):
    label: str
    series: Series
    dashed: bool = False


class Mark(NamedTuple):
    """An incident at a step."""

    step: int
    kind: str
    text: str


class Axis(NamedTuple):
    """A map from numbers to pixels; `pixels[0]` is the pixel of `low`."""

    low: float
    high: float
    pixels: tuple[float, float]
    log: bool

    def place(self, values: np.ndarray) -> np.ndarray:
        low, high = (math.log10(x) if self.log else x for x in (self.low, self.high))
        own = np.log10(values) if self.log else values
        return self.pixels[0] + (own - low) / (high - low) * (self.pixels[1] - self.pixels[0])

    def ticks(self, count: int) -> list[float]:
        if self.log:
            found = [x for x in _decades(self.low, self.high) if self.low <= x <= self.high]
            if len(found) >= 2:
                return found[:: -(-len(found) // count)]
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def chart(
    title: str, unit: str, lines: Sequence[Line], marks: Sequence[Mark] = (), points: int = 1000, may_log: bool = True
) -> str:
    """HTML of a figure with its curves over steps; nothing where none has a finite value. points: of a curve."""
    lines = [line for line in lines if len(line.series.finite)]
    if not lines:
        return ""
    steps = np.concatenate([line.series.steps for line in lines])
    x = _axis(steps, (LEFT, WIDTH - RIGHT), may_log=False, margin=0.0)
    values = np.concatenate([line.series.finite for line in lines])
    y = _axis(values, (HEIGHT - BOTTOM, TOP), may_log, margin=0.04)
    drawn = [_grid(x, y), *_marks(marks, x)]
    for number, line in enumerate(lines):
        drawn += _curve(line, number % COLOURS, x, y, points)
    names = [f'<span class="k{n % COLOURS}">{escape(line.label)}</span>' for n, line in enumerate(lines[:LEGEND])]
    more = f"<i>and {len(lines) - LEGEND} more</i>" if len(lines) > LEGEND else ""
    scale = ", ".join(filter(None, (unit, "logarithmic" if y.log else "")))
    data = f'data-x="{x.low},{x.high}" data-y="{y.low},{y.high},{int(y.log)}"'
    return (
        f"<figure><figcaption>{escape(title)} <small>{escape(scale)}</small><output></output></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" {data}>{"".join(drawn)}</svg>'
        f'<p class="legend">{" ".join(names)} {more}</p></figure>'
    )


def number_text(value: float) -> str:
    """A number in four digits, from 10,000 on with k, M, G or T."""
    if not math.isfinite(value):
        return "not finite"
    if abs(value) < 1e4:
        return f"{value:.4g}"
    power, letter = next((p, s) for p, s in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(value) >= p)
    return f"{value / power:.4g}{letter}"


def _axis(values: np.ndarray, pixels: tuple[float, float], may_log: bool, margin: float) -> Axis:
    """The axis of some values. margin: room at either end of a linear axis, as a part of the values' range; the axis
    does not go below 0 where no value does."""
    low, high = float(values.min()), float(values.max())
    if high == low:
        room = abs(high) * 0.05 or 1.0
        return Axis(low - room, high + room, pixels, False)
    if may_log and low > 0 and high / low >= LOG_FROM:
        return Axis(low, high, pixels, True)
    room = margin * (high - low)
    return Axis(0.0 if 0 <= low <= room else low - room, high + room, pixels, False)


def _decades(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 3 else (1,)
    return [factor * 10.0**power for power in powers for factor in factors]


def _grid(x: Axis, y: Axis) -> str:
    found = []
    for value, place in zip(ticks := y.ticks(5), y.place(np.array(ticks)), strict=True):
        found.append(f'<path class="g" d="M{LEFT} {place:.1f}H{WIDTH - RIGHT}"/>')
        found.append(f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{number_text(value)}</text>')
    for value, place in zip(ticks := x.ticks(6), x.place(np.array(ticks)), strict=True):
        found.append(f'<text x="{place:.1f}" y="{HEIGHT - 9}" text-anchor="middle">{number_text(value)}</text>')
    return "".join(found)


def _marks(marks: Sequence[Mark], x: Axis) -> list[str]:
    """At most one mark of a kind at each pixel."""
    seen: dict[tuple[str, int], str] = {}
    for mark in marks:
        if x.low <= mark.step <= x.high:
            place = int(x.place(np.array([mark.step]))[0])
            seen.setdefault((mark.kind, place), f"step {mark.step}: {mark.text}"[:300])
    return [
        f'<path class="m {kind}" d="M{place} {TOP}V{HEIGHT - BOTTOM}"><title>{escape(text)}</title></path>'
        for (kind, place), text in seen.items()
    ]


def _curve(line: Line, colour: int, x: Axis, y: Axis, points: int) -> list[str]:
    held = " d" if line.dashed else ""
    if len(line.series.steps) < NOISY:
        return [_polyline(line.series, f"c{colour}{held}", x, y, line.label)]
    mean = smoothed(line.series, max(3, len(line.series.steps) // 60))
    raw = _polyline(decimated(line.series, points), f"c{colour} raw", x, y, None)
    return [raw, _polyline(decimated(mean, points // 4), f"c{colour}{held}", x, y, line.label)]


def _polyline(series: Series, kind: str, x: Axis, y: Axis, label: str | None) -> str:
    """An SVG path, broken where a value cannot be drawn. A curve with a label shows its values under the pointer."""
    drawable = np.isfinite(series.values) & ((series.values > 0) | (not y.log))
    places = x.place(series.steps), y.place(np.where(drawable, series.values, y.low))
    parts, pen = [], False
    for across, down, there in zip(*places, drawable, strict=True):
        if there:
            parts.append(f"{'L' if pen else 'M'}{across:.1f} {down:.1f}")
        pen = bool(there)
    path = "".join(parts)
    name = "" if label is None else f' data-label="{escape(label)}"'
    if path.count("M") == len(parts):  # nothing that a line could join
        path = "".join(f"{part}h0" for part in parts)
        kind += " dots"
    return f'<path class="c {kind}" d="{path}"{name}/>'
