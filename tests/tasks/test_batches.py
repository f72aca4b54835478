"""The order of examples, their shares, padding, and that neither ranks nor a resume change the examples of a step."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megasparse.config.finetuning import HeadConfig
from megasparse.data.batches import Batch, Step
from megasparse.errors import ConfigError, DataError
from megasparse.evaluation.generate import BeamSettings
from megasparse.ops.random import RngContext
from megasparse.tasks.batches import EncodedExample, ExampleBatches, Inputs, Segments, collate, fingerprint
from megasparse.tasks.form import TaskModel
from megasparse.tasks.forms.texts import Texts, TokenBatches, packed, padded, sizes_of
from megasparse.tasks.task import SourceLocation
from megasparse.training.ranks import Ranks
from tests.helpers.cases import together
from tests.helpers.finetuning import our_body
from tests.helpers.texts import example as text

NUMBER, PACK = 21, 48


def example(number: int, length: int, label: int | float | None = 0) -> EncodedExample:
    tokens = (np.arange(length) * 7 + number) % 256
    tokens[0] = number
    location = SourceLocation(Path("made.tsv"), number + 1)
    return EncodedExample((Segments(tokens, np.arange(length) % 2),), label, location, str(number))


DRAWN = random.Random(2)
EXAMPLES = [example(i, 1 + (i * 5) % 19, i % 3) for i in range(NUMBER)]
PAIRS = [text([i, *[7] * DRAWN.randrange(12)], [i, *[8] * DRAWN.randrange(9)], i) for i in range(NUMBER)]
SIZES = sizes_of(PAIRS, PACK)


def texts(examples: Any) -> Texts:
    source, target = (padded([getattr(each, side) for each in examples]) for side in ("source", "target"))
    return Texts(source, target, BeamSettings(1, 1))


def batches(unit: str = "examples", ranks: Ranks = Ranks(), start: int = 0, micro: int = 0) -> Any:  # noqa: B008
    """Steps of 4 micro-batches, of 2 examples each or of 48 tokens."""
    if unit == "tokens":
        settings: dict[str, Any] = {"global_batch": 4 * PACK, "micro_batch": micro or PACK, "start": start}
        return TokenBatches(PAIRS, seed=3, ranks=ranks, collate=texts, **settings)
    return ExampleBatches(
        EXAMPLES, seed=3, global_batch=8, micro_batch=2, ranks=ranks, start=start,
        collate=lambda examples: collate(examples, 64),
    )  # fmt: skip


def rows(batch: Batch) -> torch.Tensor:
    inputs: Any = batch.tokens
    return inputs.source.tokens if isinstance(inputs, Texts) else inputs.sequences[0].tokens


def seen(step: Step) -> list[list[tuple[int, int]]]:
    """(global sample number, example) of each row of each micro-batch."""
    return [list(zip(b.samples.tolist(), rows(b)[:, 0].tolist(), strict=True)) for b in step.micro_batches]


UNITS = pytest.mark.parametrize("unit", ["examples", "tokens"])


@UNITS
def test_every_example_comes_once_an_epoch_and_steps_go_over_its_end(unit):
    steps = list(itertools.islice(batches(unit), 30))
    assert all(len(step.micro_batches) == 4 for step in steps)
    drawn = sorted(itertools.chain(*itertools.chain(*map(seen, steps))))
    assert [sample for sample, _ in drawn] == list(range(len(drawn))) and steps[-1].position == len(drawn)
    epochs = [[i for _, i in drawn[first : first + NUMBER]] for first in range(0, len(drawn) - NUMBER, NUMBER)]
    assert len(epochs) > 4 and len(set(map(tuple, epochs))) == len(epochs)
    assert all(sorted(epoch) == list(range(NUMBER)) for epoch in epochs)
    assert any(step.position % NUMBER for step in steps if step.position > NUMBER)


@UNITS
@together("world_size", [2, 4])
def test_ranks_share_out_the_same_batches(unit, world_size):
    alone, shares = batches(unit), [batches(unit, Ranks(rank, world_size)) for rank in range(world_size)]
    for _ in range(20):
        expected, each = next(alone), [next(share) for share in shares]
        assert {step.position for step in each} == {expected.position}
        assert all(len(step.micro_batches) == 4 // world_size for step in each)
        assert sorted(itertools.chain(*map(seen, each))) == sorted(seen(expected))


@UNITS
@together("taken", [1, 2, 5, 11])
def test_a_resume_continues_at_its_position(unit, taken):
    straight = batches(unit)
    resumed = batches(unit, start=[next(straight).position for _ in range(taken)][-1])
    for _ in range(8):
        mine, theirs = next(straight), next(resumed)
        assert mine.position == theirs.position and seen(mine) == seen(theirs)
        for one, other in zip(mine.micro_batches, theirs.micro_batches, strict=True):
            assert torch.equal(rows(one), rows(other))


def test_alike_lengths_stand_together():
    for step in itertools.islice(batches(), 10):
        lengths = [each for batch in step.micro_batches for each in batch.tokens.sequences[0].lengths.tolist()]  # type: ignore[attr-defined]
        assert lengths == sorted(lengths)


def test_sorting_by_length_changes_no_mean_gradient():
    model = TaskModel(our_body(dropout=0.0), 3, HeadConfig(dropout=0.0), towers=False, seed=0).train()

    def gradient(parts: list[tuple[Inputs, torch.Tensor]]) -> torch.Tensor:
        model.zero_grad()
        for inputs, samples in parts:
            (model(inputs, RngContext(0, 1, samples, training=True))[0] / len(parts)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    step = next(batches())
    numbers = [number for _, number in sorted(itertools.chain(*seen(step)))]
    whole = collate([EXAMPLES[i] for i in numbers], 64)
    expected = gradient([(whole, torch.arange(8))])
    result = gradient([(batch.tokens, batch.samples) for batch in step.micro_batches])  # type: ignore[misc]
    assert expected.norm() > 1e-3 and (result - expected).norm() < 1e-5 * expected.norm()


def test_padding_and_labels():
    inputs = collate([example(0, 3, 2), example(1, 9, 0), example(2, 1, 1)], 64)
    (read,), lengths = inputs.sequences, [3, 9, 1]
    assert read.tokens.shape == read.types.shape == (3, 16) and read.lengths.tolist() == lengths
    assert read.tokens.dtype == read.types.dtype == read.lengths.dtype == torch.int64
    assert read.mask is not None and read.mask.sum(1).tolist() == lengths and read.mask[0, :3].all()
    for row, length in enumerate(lengths):
        tokens, types = example(row, length).sequences[0]
        assert read.tokens[row].tolist() == [*tokens, *[0] * (16 - length)]
        assert read.types[row].tolist() == [*types, *[0] * (16 - length)]
    numbers = collate([example(0, 3, 2.5), example(1, 3, 1)], 64).labels
    for labels, dtype, values in ((inputs.labels, torch.int64, [2, 0, 1]), (numbers, torch.float32, [2.5, 1.0])):
        assert labels is not None and labels.dtype == dtype and labels.tolist() == values
    assert collate([example(0, 3, 2), example(1, 3, None)], 64).labels is None


def test_the_fingerprint_knows_tokens_labels_and_their_order():
    given = EXAMPLES[:3]
    changed = [[example(*values), *given[1:]] for values in ((0, 1, 1), (5, 1), (0, 2))]
    other = [given[:2], [given[1], given[0], given[2]], *changed]
    result = {fingerprint(examples) for examples in (given, *other)}
    assert len(result) == 6 and fingerprint(list(given)) in result


def test_a_pack_is_filled_as_far_as_possible():
    packs = packed(SIZES, PACK, 3, 0)
    assert max(len(pack) * int(SIZES[pack].max(0).sum()) for pack in packs) <= PACK
    key = lambda i: tuple(SIZES[i])  # noqa: E731
    in_order = sorted(packs, key=lambda pack: (key(pack[0]), key(pack[-1])))
    assert [key(i) for i in itertools.chain(*in_order)] == sorted(key(i) for i in range(NUMBER))
    for pack, following in itertools.pairwise(in_order):
        wider = [*pack, following[0]]
        assert len(wider) * int(SIZES[wider].max(0).sum()) > PACK
    assert [pack.tolist() for pack in in_order] != [pack.tolist() for pack in packs]


def test_a_resume_with_other_packs_is_rejected():
    straight = batches("tokens")
    positions = [next(straight).position for _ in range(4)]
    with pytest.raises(ConfigError, match=r"training\.micro_batch: 96, but the checkpoint's position .* started with"):
        for position in positions:
            batches("tokens", start=position, micro=2 * PACK)


def test_an_example_that_fits_into_no_pack_is_named():
    given = [text([1], [2], 0), text([1] * 30, [2] * 19, 1), text([1] * 30, [2] * 30, 2)]
    with pytest.raises(DataError) as caught:
        sizes_of(given, PACK)
    assert str(caught.value) == (
        "made.en:2: 49 tokens with its answer are more than training.micro_batch = 48. "
        "Raise it to 60, or lower task.max_length"
    )
    assert [len(pack) for pack in packed(sizes_of(given, 60), 60, 0, 0)] == [1, 1, 1]
