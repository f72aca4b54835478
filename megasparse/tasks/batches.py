"""Encoded examples, their counts, and batches. B batch, L length."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megasparse.config.finetuning import TaskConfig
from megasparse.data.batches import Batch, Step, Steps
from megasparse.data.order import permutation
from megasparse.errors import DataError
from megasparse.tasks.task import SourceLocation
from megasparse.training.ranks import Ranks

MULTIPLE = 8  # lengths of batches are rounded up to a multiple of this, for fewer shapes, and full tiles on GPUs


class Segments(NamedTuple):
    """A sequence of one or two segments: tokens, int64 (L,), and types, 1 in the second segment, else 0."""

    tokens: np.ndarray
    types: np.ndarray


@dataclass(frozen=True)
class EncodedExample:
    sequences: tuple[Segments, ...]  # one sequence, or two if the task has towers
    label: Any
    location: SourceLocation
    name: str
    marks: np.ndarray | None = field(default=None, kw_only=True)  # positions, int64 (K,), of the candidates' scores
    candidates: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def length(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(len(sequence.tokens) for sequence in self.sequences)

    def content(self) -> Iterator[bytes]:
        """Yield the bytes of all training data in the example."""
        yield f"{self.label!r} {[len(sequence.tokens) for sequence in self.sequences]}\n".encode()
        yield b"".join(sequence.tokens.tobytes() for sequence in self.sequences)
        yield b"" if self.marks is None else self.marks.tobytes()


def fingerprint(examples: Sequence[EncodedExample]) -> str:
    """Return the SHA-256 of the training data: tokens and labels, in order."""
    digest = hashlib.sha256()
    for example in examples:
        for piece in example.content():
            digest.update(piece)
    return digest.hexdigest()


@dataclass
class ExampleCounts:
    """Counts of a split's inputs, or of its answers, and checks of each of them."""

    config: TaskConfig
    noun: str = "inputs"
    key: str = "task.max_length"
    limit: int = 0
    examples: int = 0
    cut: int = 0  # number of texts longer than the limit, which were truncated to their start
    empty: int = 0
    longest: int = 0  # longest text in tokens before truncation
    first_cut: SourceLocation | None = None
    first_empty: SourceLocation | None = None
    kinds: dict[str, int] = field(default_factory=dict)  # number of examples by class, and other counts of a form

    def count_empty(self, problem: str, location: SourceLocation) -> None:
        """Count an empty text. Raises DataError if the configuration forbids it."""
        if self.config.empty == "refuse":
            raise DataError(location, problem, 'Remove it, or keep and count such examples: --set task.empty="keep"')
        self.empty, self.first_empty = self.empty + 1, self.first_empty or location

    def is_cut(self, length: int, location: SourceLocation) -> bool:
        """Count a text's tokens. Return True if it is too long. Raises DataError if the configuration forbids that."""
        self.longest = max(self.longest, length)
        if length <= self.limit:
            return False
        if self.config.too_long == "refuse":
            problem = f"{length:,} tokens are more than {self.key} = {self.limit:,}"
            raise DataError(location, problem, 'Raise it, or set task.too_long="cut"')
        self.cut, self.first_cut = self.cut + 1, self.first_cut or location
        return True

    def notes(self, split: str) -> list[str]:
        """Return the lines about truncated and empty texts."""
        notes = []
        if self.cut:
            cut = f"{split}: {self.cut:,} {self.noun} of more than {self.limit:,} tokens are truncated to their start"
            notes.append(f"{cut}, the first in {self.first_cut}. Raise {self.key} to keep more of them")
        if self.empty:
            notes.append(f"{split}: {self.empty:,} {self.noun} are empty, the first in {self.first_empty}")
        return notes


class Movable:
    """Dataclass of tensors and other values, nested or not, that can be moved to a device."""

    def to(self, device: torch.device) -> Any:
        def moved(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(moved, value))
            return value.to(device) if isinstance(value, Tensor | Movable) else value

        return type(self)(*(moved(getattr(self, field.name)) for field in fields(self)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Padded(Movable):
    """The sequences of a batch, padded to one length: tokens and types as in Segments, (B, L), 0 for padding."""

    tokens: Tensor
    types: Tensor
    lengths: Tensor  # number of real tokens, int64 (B,), at least 1; they come first

    @property
    def mask(self) -> Tensor | None:
        """Mask of real tokens, bool (B, L); None if all are real."""
        mask = first(self.lengths, self.tokens.shape[1])
        return None if bool(mask.all()) else mask


def first(counts: Tensor, width: int) -> Tensor:
    """Return a mask (…, width) of the first `counts` entries."""
    return torch.arange(width, device=counts.device) < counts.unsqueeze(-1)


@dataclass(frozen=True)
class Inputs(Movable):
    """A micro-batch of examples, as `Batch.tokens` of a fine-tuning run."""

    sequences: tuple[Padded, ...]  # one sequence per example, or two if the task has towers
    labels: Tensor | None  # (B,) int64 classes or fp32 numbers; None without labels
    marks: Tensor | None = None  # int64 (B, K): positions of the candidates' scores in a choice, padded with -1

    def numel(self) -> int:
        """Return the number of tokens without padding."""
        return sum(int(sequence.lengths.sum()) for sequence in self.sequences)


def side_by_side(rows: Sequence[Any], limit: int | None = None, fill: int = 0) -> tuple[Tensor, Tensor]:
    """Stack rows of integers to (B, W) int64, padded with `fill`, W a multiple of 8, at most the limit, or without a
    limit the longest row. Return lengths too.
    """
    longest = max(map(len, rows))
    width = longest if limit is None else min(limit, -(-max(1, longest) // MULTIPLE) * MULTIPLE)
    table = np.full((len(rows), width), fill, dtype=np.int64)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return torch.from_numpy(table), torch.tensor([len(row) for row in rows])


def pad(sequences: Sequence[Segments], limit: int) -> Padded:
    tokens, lengths = side_by_side([sequence.tokens for sequence in sequences], limit)
    types, _ = side_by_side([sequence.types for sequence in sequences], limit)
    return Padded(tokens, types, lengths.clamp(min=1))


def collate(examples: Sequence[EncodedExample], limit: int) -> Inputs:
    """Pad sequences to a batch of at most `limit` tokens each. An example without tokens reads the id 0."""
    labels = None
    if all(example.label is not None for example in examples):
        labels = torch.tensor([example.label for example in examples])
        labels = labels.float() if labels.is_floating_point() else labels
    towers = zip(*(example.sequences for example in examples), strict=True)
    return Inputs(tuple(pad(tower, limit) for tower in towers), labels)


class ExampleBatches(Steps):
    """Endless iterator of `Step`s over examples in memory, epoch after epoch; each epoch contains every example once.

    The i-th example is a pure function of (seed, i), and the ranks split each global batch. Within a global batch,
    examples are sorted by length, so that micro-batches contain little padding; each keeps its global sample number, on
    which random draws depend. start: first sample number, a checkpoint's position.
    """

    def __init__(
        self, examples: Sequence[Any], *, seed: int, global_batch: int, micro_batch: int, ranks: Ranks,
        collate: Callable[[Sequence[Any]], Any], start: int = 0,
    ):  # fmt: skip
        self.examples, self.seed, self.collate = examples, seed, collate
        self.global_batch, self.micro_batch, self.ranks = global_batch, micro_batch, ranks
        self.position, self._epoch = start, -1

    def __next__(self) -> Step:
        micro_batches = self._deal()
        batches = []
        for share in micro_batches[self.ranks.rank :: self.ranks.world_size]:
            inputs: Any = self.collate([example for example, _ in share])
            batches.append(Batch(inputs, torch.tensor([sample for _, sample in share])))
        return Step(batches, self.position, 0.0)

    def _deal(self) -> list[list[tuple[Any, int]]]:
        """Return the micro-batches of all ranks, as examples with their sample numbers, and advance the position."""
        samples, located = range(self.position, self.position + self.global_batch), []
        for sample in samples:
            epoch, index = divmod(sample, len(self.examples))
            if self._epoch != epoch:
                self._epoch, self._order = epoch, permutation(len(self.examples), self.seed, epoch)
            located.append((self.examples[int(self._order[index])], sample))
        self.position = samples.stop
        located.sort(key=lambda pair: pair[0].length)
        return [located[first : first + self.micro_batch] for first in range(0, len(located), self.micro_batch)]
