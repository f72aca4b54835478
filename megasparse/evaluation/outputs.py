"""Result files, checked before the work starts and written atomically, and figures for documents."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasparse.errors import FileError
from megasparse.files import replacing, write_file

UNWRITABLE = ("cannot be written ({})", "Make room, or choose another")


def require_writable(*paths: Path | None, sources: Sequence[str] = ()) -> None:
    """Create the folders of output files. Raises FileError if one cannot be written or is a source."""
    for path in paths:
        if path is None:
            continue
        with FileError.instead_of(OSError, path, *UNWRITABLE):
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.resolve() in [Path(source).resolve() for source in sources]:
            raise FileError(path, "is an input file", "Choose another name")
        if path.is_dir():
            raise FileError(path, "is a folder", "Give the name of a file")
        if not os.access(path.parent, os.W_OK):
            raise FileError(path, "the folder is not writable", UNWRITABLE[1])


def write_output(path: Path, content: bytes | str) -> None:
    """Write a file by `files.write_file` and create its folder. Raises FileError."""
    require_writable(path)
    with FileError.instead_of(OSError, path, *UNWRITABLE):
        write_file(path, content)


def write_json(path: Path, result: dict[str, Any]) -> None:
    write_output(path, json.dumps(result, indent=2) + "\n")


# Figures: SVGs in mid-tones on a transparent ground, legible on light and dark pages

COLOURS = ("#2f9e6e", "#d9730d", "#8a63d2", "#3b82c4", "#c0466b", "#8c7a3d", "#4aa3a2")
GREY = "#808890"


def new_figure(columns: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(8.2, 3.1), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def save_figure(figure: Any, path: Path) -> None:
    """Write the SVG in colours that are legible on any background; the same numbers give identical bytes."""
    from matplotlib import rc_context

    for axes in figure.axes:
        axes.grid(color=GREY, alpha=0.3)
        axes.tick_params(colors=GREY)
        for part in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.spines.values()):
            part.set_color(GREY)
    figure.axes[0].legend(frameon=False, fontsize="small", labelcolor=GREY).set_zorder(3)
    with rc_context({"svg.hashsalt": "megasparse"}), replacing(path) as file:
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})


def draw_lengths(lengths: dict[str, Any], path: Path) -> None:
    """Plot the number of documents and their bytes by length. lengths: a section of report.json."""
    figure, (by_number, by_size) = new_figure(2)
    positions = range(len(lengths["documents"]))
    labels = [_size(edge) for edge in lengths["edges"][:-1]]
    median = f"median {lengths['quantiles']['0.5']:,} bytes"
    by_number.bar(positions, lengths["documents"], color=COLOURS[0], label=median)
    by_size.bar(positions, lengths["bytes"], color=COLOURS[1])
    every = -(-len(labels) // 8)
    for axes, title in ((by_number, "documents by length"), (by_size, "bytes by length of their document")):
        axes.set_xticks([position - 0.5 for position in positions][::every], labels[::every])
        axes.set(title=title, xlabel="bytes of a document, from")
    save_figure(figure, path)


def _size(number: int) -> str:
    power = min((number.bit_length() - 1) // 10, 3)
    return f"{number >> 10 * power}{('', 'Ki', 'Mi', 'Gi')[power]}"
