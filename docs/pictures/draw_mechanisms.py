"""Draw the pictures of docs/how-it-works.md: the keys that each mechanism reads in a short text.

    python docs/pictures/draw_mechanisms.py    # writes mechanism_*.svg, causality.svg, reversible.svg next to itself

The model consists of one layer and one head, with initial weights and without positions: equal letters have equal
queries and keys. Mid-tones on a transparent ground are legible on light and dark pages.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasparse.evaluation.attention_quality import record_calls, weights_of
from megasparse.evaluation.outputs import COLOURS, GREY
from megasparse.model.build import build_model
from megasparse.settings.load import build_config

FOLDER = Path(__file__).parent
TEXT = "the cat and the hat and the bat."
CELL, EDGE, GAP = 10, 16, 4
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "local": {"chunk": 8},
    "lsh": {"rounds": 1, "chunk": 8, "buckets": 4},
    "lha": {"chunk": 8},
    "yoso": {"hashes": 8, "code_bits": 4},
    "smart_bird": {"keys": 4},
    "ngram": {"lengths": [3], "chunk": 4, "window": 4},
    "routing": {"chunk": 8},
}


class Seen(NamedTuple):
    """Attention of a mechanism to a text of L tokens."""

    weights: Tensor
    """(L, L), one row per query."""
    buckets: list[int] | None
    """Bucket of each token, if the mechanism uses buckets."""


def look(kind: str, text: str = TEXT, seed: int = 3, **changes: Any) -> Seen:
    """Let a mechanism attend inside a model of one layer and one head."""
    size = {"layers": 1, "heads": 1, "d_model": 32, "d_ff": 32, "max_length": len(TEXT), "start_token": 0}
    attention = {"pattern": [kind], kind: {**KINDS[kind], **changes}}
    blocks = {"blocks": "ordinary", "activations": "stored", "positions": {"kind": "rotary", "base": 1e12}}
    values = {"model": {**size, **blocks, "attention": attention}, "data": {"sequence_length": len(TEXT)}}
    model = build_model(build_config(values).model, seed)
    (call,) = record_calls(model, torch.tensor([list(text.encode())]), seed)
    buckets = call.mechanism.buckets_of(call.inputs, call.context)
    return Seen(weights_of(call, call.mechanism)[0, 0], None if buckets is None else buckets[0].flatten().tolist())


def main() -> None:
    for kind in KINDS:
        found = look(kind)
        height = EDGE + CELL * len(TEXT) + GAP
        parts = [*grid(found, 0)]
        if found.buckets is not None:
            parts += sorting(found.buckets, height + 14)
            height += 70
        write(f"mechanism_{kind}", EDGE + CELL * len(TEXT) + GAP, height, parts)
    write("causality", *causality())
    write("reversible", *reversible())


def grid(found: Seen, left: int, marked: frozenset[int] = frozenset()) -> Iterator[str]:
    """Queries downwards, keys to the right. A cell is as strong as its weight; its colour is the query's bucket's."""
    strongest = found.weights.amax(-1, keepdim=True).clamp_min(1e-9)
    strength = (found.weights / strongest).clamp(0, 1).sqrt()
    side = CELL * len(TEXT)
    for number, letter in enumerate(TEXT):
        middle = EDGE + CELL * number + CELL / 2
        colour = _bucket_colour(found, number)
        yield word(left + middle, EDGE - 5, letter, colour, anchor="middle")
        yield word(left + EDGE - 5, middle + 3, letter, colour, anchor="end")
        if number in marked:
            yield box(left + EDGE, middle - CELL / 2, side, CELL, "#c0466b", 0.25)
    steps = "".join(f"v{CELL}h{CELL}" for _ in TEXT)
    outline = f"M{left + EDGE} {EDGE}h{CELL}{steps[: steps.rindex('h')]}H{left + EDGE}z"
    yield f'<path d="{outline}" fill="{GREY}" opacity=".15"/>'
    for query, key in (found.weights > 0).nonzero().tolist():
        colour, shade = _bucket_colour(found, query, COLOURS[0]), 0.25 + 0.75 * float(strength[query, key])
        yield box(left + EDGE + CELL * key, EDGE + CELL * query, CELL - 1, CELL - 1, colour, shade)


def _bucket_colour(found: Seen, token: int, other: str = GREY) -> str:
    return other if found.buckets is None else COLOURS[found.buckets[token] % len(COLOURS)]


def sorting(buckets: list[int], top: float) -> Iterator[str]:
    """The tokens in their order, below them sorted by bucket and position, with a line from place to place."""
    order = sorted(range(len(buckets)), key=lambda token: (buckets[token], token))
    for place, token in enumerate(order):
        x0, x1 = (EDGE + CELL * at + CELL / 2 for at in (token, place))
        colour = COLOURS[buckets[token] % len(COLOURS)]
        yield f'<path d="M{x0} {top + 3}L{x1} {top + 38}" stroke="{colour}" stroke-width="1" fill="none" opacity=".7"/>'
        yield word(x0, top, TEXT[token], colour, anchor="middle")
        yield word(x1, top + 48, TEXT[token], colour, anchor="middle")


def causality() -> tuple[int, int, list[str]]:
    """Two windows of the same hash: which queries see other keys when only the second half of the text changes."""
    half, side = len(TEXT) // 2, EDGE + CELL * len(TEXT) + 3 * GAP
    other = TEXT[:half] + "a rat, a fat rat"
    parts = []
    for number, (window, name) in enumerate(
        (("chunk", "sorted and cut into chunks"), ("band", "the bucket's last keys: band"))
    ):
        before, after = (look("lsh", text, chunk=4, window=window) for text in (TEXT, other))
        moved = ((before.weights > 0) != (after.weights > 0)).any(-1)[:half].nonzero().flatten().tolist()
        parts += [*grid(before, number * side, frozenset(moved))]
        parts.append(
            word(number * side + EDGE, EDGE + CELL * len(TEXT) + 14, f"{name}: {len(moved)} of {half} change", GREY)
        )
    return 2 * side, EDGE + CELL * len(TEXT) + 22, parts


def reversible() -> tuple[int, int, list[str]]:
    """A reversible block, forward and back: two streams, two branches."""
    parts = []
    for left, title, sign, first, second in (
        (0, "forward", "+", "Attention", "Feed-forward"),
        (330, "backward: inputs from outputs", "−", "Feed-forward", "Attention"),
    ):
        names = ("x₁", "x₂", "y₁", "y₂") if sign == "+" else ("y₂", "y₁", "x₂", "x₁")
        parts += [word(left + 10, 14, title, GREY, 12)]
        for y in (50, 130):
            parts.append(f'<path d="M{left + 34} {y}H{left + 276}" stroke="{GREY}" stroke-width="1.5"/>')
        for x, up, name, colour in ((95, False, first, COLOURS[0]), (195, True, second, COLOURS[1])):
            start, end = (50, 130) if up else (130, 50)
            parts.append(f'<path d="M{left + x} {start}V{end}" stroke="{colour}" stroke-width="1.5"/>')
            parts.append(box(left + x - 46, 78, 92, 24, colour, 1.0))
            parts.append(word(left + x, 94, name, "#ffffff", 12, "middle"))
            parts.append(f'<circle cx="{left + x}" cy="{end}" r="8" fill="{colour}"/>')
            parts.append(word(left + x, end + 4, sign, "#ffffff", 12, "middle"))
        for name, x, y in zip(names, (20, 20, 288, 288), (54, 134, 54, 134), strict=True):
            parts.append(word(left + x, y, name, GREY, 13, "middle"))
    return 630, 150, parts


def box(x: float, y: float, width: float, height: float, colour: str, opacity: float) -> str:
    shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"'
    return f'<rect {shape} fill="{colour}" fill-opacity="{opacity:.2f}"/>'


def word(x: float, y: float, text: str, colour: str, size: int = 10, anchor: str = "start") -> str:
    shown = escape(text.replace(" ", "·") if len(text) == 1 else text)
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{shown}</text>'


def write(name: str, width: float, height: float, parts: list[str]) -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    style = 'font-family="ui-monospace,monospace"'
    (FOLDER / f"{name}.svg").write_text("\n".join([f"{head} {style}>", *parts, "</svg>", ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
