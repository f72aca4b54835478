"""Table of downstream tasks: their files, columns, classes and metrics.

Alternative names of columns and classes are separated by |: the official files' name, and the name in the dataset on
the Hub. GLUE's folders are the ones that its official archive unpacks to; its test files lack public labels. Metrics
are the benchmark's, in GLUE its main one first (LHA's paper reports accuracy for MRPC and QQP).
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, DataError, did_you_mean
from megasparse.files import natural
from megasparse.tasks.metrics import ROUGE
from megasparse.tasks.readers.images import CIFAR10, cifar_files, class_folders, grey_pixels
from megasparse.tasks.readers.mind import NEWS_COLUMNS
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
    tab_separated,
    whole_bytes,
    whole_text,
)
from megasparse.tasks.task import HUB, Example, Input, SourceLocation, Task, examples_of, existing, parts_of, split_name

Files = Mapping[str, str | Sequence[str]] | Callable[[Path], dict[str, list[Path]]]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A task whose files contain one example per row."""

    files: tuple[Files, ...]
    """Official files of each split, or alternatives, of which the first that exists is read. Files of the split "" are
    split by position."""
    rows: Callable[[Path], Rows] = tab_separated
    text: tuple[str | Callable[[dict[str, Any]], Input], ...]
    """Column of each input, or a function of the row."""
    label: str | Callable[[dict[str, Any]], Any] = "label"
    """Column of the label, or a function of the row."""
    classes: tuple[str, ...] | None = None
    """Names of the classes by number; None if the label is a number from 0 to 5, or a text."""
    metrics: tuple[str, ...] = ("accuracy",)
    inner: str = ""
    """Folder that an archive of the files unpacks to."""
    identifier: str = "index|idx|id"
    """Column, or columns separated by spaces, of the official ids; without one, rows are numbered."""
    hub: str = ""
    """OWNER/NAME/CONFIGURATION of the dataset with the same columns on the Hub."""
    form: str = "labels"
    towers: bool = False
    vocabulary: int | None = None
    whole: bool = False
    """True to leave rows without a text or answer out of the splits, and to print their number."""


class RowTask(Task):
    """A task of the catalog, read from its official files or a Hugging Face dataset."""

    text_key = ""
    """Key of the configuration that names the text columns, for hints."""

    def __init__(self, config: TaskConfig, entry: Entry):
        super().__init__(config)
        self.name, self.entry, self.metrics, self.form = config.name, entry, entry.metrics, entry.form
        self.segments, self.towers, self.vocabulary = len(entry.text), entry.towers, entry.vocabulary
        self._numbers = {name: i for i, names in enumerate(entry.classes or ()) for name in names.split("|")}
        self.classes = tuple(names.partition("|")[0] for names in entry.classes) if entry.classes else None

    def files(self, folder: Path) -> dict[str, list[Path]]:
        folder = Path(f"{HUB}{self.entry.hub}") if str(folder) == "hub" else folder
        if is_dataset(folder):
            return {split: [folder.with_name(f"{folder.name}#{split}")] for split in open_dataset(folder)}
        for files in self.entry.files:
            if callable(files):
                splits = files(folder)
            elif "" in files:
                splits = parts_of([path for paths in existing(folder, files).values() for path in paths])
            else:
                splits = existing(folder, files, self.entry.inner)
            if any(splits.values()):
                return splits
        return {}

    def read(self, file: Path) -> Iterator[Example]:
        file, part = split_name(file)
        if is_dataset(file):
            yield from examples_of(file, dataset_rows(file, part or "train"), self.example)
            return
        rows, incomplete = self.entry.rows(file), []
        for example in examples_of(file, rows, self.example, part):
            if part and self.entry.whole and not (str(example.inputs[0]).strip() and example.label):
                incomplete.append(str(example.location.line))
            else:
                yield example
        if incomplete:
            notice = f"{file}#{part}: left out {len(incomplete)} articles without a title or a text"
            print(f"{notice}: lines {', '.join(incomplete)}", file=sys.stderr)

    def example(self, row: dict[str, Any], location: SourceLocation, number: str) -> Example:
        """Convert a row. number: index of the row. Raises DataError naming the location."""
        inputs = tuple(self._input(row, column, location) for column in self.entry.text)
        try:
            label = self._label(row, location)
        except DataError:
            if self.needs_labels:
                raise
            label = None
        columns = (names.split() for names in self.entry.identifier.split("|"))
        parts = next((names for names in columns if all(name in row for name in names)), None)
        return Example(inputs, label, location, " ".join(str(row[name]) for name in parts) if parts else number)

    def _input(self, row: dict[str, Any], column: Any, location: SourceLocation) -> Input:
        if callable(column):
            try:
                value: Any = column(row)
            except (KeyError, TypeError, ValueError, AttributeError) as error:  # a dataset has values of any type
                missing = f"missing column {error}" if isinstance(error, KeyError) else str(error)
                raise DataError(str(location), missing, HINT) from None
            return value
        value = field(row, column, location, self.text_key)
        if not isinstance(value, str):
            problem = f'{json.dumps(value, ensure_ascii=False)[:80]} in the column "{column}" is not a text'
            raise DataError(str(location), problem, "Write a text in quotation marks")
        return value

    def _label(self, row: dict[str, Any], location: SourceLocation) -> Any:
        column = self.entry.label
        if callable(column):
            return self._input(row, column, location)
        names = [column] if self.text_key else column.split("|")
        value = next((row[name] for name in names if name in row), None)
        if self.form == "texts":
            return value.strip() if isinstance(value, str) else None
        if value is None:
            return None
        text = value if isinstance(value, str) else json.dumps(value)
        if self.classes is None:
            return similarity(text, location)
        return self._numbers[text] if text in self._numbers else self.class_of(text, location)


DIGITS = tuple("0123456789")
TOKENS = (*DIGITS, "[MIN", "[MAX", "[MED", "[SM", "]")
"""Tokens of ListOps by id. Parentheses are redundant and omitted. Long Range Arena's published input pipeline also
dropped every bracket, an error by its authors."""


def token_ids(row: dict[str, Any]) -> np.ndarray:
    """Return the token ids of the column Source, int64 (L,). Raises ValueError for an unknown token."""
    tokens = [token for token in row["Source"].split() if token not in ("(", ")")]
    if unknown := [token for token in tokens if token not in TOKENS]:
        raise ValueError(f'unknown token "{unknown[0][:80]}" in Source; ListOps has ( ) {" ".join(TOKENS)}')
    return np.array([TOKENS.index(token) for token in tokens], dtype=np.int64)


def similarity(text: str, location: SourceLocation) -> float:
    """Parse a label from 0 to 5. Raises DataError naming the location."""
    if (value := parse_number(text.strip())) is None or not 0.0 <= value <= 5.0:
        raise DataError(str(location), f'"{text[:80]}" is not a similarity from 0 to 5', "Correct it")
    return value


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
            line = DataError(str(location), problem, HINT)
        elif fields:
            line = dict(zip(("score", "sentence1", "sentence2"), fields[4:7], strict=True))
        yield location, line


def pairs(file: Path) -> Rows:
    """Read the <pair>s of an RTE challenge's XML file: attributes, and texts by element.

    Nothing outside the file is read. Entity declarations are an error, because with them a small file can expand to a
    large one. Raises DataError also if the file is not XML.
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
        if len(texts) < len(pair) or any(len(part) for part in pair) or "id" not in pair.attrib:
            problem = "a pair without an id, or with a repeated or nested element"
            yield location, DataError(str(location), problem, HINT)
        else:
            yield location, {**pair.attrib, **texts}


def review_files(path: Path) -> Rows:
    """Read one review per file: a folder's in neg/ and pos/, by the numbers in their names; or a single file, with the
    folder's name as label.
    """
    files = [path]
    if path.is_dir():
        files = []
        for folder in (path / "neg", path / "pos"):
            if not (reviews := sorted(folder.glob("*.txt"), key=lambda review: natural(review.name))):
                raise DataError(folder, "contains no *.txt", "Use a folder with neg/*.txt and pos/*.txt")
            files += reviews
    for file in files:
        label, location = file.resolve().parent.name, SourceLocation(file)
        row = {"text": whole_text(file), "id": f"{label}/{file.stem}" if path.is_dir() else file.stem}
        yield location, row | ({"label": label} if label in ("neg", "pos") else {})


def review_folds(folder: Path) -> dict[str, list[Path]]:
    """Return the files of the official folds of the movie reviews: the last one is the test split, the one before it
    the validation split. (The authors test on each fold in turn.)
    """
    roots = (folder / name for name in (".", "txt_sentoken", "movie_reviews"))
    root = next((root for root in roots if (root / "neg").is_dir()), folder)
    return {
        split: [file for name in ("neg", "pos") for file in sorted((root / name).glob(f"cv{fold}[0-9][0-9]_*.txt"))]
        for split, fold in {"train": "[0-7]", "validation": "8", "test": "9"}.items()
    }


def polarity_rows(file: Path) -> Rows:
    """Read one sentence per line, with labels from *.neg and *.pos. A file that is not UTF-8 is read as Latin-1, the
    encoding of the official files.
    """
    data, name = whole_bytes(file), file.suffix.removeprefix(".")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    label = {"label": name} if name in ("neg", "pos") else {}
    sentences = text.split("\n")  # splitlines would also split at a Latin-1 control character
    for number, sentence in enumerate(sentences[: -1 if not sentences[-1] else None], 1):
        yield SourceLocation(file, number), {"text": sentence.removesuffix("\r"), **label}


def every_33rd(file: Path) -> Rows:
    """Read every 33rd of Amazon's reviews, 50,000: Smart Bird's paper uses as many, but does not specify which."""
    for number, (location, row) in enumerate(islice(json_lines(file), 0, 33 * 50_000, 33)):
        yield location, row | {"id": 33 * number} if isinstance(row, dict) else row


def sentences(column: str, mark: str, row: dict[str, Any]) -> str:
    """Join the sentences of a paper by `mark`, without the tags <S> and </S> around sentences of abstracts."""
    values = row[column]
    if not isinstance(values, list) or not all(isinstance(sentence, str) for sentence in values):
        raise ValueError(f'"{column}" is not a list of sentences')
    stripped = (sentence.strip() for sentence in values)
    return mark.join(one.removeprefix("<S>").removesuffix("</S>").strip() if mark == "\n" else one for one in stripped)


def article(row: dict[str, Any]) -> str:
    return " ".join([row["text"]] if "text" in row else [row["title"], row["description"]])


def abstract(row: dict[str, Any]) -> str | None:
    return sentences("abstract_text", "\n", row) if "abstract_text" in row else None


TSV = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}
MICROSOFT = {"train": "msr_paraphrase_train.txt", "test": "msr_paraphrase_test.txt"}
TOPICS = (
    *("autos", "entertainment", "finance", "foodanddrink", "games", "health", "kids", "lifestyle", "middleeast"),
    *("movies", "music", "news", "northamerica", "sports", "travel", "tv", "video", "weather"),
)
F1, SIMILARITY = ("accuracy", "macro_f1"), ("pearson", "spearman")
REVIEWS = "reviews_Electronics_5.json"
glue = partial(Entry, files=(TSV,), text=("sentence1", "sentence2"))
amazon = partial(
    Entry, files=({"": REVIEWS}, {"": f"{REVIEWS}.gz"}), text=("reviewText",), label="overall", metrics=F1,
    classes=("1.0|1", "2.0|2", "3.0|3", "4.0|4", "5.0|5"),
)  # fmt: skip

TASKS: dict[str, Entry | str] = {
    # GLUE (Wang et al. 2019)
    "cola": glue(inner="CoLA", rows=cola_rows, text=("sentence",), classes=("0|unacceptable", "1|acceptable"),
                 metrics=("matthews", "accuracy"), hub="nyu-mll/glue/cola"),
    # `test` and `validation` are of the genres of the training set, the mismatched splits of others. Files also contain
    # each annotator's label: label1 and so on.
    "mnli": glue(inner="MNLI", text=("sentence1|premise", "sentence2|hypothesis"), label="gold_label|label",
                 classes=("entailment", "neutral", "contradiction"), hub="nyu-mll/glue/mnli",
                 files=({"train": "train.tsv", "validation": "dev_matched.tsv",
                         "validation_mismatched": "dev_mismatched.tsv", "test": "test_matched.tsv",
                         "test_mismatched": "test_mismatched.tsv"},)),
    # Microsoft's training file contains GLUE's validation examples, and its test file contains labels.
    "mrpc": glue(inner="MRPC", files=(TSV, MICROSOFT), text=("#1 String|sentence1", "#2 String|sentence2"),
                 label="Quality|label", classes=("0|not_equivalent", "1|equivalent"), metrics=("f1", "accuracy"),
                 identifier="index|idx", hub="nyu-mll/glue/mrpc"),
    "qnli": glue(inner="QNLI", text=("question", "sentence"), classes=("entailment", "not_entailment"),
                 hub="nyu-mll/glue/qnli"),
    # Eleven questions of Quora's release contain a line end. GLUE split the release's 404,301 lines one by one, so that
    # 22 of them are halves of these pairs, far from their other halves. They are skipped, as in published results
    # (363,849 and 40,430 pairs remain).
    "qqp": glue(inner="QQP", text=("question1", "question2"), label="is_duplicate|label", identifier="id|idx",
                classes=("0|not_duplicate", "1|duplicate"), metrics=("f1", "accuracy"), hub="nyu-mll/glue/qqp"),
    "rte": glue(inner="RTE", classes=("entailment", "not_entailment"), hub="nyu-mll/glue/rte"),
    "sst2": glue(inner="SST-2", text=("sentence",), classes=("0|negative", "1|positive"), hub="nyu-mll/glue/sst2"),
    "stsb": glue(inner="STS-B", label="score|label", metrics=SIMILARITY, hub="nyu-mll/glue/stsb"),
    # STS as published by its authors (Cer et al. 2017), with the test labels that GLUE does not publish.
    "sts_benchmark": glue(inner="stsbenchmark", rows=sts_rows, label="score", metrics=SIMILARITY, files=(
        {"train": "sts-train.csv", "validation": "sts-dev.csv", "test": "sts-test.csv"},)),
    # The first three challenges. GLUE's RTE splits their pairs differently: results are not comparable.
    "rte_challenge": glue(inner="rte", rows=pairs, text=("t", "h"), label="entailment|value", files=({
        "train": [f"rte{number}_dev.xml" for number in (1, 2, 3)],
        "test": [f"rte{number}_test.xml" for number in (1, 2, 3)],
    },), classes=("entailment|YES|TRUE", "not_entailment|NO|FALSE")),
    # Long Range Arena (Tay et al. 2021). ListOps' parentheses are redundant with its brackets.
    "listops": Entry(text=(token_ids,), label="Target", classes=DIGITS, vocabulary=len(TOKENS), files=(
        {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"},)),
    # Tay et al. validate on the test set, which would select the checkpoint by it; here a part of `train` is held out.
    "byte_imdb": Entry(files=({"train": "train", "test": "test"},), rows=review_files, text=("text",),
                       classes=("neg", "pos"), hub="stanfordnlp/imdb"),
    # These texts are Python's representation of bytes, b'...', with escapes. They are read unchanged, as by Tay et al.
    "aan": Entry(files=({"train": "new_aan_pairs.train.tsv", "validation": "new_aan_pairs.eval.tsv",
                         "test": "new_aan_pairs.test.tsv"},), text=("text1", "text2"), towers=True,
                 rows=partial(tab_separated, columns=("label", "id1", "id2", "text1", "text2")),
                 classes=("0|0.0", "1|1.0"), identifier="id1 id2"),
    "pathfinder": "images:Pathfinder",
    # Tay et al. hold out the last tenth of the training images after shuffling. Without a split `validation`,
    # task.validation_fraction, 0.1, holds out as many at random, 5,000.
    "grey_cifar10": Entry(files=(cifar_files,), rows=class_folders, text=(grey_pixels,), classes=CIFAR10,
                          vocabulary=256, hub="uoft-cs/cifar10"),
    # Text classification. imdb: the files of Tang, Qin and Liu (ACL 2015, or EMNLP 2015); Smart Bird uses JMARS' files.
    "imdb": Entry(files=tuple({split: f"imdb{mark}{name}.txt.ss" for split, name in
                               (("train", "train"), ("validation", "dev"), ("test", "test"))} for mark in ".-"),
                  rows=partial(tab_separated, columns=("user", "product", "rating", "text"), mark="\t\t"),
                  text=(lambda row: " ".join(map(str.strip, row["text"].split("<sssss>"))),),
                  label="rating", classes=tuple(map(str, range(1, 11))), metrics=F1),
    "movie_reviews": Entry(files=(review_folds,), rows=review_files, text=("text",), classes=("neg", "pos")),
    "sentence_polarity": Entry(files=({"": ("rt-polarity.neg", "rt-polarity.pos")},), rows=polarity_rows,
                               text=("text",), classes=("neg", "pos")),
    "amazon": amazon(rows=json_lines),
    "amazon_50k": amazon(rows=every_33rd),
    "ag_news": Entry(files=({"train": "train.csv", "test": "test.csv"},), metrics=F1, label="class index|label",
                     rows=partial(comma_separated, columns=("class index", "title", "description")), text=(article,),
                     classes=("World|1", "Sports|2", "Business|3", "Sci/Tech|4"), hub="fancyzhx/ag_news"),
    # The official validation and test folders contain many of the same articles, so one file is split. Smart Bird reads
    # the bodies of more articles, which MIND links to but does not contain: its results are for other texts.
    "mind_topics": Entry(files=tuple({"": f"{folder}news.tsv"} for folder in
                                     ("MINDlarge_train/", "MINDsmall_train/", "")),
                         rows=partial(tab_separated, columns=NEWS_COLUMNS),
                         text=(lambda row: " ".join(filter(None, (row["title"], row["abstract"]))),),
                         label="category", classes=TOPICS, metrics=F1),
    # Text to text
    "pubmed": Entry(files=({"train": "train.txt", "validation": "val.txt", "test": "test.txt"},), form="texts",
                    inner="pubmed-dataset", rows=json_lines, text=(partial(sentences, "article_text", " "),),
                    label=abstract, metrics=ROUGE, identifier="article_id"),
    # 95 of its rows contain no title or no text.
    "headlines": Entry(files=({"": "NewsArticles.csv"}, {"": "NewsArticles.zip"}), rows=comma_separated, form="texts",
                       text=(lambda row: str(row["text"]).strip(),), label="title", metrics=ROUGE,
                       identifier="article_id", whole=True),
    "parallel_text": "texts:ParallelText",
    "wmt14": "texts:WMT14",
    "cnn_dm": "texts:CNNDailyMail",
    "table": "tables:Table",
    "text_table": "tables:TextTable",
    # Other forms
    "mind": "mind:MIND",
    "wikihop": "wikihop:WikiHop",
    "series": "series:Series",
    "etth1": "series:ETTh1",
    "ettm1": "series:ETTm1",
}  # fmt: skip
"""Entry of each task, or module:class in readers/ that reads it."""


def build_task(config: TaskConfig) -> Task:
    """Build the task `task.name`. Raises ConfigError for an unknown task or an invalid setting."""
    if (entry := TASKS.get(config.name)) is None:
        raise ConfigError("task.name", f'unknown task "{config.name}"', did_you_mean(config.name, TASKS))
    if isinstance(entry, Entry):
        return RowTask(config, entry)
    module, _, kind = entry.partition(":")
    task: Task = getattr(importlib.import_module(f"megasparse.tasks.readers.{module}"), kind)(config)
    return task
