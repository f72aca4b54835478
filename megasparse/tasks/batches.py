"""Encoded examples to micro-batches. B batch, L length."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megasparse.data.batches import Batch, Step, Steps
from megasparse.data.order import permutation
from megasparse.tasks.encoding import Encoded
from megasparse.training.ranks import Ranks

Collate = Callable[[Sequence[Encoded]], Any]
"""Function from examples to the batch that the task's model takes."""
MULTIPLE = 8
"""Lengths of batches are rounded up to a multiple of this: fewer shapes, and whole tiles on a GPU."""


class Movable:
    """A dataclass of tensors, of other such classes, and of what has no device."""

    def to(self, device: torch.device) -> Any:
        """The same on a device."""
        return type(self)(*(_moved(getattr(self, field.name), device) for field in fields(self)))  # type: ignore[arg-type]


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_moved(each, device) for each in value)
    return value.to(device) if isinstance(value, Tensor | Movable) else value


@dataclass(frozen=True)
class Padded(Movable):
    """The sequences of a batch, padded to one length."""

    tokens: Tensor
    """Tokens, int64 (B, L), 0 where there is no token."""
    types: Tensor
    """Segments, int64 (B, L): 1 in the second segment."""
    lengths: Tensor
    """Lengths, int64 (B,): number of real tokens, which come first; at least 1."""

    @property
    def mask(self) -> Tensor | None:
        """Mask of the tokens, bool (B, L), true for real tokens; None where all are."""
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        mask = positions < self.lengths.unsqueeze(1)
        return None if bool(mask.all()) else mask


@dataclass(frozen=True)
class Inputs(Movable):
    """A micro-batch of examples, in place of the `Batch.tokens` of a pretraining run."""

    sequences: tuple[Padded, ...]
    """One sequence an example, or two where the task has towers."""
    labels: Tensor | None
    """(B,) int64 classes or fp32 numbers; None where the files have no labels."""

    def numel(self) -> int:
        """Number of tokens read, without padding."""
        return sum(int(each.lengths.sum()) for each in self.sequences)


def collate(examples: Sequence[Encoded], limit: int) -> Inputs:
    """A batch of padded sequences of at most `limit` tokens. An example without any token reads the id 0."""
    towers = range(len(examples[0].sequences))
    labels = [example.label for example in examples]
    known = None
    if all(label is not None for label in labels):
        known = torch.tensor(labels)
        known = known.float() if known.is_floating_point() else known
    return Inputs(tuple(_padded([example.sequences[i] for example in examples], limit) for i in towers), known)


def dummy_tokens(vocabulary: int, batch: int, length: int, generator: torch.Generator | None = None) -> Padded:
    """Random tokens whose last one is padding, so that there is a mask."""
    generator = generator or torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (batch, length), generator=generator)
    return Padded(tokens, torch.zeros_like(tokens), torch.full((batch,), max(1, length - 1)))


def _padded(sequences: Sequence[Any], limit: int) -> Padded:
    lengths = [max(1, len(each.tokens)) for each in sequences]
    width = min(limit, -(-max(lengths) // MULTIPLE) * MULTIPLE)
    tokens, types = (np.zeros((len(sequences), width), dtype=np.int64) for _ in range(2))
    for row, each in enumerate(sequences):
        tokens[row, : len(each.tokens)] = each.tokens
        types[row, : len(each.types)] = each.types
    return Padded(torch.from_numpy(tokens), torch.from_numpy(types), torch.tensor(lengths))


class ExampleBatches(Steps):
    """Endless iterator of `Step`s over examples in memory: epochs follow each other, in each every example comes once.

    Which one comes i-th is a pure function of (seed, i); the ranks share each global batch out among them whatever
    their number. Inside a global batch examples of like length stand together, so that micro-batches have little
    padding; each keeps the global sample number that its draws depend on.
    """

    def __init__(
        self,
        examples: Sequence[Encoded],
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        ranks: Ranks,
        collate: Collate,
        start: int = 0,
    ):
        """Prepare the batches of a run. start: the global sample number to begin at, a checkpoint's position."""
        self.examples, self.seed, self.collate = examples, seed, collate
        self.global_batch, self.micro_batch, self.ranks = global_batch, micro_batch, ranks
        self.position = start
        self._epoch: tuple[int, np.ndarray] | None = None

    def __next__(self) -> Step:
        samples = range(self.position, self.position + self.global_batch)
        self.position = samples.stop
        located = sorted(((self._locate(sample), sample) for sample in samples), key=lambda one: one[0].length)
        share = self.micro_batch * self.ranks.world_size
        batches = []
        for first in range(self.ranks.rank * self.micro_batch, self.global_batch, share):
            mine = located[first : first + self.micro_batch]
            numbers = torch.tensor([sample for _, sample in mine])
            inputs: Any = self.collate([example for example, _ in mine])
            batches.append(Batch(inputs, numbers, self.position))
        return Step(batches, self.position, 0.0)

    def _locate(self, sample: int) -> Encoded:
        epoch, index = divmod(sample, len(self.examples))
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, permutation(len(self.examples), self.seed, epoch))
        return self.examples[int(self._epoch[1][index])]


def fingerprint(examples: Sequence[Encoded]) -> str:
    """The sha256 of the training data: tokens and labels, in order."""
    digest = hashlib.sha256()
    for example in examples:
        for piece in example.content():
            digest.update(piece)
    return digest.hexdigest()
