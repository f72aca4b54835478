"""Packs hold as many tokens as fit, every example comes once an epoch, and neither ranks nor a resume change a step."""

import itertools
import random
from typing import Any

import pytest
import torch

from megasparse.data.batches import Step
from megasparse.errors import ConfigError, DataError
from megasparse.evaluation.beam import BeamSettings
from megasparse.tasks.forms.texts import Texts, TokenBatches, packed, side_by_side, sizes_of
from megasparse.training.ranks import Ranks
from tests.helpers.texts import example

DRAWN = random.Random(2)
EXAMPLES = [
    example([number, *[7] * DRAWN.randrange(12)], [number, *[8] * DRAWN.randrange(9)], number) for number in range(61)
]
"""Examples whose first tokens are their numbers."""
MOST, GLOBAL = 48, 192
SIZES = sizes_of(EXAMPLES, MOST)
Seen = list[tuple[int, int]]


def collate(examples: Any) -> Texts:
    source, target = (side_by_side([getattr(each, side) for each in examples]) for side in ("source", "target"))
    return Texts(source, target, BeamSettings(1, 1, None))


def batches(ranks: Ranks = Ranks(), seed: int = 3, start: int = 0, micro: int = MOST) -> TokenBatches:  # noqa: B008
    settings: dict[str, Any] = {"seed": seed, "global_batch": GLOBAL, "micro_batch": micro, "start": start}
    return TokenBatches(EXAMPLES, ranks=ranks, collate=collate, **settings)


def seen(step: Step) -> list[Seen]:
    """(global sample number, example) of each row of each micro-batch."""
    found = []
    for batch in step.micro_batches:
        given: Any = batch.tokens
        numbers = given.source.tokens[:, 0].tolist()
        assert given.target.tokens[:, 0].tolist() == numbers
        found.append(list(zip(batch.samples.tolist(), numbers, strict=True)))
    return found


def flat(steps: list[list[Seen]]) -> Seen:
    return [pair for step in steps for micro_batch in step for pair in micro_batch]


def test_a_pack_takes_what_fits_and_no_less():
    """Sorted, each pack is as long as it can be."""
    packs = packed(SIZES, MOST, 3, 0)
    tokens = [len(pack) * int(SIZES[pack].max(0).sum()) for pack in packs]
    assert max(tokens) <= MOST
    key = lambda i: tuple(SIZES[i])  # noqa: E731
    in_order = sorted(packs, key=lambda pack: (key(pack[0]), key(pack[-1])))
    numbers = list(itertools.chain(*in_order))
    assert [key(i) for i in numbers] == sorted(key(i) for i in range(len(EXAMPLES)))
    for pack, following in itertools.pairwise(in_order):
        wider = [*pack, following[0]]
        assert len(wider) * int(SIZES[wider].max(0).sum()) > MOST
    assert [pack.tolist() for pack in in_order] != [pack.tolist() for pack in packs]


def test_every_example_comes_once_an_epoch_and_steps_go_over_its_end():
    made = batches()
    steps = [next(made) for _ in range(40)]
    assert all(len(step.micro_batches) == GLOBAL // MOST for step in steps)
    drawn = flat([seen(step) for step in steps])
    assert [sample for sample, _ in drawn] == list(range(len(drawn))) and steps[-1].position == len(drawn)
    number = len(EXAMPLES)
    epochs = [[i for _, i in drawn[first : first + number]] for first in range(0, len(drawn) - number, number)]
    assert len(epochs) > 4 and len(set(map(tuple, epochs))) == len(epochs)
    assert all(sorted(epoch) == list(range(number)) for epoch in epochs)
    assert any(step.position % number for step in steps if step.position > number)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_out_the_same_packs(world_size):
    alone, shares = batches(), [batches(Ranks(rank, world_size)) for rank in range(world_size)]
    for _ in range(20):
        expected, each = next(alone), [next(share) for share in shares]
        assert {step.position for step in each} == {expected.position}
        assert all(len(step.micro_batches) == GLOBAL // MOST // world_size for step in each)
        assert sorted(itertools.chain(*map(seen, each))) == sorted(seen(expected))


@pytest.mark.parametrize("taken", [1, 2, 5, 11])
def test_a_resume_goes_on_where_it_was(taken):
    straight = batches()
    position = [next(straight).position for _ in range(taken)][-1]
    resumed = batches(start=position)
    for _ in range(8):
        mine, theirs = next(straight), next(resumed)
        assert mine.position == theirs.position and seen(mine) == seen(theirs)
        for one, other in zip(mine.micro_batches, theirs.micro_batches, strict=True):
            assert torch.equal(one.tokens.source.tokens, other.tokens.source.tokens)  # type: ignore[attr-defined]


def test_a_resume_with_other_packs_is_refused():
    straight = batches()
    positions = [next(straight).position for _ in range(4)]
    with pytest.raises(ConfigError, match=r"training\.micro_batch: 96, and the checkpoint's position .* began with"):
        for position in positions:
            batches(start=position, micro=2 * MOST)


def test_an_example_that_fits_into_no_pack_is_named():
    given = [example([1], [2], 0), example([1] * 30, [2] * 19, 1), example([1] * 30, [2] * 30, 2)]
    with pytest.raises(DataError) as caught:
        sizes_of(given, MOST)
    assert str(caught.value) == (
        "made.en:2: 49 tokens with its answer's are more than training.micro_batch = 48. "
        "Raise it to 60 or more, or lower task.max_length"
    )
    assert [len(pack) for pack in packed(sizes_of(given, 60), 60, 0, 0)] == [1, 1, 1]
