"""The order of examples, their shares, padding, and that neither ranks nor a resume change what a step sees."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megasparse.config.finetuning import HeadConfig
from megasparse.data.batches import Batch
from megasparse.ops.random import RngContext
from megasparse.tasks.batches import Encoded, ExampleBatches, Inputs, Segments, collate, fingerprint
from megasparse.tasks.forms.labels import TaskModel
from megasparse.tasks.task import SourceLocation
from megasparse.training.ranks import Ranks
from tests.helpers.finetuning import our_body

NUMBER, GLOBAL = 21, 8


def example(number: int, length: int, label: int | float | None = 0, second: int | None = None) -> Encoded:
    """An example whose first token is its number."""
    tokens = (np.arange(length) * 7 + number) % 256
    tokens[0] = number
    towers = [Segments(tokens, np.arange(length) % 2)]
    if second is not None:
        towers.append(Segments(np.arange(second), np.zeros(second, dtype=np.int64)))
    return Encoded(tuple(towers), label, SourceLocation(Path("made.tsv"), number + 1), str(number))


EXAMPLES = [example(i, 1 + (i * 5) % 19, i % 3) for i in range(NUMBER)]


def batches(ranks: Ranks = Ranks(), seed: int = 3, micro: int = 2, start: int = 0) -> ExampleBatches:  # noqa: B008
    return ExampleBatches(
        EXAMPLES, seed=seed, global_batch=GLOBAL, micro_batch=micro, ranks=ranks, start=start,
        collate=lambda examples: collate(examples, 64),
    )  # fmt: skip


def seen(batch: Batch) -> list[tuple[int, int]]:
    """(global sample number, example) of each row."""
    (read,) = batch.tokens.sequences  # type: ignore[attr-defined]
    return list(zip(batch.samples.tolist(), read.tokens[:, 0].tolist(), strict=True))


def steps(made: ExampleBatches, number: int) -> list[list[tuple[int, int]]]:
    """What each of so many steps sees, in the order of the samples."""
    found = [next(made) for _ in range(number)]
    return [sorted(pair for batch in step.micro_batches for pair in seen(batch)) for step in found]


def test_every_example_comes_once_an_epoch_and_epochs_differ():
    drawn = [number for step in steps(batches(), NUMBER) for _, number in step]  # 8 epochs of 21
    epochs = [drawn[first : first + NUMBER] for first in range(0, len(drawn), NUMBER)]
    assert len(epochs) == GLOBAL
    assert all(sorted(epoch) == list(range(NUMBER)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == GLOBAL


def test_the_order_is_a_function_of_the_seed_and_the_number():
    drawn = steps(batches(seed=3), 6)
    assert drawn == steps(batches(seed=3), 6) == steps(batches(seed=3, micro=4), 6)
    assert drawn != steps(batches(seed=4), 6)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_out_the_same_global_batches(world_size):
    alone = steps(batches(), 6)
    shares = [batches(Ranks(rank, world_size)) for rank in range(world_size)]
    for expected in alone:
        each = [next(share) for share in shares]
        assert len({step.position for step in each}) == 1
        assert all(len(step.micro_batches) == GLOBAL // (2 * world_size) for step in each)
        assert sorted(pair for step in each for batch in step.micro_batches for pair in seen(batch)) == expected


@pytest.mark.parametrize("taken", [1, 2, 3, 7])
def test_a_resume_goes_on_where_it_was(taken):
    straight, resumed = batches(), batches(start=taken * GLOBAL)
    for _ in range(taken):
        position = next(straight).position
    assert position == taken * GLOBAL
    for _ in range(4):
        mine, theirs = next(straight), next(resumed)
        assert mine.position == theirs.position
        for one, other in zip(mine.micro_batches, theirs.micro_batches, strict=True):
            assert seen(one) == seen(other) and torch.equal(tokens(one), tokens(other))


def tokens(batch: Batch) -> torch.Tensor:
    return batch.tokens.sequences[0].tokens  # type: ignore[attr-defined]


def test_alike_lengths_stand_together():
    for _ in range(10):
        step = next(made := batches())
        lengths = [each for batch in step.micro_batches for each in batch.tokens.sequences[0].lengths.tolist()]  # type: ignore[attr-defined]
        assert lengths == sorted(lengths)
        made.position += GLOBAL


def test_sorting_by_length_changes_no_mean_gradient():
    """The mean over micro-batches of a step is the gradient of the unsorted global batch."""
    model = TaskModel(our_body(dropout=0.0), 3, HeadConfig(dropout=0.0), towers=False, seed=0).train()

    def gradient(parts: list[tuple[Inputs, torch.Tensor]]) -> torch.Tensor:
        model.zero_grad()
        for inputs, samples in parts:
            (model(inputs, RngContext(0, 1, samples, training=True))[0] / len(parts)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    made = batches()
    step = next(made)
    numbers = [number for _, number in steps(batches(), 1)[0]]
    whole = collate([EXAMPLES[i] for i in numbers], 64)
    expected = gradient([(whole, torch.arange(GLOBAL))])
    found = gradient([(batch.tokens, batch.samples) for batch in step.micro_batches])  # type: ignore[misc]
    assert expected.norm() > 1e-3 and (found - expected).norm() < 1e-5 * expected.norm()


def test_padding():
    (read,) = collate([example(0, 3), example(1, 9), example(2, 1)], 64).sequences
    assert read.tokens.shape == read.types.shape == (3, 16) and read.lengths.tolist() == [3, 9, 1]
    assert read.tokens.dtype == read.types.dtype == read.lengths.dtype == torch.int64
    mask = read.mask
    assert mask is not None and mask.sum(1).tolist() == [3, 9, 1] and mask[0, :3].all()
    for row, length in enumerate((3, 9, 1)):
        given = example(row, length).sequences[0]
        assert read.tokens[row, :length].tolist() == given.tokens.tolist()
        assert read.types[row, :length].tolist() == given.types.tolist()
        assert not read.tokens[row, length:].any() and not read.types[row, length:].any()


def test_labels():
    classes = collate([example(0, 3, 2), example(1, 3, 0)], 64).labels
    assert classes is not None and classes.dtype == torch.int64 and classes.tolist() == [2, 0]
    numbers = collate([example(0, 3, 2.5), example(1, 3, 1)], 64).labels
    assert numbers is not None and numbers.dtype == torch.float32 and numbers.tolist() == [2.5, 1.0]
    assert collate([example(0, 3, 2), example(1, 3, None)], 64).labels is None


def test_the_fingerprint_knows_tokens_labels_and_their_order():
    given = EXAMPLES[:3]
    other = [
        given[:2],
        [given[1], given[0], given[2]],
        [example(0, 1, 1), *given[1:]],
        [example(5, 1), *given[1:]],
        [example(0, 2), *given[1:]],
    ]
    found = {fingerprint(examples) for examples in (given, *other)}
    assert len(found) == 6 and fingerprint(list(given)) in found
