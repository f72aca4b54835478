"""Figures for documents: SVGs in mid-tones on a transparent ground, legible on light and dark pages."""

from pathlib import Path
from typing import Any

from megasparse.data.corpora.records import Lengths
from megasparse.errors import ConfigError

COLOURS = ("#2f9e6e", "#d9730d", "#8a63d2", "#3b82c4", "#c0466b", "#8c7a3d", "#4aa3a2")
GREY = "#808890"


def new_figure(columns: int) -> tuple[Any, list[Any]]:
    """A matplotlib figure and its axes, side by side. Raises ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib", "is not installed", "pip install matplotlib") from None
    figure = Figure(figsize=(8.2, 3.1), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def save_figure(figure: Any, path: Path) -> None:
    """Write the SVG in colours that are legible on any ground, the same byte for byte from the same numbers."""
    from matplotlib import rc_context

    for axes in figure.axes:
        axes.grid(color=GREY, alpha=0.3)
        axes.tick_params(colors=GREY)
        for part in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.spines.values()):
            part.set_color(GREY)
    figure.axes[0].legend(frameon=False, fontsize="small", labelcolor=GREY).set_zorder(3)
    with rc_context({"svg.hashsalt": "megasparse"}):
        figure.savefig(path, transparent=True, metadata={"Date": None})


def draw_lengths(lengths: Lengths, path: Path) -> None:
    """Draw documents, and their bytes, by length into an SVG. Raises ConfigError where matplotlib is not installed."""
    figure, (by_number, by_size) = new_figure(2)
    positions = range(len(lengths.documents))
    labels = [_size(edge) for edge in lengths.edges[:-1]]
    by_number.bar(positions, lengths.documents, color=COLOURS[0], label=f"median {lengths.quantiles['0.5']:,} bytes")
    by_size.bar(positions, lengths.bytes, color=COLOURS[1])
    every = -(-len(labels) // 8)
    for axes, title in ((by_number, "documents by length"), (by_size, "bytes by length of their document")):
        axes.set_xticks([position - 0.5 for position in positions][::every], labels[::every])
        axes.set(title=title, xlabel="bytes of a document, from")
    save_figure(figure, path)


def _size(number: int) -> str:
    """A power of two with Ki, Mi or Gi."""
    power = min((number.bit_length() - 1) // 10, 3)
    return f"{number >> 10 * power}{('', 'Ki', 'Mi', 'Gi')[power]}"
