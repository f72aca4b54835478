"""Common interface of all tasks of a form: encoding, batches, model, answers and metrics."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import nn

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import ModelConfig
from megasparse.data.tokenizers import Tokenizer
from megasparse.errors import ConfigError
from megasparse.tasks.backbones import Backbone, MegasparseBody
from megasparse.tasks.batches import EncodedExample, ExampleCounts, Segments
from megasparse.tasks.metrics import METRICS
from megasparse.tasks.task import Example, Input, SourceLocation, Task

LINE_END = 10  # byte between two segments, for models without a separator


class Form(ABC):
    """Base class of the forms of tasks, selected by a task's `form`. N examples, B of them in a batch.

    Inputs are encoded in the format of pretrained models: [begin] A [separator], or [begin] A [separator] B
    [separator], if the tokenizer has these tokens; else A, or A, a line end and B.
    """

    two_sided: ClassVar[bool] = False  # True if the model is an encoder–decoder, False if it is one stack
    pooled_sketch: ClassVar[bool] = True
    """True if a Smart Bird sketch learns a class per sequence, False if it learns the predicted tokens."""
    tokenizer: Any = None  # tokenizer of the pretrained model; None if the task's inputs are ids

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

    def prepare(self, body: Backbone, tokenizer: Tokenizer) -> None:
        """Prepare the encoding of examples for a pretrained body. Special tokens beyond its vocabulary are omitted.
        Raises ConfigError if body and tokenizer are incompatible with the task.
        """
        ids = self.task.vocabulary
        require_vocabulary(body, ids or tokenizer.vocabulary, self.task.name if ids else None)
        self.tokenizer, special = tokenizer if ids is None else None, tokenizer.special if ids is None else None
        fits = special is not None and max(special.begin, special.separator) < body.vocabulary
        self.special, self.separators = special if fits else None, body.separators

    def reset(self) -> None:
        """Start the counts of a split's examples."""
        self.counts = ExampleCounts(self.task.config, limit=self.task.config.max_length)

    def encode(self, examples: Iterable[Example]) -> Iterator[EncodedExample]:
        """Encode the examples of a split, and count them in `counts`. Raises DataError naming the location of an empty
        or too long input, if the configuration treats these as errors; ConfigError if task.max_length leaves no space
        for text.
        """
        self.reset()
        for example in examples:
            self.counts.examples += 1
            yield self.encoded(example)

    def encoded(self, example: Example) -> EncodedExample:
        """Encode one example."""
        if self.task.classes is not None and example.label is not None:
            name = self.task.classes[int(example.label)]
            self.counts.kinds[name] = self.counts.kinds.get(name, 0) + 1
        groups = [(value,) for value in example.inputs] if self.task.towers else [example.inputs]
        sequences = tuple(self._join(group, example.location) for group in groups)
        return EncodedExample(sequences, example.label, example.location, example.name)

    def lines(self, split: str) -> list[str]:
        """Return the lines to print about the split encoded last."""
        counts = self.counts
        title = f"{split}: {counts.examples:,} examples, the longest of {counts.longest:,} tokens"
        if counts.kinds:
            title += "; " + ", ".join(f"{name} {count:,}" for name, count in sorted(counts.kinds.items()))
        return [title, *counts.notes(split)]

    def _join(self, inputs: tuple[Input, ...], location: SourceLocation) -> Segments:
        parts = [self._ids(value, location) for value in inputs]
        frame = self._frame(len(parts))
        special = sum(map(len, frame))
        if self.counts.is_cut(sum(map(len, parts)) + special, location):
            room = self.task.config.max_length - special
            if room < len(parts):
                problem = f"{self.task.config.max_length} leaves no space for text next to {special} special tokens"
                raise ConfigError("task.max_length", problem, "Raise it")
            parts = cut(parts, room)
        first = len(frame[0]) + len(parts[0]) + len(frame[1])
        ends = (piece for pair in zip(parts, frame[1:], strict=True) for piece in pair)
        tokens = np.concatenate([frame[0], *ends])
        return Segments(tokens, (np.arange(len(tokens)) >= first).astype(np.int64))

    def _frame(self, segments: int) -> list[np.ndarray]:
        """Return the special tokens before, between and after the segments."""
        if self.special is None:
            between = [LINE_END] if self.tokenizer is not None and self.tokenizer.name == "bytes" else []
            ids: list[list[int]] = [[], *[between] * (segments - 1), []]
        else:
            separator = [self.special.separator]
            ids = [[self.special.begin], *[separator * self.separators] * (segments - 1), separator]
        return [np.array(tokens, dtype=np.int64) for tokens in ids]

    def _ids(self, value: Input, location: SourceLocation) -> np.ndarray:
        if isinstance(value, str):
            assert self.tokenizer is not None, "a task with texts needs a tokenizer"
            tokens = self.tokenizer.encode(value).numpy()
        else:
            tokens = value
        if not len(tokens):
            self.counts.count_empty("empty: the model has nothing to read", location)
        return tokens

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


def cut(parts: list[np.ndarray], room: int) -> list[np.ndarray]:
    """Truncate the parts to `room` tokens in total, longest first, as Hugging Face's tokenizers do.

    The shorter of two parts keeps up to half of the room, the longer one the rest; of equal parts the second is cut.
    """
    lengths = [len(part) for part in parts]
    if len(parts) == 1:
        lengths = [min(lengths[0], room)]
    elif sum(lengths) > room:
        short, long = (1, 0) if lengths[0] > lengths[1] else (0, 1)
        lengths[short] = min(lengths[short], room // 2)
        lengths[long] = room - lengths[short]
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def require_vocabulary(body: Any, needed: int, task: str | None = None) -> None:
    """Raise ConfigError if a body lacks embeddings for ids of a task or its tokenizer."""
    if needed > body.vocabulary:
        problem = f"{body.vocabulary} ids, but {task or 'its tokenizer'} has {needed}"
        raise ConfigError("model.vocabulary", problem, f"Set it to {needed} or more")
