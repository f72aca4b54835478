"""Files that pyarrow reads: texts of a column in Parquet and Arrow files, and what is compressed with Zstandard.

pyarrow is an extra: only what needs it imports it. What comes out of a file is validated before a value is touched, as
offsets in a forged one point anywhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megasparse.errors import ConfigError, DataError, did_you_mean

BATCH_ROWS = 512  # decoded at once
LARGEST_FOOTER = 1 << 26
"""Bytes of any text, and numbers of any list, in a Parquet file's own description."""


def arrow() -> Any:
    """The module pyarrow. Raises DataError where it is not installed."""
    try:
        import pyarrow
    except ImportError:
        hint = "Run: pip install 'megasparse[arrow]'"
        raise DataError("pyarrow", "it is not installed, which reads .zst, Parquet and Arrow files", hint) from None
    return pyarrow


def open_zstd(stream: IO[bytes]) -> Any:
    """The decompressed content of a stream of Zstandard frames."""
    pyarrow = arrow()
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), "zstd")


def parquet_values(path: Path, column: str) -> Iterator[bytes | None]:
    """The values of a column of texts, None for null. Raises what `_values` does."""
    arrow()
    from pyarrow.parquet import ParquetFile

    limits = {"thrift_string_size_limit": LARGEST_FOOTER, "thrift_container_size_limit": LARGEST_FOOTER}
    with _reading(path), ParquetFile(path, page_checksum_verification=True, pre_buffer=False, **limits) as file:
        _require_texts(path, file.schema_arrow, column)
        for batch in file.iter_batches(BATCH_ROWS, columns=[column], use_threads=False):
            yield from _values(batch.column(0))


def arrow_values(path: Path, column: str) -> Iterator[bytes | None]:
    """The values of a column of texts in an Arrow file, of the stream or the file format, None for null."""
    pyarrow = arrow()
    with _reading(path), pyarrow.OSFile(str(path)) as file:
        magic = file.read(6)
        file.seek(0)
        if magic == b"ARROW1":
            opened = pyarrow.ipc.open_file(file)
            batches = (opened.get_batch(number) for number in range(opened.num_record_batches))
        else:
            opened = pyarrow.ipc.open_stream(file)
            batches = iter(opened)
        _require_texts(path, opened.schema, column)
        for batch in batches:
            yield from _values(batch.column(opened.schema.get_field_index(column)))


def _require_texts(path: Path, schema: Any, column: str) -> None:
    """Raises ConfigError unless a file has one column of this name, of texts."""
    found = schema.get_all_field_indices(column)
    if len(found) != 1:
        problem = f'{path} has {len(found) or "no"} columns "{column}"' if found else f'{path} has no column "{column}"'
        raise ConfigError("--column", problem, did_you_mean(column, schema.names[:50]))
    kind = schema.field(found[0]).type
    plain = kind.value_type if _is_dictionary(kind) else kind
    if not any(test(plain) for test in _tests_of_texts()):
        texts = [each.name for each in list(schema)[:50] if any(test(each.type) for test in _tests_of_texts())]
        hint = f"Texts are in: {', '.join(texts)}" if texts else "Choose a file that has texts"
        raise ConfigError("--column", f'"{column}" of {path} holds {str(kind)[:80]}, not text', hint)


def _is_dictionary(kind: Any) -> bool:
    return bool(arrow().types.is_dictionary(kind))


def _tests_of_texts() -> list[Any]:
    types = arrow().types
    others = (types.is_string_view, types.is_binary_view, types.is_null)  # the last where all values are null
    return [types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, *others]


def _values(column: Any) -> list[bytes | None]:
    """The values of an array of texts. Raises ArrowInvalid where its inside contradicts itself."""
    pyarrow = arrow()
    if _is_dictionary(column.type):
        column.validate(full=True)
        column = column.dictionary_decode()
    types = pyarrow.types
    if types.is_string(column.type):
        column = column.view(pyarrow.binary())
    elif types.is_large_string(column.type):
        column = column.view(pyarrow.large_binary())
    elif types.is_string_view(column.type):
        column = column.view(pyarrow.binary_view())
    column.validate(full=True)
    values: list[bytes | None] = column.to_pylist()
    return values


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what pyarrow raises for a damaged file into DataError."""
    try:
        yield
    except (arrow().ArrowException, OSError, MemoryError, ValueError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(path, f"cannot be read: {reason}", "Check that it is complete; get it again") from None
