"""A picture of what `megasparse bench attention --json` measured: time and memory against length, both logarithmic.

Drawn in mid-tones on a transparent ground, so that it is legible on light and dark pages.
"""

from pathlib import Path
from typing import Any

from megasparse.config import strict_json
from megasparse.errors import ConfigError, DataError

NAMES = {"sdpa": "full attention (SDPA)", "hf": "Reformer (HuggingFace)", "reformer-pytorch": "reformer-pytorch"}
COLOURS = ("#2f9e6e", "#d9730d", "#8a63d2", "#3b82c4", "#c0466b")
GREY = "#808890"
PANELS = {
    "seconds, forward and backward": lambda row: row["forward_backward"]["median"],
    "GB": lambda row: row["extra_bytes"] / 1e9,
}
"""Title -> the figure of a row."""


def read(path: Path) -> list[dict[str, Any]]:
    """The measured rows of a file, without those that ended with an error. Raises DataError where there is none."""
    hint = "Give what `megasparse bench attention --json` wrote"
    try:
        found = strict_json.parse(path.read_text(encoding="utf-8"), str(path))
        rows = [row for row in found["rows"] if "error" not in row]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(path, f"cannot be read ({error})", hint) from None
    except (TypeError, KeyError):
        rows = []
    if not rows:
        raise DataError(path, "there is no measurement in it", hint)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the SVG. rows: one a measurement (`read`). Raises ConfigError where matplotlib is not installed."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("matplotlib", "is not installed", "pip install matplotlib") from None
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    names.sort(key=lambda name: name in NAMES)  # ours first
    figure = Figure(figsize=(8.2, 3.1), layout="constrained")
    for axes, (title, value) in zip(figure.subplots(1, 2), PANELS.items(), strict=True):
        for name, colour in zip(names, COLOURS, strict=False):
            mine = sorted((row["length"], value(row)) for row in rows if row["implementation"] == name)
            label = NAMES.get(name, f"megasparse, {name}")
            axes.plot(
                *zip(*mine, strict=True), "o-", color=colour, label=label, linewidth=2.4 if name not in NAMES else 1.4
            )
        axes.set(xscale="log", yscale="log", title=title, xlabel="tokens")
        lengths = sorted({row["length"] for row in rows})
        axes.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
        axes.minorticks_off()
        axes.grid(color=GREY, alpha=0.3)
        axes.tick_params(colors=GREY)
        for part in (axes.title, axes.xaxis.label, *axes.spines.values()):
            part.set_color(GREY)
    legend = figure.axes[0].legend(frameon=False, fontsize="small", labelcolor=GREY)
    legend.set_zorder(3)
    with rc_context({"svg.hashsalt": "megasparse"}):  # the same picture, byte for byte, from the same figures
        figure.savefig(path, transparent=True, metadata={"Date": None})
