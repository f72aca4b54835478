"""Figures for documents: SVGs in mid-tones on a transparent ground, legible on light and dark pages."""

from pathlib import Path
from typing import Any

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


def style(figure: Any, **legend_at: Any) -> None:
    """Give axes and legend the colours that are legible on any ground. legend_at: where the legend is, as Axes.legend
    takes it.
    """
    for axes in figure.axes:
        axes.grid(color=GREY, alpha=0.3)
        axes.tick_params(colors=GREY)
        for part in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.spines.values()):
            part.set_color(GREY)
    figure.axes[0].legend(frameon=False, fontsize="small", labelcolor=GREY, **legend_at).set_zorder(3)


def save_figure(figure: Any, path: Path, **legend_at: Any) -> None:
    """Write the SVG in the style of `style`, the same byte for byte from the same numbers."""
    from matplotlib import rc_context

    style(figure, **legend_at)
    with rc_context({"svg.hashsalt": "megasparse"}):
        figure.savefig(path, transparent=True, metadata={"Date": None})
