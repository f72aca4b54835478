"""What all tasks of one form share: how examples are read and batched, what learns them, what its answers are worth."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from torch import nn

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import ModelConfig
from megasparse.errors import ConfigError
from megasparse.tasks.backbones import Backbone, MegasparseBody
from megasparse.tasks.encoding import Encoded, Encoder
from megasparse.tasks.metrics import METRICS
from megasparse.tasks.task import Example, Task

FORM_CLASSES = {
    "labels": "LabelForm",
    "forecast": "ForecastForm",
    "ranking": "RankingForm",
    "texts": "TextForm",
    "choice": "ChoiceForm",
}
"""Form -> its class, in the module of forms/ of the same name."""


class Form(ABC):
    """A task's `form` names one. N examples, B of them in a batch."""

    two_sided: ClassVar[bool] = False
    """Whether the model is an encoder–decoder, rather than one stack."""
    pooled_sketch: ClassVar[bool] = True
    """Whether a Smart Bird sketch learns a class of each sequence, rather than the tokens that are told."""

    def __init__(self, task: Task, config: FinetuneConfig):
        """Raises ConfigError where settings of the run do not fit."""
        self.task, self.config = task, config

    def body(self, model: ModelConfig) -> Backbone:
        """A body of ours, its weights yet to be filled."""
        return MegasparseBody(model)

    def check(self, body: Backbone) -> None:  # noqa: B027
        """Raise ConfigError where settings of the run do not fit the body that it starts from. One rebuilt for a
        checkpoint lacks what only a start needs, as a pooler.
        """

    def sketch_labels(self, train: Sequence[Example]) -> int:
        """Number of classes that a Smart Bird sketch learns to tell of a sequence."""
        return 2

    @abstractmethod
    def encoder(self, start: Any) -> Encoder:
        """What turns the task's examples into what `collate` takes. start: has a body and a tokenizer. Raises
        ConfigError where they do not fit the task.
        """

    @abstractmethod
    def model(self, body: Backbone) -> nn.Module:
        """What learns the task, around a pretrained body, which it has as `body`. Called with a batch of `collate`'s
        and draws, it returns the objective and statistics:

        nats, tokens: the sum of the costs and of the weights of the batch's examples, whose quotient is the loss.
        Out of training also `told`: of each of the B examples a tensor, that `answer` reads; and where the examples
        have labels `costs` and `weights`, (B,) each. All others are means to log.
        An attribute `uneven` tells whether batches weigh unequally much; then it has `count_scored(batch)`, the sum of
        its weights, and takes `divisor` in place of it, as pretrained models do.
        """

    @abstractmethod
    def collate(self, examples: Sequence[Encoded]) -> Any:
        """A batch, which has to(device), and numel(), the tokens that are read."""

    @abstractmethod
    def dummy_batch(self, body: Backbone, batch: int, length: int) -> Any:
        """A batch of the memory that one of so many examples takes whose inputs are as long as `length`."""

    @abstractmethod
    def answer(self, example: Encoded, predicted: np.ndarray) -> Any:
        """What the metrics compare with `label`: of what the model told of an example, flat float64."""

    def label(self, example: Encoded) -> Any:
        return example.label

    def row(self, example: Encoded, predicted: np.ndarray) -> dict[str, Any]:
        """What a file of predictions has of an example, JSON values: `label` (null where it has none), `told`, and what
        else there is to know.
        """
        return {"label": self.label(example), "predicted": self.answer(example, predicted)}

    def line(self, row: dict[str, Any]) -> str:
        """A row in a .txt file of predictions."""
        return " ".join(str(row["predicted"]).split())

    def example(self, texts: Sequence[str]) -> Example:
        """One without a label, of texts from the command line. Raises ConfigError where the task has other inputs."""
        raise ConfigError("--text", f'"{self.task.name}" reads no texts', "Give --source FILE")

    def measures(self, examples: Sequence[Encoded], answers: Sequence[Any]) -> dict[str, float]:
        """The task's metrics, by name."""
        labels = column([self.label(example) for example in examples])
        return {name: METRICS[name](labels, column(answers)) for name in self.task.metrics}


def column(values: Sequence[Any]) -> np.ndarray:
    """(N,): numbers as they are, anything else as objects."""
    if all(isinstance(value, int | float | np.number) for value in values):
        return np.array(values)
    found = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):  # as a whole, arrays of one shape would be unpacked
        found[place] = value
    return found


def form_of(task: Task, config: FinetuneConfig) -> Form:
    """Raises ConfigError where settings of the run do not fit the form."""
    module = importlib.import_module(f"megasparse.tasks.forms.{task.form}")
    return getattr(module, FORM_CLASSES[task.form])(task, config)
