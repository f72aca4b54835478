"""MosaicML's shards (MDS, version 2): where the tokens of each sample lie in the file. All numbers are little endian.

samples n: uint32; offsets of the samples and of their end: n + 1 uint32; description: JSON; samples
a sample: uint32 sizes of its columns that are not of a fixed size, then the columns
a column ndarray:DTYPE:SHAPE is its values; without SHAPE, one byte (dimensions · 4 + log2 of the bytes of a size)
and the sizes stand before them; without DTYPE, a byte that names it stands before that; `bytes` are values
"""

import json
import os
import re
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megasparse.data.index_file import MOST_SAMPLES, Width

LARGEST_DESCRIPTION = 1 << 20  # bytes
MOST_COLUMNS = 64
TOKENS = ("tokens", "input_ids")
ENCODING = re.compile(r"bytes|ndarray(?::u?int(8|16|32|64)(?::([0-9]{1,9})(?:,[0-9]{1,9})*)?)?")
WIDTHS: dict[int, Width] = {8: 1, 9: 1, 16: 2, 17: 2, 32: 4, 33: 4, 64: 8, 65: 8}
"""Bytes a token by the byte that names a dtype."""
BYTES_WIDTH: Width = 8
"""Bytes a token of a column `bytes`, unless it is said: those that convert text write int64."""
Size = Annotated[int, Field(ge=0, lt=1 << 32)]


class BadMds(Exception):
    """A file is not a shard of tokens as MosaicML writes them."""


class Description(BaseModel):
    """What a shard says of its columns."""

    model_config = ConfigDict(strict=True)

    version: Annotated[int, Field(ge=2, le=2)]
    format: Annotated[str, Field(pattern="^mds$")]
    column_names: Annotated[list[str], Field(max_length=MOST_COLUMNS)]
    column_encodings: Annotated[list[str], Field(max_length=MOST_COLUMNS)]
    column_sizes: Annotated[list[Size | None], Field(max_length=MOST_COLUMNS)]


class Column(NamedTuple):
    """The column of tokens: the number-th of all."""

    number: int
    width: Width | None
    """Bytes a token; None where each sample says it, or nobody does."""
    named: bool
    """A byte before the values names their type."""
    shaped: bool
    """The shape stands before the values."""


def mds_places(descriptor: int, total: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Byte offset and size of each sample's tokens of `width` bytes each, in a file of `total` bytes: int64 (samples,)
    each. Raises BadMds naming the sample that is not as it should be.
    """
    offsets, description = _header(descriptor, total)
    column, sizes = token_column(description), description.column_sizes
    if column.width not in (width, None):
        raise BadMds(f"its tokens have {column.width} bytes each, where {width} are expected")
    loose = sizes.count(None)
    begins, lengths = offsets[:-1].copy(), np.diff(offsets)
    for number, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
        said = iter(_numbers(descriptor, begin, loose)) if 4 * loose <= length else iter(())
        own = [next(said, -1) if size is None else size for size in sizes]
        if min(own) < 0 or 4 * loose + sum(own) != length:
            raise BadMds(f"sample {number} at byte {begin} does not have the {length} bytes of its columns")
        start = begin + 4 * loose + sum(own[: column.number])
        head = _head(descriptor, start, column, width)
        if head is None or head >= own[column.number] or (own[column.number] - head) % width:
            raise BadMds(f"sample {number} at byte {begin} has no tokens of {width} bytes each")
        begins[number], lengths[number] = start + head, own[column.number] - head
    return begins, lengths


def mds_width(descriptor: int, total: int) -> Width | None:
    """Bytes a token, by the description or the first sample; None where neither says it. Raises BadMds."""
    offsets, description = _header(descriptor, total)
    column = token_column(description)
    if column.width or not column.named:
        return column.width
    loose, sizes = description.column_sizes.count(None), description.column_sizes
    begin = int(offsets[0])
    said = iter(_numbers(descriptor, begin, loose))
    before = [next(said, 0) if size is None else size for size in sizes][: column.number]
    code = os.pread(descriptor, 1, begin + 4 * loose + sum(before))
    return WIDTHS.get(code[0]) if code else None


def token_column(description: Description) -> Column:
    """The column `tokens` or `input_ids`, or the only one of whole numbers. Raises BadMds where there is none."""
    names, encodings = description.column_names, description.column_encodings
    if not len(names) == len(encodings) == len(description.column_sizes) or len({*names}) < len(names):
        raise BadMds("its columns' names, encodings and sizes do not belong together")
    fit = [number for number, encoding in enumerate(encodings) if ENCODING.fullmatch(encoding)]
    chosen = [number for number in fit if names[number] in TOKENS] or fit
    if len(chosen) != 1:
        shown = ", ".join(f"{name} ({encoding})" for name, encoding in zip(names[:5], encodings, strict=False))
        raise BadMds(f"it has no column of tokens among {ascii(shown)[1:200]}")
    encoding = encodings[chosen[0]]
    match = ENCODING.fullmatch(encoding)
    assert match is not None
    width = WIDTHS[int(match[1])] if match[1] else None
    array = encoding != "bytes"
    return Column(chosen[0], width, named=array and width is None, shaped=array and match[2] is None)


def _header(descriptor: int, total: int) -> tuple[np.ndarray, Description]:
    """Offsets of the samples and of their end, int64 (samples + 1,), and the description."""
    (samples,) = _numbers(descriptor, 0, 1) or [0]
    start = 4 * (samples + 2)
    if not 1 <= samples <= MOST_SAMPLES or start > total:
        raise BadMds(f"{samples} samples do not fit its {total} bytes")
    offsets = np.asarray(_numbers(descriptor, 4, samples + 1), dtype=np.int64)
    if len(offsets) != samples + 1 or offsets[0] < start or offsets[-1] != total or (np.diff(offsets) <= 0).any():
        raise BadMds("its samples do not follow each other to its end")
    if offsets[0] - start > LARGEST_DESCRIPTION:
        raise BadMds(f"its description has {offsets[0] - start} bytes, at most {LARGEST_DESCRIPTION} are expected")
    try:
        described = os.pread(descriptor, int(offsets[0]) - start, start)
        return offsets, Description.model_validate(json.loads(described.decode()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ascii(".".join(map(str, first["loc"])))[1:100]
        raise BadMds(f"its description is none: {where}: {first['msg'][:100]}") from None
    except (ValueError, RecursionError) as error:
        raise BadMds(f"its description is no JSON ({type(error).__name__})") from None


def _head(descriptor: int, start: int, column: Column, width: int) -> int | None:
    """Bytes before the values of a column; None where they name another type."""
    raw = os.pread(descriptor, 2, start) if column.named or column.shaped else b""
    if len(raw) < column.named + column.shaped or (column.named and WIDTHS.get(raw[0]) != width):
        return None
    shape = 1 + ((raw[column.named] >> 2) << (raw[column.named] & 3)) if column.shaped else 0
    return column.named + shape


def _numbers(descriptor: int, start: int, count: int) -> list[int]:
    """uint32 numbers at a byte of a file; fewer where it ends."""
    raw = os.pread(descriptor, 4 * count, start)
    numbers: list[int] = np.frombuffer(raw[: len(raw) // 4 * 4], dtype="<u4").tolist()
    return numbers
