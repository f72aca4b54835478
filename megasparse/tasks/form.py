"""The common part of all tasks of one form: encoding, batches, model, answers and metrics."""

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
    """A form of tasks, which a task's `form` names. N examples, B of them in a batch."""

    two_sided: ClassVar[bool] = False
    """True if the model is an encoder–decoder, rather than one stack."""
    pooled_sketch: ClassVar[bool] = True
    """True if a Smart Bird sketch learns a class of each sequence, rather than the predicted tokens."""
    encoder_class: ClassVar[type[ExampleEncoder]] = ExampleEncoder

    def __init__(self, task: Task, config: FinetuneConfig):
        """Raise ConfigError if settings of the run do not fit."""
        self.task, self.config = task, config

    @property
    def reads_pooler(self) -> bool:
        """True if the model of the task reads the pretrained pooler of a body that has one."""
        return False

    def body(self, model: ModelConfig) -> Backbone:
        """Return a megasparse body whose weights are not filled yet."""
        return MegasparseBody(model)

    def check(self, body: Backbone) -> None:  # noqa: B027
        """Raise ConfigError if settings of the run do not fit the body that it starts from."""

    def sketch_labels(self, train: Iterable[Example]) -> int:
        """Return the number of classes of a sequence that a Smart Bird sketch learns to predict."""
        return 2

    def encoder(self, start: Any) -> ExampleEncoder:
        """Return the encoder of examples. start: body, tokenizer. Raises ConfigError if they do not fit."""
        task, body, ids = self.task, start.body, self.task.vocabulary
        require_vocabulary(body, ids or start.tokenizer.vocabulary, task.name if ids else None)
        tokenizer = start.tokenizer if ids is None else None
        return self.encoder_class(task, tokenizer, body.vocabulary, body.separators)

    @abstractmethod
    def model(self, body: Backbone) -> nn.Module:
        """Return the model of the task around a pretrained body, its attribute `body`.

        Called with a batch and a RngContext, it returns the objective and statistics:

        nats, tokens: the sums of the costs and of the weights of the batch's examples, whose quotient is the loss.
        Out of training also `predicted`: a tensor for each of the B examples, which `answer` reads; and where the
        examples have labels `costs` and `weights`, (B,) each. All others are means to log.
        Its attribute `varying_token_counts` says whether the weights of batches vary; then it has
        `count_scored(batch)`, the sum of the weights, and takes `divisor` in its place, as pretrained models do.
        """

    @abstractmethod
    def collate(self, examples: Sequence[EncodedExample]) -> Any:
        """Return a batch, with to(device), and numel(), the number of tokens that are read."""

    @abstractmethod
    def answer(self, example: EncodedExample, predicted: np.ndarray) -> Any:
        """Return the answer that metrics compare with `label`. predicted: the model's output, flat float64."""

    def row(self, example: EncodedExample, predicted: np.ndarray) -> dict[str, Any]:
        """Return the JSON values of a prediction: `label` or null, `predicted`, and what the form adds."""
        return {"label": example.label, "predicted": self.answer(example, predicted)}

    def example(self, texts: Sequence[str]) -> Example:
        """Return an example of texts from the command line. Raises ConfigError if the task has other inputs."""
        if self.task.form not in ("labels", "texts") or self.task.vocabulary is not None:
            raise ConfigError("--text", f'"{self.task.name}" reads no texts', "Give --source FILE")
        if len(texts) != self.task.segments:
            problem = f'{len(texts)} given, and an example of "{self.task.name}" has {self.task.segments}'
            raise ConfigError("--text", problem, f"Give it {'twice' if self.task.segments == 2 else 'once'}")
        return Example(tuple(texts), None, SourceLocation(Path("--text")), "0")

    def measures(self, examples: Sequence[EncodedExample], answers: Sequence[Any]) -> dict[str, float]:
        """Return the task's metrics, by name."""
        labels = column([example.label for example in examples])
        return {name: METRICS[name](labels, column(answers)) for name in self.task.metrics}


def column(values: Sequence[Any]) -> np.ndarray:
    """Return the values as an array (N,): numbers as they are, anything else as objects."""
    if all(isinstance(value, int | float | np.number) for value in values):
        return np.array(values)
    objects = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # as a whole, arrays of one shape would be unpacked
        objects[index] = value
    return objects
