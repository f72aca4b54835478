"""Eight tasks of GLUE (Wang et al. 2019), from the folders that its official download unpacks to.

CoLA/ MNLI/ MRPC/ QNLI/ QQP/ RTE/ SST-2/ STS-B/, each with train.tsv, dev.tsv and test.tsv; the labels of the test files
are not public. A task's `source` is its own folder, or the one that holds them all. Metrics are the benchmark's; the
first one is GLUE's own: F1 for MRPC and QQP (LHA's paper reports accuracy), Matthews' correlation for CoLA, Pearson's
for STS-B.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks.readers.rows import as_row, field, lines, tab_separated
from megasparse.tasks.readers.sts_benchmark import similarity
from megasparse.tasks.task import Example, SourceLocation, Task, existing

Rows = Iterator[tuple[SourceLocation, dict[str, str]]]


class GLUETask(Task):
    """The common parts of the eight tasks."""

    folder: ClassVar[str]
    """Name of the folder in the official download."""
    texts: ClassVar[tuple[str, ...]] = ("sentence1", "sentence2")
    """Columns of the inputs."""
    label: ClassVar[str] = "label"
    identifier: ClassVar[str] = "index"
    """Column of the official ids; files without one have their examples counted."""
    splits: ClassVar[dict[str, str]] = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}

    def __init__(self, config: TaskConfig):
        super().__init__(config)
        self.segments = len(self.texts)

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return existing(folder, self.splits, self.folder)

    def read(self, file: Path) -> Iterator[Example]:
        for number, (location, row) in enumerate(self.rows(file)):
            inputs = tuple(field(row, column, location) for column in self.texts)
            label = self.value(row[self.label], location) if self.label in row else None
            yield Example(inputs, label, location, row.get(self.identifier, str(number)))

    def rows(self, file: Path) -> Rows:
        return tab_separated(file)

    def value(self, label: str, location: SourceLocation) -> int | float:
        """The value of a label as the file has it. Raises DataError naming the location."""
        return self.class_of(label, location)


class CoLA(GLUETask):
    """Whether a sentence is acceptable English (Warstadt et al. 2018)."""

    name = "cola"
    folder = "CoLA"
    metrics = ("matthews", "accuracy")
    classes = ("0", "1")
    texts = ("sentence",)

    def rows(self, file: Path) -> Rows:
        """Training and validation files have no line of column names, the test file has one."""
        first = next(lines(file), None)
        header = first is not None and first[1].split("\t") == ["index", "sentence"]
        return tab_separated(file, None if header else ["source", "label", "mark", "sentence"])


class MNLI(GLUETask):
    """Whether a premise entails a hypothesis (Williams et al. 2018). `test` and `validation` are of the genres that
    are trained on, `test_mismatched` and `validation_mismatched` of others.
    """

    name = "mnli"
    folder = "MNLI"
    metrics = ("accuracy",)
    classes = ("entailment", "neutral", "contradiction")
    label = "gold_label"  # files have each annotator's label too, label1 and so on
    splits: ClassVar[dict[str, str]] = {
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
    folder = "MRPC"
    metrics = ("f1", "accuracy")
    classes = ("0", "1")
    texts = ("#1 String", "#2 String")
    label = "Quality"

    def files(self, folder: Path) -> dict[str, list[Path]]:
        microsoft = {"train": "msr_paraphrase_train.txt", "test": "msr_paraphrase_test.txt"}
        return super().files(folder) or existing(folder, microsoft, self.folder)


class QNLI(GLUETask):
    """Whether a sentence answers a question (from SQuAD, Rajpurkar et al. 2016)."""

    name = "qnli"
    folder = "QNLI"
    metrics = ("accuracy",)
    classes = ("entailment", "not_entailment")
    texts = ("question", "sentence")


class QQP(GLUETask):
    """Whether two questions of Quora ask the same (Iyer et al. 2017).

    In eleven pairs of Quora's release a question has a line end inside. GLUE dealt the release's 404,301 lines out to
    training and validation one by one, so that 22 of theirs are halves of these pairs, far from their other halves:
    21 in train.tsv, 1 in dev.tsv. They are left out, as published results do (363,849 and 40,430 pairs remain), and
    their number and lines are printed on stderr. Any other malformed line is an error.
    """

    name = "qqp"
    folder = "QQP"
    metrics = ("f1", "accuracy")
    classes = ("0", "1")
    texts = ("question1", "question2")
    label = "is_duplicate"
    identifier = "id"

    def rows(self, file: Path) -> Rows:
        names: list[str] | None = None
        halves: list[int | None] = []
        for location, line in lines(file):
            fields = line.split("\t")
            if names is None:
                names = fields
            elif len(fields) != len(names) and is_half(fields):
                halves.append(location.line)
            else:
                yield location, as_row(names, fields, location)
        if halves:
            left_out = f"{file}: left out {len(halves)} lines, halves of pairs that are broken in the official file"
            print(f"{left_out}: lines {', '.join(map(str, halves))}", file=sys.stderr)


class RTE(GLUETask):
    """Whether a text entails a hypothesis (Dagan et al. 2006 and three later challenges)."""

    name = "rte"
    folder = "RTE"
    metrics = ("accuracy",)
    classes = ("entailment", "not_entailment")


class SST2(GLUETask):
    """Whether a sentence of a film review is positive (Socher et al. 2013)."""

    name = "sst2"
    folder = "SST-2"
    metrics = ("accuracy",)
    classes = ("0", "1")
    texts = ("sentence",)


class STSB(GLUETask):
    """How alike two sentences are, from 0 to 5 (Cer et al. 2017)."""

    name = "stsb"
    folder = "STS-B"
    metrics = ("pearson", "spearman")
    label = "score"

    def value(self, label: str, location: SourceLocation) -> int | float:
        return similarity(label, location)


FIRST_HALVES = {
    ("2332", "4637", "4638"),
    ("12330", "23766", "23767"),
    ("65477", "113627", "113628"),
    ("174372", "268758", "268759"),
    ("196865", "297681", "297682"),
    ("198200", "99321", "4637"),
    ("227767", "336684", "336685"),
    ("264607", "381419", "381420"),
    ("282584", "216251", "402550"),
    ("283933", "404107", "404108"),
    ("364931", "19408", "402550"),
}
"""Ids of the broken pairs of QQP."""
SECOND_HALVES = (
    "What is the best water purifier available in India?",
    "Was Muhammad a real historical figure? What is the evidence for his existence?",
    "given the set of busy-time intervals of two people, as in a calendar?",
    "What does the Quran say about homosexuality?",
    'specifically teach them something in School."',
    '-5 [-7 0 0 5]; 2. 3 [6 4 5 -5 3 1]?"',
)
"""Ends of the last questions of those pairs whose second half has more than a quotation mark."""


def is_half(fields: list[str]) -> bool:
    """Whether a line of QQP's official files is a half of one of its broken pairs."""
    if len(fields) in (4, 5):
        return tuple(fields[:3]) in FIRST_HALVES
    if fields == ['"', "0"]:
        return True
    return len(fields) in (2, 3) and fields[-1] == "0" and fields[-2].endswith(SECOND_HALVES)
