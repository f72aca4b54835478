"""Downstream tasks of one example per row, read from catalog.json: their files, columns, classes and metrics.

Alternative names of columns and classes are separated by |: the official files' name, and the Hub's. GLUE's test files
lack public labels. Metrics are the benchmark's, in GLUE its main one first. NAME() is a function of FUNCTIONS. A task
in a special format is a class, given as module:class in readers/.
"""

import importlib
import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from megasparse.config.files import find_file
from megasparse.errors import ConfigError, DataError, did_you_mean
from megasparse.files import natural, read_file
from megasparse.tasks.readers.images import class_folders, grey_pixels
from megasparse.tasks.readers.rows import (
    HINT,
    Rows,
    comma_separated,
    dataset_rows,
    field,
    is_dataset,
    json_lines,
    lines,
    open_dataset,
    parse_number,
    strict,
    tab_separated,
    table_rows,
    whole_bytes,
    whole_text,
)
from megasparse.tasks.task import HUB, Example, SourceLocation, Task, examples_of, existing, parts_of, split_name

if TYPE_CHECKING:
    from megasparse.config.finetuning import TaskConfig


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A task whose files contain one example per row."""

    files: Sequence[Mapping[str, Any]] = ({"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"},)
    """Official files of each split, or alternatives, of which the first that exists is read. Files of the split "" are
    split by position.
    """
    rows: str = "tab_separated()"  # reader of a file, one of FUNCTIONS
    columns: Sequence[str] | None = None  # names of the columns; None if the files contain them
    mark: str = ""  # separator of the fields if it is not a tab
    text: Sequence[str] = ()  # column of each input, or a function of the row; () reads `task.text` and `task.label`
    label: str = "label"  # column of the label, or a function of the row
    classes: Sequence[str] | None = None  # by number; None if the label is a number from 0 to 5, or a text
    metrics: Sequence[str] = ("accuracy",)
    inner: str = ""  # folders, separated by |, that an archive of the files unpacks to
    identifier: str = "index|idx|id"  # column, or columns separated by spaces, of the ids; without, rows are numbered
    hub: str = ""  # OWNER/NAME/CONFIGURATION of the dataset with the same columns on the Hub
    form: str = "labels"
    towers: bool = False
    vocabulary: int | None = None
    whole: bool = False  # True to leave rows without a text or answer out of the splits, and to print their number
    reader: str = "RowTask"  # RowTask, or a subclass of it
    note: str = ""  # differences from publications


class RowTask(Task):
    """A task of the catalog, read from its official files or a Hugging Face dataset."""

    def __init__(self, config: "TaskConfig", entry: Entry):
        super().__init__(config)
        self.configured = not entry.text
        self.text, self.label = (config.text, config.label) if self.configured else (entry.text, entry.label)
        if self.configured and entry.form == "texts" and len(self.text) != 1:
            raise ConfigError("task.text", f'{len(self.text)} names, but "{config.name}" reads one', "Name one")
        if self.configured and self.label in self.text:
            raise ConfigError("task.label", f'"{self.label}" is also task.text', "Use different names")
        self.name, self.entry, self.metrics, self.form = config.name, entry, tuple(entry.metrics), entry.form
        self.segments, self.towers, self.vocabulary = len(self.text), entry.towers, entry.vocabulary
        self._numbers = {name: i for i, names in enumerate(entry.classes or ()) for name in names.split("|")}
        self.classes = tuple(names.partition("|")[0] for names in entry.classes) if entry.classes else None

    def files(self, folder: Path) -> dict[str, list[Path]]:
        folder = Path(f"{HUB}{self.entry.hub}") if str(folder) == "hub" else folder
        if is_dataset(folder):
            return {split: [folder.with_name(f"{folder.name}#{split}")] for split in open_dataset(folder)}
        for files in self.entry.files:
            if splits := existing(folder, files, self.entry.inner):
                return parts_of(splits[""]) if "" in splits else splits
        return {}

    def rows(self, file: Path) -> Rows:
        settings = {name: value for name in ("columns", "mark") if (value := getattr(self.entry, name))}
        return FUNCTIONS[self.entry.rows](file, **settings)

    def read(self, file: Path) -> Iterator[Example]:
        file, part = split_name(file)
        incomplete, of_dataset = [], is_dataset(file)
        rows = dataset_rows(file, part or "train") if of_dataset else self.rows(file)
        for example in examples_of(file, rows, self.example, None if of_dataset else part):
            if part and not of_dataset and self.entry.whole and not (str(example.inputs[0]).strip() and example.label):
                incomplete.append(str(example.location.line))
            else:
                yield example
        if incomplete:
            notice = f"{file}#{part}: left out {len(incomplete)} articles without a title or a text"
            print(f"{notice}: lines {', '.join(incomplete)}", file=sys.stderr)

    def example(self, row: dict[str, Any], location: SourceLocation, number: str) -> Example:
        """Convert a row. number: its index. Raises DataError naming the location."""
        inputs = tuple(self._input(row, column, location) for column in self.text)
        try:
            label = self._label(row, location)
        except DataError:
            if self.needs_labels:
                raise
            label = None
        columns = (names.split() for names in self.entry.identifier.split("|"))
        parts = next((names for names in columns if all(name in row for name in names)), None)
        return Example(inputs, label, location, " ".join(str(row[name]) for name in parts) if parts else number)

    def _input(self, row: dict[str, Any], column: str, location: SourceLocation) -> Any:
        if column in FUNCTIONS and not self.configured:
            try:
                return FUNCTIONS[column](row)
            except (KeyError, TypeError, ValueError, AttributeError) as error:  # a dataset has values of any type
                missing = f"missing column {error}" if isinstance(error, KeyError) else str(error)
                raise DataError(location, missing, HINT) from None
        value = field(row, column, location, "task.text" if self.configured else "")
        if not isinstance(value, str):
            raise DataError(location, f'{json_text(value)[:80]} in the column "{column}" is not a text', "Quote it")
        return value

    def _label(self, row: dict[str, Any], location: SourceLocation) -> Any:
        if self.label in FUNCTIONS and not self.configured:
            return self._input(row, self.label, location)
        names = [self.label] if self.configured else self.label.split("|")
        if (name := next((name for name in names if name in row), None)) is None:
            return None
        value = row[name]
        if self.form == "texts":
            return value.strip() if isinstance(value, str) else None
        if value is None and not self.configured:
            return None
        text = label_text(value, name, location) if self.configured else json_text(value).strip()
        if self.classes is not None:
            return self._numbers[text] if text in self._numbers else self.class_of(text, location)
        number = parse_number(text)
        if number is None or not (self.configured or 0.0 <= number <= 5.0):
            kind, hint = "similarity from 0 to 5", "Correct it"
            if self.configured:
                kind, hint = "float32 number", "Write one, such as 3.5; or predict classes: --set task.labels=null"
            raise DataError(location, f'"{text[:80]}" in the column "{name}" is not a {kind}', hint)
        return number


def json_text(value: Any) -> str:
    """Return a text unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_class(text: str) -> str:
    """Return the name of a class, equal for labels that look alike but differ in invisible characters."""
    return re.sub(r"^[\s\u200b\ufeff]+|[\s\u200b\ufeff]+$", "", unicodedata.normalize("NFC", text))


def label_text(value: Any, column: str, location: SourceLocation) -> str:
    """Return the class that a label names; of other JSON values than texts the JSON."""
    if value is None or isinstance(value, dict | list):
        raise DataError(location, f'{json_text(value)[:80]} in the column "{column}" is not a label', "Write a text")
    if not (text := as_class(json_text(value))):
        raise DataError(location, f'no label in the column "{column}"', "Write one, or remove the row")
    return text


class Table(RowTask):
    """A CSV file (quoted as in RFC 4180), a TSV file (no quoting) with column names in its first line, JSON lines, or a
    Hugging Face dataset. The label column is optional.

    Labels are classes, given by their text, read from the training file if task.labels is null; or numbers to predict,
    if task.labels is []; or the answers of `text_table`.
    """

    source_is_file = True

    def __init__(self, config: "TaskConfig", entry: Entry):
        super().__init__(config, entry)
        if self.form == "texts":
            return
        labels = config.labels
        if labels and len(set(map(as_class, labels))) == len(labels):
            labels = [*map(as_class, labels)]
        if labels == []:
            self.metrics = ("pearson", "spearman")
            return
        if labels is not None and (len(set(labels)) < len(labels) or len(labels) < 2):
            hint = "List two classes or more, each once; [] predicts numbers, null uses the training file's classes"
            raise ConfigError("task.labels", f"{json_text(labels)[:80]} is not valid", hint)
        self.classes = tuple(labels) if labels is not None else self._classes_of(find_file(config.source))
        self.config = config.changed(labels=list(self.classes))
        numbers = [parse_number(label) for label in self.classes]
        if None not in numbers and any(value != int(value or 0) for value in numbers):
            title = f'warning: the {len(numbers)} real numbers in the column "{config.label}" are treated as classes'
            self.warnings = [f"{title}: task.labels=[] predicts numbers"]

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return super().files(folder) or {"train": [folder]}

    def read(self, file: Path) -> Iterator[Example]:
        path, part = split_name(file)
        for index, (location, row) in enumerate(table_rows(path if is_dataset(path) else file, part)):
            yield self.example(row, location, str(index))

    def _classes_of(self, file: Path) -> tuple[str, ...]:
        column = self.config.label
        names = {label_text(field(row, column, at, "task.label"), column, at) for at, row in table_rows(file)}
        if len(names) < 2:
            problem = f'{len(names)} labels in the column "{column}" ({", ".join(names)[:80]})'
            raise DataError(file, problem, "Use a file with two classes or more, or list them in task.labels")
        numbers = {label: value for label in names if (value := parse_number(label)) is not None}
        ranks = numbers if len(numbers) == len(names) else dict.fromkeys(names, 0.0)
        return tuple(sorted(names, key=lambda label: (ranks[label], label)))


class ParallelText(RowTask):
    """A folder of files STEM.SOURCE and STEM.TARGET, each optionally with .gz; or a dataset with these columns.
    `task.text` is the suffix of the source, `task.label` of the target. The entry's files are the stems of each split.

    Files whose names start with test are test files: a single one is the split "test"; of several, each is a split
    named by its stem. Without a target's file next to it, the examples of a source's are unlabelled.
    """

    def __init__(self, config: "TaskConfig", entry: Entry):
        super().__init__(config, entry)
        self.source, self.target = (str(names).partition("|")[0] for names in (*self.text, self.label))
        other = self.target if self.source == "en" else self.source
        self.entry = replace(entry, hub=entry.hub.format(other=other), files=())
        splits = ((split, [names] if isinstance(names, str) else names) for split, names in entry.files[0].items())
        self.stems = {stem: split for split, stems in splits for stem in stems}

    def files(self, folder: Path) -> dict[str, list[Path]]:
        """Return the files by split. Raises DataError if there are none, if two files are in the same split, or if
        training or validation texts lack translations.
        """
        if splits := super().files(folder):
            return splits
        for file in sorted(folder.iterdir()):
            name = file.name.removesuffix(".gz")
            stem = name.removesuffix(f".{self.source}")
            split = self.stems.get(stem, stem if stem.startswith("test") else None)
            if split is None or stem == name:
                continue
            if split in splits:
                problem = f"{splits[split][0].name} and {file.name} are both in its {split} split"
                raise DataError(folder, problem, "Keep one of them")
            if split in ("train", "validation") and self.translation(file) is None:
                raise DataError(file, f"the file {stem}.{self.target} is missing", "Add it there, or set task.label")
            splits[split] = [file]
        tests = [split for split in splits if split.startswith("test")]
        if len(tests) == 1:
            splits["test"] = splits.pop(tests[0])
        if not splits:
            names = " or ".join(f"{stem}.{self.source}" for stem in self.stems)
            raise DataError(folder, f"contains no file {names} (nor .gz)", "Set task.text and task.label to suffixes")
        return splits

    def rows(self, file: Path) -> Rows:
        """Yield the lines of both sides by column."""
        if (other := self.translation(file)) is None:
            yield from ((location, {self.source: line.strip()}) for location, line in strict(lines(file)))
            return
        sides = strict(lines(file)), strict(lines(other))
        for number, (read, answer) in enumerate(zip_longest(*sides)):
            if read is None or answer is None:
                counts = [number + (side is not None) + sum(1 for _ in rest)
                          for side, rest in zip((read, answer), sides, strict=True)]  # fmt: skip
                problem = f"{counts[0]:,} lines, but {counts[1]:,} in {other}"
                raise DataError(file, problem, "Use files whose lines are translations of each other")
            yield read[0], {self.source: read[1].strip(), self.target: answer[1]}

    def translation(self, file: Path) -> Path | None:
        """Return the target file of a source file. Raises DataError if the file itself is the target's."""
        name = file.name.removesuffix(".gz")
        if name.endswith(f".{self.target}"):
            problem = f'its suffix is the target\'s, task.label = "{self.target}"'
            raise DataError(file, problem, f"Use the source's file, *.{self.source}")
        other = f"{name.removesuffix(self.source)}{self.target}"
        paths = [file.with_name(other), file.with_name(f"{other}.gz")] if name.endswith(f".{self.source}") else []
        return next((path for path in paths if path.exists()), None)


DIGITS = tuple("0123456789")
TOKENS = (*DIGITS, "[MIN", "[MAX", "[MED", "[SM", "]")
"""Tokens of ListOps by id. Parentheses are redundant and omitted. Long Range Arena's published input pipeline also
dropped every bracket, an error by its authors.
"""


def token_ids(row: dict[str, Any]) -> np.ndarray:
    """Return the token ids of the column Source, int64 (L,). Raises ValueError for an unknown token."""
    tokens = [token for token in row["Source"].split() if token not in ("(", ")")]
    if unknown := [token for token in tokens if token not in TOKENS]:
        raise ValueError(f'unknown token "{unknown[0][:80]}" in Source; ListOps has ( ) {" ".join(TOKENS)}')
    return np.array([TOKENS.index(token) for token in tokens], dtype=np.int64)


def cola_rows(file: Path) -> Rows:
    """Read a file of CoLA. Only the test file starts with column names."""
    first = next(lines(file), None)
    header = first is not None and first[1] == "index\tsentence"
    return tab_separated(file, None if header else ("source", "label", "mark", "sentence"))


def sts_rows(file: Path) -> Rows:
    """Read a file of the STS benchmark. Rows of some genres contain two more fields, the licences of the sentences."""
    for location, line in lines(file):
        fields = line.split("\t") if isinstance(line, str) else []
        if fields and len(fields) not in (7, 9):
            problem = f"{len(fields)} fields instead of 7, or 9 with licences"
            line = DataError(location, problem, HINT)
        elif fields:
            line = dict(zip(("score", "sentence1", "sentence2"), fields[4:7], strict=True))
        yield location, line


def xml_pairs(file: Path) -> Rows:
    """Read the <pair>s of an RTE challenge's XML file: attributes, and texts by element. Entity declarations are an
    error, because with them a small file can expand to a large one.
    """
    data = whole_bytes(file)
    try:
        if b"<!ENTITY" in data:
            raise DataError(file, "declares its own entities", "Replace them by the text that they expand to")
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        raise DataError(f"{file}:{error.position[0]}", f"not XML ({error})", HINT) from None
    except (LookupError, ValueError) as error:
        raise DataError(file, f"is in an encoding that cannot be read ({error})", "Convert it to UTF-8") from None
    for number, pair in enumerate(root.iter("pair"), 1):
        location, texts = SourceLocation(file, number), {part.tag: part.text or "" for part in pair}
        wrong = len(texts) < len(pair) or any(len(part) for part in pair) or "id" not in pair.attrib
        problem = "a pair without an id, or with a repeated or nested element"
        yield location, DataError(location, problem, HINT) if wrong else {**pair.attrib, **texts}


def review_files(path: Path) -> Rows:
    """Read one review per file: those in neg/ and pos/ by the numbers in their names, or a single one."""
    files = [path]
    if path.is_dir():
        folders = [sorted((path / name).glob("*.txt"), key=lambda file: natural(file.name)) for name in ("neg", "pos")]
        if not all(folders):
            folder = path / ("pos" if folders[0] else "neg")
            raise DataError(folder, "contains no *.txt", "Use a folder with neg/*.txt and pos/*.txt")
        files = [*folders[0], *folders[1]]
    for file in files:
        label = file.resolve().parent.name
        row = {"text": whole_text(file), "id": f"{label}/{file.stem}" if path.is_dir() else file.stem}
        yield SourceLocation(file), row | ({"label": label} if label in ("neg", "pos") else {})


def polarity_rows(file: Path) -> Rows:
    """Read one sentence per line, with labels from *.neg and *.pos. Official files are Latin-1, copies often UTF-8."""
    data, name = whole_bytes(file), file.suffix.removeprefix(".")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    label = {"label": name} if name in ("neg", "pos") else {}
    # splitlines would also split at a Latin-1 control character
    for number, sentence in enumerate(text.removesuffix("\n").split("\n") if text else [], 1):
        yield SourceLocation(file, number), {"text": sentence.removesuffix("\r"), **label}


def every_33rd(file: Path) -> Rows:
    """Read every 33rd of Amazon's reviews, 50,000: Smart Bird's paper uses as many, but does not specify which."""
    for number, (location, row) in enumerate(islice(json_lines(file), 0, 33 * 50_000, 33)):
        yield location, row | {"id": 33 * number} if isinstance(row, dict) else row


def sentences(row: dict[str, Any], column: str) -> list[str]:
    """Return the sentences of a paper. Raises ValueError for others."""
    values = row[column]
    if not isinstance(values, list) or not all(isinstance(sentence, str) for sentence in values):
        raise ValueError(f'"{column}" is not a list of sentences')
    return [sentence.strip() for sentence in values]


READERS = (
    *(tab_separated, comma_separated, json_lines, cola_rows, sts_rows, xml_pairs, review_files, polarity_rows),
    *(every_33rd, class_folders, token_ids, grey_pixels),
)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"{function.__name__}()": function for function in READERS},
    "abstract()": lambda row: (
        "\n".join(one.removeprefix("<S>").removesuffix("</S>").strip() for one in sentences(row, "abstract_text"))
        if "abstract_text" in row
        else None
    ),
    "paper()": lambda row: " ".join(sentences(row, "article_text")),
    "article()": lambda row: " ".join([row["text"]] if "text" in row else [row["title"], row["description"]]),
    "title_and_abstract()": lambda row: " ".join(filter(None, (row["title"], row["abstract"]))),
    "joined_sentences()": lambda row: " ".join(map(str.strip, row["text"].split("<sssss>"))),
    "stripped_text()": lambda row: str(row["text"]).strip(),
}
"""Functions that catalog.json names: readers of files, and inputs and labels of a row."""
TASKS: dict[str, Entry | str] = {
    name: entry if isinstance(entry, str) else Entry(**entry)
    for name, entry in json.loads(read_file(Path(__file__).with_suffix(".json"))).items()
}


def build_task(config: "TaskConfig") -> Task:
    """Build the task `task.name`. Raises ConfigError for an unknown task or an invalid setting."""
    if (entry := TASKS.get(config.name)) is None:
        raise ConfigError("task.name", f'unknown task "{config.name}"', did_you_mean(config.name, TASKS))
    if isinstance(entry, Entry):
        row_task: type[RowTask] = {"RowTask": RowTask, "Table": Table, "ParallelText": ParallelText}[entry.reader]
        return row_task(config, entry)
    module, _, kind = entry.partition(":")
    return getattr(importlib.import_module(f"megasparse.tasks.readers.{module}"), kind)(config)
