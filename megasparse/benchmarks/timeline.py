"""A timeline drawn: a row for each resource of each rank, in seconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasparse.evaluation.figure import COLOURS, GREY, new_figure, save_figure
from megasparse.planning.timeline import RESOURCES, Timeline

NAMES = {"exchange": "all-to-all", "gather": "ZeRO", "swap": "swap"}


def draw(found: Timeline, ranks: Sequence[int], path: Path) -> None:
    """Write the SVG of these ranks. Raises ConfigError where matplotlib is not installed."""
    figure, [axes] = new_figure(1)
    rows = [(rank, resource) for rank in ranks for resource in RESOURCES]
    figure.set_figheight(1.2 + 0.24 * len(rows))
    named: set[str] = set()
    for place, (rank, resource) in enumerate(rows):
        for kind, spans in _spans(found, rank, resource).items():
            label = kind if kind not in named else None
            named.add(kind)
            axes.broken_barh(spans, (place - 0.4, 0.8), facecolor=_colour(kind), label=label, linewidth=0)
    axes.set_yticks(
        range(len(rows)), [f"rank {rank}" if resource == "compute" else NAMES[resource] for rank, resource in rows]
    )
    axes.invert_yaxis()
    axes.set(xlabel="seconds", xlim=(0, found.seconds), title=f"a step of {found.seconds:.3g} s")
    save_figure(figure, path, loc="upper left", bbox_to_anchor=(1.0, 1.0))


KINDS = ("forward", "head", "backward", "optimizer", "all-to-all", "ZeRO", "swap")


def _spans(found: Timeline, rank: int, resource: str) -> dict[str, list[tuple[float, float]]]:
    """Begin and length of each task of a resource, by kind."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for number, task in enumerate(found.tasks):
        if task.resource == resource:
            kind = NAMES.get(resource) or task.name.split()[0]
            begin, end = float(found.begin[number, rank]), float(found.end[number, rank])
            earlier = spans.setdefault(kind, [])
            if earlier and sum(earlier[-1]) >= begin:  # one after the other is one
                begin = earlier.pop()[0]
            earlier.append((begin, end - begin))
    return spans


def _colour(kind: str) -> Any:
    return dict(zip(KINDS, COLOURS, strict=True)).get(kind, GREY)
