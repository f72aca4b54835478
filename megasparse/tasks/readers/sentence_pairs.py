"""GLUE's tasks (Wang et al. 2019), and RTE and STS from their own official files.

GLUE: the folders that its official download unpacks to, CoLA/ MNLI/ MRPC/ QNLI/ QQP/ RTE/ SST-2/ STS-B/, each with
train.tsv, dev.tsv and test.tsv; the labels of the test files are not public. A task's `source` is its own folder, or
the one that holds them all. Metrics are the benchmark's; the first one is GLUE's own: F1 for MRPC and QQP (LHA's paper
reports accuracy), Matthews' correlation for CoLA, Pearson's for STS-B.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from xml.parsers import expat

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import DataError
from megasparse.tasks.readers.rows import HINT, RowTask, field, lines, tab_separated, whole_bytes
from megasparse.tasks.task import Example, Skipping, SourceLocation, existing

COLUMNS = ("genre", "file", "year", "old_index", "score", "sentence1", "sentence2")
"""Rows of some genres have two more: the source of each sentence, with its licence."""
MOST_ALIKE = 5.0


class STSBenchmark(RowTask):
    """The STS benchmark as its authors publish it (Cer et al. 2017): sts-train.csv, sts-dev.csv and sts-test.csv, with
    the test labels that GLUE's STS-B keeps to itself. Fields are separated by tabs, despite the files' names, and a
    quotation mark is an ordinary character.

    How alike two sentences are, from 0 to 5. `source`: the folder of the three files, or the one that holds it.
    """

    name = "sts_benchmark"
    metrics = ("pearson", "spearman")
    segments = 2
    official: ClassVar = {"train": "sts-train.csv", "validation": "sts-dev.csv", "test": "sts-test.csv"}
    inner = "stsbenchmark"
    rows = staticmethod(lines)

    def example(self, row: str, location: SourceLocation, number: str) -> Example:
        fields = row.split("\t")
        if len(fields) not in (7, 9):
            problem = f"{len(fields)} fields where there are 7 ({', '.join(COLUMNS)}), or 9 with licences"
            raise DataError(str(location), problem, HINT)
        score, first, second = fields[4:7]
        return Example((first, second), similarity(score, location), location, number)


def similarity(text: str, location: SourceLocation) -> float:
    """Return a label from 0 to 5, as a number. Raises DataError naming the location for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= MOST_ALIKE:
        raise DataError(str(location), f'"{text[:80]}" is no similarity from 0 to 5', "Put it right")
    return value


class GLUETask(RowTask):
    """The common parts of the eight tasks."""

    texts: ClassVar[tuple[str, ...]] = ("sentence1", "sentence2")
    """Columns of the inputs."""
    label: ClassVar[str] = "label"
    identifier: ClassVar[str] = "index"
    """Column of the official ids; files without one have their examples counted."""
    official: ClassVar[dict[str, str]] = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}

    def __init__(self, config: TaskConfig):
        super().__init__(config)
        self.segments = len(self.texts)

    def example(self, row: dict[str, str], location: SourceLocation, number: str) -> Example:
        inputs = tuple(field(row, column, location) for column in self.texts)
        label = self.value(row[self.label], location) if self.label in row else None
        return Example(inputs, label, location, row.get(self.identifier, number))

    def value(self, label: str, location: SourceLocation) -> int | float:
        """Return the value of a label as the file has it. Raises DataError naming the location."""
        return self.class_of(label, location)


class CoLA(GLUETask):
    """Whether a sentence is acceptable English (Warstadt et al. 2018)."""

    name = "cola"
    inner = "CoLA"
    metrics = ("matthews", "accuracy")
    classes = ("0", "1")
    texts = ("sentence",)

    def rows(self, file: Path, skipping: Skipping) -> Iterator[tuple[SourceLocation, dict[str, str]]]:
        """Training and validation files have no line of column names, the test file has one."""
        first = next(lines(file), None)
        header = first is not None and first[1].split("\t") == ["index", "sentence"]
        return tab_separated(file, None if header else ["source", "label", "mark", "sentence"], skipping)


class MNLI(GLUETask):
    """Whether a premise entails a hypothesis (Williams et al. 2018). `test` and `validation` are of the genres that
    are trained on, `test_mismatched` and `validation_mismatched` of others.
    """

    name = "mnli"
    inner = "MNLI"
    metrics = ("accuracy",)
    classes = ("entailment", "neutral", "contradiction")
    label = "gold_label"  # files have each annotator's label too, label1 and so on
    official: ClassVar[dict[str, str]] = {
        "train": "train.tsv",
        "validation": "dev_matched.tsv",
        "validation_mismatched": "dev_mismatched.tsv",
        "test": "test_matched.tsv",
        "test_mismatched": "test_mismatched.tsv",
    }


class MRPC(GLUETask):
    """Whether two sentences say the same (Dolan and Brockett 2005). Where GLUE's files are not there, Microsoft's own
    are read, whose training file holds GLUE's validation examples too, and whose test file has labels.
    """

    name = "mrpc"
    inner = "MRPC"
    metrics = ("f1", "accuracy")
    classes = ("0", "1")
    texts = ("#1 String", "#2 String")
    label = "Quality"

    def files(self, folder: Path) -> dict[str, list[Path]]:
        microsoft = {"train": "msr_paraphrase_train.txt", "test": "msr_paraphrase_test.txt"}
        return super().files(folder) or existing(folder, microsoft, self.inner)


class QNLI(GLUETask):
    """Whether a sentence answers a question (from SQuAD, Rajpurkar et al. 2016)."""

    name = "qnli"
    inner = "QNLI"
    metrics = ("accuracy",)
    classes = ("entailment", "not_entailment")
    texts = ("question", "sentence")


class QQP(GLUETask):
    """Whether two questions of Quora ask the same (Iyer et al. 2017).

    In eleven pairs of Quora's release a question has a line end inside. GLUE dealt the release's 404,301 lines out to
    training and validation one by one, so that 22 of theirs are halves of these pairs, far from their other halves:
    21 in train.tsv, 1 in dev.tsv. They are skipped, as in published results (363,849 and 40,430 pairs remain).
    """

    name = "qqp"
    inner = "QQP"
    metrics = ("f1", "accuracy")
    classes = ("0", "1")
    texts = ("question1", "question2")
    label = "is_duplicate"
    identifier = "id"


class RTE(GLUETask):
    """Whether a text entails a hypothesis (Dagan et al. 2006 and three later challenges)."""

    name = "rte"
    inner = "RTE"
    metrics = ("accuracy",)
    classes = ("entailment", "not_entailment")


class SST2(GLUETask):
    """Whether a sentence of a film review is positive (Socher et al. 2013)."""

    name = "sst2"
    inner = "SST-2"
    metrics = ("accuracy",)
    classes = ("0", "1")
    texts = ("sentence",)


class STSB(GLUETask):
    """How alike two sentences are, from 0 to 5 (Cer et al. 2017)."""

    name = "stsb"
    inner = "STS-B"
    metrics = ("pearson", "spearman")
    label = "score"

    def value(self, label: str, location: SourceLocation) -> int | float:
        return similarity(label, location)


ENTAILMENT = {
    "YES": "entailment",
    "NO": "not_entailment",
    "TRUE": "entailment",  # the first challenge's words
    "FALSE": "not_entailment",
}


class RTEChallenge(RowTask):
    """The first three challenges of recognising textual entailment (Dagan et al. 2006, Bar-Haim et al. 2006,
    Giampiccolo et al. 2007), the sets that GLUE's RTE is made of, as their XML files: rteN_dev.xml and rteN_test.xml,
    N from 1 to 3.

    `train` is the three development sets, 1,767 pairs, and `test` the three test sets, 2,400 pairs, with labels. GLUE's
    RTE deals the same pairs out otherwise and adds a fifth challenge: figures for one are none for the other.

    Whether a text entails a hypothesis. `source`: the folder of the six files, or the one that holds it as rte/.
    """

    name = "rte_challenge"
    metrics = ("accuracy",)
    segments = 2
    classes = ("entailment", "not_entailment")
    official: ClassVar = {
        "train": [f"rte{number}_dev.xml" for number in (1, 2, 3)],
        "test": [f"rte{number}_test.xml" for number in (1, 2, 3)],
    }
    inner = "rte"

    def rows(self, file: Path, skipping: Skipping) -> Iterator[tuple[SourceLocation, Any]]:
        for skipping.rows, (location, *pair) in enumerate(pairs(file), start=1):
            yield location, pair

    def example(self, row: list[dict[str, str]], location: SourceLocation, number: str) -> Example:
        attributes, texts = row
        if "id" not in attributes:
            raise DataError(str(location), "a pair without an id", HINT)
        if missing := [name for name in ("t", "h") if name not in texts]:
            raise DataError(str(location), f"pair {attributes['id']} has no <{missing[0]}>", HINT)
        answer = attributes.get("entailment", attributes.get("value"))
        label = None if answer is None else self.class_of(ENTAILMENT.get(answer, answer), location)
        return Example((texts["t"], texts["h"]), label, location, attributes["id"])


def pairs(file: Path) -> list[tuple[SourceLocation, dict[str, str], dict[str, str]]]:
    """Return the location of each <pair>, its attributes, and the text of each element in it.

    Nothing outside the file is read: the DTD that the official files name, which says nothing of their content, is
    not. Raises DataError if the file is not XML, and if it declares or uses entities of its own, by which a small file
    can become a large one or read others.
    """
    rows: list[tuple[SourceLocation, dict[str, str], dict[str, str]]] = []
    path: list[str] = []  # the <pair> that is being read, and the element inside it
    parser = expat.ParserCreate()
    parser.buffer_text = True

    def require(holds: bool, problem: str) -> None:
        if not holds:
            raise DataError(str(SourceLocation(file, parser.CurrentLineNumber)), problem, HINT)

    def start(name: str, attributes: dict[str, str]) -> None:
        if name == "pair":
            require(not path, "a <pair> inside a <pair>")
            rows.append((SourceLocation(file, parser.CurrentLineNumber), attributes, {}))
            path.append(name)
        elif path:
            require(len(path) == 1, f"<{name}> inside <{path[-1]}>")
            require(name not in rows[-1][2], f"a second <{name}> of a pair")
            rows[-1][2][name] = ""
            path.append(name)

    def text(content: str) -> None:
        if len(path) == 2:
            rows[-1][2][path[-1]] += content

    def doctype(name: str, system: str | None, public: str | None, declares: int) -> None:
        require(not declares, "declares a document type of its own, and with it perhaps entities")

    parser.StartElementHandler, parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = start, text, doctype
    parser.EndElementHandler = lambda name: path.pop() if path else None
    parser.SkippedEntityHandler = lambda name, parameter: require(False, f"&{name}; is declared nowhere")
    try:
        parser.Parse(whole_bytes(file), True)
    except expat.ExpatError as error:
        problem = f"is no XML ({expat.ErrorString(error.code)})"
        raise DataError(str(SourceLocation(file, error.lineno)), problem, HINT) from None
    except (LookupError, ValueError) as error:
        raise DataError(file, f"is in an encoding that cannot be read ({error})", "Convert it to UTF-8") from None
    if not rows:
        raise DataError(file, "has no <pair>", "Give a file of the task")
    return rows
