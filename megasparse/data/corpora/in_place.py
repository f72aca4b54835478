"""Files of tokens that exist already and are read where they are: each sample is checked, and an index is written."""

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megasparse.data.files import file_sha256
from megasparse.data.index_file import INDEX_FILE, MOST_SAMPLES, IndexFile, Shard, Split, TokenizerEntry, Width, save
from megasparse.data.members import BLOCK, PIECE, Places, open_shard
from megasparse.data.text_encoder import TextEncoder
from megasparse.errors import DataError

HINT = "Repair or remove it, then run the command again"


class Format(NamedTuple):
    """Requirements that every sample meets."""

    width: Width
    ids: int
    """Every token is below this."""
    record: int
    """Every sample has a multiple of so many tokens."""


class Found(NamedTuple):
    shard: Shard
    sample_bytes: int | None
    """Bytes of every sample but the last, which may have less; None where they differ."""


@contextmanager
def reading(path: Path) -> Iterator[int]:
    """A descriptor of a regular file. Raises DataError where it cannot be read."""
    try:
        descriptor = open_shard(path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", HINT) from None


def examine(
    descriptor: int, path: Path, name: str, places: Places, form: Format, start: int = 0, size: int | None = None
) -> Found:
    """The index's entry, as `name`, of the `size` bytes from `start` on of the file at `path`, by default all of it.

    Raises DataError naming the sample, and its byte, whose tokens are not as `form` wants them.
    """
    sizes = places.sizes.tolist()
    if not 1 <= len(sizes) <= MOST_SAMPLES:
        raise DataError(path, f"it has {len(sizes):,} samples, 1 to {MOST_SAMPLES:,} are expected", HINT)
    crc32 = [
        _checksum(descriptor, path, member, offset, length, form)
        for member, (offset, length) in enumerate(zip(places.offsets.tolist(), sizes, strict=True))
    ]
    even = set(sizes[:-1]) <= {sizes[0]} and sizes[-1] <= sizes[0]
    size = os.fstat(descriptor).st_size if size is None else size
    shard = Shard(
        file=name,
        samples=len(sizes),
        tokens=sum(sizes) // form.width,
        width=form.width,
        bytes=size,
        sha256=file_sha256(descriptor, start=start, size=size),
        crc32="".join(crc32),
        start=start,
    )
    return Found(shard, sizes[0] if even else None)


def _checksum(descriptor: int, path: Path, member: int, offset: int, size: int, form: Format) -> str:
    """Return the crc32 of a sample, 8 digits. Raises DataError when its tokens are not as they should be."""
    where = f"member {member} at byte {offset - (BLOCK if path.suffix == '.tar' else 0)}"
    if size // form.width % form.record:
        problem = f"{where} has {size // form.width} tokens, no whole number of records of {form.record}"
        raise DataError(path, problem, HINT)
    crc32 = 0
    for start in range(0, size, PIECE):
        piece = os.pread(descriptor, min(PIECE, size - start), offset + start)
        crc32 = zlib.crc32(piece, crc32)
        largest = int(np.frombuffer(piece, dtype=f"<u{form.width}").max(initial=0))
        if largest >= form.ids:
            problem = f"{where} has the token {largest}, the tokenizer's are below {form.ids}"
            raise DataError(path, problem, "Give the tokenizer and the --width that the shards were made with")
    return f"{crc32:08x}"


def write_index(folder: Path, encoder: TextEncoder, splits: Mapping[str, Sequence[Shard]], **entries: Any) -> None:
    """Write the index of the shards of each split. entries: the others of an IndexFile."""
    found = {name: Split.of(shards) for name, shards in splits.items()}
    if encoder.name in ("bytes", "pixels"):
        found = {name: Split.of(split.shards, split.tokens) for name, split in found.items()}
    tokenizer = TokenizerEntry(name=encoder.name, sha256=encoder.sha256)
    save(IndexFile(tokenizer=tokenizer, splits=found, **entries), folder / INDEX_FILE)


@contextmanager
def linking(output: Path) -> Iterator[list[Path]]:
    """A folder for an index and links to what it is of. The links are noted in the list; a failure leaves none.

    Raises DataError where the folder has an index already.
    """
    if (output / INDEX_FILE).exists():
        raise DataError(output, "there is an index here already", "Choose another --output, or delete this folder")
    links: list[Path] = []
    made = not output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        yield links
    except BaseException:
        for link in links:
            link.unlink(missing_ok=True)
        if made:
            output.rmdir()
        raise


def link(output: Path, name: str, target: Path, links: list[Path]) -> None:
    """Make `name` in the folder a link to a file. Raises DataError where that cannot be done."""
    try:
        (output / name).symlink_to(target.resolve())
    except OSError as error:
        raise DataError(output / name, f"cannot be made: {error.strerror}", "Choose another --output") from None
    links.append(output / name)
