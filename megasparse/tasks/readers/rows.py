"""Files of rows, one example a row: tab-separated, CSV, JSON lines; every error names file and line, and what to do.

A file whose name ends in .gz is decompressed as it is read, and so is the one file of an archive that ends in .zip.
"""

import csv
import gzip
import json
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from megasparse.errors import DataError, did_you_mean
from megasparse.tasks.task import Example, Skipping, SourceLocation, Task

LONGEST_FIELD = 1 << 30
UNREADABLE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError)
"""Errors of opening or decompressing; RuntimeError is that of an encrypted archive."""


class RowTask(Task):
    """A task whose official files have an example a row. Malformed rows are skipped within `task.max_skipped`."""

    columns: ClassVar[Sequence[str] | None] = None
    """Names of the columns of tab-separated files; None where their first line has them."""

    def read(self, file: Path) -> Iterator[Example]:
        with self.skipping(file) as skipping:
            for number, (location, row) in enumerate(self.rows(file, skipping)):
                with skipping:
                    yield self.example(row, location, str(number))

    def rows(self, file: Path, skipping: Skipping) -> Iterator[tuple[SourceLocation, Any]]:
        """The rows of a file, with their locations."""
        return tab_separated(file, self.columns, skipping)

    @abstractmethod
    def example(self, row: Any, location: SourceLocation, number: str) -> Example:
        """The example of a row. number: the row's, from 0. Raises DataError naming the location."""


def lines(file: Path, skipping: Skipping | None = None) -> Iterator[tuple[SourceLocation, str]]:
    """The lines of a UTF-8 file without their ends, which are LF or CR LF and nothing else (a text may have U+2028).

    Raises DataError where it cannot be read, and for what is no UTF-8. skipping: counts the lines, and takes those
    that are no UTF-8.
    """
    for location, line in _whole_lines(file, skipping):
        yield location, line.removesuffix("\n").removesuffix("\r")


def _whole_lines(file: Path, skipping: Skipping | None = None) -> Iterator[tuple[SourceLocation, str]]:
    """The lines of a UTF-8 file with their ends."""
    try:
        with _opened(file) as stream:
            for number, raw in enumerate(stream, start=1):
                location = SourceLocation(file, number)
                if skipping is not None:
                    skipping.rows += 1
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    problem = f"is no UTF-8 (byte 0x{raw[error.start]:02x} in column {error.start + 1})"
                    wrong = DataError(str(location), problem, "Convert the file: iconv -f latin1 -t utf-8")
                    _skip(skipping, wrong)
                    continue
                yield location, text
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(file, f"cannot be read ({reason})", "Give a file of the task, and a whole one") from None


@contextmanager
def _opened(file: Path) -> Iterator[Iterable[bytes]]:
    if file.suffix != ".zip":
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
            yield stream
        return
    with zipfile.ZipFile(file) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        if len(members) != 1:
            raise DataError(file, f"has {len(members)} files, where one is read", "Unpack the one that is meant")
        with archive.open(members[0]) as inside:
            yield inside


def tab_separated(
    file: Path, columns: Sequence[str] | None = None, skipping: Skipping | None = None
) -> Iterator[tuple[SourceLocation, dict[str, str]]]:
    """Rows of fields with tabs between them, in which a quotation mark is an ordinary character (GLUE's files).

    columns: their names; None where the first line has them. Raises DataError for a row of another number of fields,
    or gives it to `skipping`.
    """
    names = list(columns) if columns is not None else None
    for location, line in lines(file, skipping):
        fields = line.split("\t")
        if names is None:
            names = _column_names(fields, location)
            continue
        try:
            row = as_row(names, fields, location)
        except DataError as error:
            _skip(skipping, error)
        else:
            yield location, row
    if names is None:
        raise _empty(file)


def comma_separated(
    file: Path, columns: Sequence[str] | None = None, skipping: Skipping | None = None
) -> Iterator[tuple[SourceLocation, dict[str, str]]]:
    """Rows of a CSV file (RFC 4180: quoted fields may hold commas, quotation marks and line ends). Empty
    lines are skipped.

    columns: their names; None where the first row has them. A row's location is the line it begins on. Raises
    DataError; skipping: counts the rows, and takes those of another number of fields.
    """
    csv.field_size_limit(LONGEST_FIELD)
    last = 0

    def texts() -> Iterator[str]:
        nonlocal last
        for location, line in _whole_lines(file):
            last = location.line or 0
            yield line

    names = list(columns) if columns is not None else None
    reader, first = csv.reader(texts(), strict=True), 1
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            hint = "Close the quotation mark, or double it inside a quoted field"
            raise DataError(str(SourceLocation(file, first)), f"is no CSV ({error})", hint) from None
        if fields is None:
            break
        location, first = SourceLocation(file, first), last + 1
        if names is None:
            names = _column_names(fields, location)
            if len(names) == 1 and (";" in names[0] or "\t" in names[0]):
                hint = "Save it with commas between the fields, or with tabs and the ending .tsv"
                raise DataError(str(location), f'has one column, "{names[0]}"', hint)
        elif fields:
            hint = "Put it right: a field with a comma stands in quotation marks"
            if skipping is not None:
                skipping.rows += 1
            try:
                row = as_row(names, fields, location, hint)
            except DataError as error:
                _skip(skipping, error)
            else:
                yield location, row
    if names is None:
        raise _empty(file)


def json_lines(file: Path, skipping: Skipping | None = None) -> Iterator[tuple[SourceLocation, dict[str, Any]]]:
    """JSON objects, one a line; empty lines are skipped. Raises DataError for anything else, and for what only Python
    takes for JSON: a key given twice, NaN, infinity. skipping: counts the lines, and takes these errors.
    """
    for location, line in lines(file, skipping):
        if not line.strip():
            continue
        try:
            value = json.loads(line, object_pairs_hook=_without_repeats, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            _skip(skipping, DataError(str(location), f"is no JSON ({error})", "Write one object a line: {...}"))
            continue
        if not isinstance(value, dict):
            hint = 'Write one object a line: {"text": "...", "label": "..."}'
            _skip(skipping, DataError(str(location), "is no JSON object", hint))
            continue
        yield location, value


def _skip(skipping: Skipping | None, error: DataError) -> None:
    if skipping is None:
        raise error from None
    skipping.add(error)


def as_row(
    columns: Sequence[str],
    fields: Sequence[str],
    location: SourceLocation,
    hint: str = "Put it right, or take the official file",
) -> dict[str, str]:
    """The fields of a line by column. Raises DataError where their number is another one."""
    if len(fields) != len(columns):
        problem = f"{len(fields)} fields where there are {len(columns)} columns ({', '.join(columns)[:100]})"
        raise DataError(str(location), problem, hint)
    return dict(zip(columns, fields, strict=True))


def whole_bytes(file: Path) -> bytes:
    """The content of a file. Raises DataError where it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(file, f"cannot be read ({error.strerror})", "Give a file of the task") from None


def whole_text(file: Path) -> str:
    """The text of a UTF-8 file as it stands. Raises DataError where it cannot be read, or is no UTF-8."""
    try:
        return whole_bytes(file).decode()
    except UnicodeDecodeError as error:
        problem = f"is no UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start})"
        raise DataError(file, problem, "Convert the file: iconv -f latin1 -t utf-8") from None


def field(row: dict[str, Any], column: str, location: SourceLocation, key: str = "") -> Any:
    """A row's value in a column. Raises DataError where there is no such column.

    key: the configuration's key that names the column, for the hint.
    """
    if column not in row:
        hint = did_you_mean(column, [name for name in row if isinstance(name, str)])
        if key:
            hint = f"{hint.removesuffix('?')}{'?' if hint.endswith('?') else '.'} The column is named by {key}"
        raise DataError(str(location), f'has no column "{column}"', hint)
    return row[column]


def _column_names(names: list[str], location: SourceLocation) -> list[str]:
    for number, name in enumerate(names):
        if name in names[:number]:
            problem = f'two columns are called "{name[:80]}"'
            raise DataError(str(location), problem, "Give each a name of its own: the first line has the names")
    return names


def _empty(file: Path) -> DataError:
    return DataError(file, "is empty", "Its first line has the names of the columns")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f'the key "{next(key for key in keys if keys.count(key) > 1)}" is given twice')
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")
