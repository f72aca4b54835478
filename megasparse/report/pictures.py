"""Texts and pictures from TensorBoard's files, read without decoding the scalars, of which there may be millions."""

import mmap
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PNG = b"\x89PNG\r\n\x1a\n"


class Shown(NamedTuple):
    """What TensorBoard shows at one step: a text, or the bytes of a PNG file."""

    step: int
    content: str | bytes


def read_board(folder: Path) -> dict[str, list[Shown]]:
    """Every text and picture by its tag, in the order of steps; of a step that comes twice, the last one. What cannot
    be read is passed over, the end of a file that is being written too.
    """
    found: defaultdict[str, dict[int, Shown]] = defaultdict(dict)
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for record in _records(file):
            if b"text" in record or PNG in record:
                for tag, shown in _shown(record):
                    found[tag][shown.step] = shown
    return {tag: [steps[step] for step in sorted(steps)] for tag, steps in sorted(found.items())}


def _records(path: Path) -> Iterator[bytes]:
    """A TFRecord file: length (8 bytes), a checksum (4), so many bytes, a checksum (4), and so on."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            place, end = 0, len(content)
            while place + 12 <= end:
                (length,) = struct.unpack_from("<Q", content, place)
                if place + 16 + length > end:
                    return
                yield content[place + 12 : place + 12 + length]
                place += 16 + length
    except (OSError, ValueError):  # an empty file cannot be mapped
        return


def _shown(record: bytes) -> Iterator[tuple[str, Shown]]:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        event: Any = Event.FromString(record)
    except DecodeError:
        return
    for value in event.summary.value:
        if value.image.encoded_image_string.startswith(PNG):
            yield value.tag, Shown(event.step, value.image.encoded_image_string)
        elif value.metadata.plugin_data.plugin_name == "text" and value.tensor.string_val:
            text = b"\n".join(value.tensor.string_val).decode(errors="replace")
            yield value.tag.removesuffix("/text_summary"), Shown(event.step, _plain(text))


def _plain(text: str) -> str:
    """A sample without the Markdown fence that it is written in."""
    return text.removeprefix("```\n").removesuffix("\n```")
