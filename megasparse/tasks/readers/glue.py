"""Eight tasks of GLUE (Wang et al. 2019), from the folders that its official download unpacks to.

CoLA/ MNLI/ MRPC/ QNLI/ QQP/ RTE/ SST-2/ STS-B/, each with train.tsv, dev.tsv and test.tsv; the labels of the test files
are not public. A task's `source` is its own folder, or the one that holds them all. Metrics are the benchmark's; the
first one is GLUE's own: F1 for MRPC and QQP (LHA's paper reports accuracy), Matthews' correlation for CoLA, Pearson's
for STS-B.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks.readers.rows import RowTask, field, lines, tab_separated
from megasparse.tasks.readers.sts_benchmark import similarity
from megasparse.tasks.skipping import Skipping
from megasparse.tasks.task import Example, SourceLocation, existing


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
        """The value of a label as the file has it. Raises DataError naming the location."""
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
