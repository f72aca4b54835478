"""Encoding of examples to token ids, and batching. B batch, L length.

No example is dropped silently: truncated and empty inputs are counted, or raise an error.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megasparse.data.batches import Batch, Step, Steps
from megasparse.data.order import permutation
from megasparse.data.tokenizers import Tokenizer
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.task import Example, Input, SourceLocation, Task
from megasparse.training.ranks import Ranks

LINE_END = 10
"""Byte between two segments, for models without a separator."""


class Segments(NamedTuple):
    """A sequence of one or two segments."""

    tokens: np.ndarray
    """Tokens, int64 (L,)."""
    types: np.ndarray
    """Segments, int64 (L,): 1 in the second segment, 0 elsewhere."""


@dataclass(frozen=True)
class EncodedExample:
    """An example in the form that the model reads."""

    sequences: tuple[Segments, ...]
    """One sequence, or two if the task has towers."""
    label: Any
    location: SourceLocation
    name: str

    @property
    def length(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(len(sequence.tokens) for sequence in self.sequences)

    def content(self) -> Iterator[bytes]:
        """Yield the bytes of all training data in the example."""
        yield f"{self.label!r} {[len(sequence.tokens) for sequence in self.sequences]}\n".encode()
        for sequence in self.sequences:
            yield sequence.tokens.tobytes()


@dataclass
class ExampleCounts:
    """Counts of a split's examples and of the inputs that were cut or empty."""

    examples: int = 0
    cut: int = 0
    """Number of inputs longer than the model's limit, which were truncated to their start."""
    empty: int = 0
    longest: int = 0
    """Longest input in tokens before truncation."""
    first_cut: SourceLocation | None = None
    first_empty: SourceLocation | None = None
    kinds: dict[str, int] = field(default_factory=dict)
    """Number of examples by class, and other counts of a form."""

    def notes(self, split: str, noun: str, limit: int, hint: str) -> list[str]:
        """Return the lines about truncated and empty inputs. noun: name of the inputs."""
        notes = []
        if self.cut:
            cut = f"{split}: {self.cut:,} {noun} of more than {limit:,} tokens are truncated to their start"
            notes.append(f"{cut}, the first in {self.first_cut}. Raise {hint} more of them")
        if self.empty:
            notes.append(f"{split}: {self.empty:,} {noun} are empty, the first in {self.first_empty}")
        return notes


class ExampleEncoder:
    """Encoder of a task's inputs in the format of pretrained models: [begin] A [separator], or [begin] A [separator] B
    [separator], if the tokenizer has these tokens; else A, or A, a line end and B.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer | None, vocabulary: int, separators: int = 1):
        """Prepare the encoding of a task. tokenizer: None if the task's inputs are ids. vocabulary: of the model;
        special tokens beyond it are omitted. separators: number of them between two segments (2 for RoBERTa).
        """
        self.task, self.tokenizer, self.config = task, tokenizer, task.config
        special = tokenizer.special if tokenizer is not None else None
        self.special = special if special is not None and max(special.begin, special.separator) < vocabulary else None
        self.separators = separators
        self.reset()

    def reset(self) -> None:
        """Start the counts of a split."""
        self.counts = ExampleCounts()

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
        return [title, *counts.notes(split, "inputs", self.config.max_length, "task.max_length to read")]

    def _join(self, inputs: tuple[Input, ...], location: SourceLocation) -> Segments:
        parts = [self._ids(value, location) for value in inputs]
        frame = self._frame(len(parts))
        special = sum(map(len, frame))
        if self.is_cut(sum(map(len, parts)) + special, location):
            room = self.config.max_length - special
            if room < len(parts):
                problem = f"{self.config.max_length} leaves no space for text next to {special} special tokens"
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
            self.count_empty(self.counts, "empty: the model has nothing to read", location)
        return tokens

    def count_empty(self, counts: ExampleCounts, problem: str, location: SourceLocation) -> None:
        """Count an empty input. Raises DataError if the configuration treats these as errors."""
        if self.config.empty == "refuse":
            hint = 'Remove it, or keep and count such examples: --set task.empty="keep"'
            raise DataError(str(location), problem, hint)
        counts.empty, counts.first_empty = counts.empty + 1, counts.first_empty or location

    def is_cut(self, length: int, location: SourceLocation, counts: ExampleCounts | None = None) -> bool:
        """Count an input's tokens. Return True if it is too long. Raises DataError if the configuration treats these as
        errors.

        counts: counts of answers; None for inputs.
        """
        key, noun, limit = "task.max_length", "", self.config.max_length
        if counts is not None:
            key, noun, limit = "task.generation.target_length", "its answer's ", self.config.generation.target_length
        counts = counts or self.counts
        counts.longest = max(counts.longest, length)
        if length <= limit:
            return False
        if self.config.too_long == "refuse":
            problem = f"{noun}{length:,} tokens are more than {key} = {limit:,}"
            raise DataError(str(location), problem, 'Raise it, or truncate such inputs: --set task.too_long="cut"')
        counts.cut, counts.first_cut = counts.cut + 1, counts.first_cut or location
        return True


def cut(parts: list[np.ndarray], room: int) -> list[np.ndarray]:
    """Truncate the parts to `room` tokens in total, longest first, as Hugging Face's tokenizers do.

    Of two parts only the longer one is truncated, but not below half; of equal ones the second is the longer one.
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


Collate = Callable[[Sequence[EncodedExample]], Any]
"""Function from examples to a batch of the task's model."""
MULTIPLE = 8
"""Lengths of batches are rounded up to a multiple of this, for fewer shapes, and full tiles on GPUs."""


class Movable:
    """Dataclass of tensors and other values, nested or not, that can be moved to a device."""

    def to(self, device: torch.device) -> Any:
        """Return a copy on a device."""

        def moved(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(moved, value))
            return value.to(device) if isinstance(value, Tensor | Movable) else value

        return type(self)(*(moved(getattr(self, field.name)) for field in fields(self)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Padded(Movable):
    """The sequences of a batch, padded to one length."""

    tokens: Tensor
    """Tokens, int64 (B, L), 0 for padding."""
    types: Tensor
    """Segments, int64 (B, L): 1 in the second segment."""
    lengths: Tensor
    """Number of real tokens, int64 (B,), at least 1; they come first."""

    @property
    def mask(self) -> Tensor | None:
        """Mask of real tokens, bool (B, L); None if all are real."""
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        mask = positions < self.lengths.unsqueeze(1)
        return None if bool(mask.all()) else mask


@dataclass(frozen=True)
class Inputs(Movable):
    """A micro-batch of examples, as `Batch.tokens` of a fine-tuning run."""

    sequences: tuple[Padded, ...]
    """One sequence per example, or two if the task has towers."""
    labels: Tensor | None
    """(B,) int64 classes or fp32 numbers; None without labels."""
    marks: Tensor | None = None
    """Positions, int64 (B, K), of the scores of each example's candidates in a choice, padded with -1."""

    def numel(self) -> int:
        """Return the number of tokens without padding."""
        return sum(int(sequence.lengths.sum()) for sequence in self.sequences)


def side_by_side(rows: Sequence[Any], limit: int) -> tuple[Tensor, Tensor]:
    """Stack rows of integers to (B, W) int64, padded with 0, W a multiple of 8 or the limit. Return lengths too."""
    width = min(limit, -(-max(1, *map(len, rows)) // MULTIPLE) * MULTIPLE)
    table = np.zeros((len(rows), width), dtype=np.int64)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return torch.from_numpy(table), torch.tensor([len(row) for row in rows])


def collate(examples: Sequence[EncodedExample], limit: int) -> Inputs:
    """Pad sequences to a batch of at most `limit` tokens each. An example without tokens reads the id 0."""
    labels, sequences = None, []
    if all(example.label is not None for example in examples):
        labels = torch.tensor([example.label for example in examples])
        labels = labels.float() if labels.is_floating_point() else labels
    for tower in zip(*(example.sequences for example in examples), strict=True):
        tokens, lengths = side_by_side([sequence.tokens for sequence in tower], limit)
        types, _ = side_by_side([sequence.types for sequence in tower], limit)
        sequences.append(Padded(tokens, types, lengths.clamp(min=1)))
    return Inputs(tuple(sequences), labels)


class ExampleBatches(Steps):
    """Endless iterator of `Step`s over examples in memory, epoch after epoch; each epoch contains every example once.

    The i-th example is a pure function of (seed, i), and the ranks split each global batch, whatever their number.
    Within a global batch, examples are sorted by length, so that micro-batches contain little padding; each example
    keeps its global sample number, on which random draws depend.
    """

    def __init__(
        self,
        examples: Sequence[EncodedExample],
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        ranks: Ranks,
        collate: Collate,
        start: int = 0,
    ):
        """Prepare the batches of a run. start: first global sample number, a checkpoint's position."""
        self.examples, self.seed, self.collate = examples, seed, collate
        self.global_batch, self.micro_batch, self.ranks = global_batch, micro_batch, ranks
        self.position = start
        self._epoch: tuple[int, np.ndarray] | None = None

    def __next__(self) -> Step:
        micro_batches = self._deal()
        batches = []
        for share in micro_batches[self.ranks.rank :: self.ranks.world_size]:
            inputs: Any = self.collate([example for example, _ in share])
            batches.append(Batch(inputs, torch.tensor([sample for _, sample in share])))
        return Step(batches, self.position, 0.0)

    def _deal(self) -> list[list[tuple[EncodedExample, int]]]:
        """Return the micro-batches of all ranks, as examples with their sample numbers, and advance the position."""
        samples = range(self.position, self.position + self.global_batch)
        self.position = samples.stop
        located = sorted(((self._locate(sample), sample) for sample in samples), key=lambda pair: pair[0].length)
        return [located[first : first + self.micro_batch] for first in range(0, len(samples), self.micro_batch)]

    def _locate(self, sample: int) -> EncodedExample:
        epoch, index = divmod(sample, len(self.examples))
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, permutation(len(self.examples), self.seed, epoch))
        return self.examples[int(self._epoch[1][index])]


def fingerprint(examples: Sequence[EncodedExample]) -> str:
    """Return the SHA-256 of the training data: tokens and labels, in order."""
    digest = hashlib.sha256()
    for example in examples:
        for piece in example.content():
            digest.update(piece)
    return digest.hexdigest()
