"""Rows of files: tab-separated, CSV (of numbers by date too), JSON lines, and Hugging Face datasets.

Readers yield the location of each row and the row: its values by column, or the DataError of a malformed row. Files
ending in .gz, and .zip archives of a single file, are decompressed while they are read.
"""

import csv
import gzip
import math
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np

from megasparse.data.corpora.records import ONE_PER_LINE, json_hint
from megasparse.data.corpora.source import UNREADABLE
from megasparse.errors import DataError, did_you_mean
from megasparse.files import open_file, read_file, strict_json
from megasparse.tasks.task import HUB, SourceLocation, is_remote

LONGEST_LINE, LONGEST_FIELD, LARGEST = 1 << 24, 1 << 22, 1 << 31
"""Bytes of a line; characters of a CSV field of any number of lines; bytes of a file (WikiHop: 400 MB)."""
HINT = "Correct it, or use the official file"
INCOMPLETE = ("cannot be read ({})", "Use a complete file of the task")
Rows = Iterator[tuple[SourceLocation, Any]]


def strict(rows: Rows) -> Rows:
    """Yield the rows. Raises the DataError of the first malformed one."""
    for location, row in rows:
        if isinstance(row, DataError):
            raise row
        yield location, row


def lines(file: Path, ends: bool = False) -> Rows:
    """Read the lines of a UTF-8 file, with their ends or not. Lines end only in LF or CR LF, not in U+2028.

    Raises DataError if the file cannot be read, or a line has more than LONGEST_LINE bytes.
    """
    with DataError.instead_of(UNREADABLE, file, *INCOMPLETE), _opened(file) as stream:
        for number in count(1):
            raw = stream.readline(LONGEST_LINE + 1)
            location = SourceLocation(file, number)
            if not raw:
                return
            if len(raw) > LONGEST_LINE:
                raise DataError(location, f"a line of more than {LONGEST_LINE:,} bytes", HINT)
            line = _decoded(raw, location, "utf-8-sig" if number == 1 else "utf-8")
            if not ends and isinstance(line, str):
                line = line.removesuffix("\n").removesuffix("\r")
            yield location, line


def _decoded(raw: bytes, location: SourceLocation, encoding: str = "utf-8") -> str | DataError:
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 (byte 0x{raw[error.start]:02x} in column {error.start + 1})"
        coding = "utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
        return DataError(location, problem, f"Convert the file: iconv -f {coding} -t utf-8")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    if file.suffix != ".zip":
        with open_file(file) as plain, gzip.open(plain) if file.suffix == ".gz" else plain as stream:
            yield stream
        return
    with open_file(file) as packed, zipfile.ZipFile(packed) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        if len(members) != 1:
            raise DataError(file, f"contains {len(members)} files instead of one", "Unpack it and use one of them")
        with archive.open(members[0]) as inside:
            yield inside


def tab_separated(file: Path, columns: Sequence[str] | None = None, mark: str = "\t") -> Rows:
    """Read rows of tab-separated fields, in which quotation marks are ordinary characters.

    columns: their names; None if they are in the first line. mark: separator of fields; if it is not a tab, the last
    field may contain it.
    """

    def fields() -> Rows:
        for location, line in lines(file):
            most = -1 if mark == "\t" or columns is None else len(columns) - 1
            yield location, line.split(mark, most) if isinstance(line, str) else line

    yield from _by_column(file, fields(), columns, HINT)


def comma_separated(file: Path, columns: Sequence[str] | None = None) -> Rows:
    """Read rows of a CSV file (RFC 4180). The location of a row is its first line.

    Fields are separated by semicolons or tabs if the first line has these and no comma. columns: their names; None if
    they are in the first row. Raises DataError for a misplaced quotation mark.
    """
    csv.field_size_limit(LONGEST_FIELD)
    separator_hint = "Save it with commas between the fields, or with tabs and the suffix .tsv"

    def fields() -> Rows:
        rows = (line for _, line in strict(lines(file, ends=True)))
        first = next(rows, "")
        mark = next((mark for mark in ";\t" if columns is None and mark in first and "," not in first), ",")
        reader = csv.reader(chain([first] * bool(first), rows), delimiter=mark, strict=True)
        row: list[str] | None = []
        while row is not None:
            location = SourceLocation(file, reader.line_num + 1)
            try:
                row = next(reader, None)
            except csv.Error as error:
                hint = "Close or double the quotation mark; end lines in LF, not CR"
                raise DataError(location, f"not CSV ({error})", hint) from None
            if columns is None and location.line == 1 and row and len(row) == 1 and re.search("[;\t]", row[0]):
                raise DataError(location, f'contains one column, "{row[0][:80]}"', separator_hint)
            if row or (location.line == 1 and row is not None):
                yield location, row

    yield from _by_column(file, fields(), columns, "Correct it: a field with a comma needs quotation marks")


def _by_column(file: Path, rows: Rows, columns: Sequence[str] | None, hint: str) -> Rows:
    for location, fields in rows:
        if isinstance(fields, DataError):
            yield location, fields
        elif columns is None:
            columns = [name.strip() for name in fields]
            if repeated := [name for name, number in Counter(columns).items() if number > 1]:
                raise DataError(location, f'the column name "{repeated[0][:80]}" occurs twice', "Rename one of them")
        elif len(fields) == len(columns):
            yield location, dict(zip(columns, fields, strict=True))
        else:
            problem = f"{len(fields)} fields instead of {len(columns)} ({', '.join(columns)[:100]})"
            yield location, DataError(location, problem, hint)
    if columns is None:
        raise DataError(file, "is empty", "Its first line must contain the names of the columns")


def json_lines(file: Path) -> Rows:
    """Read JSON objects, one per line, without empty lines. Repeated keys, NaN and infinity are malformed."""
    for location, line in lines(file):
        if isinstance(line, str) and not line.strip():
            continue
        if isinstance(line, str):
            try:
                line = strict_json(line)
            except ValueError as error:
                line = DataError(location, f"not JSON ({error})", json_hint(line.encode()))
        if not isinstance(line, dict | DataError):
            line = DataError(location, "not a JSON object", ONE_PER_LINE)
        yield location, line


def is_dataset(path: Path) -> bool:
    """True for a dataset on the Hub, and for a folder that `datasets` saved or exported."""
    marks = ("dataset_dict.json", "state.json", "*.parquet", "data/*.parquet")
    return is_remote(path) or (path.is_dir() and any(any(path.glob(mark)) for mark in marks))


def open_dataset(path: Path) -> dict[str, Any]:
    """Return the splits of a dataset. Raises DataError if it cannot be read, or `datasets` is not installed."""
    try:
        import datasets

        if str(path).startswith(HUB):
            owner, name, *configuration = str(path).removeprefix(HUB).split("/")
            return dict(datasets.load_dataset(f"{owner}/{name}", *configuration))
        if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(str(path))
            return dict(saved) if isinstance(saved, dict) else {"train": saved}
        return dict(datasets.load_dataset("parquet", data_dir=str(path), streaming=True))
    except ImportError:
        raise DataError(path, "needs the package datasets", "pip install -e '.[tasks]'") from None
    except Exception as error:  # errors of pyarrow, the Hub's client and datasets
        problem = f"cannot be read as a dataset ({' '.join(str(error).split())[:200]})"
        name = str(path).replace(HUB, "hf://datasets/")
        raise DataError(name, problem, "Use a folder of save_to_disk or of .parquet files, or check the name") from None


def dataset_rows(path: Path, split: str) -> Rows:
    """Read the rows of a split: classes by name, without hidden ones (-1). Raises DataError for an unknown split."""
    splits = open_dataset(path)
    if (rows := splits.get(split)) is None:
        raise DataError(path, f'contains no split "{split}"', f"Its splits: {', '.join(splits)}")
    names = {column: kind.names for column, kind in (rows.features or {}).items() if hasattr(kind, "names")}
    for number, row in enumerate(rows, 1):
        row |= row["translation"] if isinstance(row.get("translation"), dict) else {}  # WMT's languages
        for column, classes in names.items():
            value = row.pop(column)
            row |= {} if value is None or value < 0 else {column: classes[value]}
        yield SourceLocation(path, number), row


def whole_bytes(file: Path, most: int = LARGEST) -> bytes:
    """Read a file. Raises DataError if it cannot be read, or has more than `most` bytes."""
    with DataError.instead_of(OSError, file, *INCOMPLETE):
        return read_file(file, most)


def whole_text(file: Path) -> str:
    """Read a UTF-8 text unchanged. Raises DataError if it cannot be read, or is not UTF-8."""
    text = _decoded(whole_bytes(file), SourceLocation(file))
    if isinstance(text, DataError):
        raise text
    return text


def field(row: dict[str, Any], column: str, location: SourceLocation, key: str = "") -> Any:
    """Return a row's value in a column. Raises DataError if the column is missing.

    column: one name, or alternatives separated by |. key: key of the configuration that names the column, for the hint.
    """
    names = column.split("|") if not key else [column]
    for name in names:
        if name in row or (name := name.strip()) in row:  # names in CSV files are read without white space around them
            return row[name]
    hint = did_you_mean(names[0], [name for name in row if isinstance(name, str)])
    if key:
        hint = f"{hint.removesuffix('?')}{'?' if hint.endswith('?') else '.'} Set the name of the column by {key}"
    raise DataError(location, f'missing column "{names[0]}"', hint)


NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def parse_number(text: str) -> float | None:
    """Parse a decimal number of float32's range. Return None for any other text."""
    value = float(text) if NUMBER.fullmatch(text) else math.inf
    return value if abs(value) <= 3.4e38 else None


READERS: dict[str, Callable[[Path], Rows]] = {".csv": comma_separated, ".tsv": tab_separated, ".jsonl": json_lines}


def table_rows(file: Path, split: str | None = None) -> Rows:
    """Read a file with a suffix in READERS, or a dataset's split ("train" by default). Raises DataError for others."""
    if is_dataset(file):
        return dataset_rows(file, split or "train")
    if (reader := READERS.get(Path(re.sub(r"\.(gz|zip)\Z", "", file.name)).suffix.lower())) is None:
        raise DataError(file, f'"{file.suffix}" is not a known kind of table', f"Use {', '.join(READERS)}")
    return strict(reader(file))


def dated_rows(
    file: Path, date: str, columns: list[str] | None, step: timedelta | None
) -> tuple[list[str], list[int], np.ndarray, np.ndarray]:
    """Read a CSV file of numbers by date. Returns the columns, and by row the line, the date, datetime64 (N,), and the
    values, float64 (N, C). columns: None reads all except the date. step: between dates; None accepts any constant one.
    """
    lines, dates, values = list[int](), list[datetime](), list[list[float]]()
    for location, row in strict(comma_separated(file)):
        problem, hint, text = "", "Sort the rows by time, one per step, and fill the gaps", field(row, date, location)
        try:
            at = datetime.fromisoformat(text.strip())
        except ValueError:
            hint = "Write it as 2016-07-01 13:00:00"
            raise DataError(location, f'"{text.strip()[:80]}" is not a date and time', hint) from None
        columns = columns or [name for name in row if name != date]
        numbers = [parse_number(field(row, column, location).strip()) for column in columns]
        if at.tzinfo is not None:  # days in a time zone vary in length
            problem, hint = f"{at} contains a time zone", "Convert all times to one zone, and omit it"
        elif dates and at <= dates[-1]:
            problem = f"{at} follows {dates[-1]}, but is not later"
        elif dates and at - dates[-1] != (step := step or at - dates[-1]):
            problem = f"{at} is {at - dates[-1]} after the previous row, but the step is {step}"
        elif None in numbers:
            column = columns[numbers.index(None)]
            problem = f'"{row[column].strip()[:80]}" in the column "{column}" is not a float32 number'
            hint = "Write one, such as 3.5, or select other columns: task.forecast.inputs"
        if problem:
            raise DataError(location, problem, hint)
        lines.append(location.line or 0)
        dates.append(at)
        values.append([float(number or 0) for number in numbers])
    if not values or not columns:
        raise DataError(file, f'no {"columns apart from" if values else "rows below"} "{date}"', "Add numbers by date")
    return columns, lines, np.array(dates, dtype="datetime64[us]"), np.array(values)
