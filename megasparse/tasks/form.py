"""The common part of all tasks of one form: encoding, batches, model, answers and metrics."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import nn

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import ModelConfig
from megasparse.errors import ConfigError
from megasparse.tasks.backbones import Backbone, MegasparseBody
from megasparse.tasks.batches import Encoded, Encoder
from megasparse.tasks.metrics import METRICS
from megasparse.tasks.task import Example, Task

FORM_CLASSES = {
    "labels": "LabelForm",
    "forecast": "ForecastForm",
    "ranking": "RankingForm",
    "texts": "TextForm",
    "choice": "ChoiceForm",
}
"""Name of each form -> its class, in the module of forms/ of the same name."""


class Form(ABC):
    """A form of tasks, which a task's `form` names. N examples, B of them in a batch."""

    two_sided: ClassVar[bool] = False
    """Whether the model is an encoder–decoder, rather than one stack."""
    pooled_sketch: ClassVar[bool] = True
    """Whether a Smart Bird sketch learns a class of each sequence, rather than the predicted tokens."""

    def __init__(self, task: Task, config: FinetuneConfig):
        """Raise ConfigError where settings of the run do not fit."""
        self.task, self.config = task, config

    @property
    def reads_pooler(self) -> bool:
        """Whether the model of the task reads a pretrained pooler, where the body has one."""
        return False

    def body(self, model: ModelConfig) -> Backbone:
        """A body of our own, its weights yet to be filled."""
        return MegasparseBody(model)

    def check(self, body: Backbone) -> None:  # noqa: B027
        """Raise ConfigError where settings of the run do not fit the body that it starts from. A body
        rebuilt for a checkpoint lacks what only a start needs, such as a pooler.
        """

    def sketch_labels(self, train: Iterable[Example]) -> int:
        """Number of classes of a sequence that a Smart Bird sketch learns to predict."""
        return 2

    @abstractmethod
    def encoder(self, start: Any) -> Encoder:
        """The encoder of examples, for `collate`. start: body, tokenizer. Raises ConfigError where they do not fit."""

    @abstractmethod
    def model(self, body: Backbone) -> nn.Module:
        """The model of the task around a pretrained body, its attribute `body`. Called with a batch and a RngContext,
        it returns the objective and statistics:

        nats, tokens: the sums of the costs and of the weights of the batch's examples, whose quotient is the loss.
        Out of training also `predicted`: a tensor for each of the B examples, which `answer` reads; and where the
        examples have labels `costs` and `weights`, (B,) each. All others are means to log.
        Its attribute `varying_token_counts` says whether the weights of batches vary; then it has
        `count_scored(batch)`, the sum of the weights, and takes `divisor` in its place, as pretrained models do.
        """

    @abstractmethod
    def collate(self, examples: Sequence[Encoded]) -> Any:
        """A batch, with to(device), and numel(), the number of tokens that are read."""

    @abstractmethod
    def dummy_batch(self, body: Backbone, batch: int, length: int) -> Any:
        """A synthetic batch that takes as much memory as one of `batch` examples with inputs of this length."""

    @abstractmethod
    def answer(self, example: Encoded, predicted: np.ndarray) -> Any:
        """The answer that metrics compare with `label`. predicted: the model's output for an example, flat float64."""

    def label(self, example: Encoded) -> Any:
        return example.label

    def row(self, example: Encoded, predicted: np.ndarray) -> dict[str, Any]:
        """The JSON values of an example in a prediction file: `label` or null, `predicted`, and what the form adds."""
        return {"label": self.label(example), "predicted": self.answer(example, predicted)}

    def example(self, texts: Sequence[str]) -> Example:
        """An example of texts from the command line. Raises ConfigError where the task has other inputs."""
        raise ConfigError("--text", f'"{self.task.name}" reads no texts', "Give --source FILE")

    def measures(self, examples: Sequence[Encoded], answers: Sequence[Any]) -> dict[str, float]:
        """The task's metrics, by name."""
        labels = column([self.label(example) for example in examples])
        return {name: METRICS[name](labels, column(answers)) for name in self.task.metrics}


def column(values: Sequence[Any]) -> np.ndarray:
    """The values as an array (N,): numbers as they are, anything else as objects."""
    if all(isinstance(value, int | float | np.number) for value in values):
        return np.array(values)
    found = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # as a whole, arrays of one shape would be unpacked
        found[index] = value
    return found


def form_of(task: Task, config: FinetuneConfig) -> Form:
    """The form of a task. Raises ConfigError where settings of the run do not fit it."""
    module = importlib.import_module(f"megasparse.tasks.forms.{task.form}")
    return getattr(module, FORM_CLASSES[task.form])(task, config)
