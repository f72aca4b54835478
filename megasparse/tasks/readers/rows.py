"""Files of rows, one example a row: tab-separated, CSV, JSON lines; and tables of your own in these formats.

Every error names file and line, and what to do. A file whose name ends in .gz is decompressed as it is read, and so is
the one file of an archive that ends in .zip.
"""

import csv
import gzip
import json
import math
import re
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from megasparse.config.files import find_file
from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, DataError, did_you_mean
from megasparse.tasks.task import Example, Skipping, SourceLocation, Task, is_in, split_name

LONGEST_FIELD = 1 << 30
UNREADABLE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError)
"""Errors of opening or decompressing; RuntimeError is that of an encrypted archive."""
HINT = "Put it right, or take the official file"


class RowTask(Task):
    """A task whose official files have an example a row. Malformed rows are skipped within MAX_SKIPPED."""

    columns: ClassVar[Sequence[str] | None] = None
    """Names of the columns of tab-separated files; None if their first line has them."""

    def read(self, file: Path) -> Iterator[Example]:
        file, part = split_name(file)
        with self.skipping(file) as skipping:
            for number, (location, row) in enumerate(self.rows(file, skipping)):
                with skipping:
                    if is_in(part, number):
                        yield self.example(row, location, str(number))

    def rows(self, file: Path, skipping: Skipping) -> Iterator[tuple[SourceLocation, Any]]:
        """Return the rows of a file, with their locations."""
        return tab_separated(file, self.columns, skipping)

    @abstractmethod
    def example(self, row: Any, location: SourceLocation, number: str) -> Example:
        """Return the example of a row. number: the row's, from 0. Raises DataError naming the location."""


def lines(file: Path, skipping: Skipping | None = None) -> Iterator[tuple[SourceLocation, str]]:
    """Read the lines of a UTF-8 file without their ends, which are LF or CR LF only (a text may have U+2028).

    skipping: counts the lines, and takes those that are not UTF-8. Raises DataError if the file cannot be read, or a
    line is not UTF-8.
    """
    for location, line in _whole_lines(file, skipping or Skipping(0.0)):
        yield location, line.removesuffix("\n").removesuffix("\r")


def _whole_lines(file: Path, skipping: Skipping) -> Iterator[tuple[SourceLocation, str]]:
    """Read the lines of a UTF-8 file with their ends."""
    try:
        with _opened(file) as stream:
            for number, raw in enumerate(stream, start=1):
                location = SourceLocation(file, number)
                skipping.rows += 1
                with skipping:
                    yield location, _decoded(raw, location, "utf-8-sig" if number == 1 else "utf-8")
    except UNREADABLE as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(file, f"cannot be read ({reason})", "Give a file of the task, and a whole one") from None


def _decoded(raw: bytes, location: SourceLocation, encoding: str = "utf-8") -> str:
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        problem = f"is no UTF-8 (byte 0x{raw[error.start]:02x} in column {error.start + 1})"
        raise DataError(str(location), problem, "Convert the file: iconv -f latin1 -t utf-8") from None


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
    """Read rows of fields with tabs between them, in which a quotation mark is an ordinary character (GLUE's files).

    columns: their names; None if the first line has them. Raises DataError for a row with another number of fields, or
    gives it to `skipping`.
    """
    skipping = skipping or Skipping(0.0)
    for location, line in lines(file, skipping):
        fields = line.split("\t")
        if columns is None:
            columns = _column_names(fields, location)
            continue
        with skipping:
            yield location, as_row(columns, fields, location)
    if columns is None:
        raise _empty(file)


def comma_separated(
    file: Path, columns: Sequence[str] | None = None, skipping: Skipping | None = None
) -> Iterator[tuple[SourceLocation, dict[str, str]]]:
    """Read rows of a CSV file (RFC 4180: quoted fields may hold commas, quotation marks and line ends).

    Empty lines are skipped. columns: their names; None if the first row has them. A row's location is the line it
    begins on. skipping: counts the rows, and takes those with another number of fields. Raises DataError.
    """
    csv.field_size_limit(LONGEST_FIELD)
    skipping = skipping or Skipping(0.0)
    reader = csv.reader((line for _, line in _whole_lines(file, Skipping(0.0))), strict=True)
    while True:
        location = SourceLocation(file, reader.line_num + 1)
        try:
            fields = next(reader, None)
        except csv.Error as error:
            hint = "Close the quotation mark, or double it inside a quoted field"
            raise DataError(str(location), f"is no CSV ({error})", hint) from None
        if fields is None:
            break
        if columns is None:
            columns = _column_names(fields, location)
            if len(columns) == 1 and (";" in columns[0] or "\t" in columns[0]):
                hint = "Save it with commas between the fields, or with tabs and the ending .tsv"
                raise DataError(str(location), f'has one column, "{columns[0]}"', hint)
        elif fields:
            skipping.rows += 1
            with skipping:
                hint = "Put it right: a field with a comma stands in quotation marks"
                yield location, as_row(columns, fields, location, hint)
    if columns is None:
        raise _empty(file)


def json_lines(file: Path, skipping: Skipping | None = None) -> Iterator[tuple[SourceLocation, dict[str, Any]]]:
    """Read JSON objects, one a line; empty lines are skipped.

    skipping: counts the lines, and takes malformed ones. Raises DataError for anything else, and for JSON that only
    Python takes: a key given twice, NaN, infinity.
    """
    skipping = skipping or Skipping(0.0)
    for location, line in lines(file, skipping):
        if not line.strip():
            continue
        with skipping:
            try:
                value = json.loads(line, object_pairs_hook=_without_repeats, parse_constant=_refuse)
            except (ValueError, RecursionError) as error:
                hint = "Write one object a line: {...}"
                raise DataError(str(location), f"is no JSON ({error})", hint) from None
            if not isinstance(value, dict):
                hint = 'Write one object a line: {"text": "...", "label": "..."}'
                raise DataError(str(location), "is no JSON object", hint)
            yield location, value


def as_row(columns: Sequence[str], fields: Sequence[str], location: SourceLocation, hint: str = HINT) -> dict[str, str]:
    """Return the fields of a line by column. Raises DataError if their number is another one."""
    if len(fields) != len(columns):
        problem = f"{len(fields)} fields where there are {len(columns)} columns ({', '.join(columns)[:100]})"
        raise DataError(str(location), problem, hint)
    return dict(zip(columns, fields, strict=True))


def whole_bytes(file: Path) -> bytes:
    """Return the content of a file. Raises DataError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(file, f"cannot be read ({error.strerror})", "Give a file of the task") from None


def whole_text(file: Path) -> str:
    """Return the text of a UTF-8 file as it is. Raises DataError if it cannot be read, or is not UTF-8."""
    return _decoded(whole_bytes(file), SourceLocation(file))


def field(row: dict[str, Any], column: str, location: SourceLocation, key: str = "") -> Any:
    """Return a row's value in a column. Raises DataError if there is no such column.

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
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f'the key "{next(key for key in keys if keys.count(key) > 1)}" is given twice')
    return values


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


READERS: dict[str, Callable[[Path], Iterator[tuple[SourceLocation, dict[str, Any]]]]] = {
    ".csv": comma_separated, ".tsv": tab_separated, ".jsonl": json_lines,
}  # fmt: skip
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def table_rows(file: Path) -> Iterator[tuple[SourceLocation, dict[str, Any]]]:
    """Read the rows of a file, by column. Raises DataError for a file that none of READERS takes, and as these do."""
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        hint = f"Give a file whose name ends in {', '.join(READERS)}"
        raise DataError(file, f'"{file.suffix}" is no known kind of table', hint)
    return reader(file)


def text_of(row: dict[str, Any], column: str, location: SourceLocation) -> str:
    """Return the text in a column. Raises DataError if there is no such column, or JSON has something else there."""
    value = field(row, column, location, "task.text")
    if not isinstance(value, str):
        problem = f'{json.dumps(value, ensure_ascii=False)[:80]} in the column "{column}" is no text'
        raise DataError(str(location), problem, "Write a text in quotation marks")
    return value


class Table(Task):
    """A CSV file (quoted as in RFC 4180) or TSV file (no quoting), whose first line names the columns, or a file of
    JSON objects, one a line (.jsonl). The file to train on is the task's source.

    Labels are classes, distinguished by their text, in JSON also by that of numbers, true and false; or, if task.labels
    is [], numbers to predict. A row without the column of labels has none, as in a file to predict on; an empty label
    is an error.
    """

    name = "table"
    source_is_file: ClassVar[bool] = True
    metrics = ("accuracy", "macro_f1")

    def __init__(self, config: TaskConfig):
        """Read the labels of the training file if task.labels is null. Raises DataError too."""
        super().__init__(config)
        self.segments, labels = len(config.text), config.labels
        if config.label in config.text:
            problem = f'"{config.label}" is a column of task.text too'
            raise ConfigError("task.label", problem, "Name the column of the labels")
        if labels == []:
            self.metrics = ("pearson", "spearman")
            return
        if labels is not None and (len(set(labels)) < len(labels) or len(labels) < 2):
            hint = "Name two classes or more, each once; [] predicts numbers, null takes those of the training file"
            raise ConfigError("task.labels", f"{json.dumps(labels, ensure_ascii=False)[:80]} are no classes", hint)
        self.classes = tuple(labels) if labels is not None else self._classes_of(find_file(config.source))

    def resolved(self) -> TaskConfig:
        return self.config.model_copy(update={"labels": list(self.classes or ())})

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return {"train": [folder]}

    def read(self, file: Path) -> Iterator[Example]:
        for number, (location, row) in enumerate(table_rows(file)):
            inputs = tuple(text_of(row, column, location) for column in self.config.text)
            yield Example(inputs, self._label(row, location), location, str(number))

    def _label(self, row: dict[str, Any], location: SourceLocation) -> int | float | None:
        if self.config.label not in row:
            return None
        label = _label_text(row[self.config.label], self.config.label, location)
        if self.classes is not None:
            return self.class_of(label, location)
        number = _number(label)
        if number is None:
            hint = "Write one, such as 3.5; or take labels as classes: --set task.labels=null"
            raise DataError(str(location), f'"{label[:80]}" in the column "{self.config.label}" is no number', hint)
        return number

    def _classes_of(self, file: Path) -> tuple[str, ...]:
        """Return the labels of a file, sorted: as numbers if all of them are numbers, else by their text."""
        column = self.config.label
        if not file.exists():
            texts = ", ".join(f'"{text}"' for text in self.config.text)
            columns = f'{texts} (task.text) and "{column}" (task.label)'
            problem = "cannot be read (No such file or directory)"
            raise DataError(file, problem, f"Give a table with the columns {columns}: --set task.source=FILE")
        labels = ((location, field(row, column, location, "task.label")) for location, row in table_rows(file))
        names = {_label_text(label, column, location) for location, label in labels}
        if len(names) < 2:
            problem = f'{len(names)} labels in the column "{column}" ({", ".join(names)[:80]})'
            raise DataError(file, problem, "Give a file with two classes or more, or name them: task.labels")
        numbers = {label: number for label in names if (number := _number(label)) is not None}
        ranks = numbers if len(numbers) == len(names) else dict.fromkeys(names, 0.0)
        return tuple(sorted(names, key=lambda label: (ranks[label], label)))


def _label_text(value: Any, column: str, location: SourceLocation) -> str:
    """Return the text of a label: of CSV and TSV as it is, of JSON as JSON writes it, without quotation marks."""
    if value is None or isinstance(value, dict | list):
        problem = f'{json.dumps(value, ensure_ascii=False)[:80]} in the column "{column}" is no label'
        raise DataError(str(location), problem, "Write a text, a number, true or false")
    text = value if isinstance(value, str) else json.dumps(value)
    if not text.strip():
        raise DataError(str(location), f'no label in the column "{column}"', "Write one, or remove the row")
    return text


def _number(label: str) -> float | None:
    number = float(label) if NUMBER.fullmatch(label) else math.inf
    return number if math.isfinite(number) else None
