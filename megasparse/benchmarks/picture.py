"""A picture of what `megasparse bench attention --json` measured: time and memory against length, both logarithmic."""

from pathlib import Path
from typing import Any

from megasparse.config import strict_json
from megasparse.errors import DataError
from megasparse.evaluation.figure import COLOURS, new_figure, save_figure

NAMES = {"sdpa": "full attention (SDPA)", "hf": "Reformer (HuggingFace)", "reformer-pytorch": "reformer-pytorch"}
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
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    names.sort(key=lambda name: name in NAMES)  # ours first
    figure, panels = new_figure(len(PANELS))
    for axes, (title, value) in zip(panels, PANELS.items(), strict=True):
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
    save_figure(figure, path)
