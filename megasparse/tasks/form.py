"""Common interface of all tasks of a form: encoding, batches, model, answers and metrics."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import nn

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import ModelConfig
from megasparse.errors import ConfigError
from megasparse.tasks.backbones import Backbone, MegasparseBody
from megasparse.tasks.batches import EncodedExample, ExampleEncoder, require_vocabulary
from megasparse.tasks.metrics import METRICS
from megasparse.tasks.task import Example, SourceLocation, Task


class Form(ABC):
    """Base class of the forms of tasks, selected by a task's `form`. N examples, B of them in a batch."""

    two_sided: ClassVar[bool] = False
    """True if the model is an encoder–decoder, False if it is one stack."""
    pooled_sketch: ClassVar[bool] = True
    """True if a Smart Bird sketch learns a class per sequence, False if it learns the predicted tokens."""
    encoder_class: ClassVar[type[ExampleEncoder]] = ExampleEncoder

    def __init__(self, task: Task, config: FinetuneConfig):
        """Raise ConfigError if settings of the run are invalid for the form."""
        self.task, self.config = task, config

    @property
    def reads_pooler(self) -> bool:
        """True if the task's model uses the pretrained pooler of a body, if there is one."""
        return False

    def body(self, model: ModelConfig) -> Backbone:
        """Build a megasparse body without filled weights."""
        return MegasparseBody(model)

    def check(self, body: Backbone) -> None:  # noqa: B027
        """Raise ConfigError if settings of the run are incompatible with the body."""

    def sketch_labels(self, train: Iterable[Example]) -> int:
        """Return the number of classes per sequence that a Smart Bird sketch learns."""
        return 2

    def encoder(self, start: Any) -> ExampleEncoder:
        """Build the encoder of examples. start: body and tokenizer. Raises ConfigError if they are incompatible."""
        task, body, ids = self.task, start.body, self.task.vocabulary
        require_vocabulary(body, ids or start.tokenizer.vocabulary, task.name if ids else None)
        tokenizer = start.tokenizer if ids is None else None
        return self.encoder_class(task, tokenizer, body.vocabulary, body.separators)

    @abstractmethod
    def model(self, body: Backbone) -> nn.Module:
        """Build the task's model around a pretrained body, its attribute `body`.

        Called with a batch and a RngContext, the model returns the objective and statistics:

        nats, tokens: sums of the examples' costs and weights; their quotient is the loss. In evaluation also
        `predicted`, one tensor for each of the B examples, the input of `answer`, and with labels `costs` and
        `weights`, (B,) each. All others are averaged and logged.
        If `varying_token_counts` is True, the sum of weights differs between batches; the model then has
        `count_scored(batch)`, which returns it, and an argument `divisor` that replaces it, as pretrained models have.
        """

    @abstractmethod
    def collate(self, examples: Sequence[EncodedExample]) -> Any:
        """Return a batch with `to(device)` and `numel()`, its number of tokens."""

    @abstractmethod
    def answer(self, example: EncodedExample, predicted: np.ndarray) -> Any:
        """Return the answer that metrics compare with `label`. predicted: the model's output, flat float64."""

    def row(self, example: EncodedExample, predicted: np.ndarray) -> dict[str, Any]:
        """Return a prediction as JSON: `label` or null, `predicted`, and fields of the form."""
        return {"label": example.label, "predicted": self.answer(example, predicted)}

    def example(self, texts: Sequence[str]) -> Example:
        """Build an example from command-line texts. Raises ConfigError if the task has other inputs."""
        if self.task.form not in ("labels", "texts") or self.task.vocabulary is not None:
            raise ConfigError("--text", f'"{self.task.name}" does not read texts', "Use --source FILE")
        if len(texts) != self.task.segments:
            problem = f'{len(texts)} given, but an example of "{self.task.name}" needs {self.task.segments}'
            raise ConfigError("--text", problem, f"Use it {'twice' if self.task.segments == 2 else 'once'}")
        return Example(tuple(texts), None, SourceLocation(Path("--text")), "0")

    def measures(self, examples: Sequence[EncodedExample], answers: Sequence[Any]) -> dict[str, float]:
        """Return the task's metrics, by name."""
        labels = column([example.label for example in examples])
        return {name: METRICS[name](labels, column(answers)) for name in self.task.metrics}


def column(values: Sequence[Any]) -> np.ndarray:
    """Return the values as an array (N,): numbers, or objects for other types."""
    if all(isinstance(value, int | float | np.number) for value in values):
        return np.array(values)
    objects = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # assigned at once, arrays of one shape would be unpacked
        objects[index] = value
    return objects
