"""A picture of how long the documents of a corpus are."""

from pathlib import Path

from megasparse.data.corpora.records_report import Lengths
from megasparse.evaluation.figure import COLOURS, new_figure, save_figure


def draw_lengths(lengths: Lengths, path: Path) -> None:
    """Draw documents, and their bytes, by length into an SVG. Raises ConfigError where matplotlib is not installed."""
    figure, (by_number, by_size) = new_figure(2)
    places = range(len(lengths.documents))
    labels = [_size(edge) for edge in lengths.edges[:-1]]
    by_number.bar(places, lengths.documents, color=COLOURS[0], label=f"median {lengths.quantiles['0.5']:,} bytes")
    by_size.bar(places, lengths.bytes, color=COLOURS[1])
    every = -(-len(labels) // 8)
    for axes, title in ((by_number, "documents by length"), (by_size, "bytes by length of their document")):
        axes.set_xticks([place - 0.5 for place in places][::every], labels[::every])
        axes.set(title=title, xlabel="bytes of a document, from")
    save_figure(figure, path)


def _size(number: int) -> str:
    """A power of two with Ki, Mi or Gi."""
    power = min((number.bit_length() - 1) // 10, 3)
    return f"{number >> 10 * power}{('', 'Ki', 'Mi', 'Gi')[power]}"
