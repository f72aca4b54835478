import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megasparse.data.batches import Step, TrainingBatches
from megasparse.data.index import Index
from megasparse.data.order import Order
from megasparse.data.reader import ShardReader
from megasparse.errors import ConfigError, DataError

Make = Callable[..., Index]
T = 30  # 33 sequences in each of seven shards of 1,000 tokens, none in the last of 13: 231 an epoch


def batches(index: Index, **changes: Any) -> TrainingBatches:
    settings: dict[str, Any] = {
        "sequence_length": T,
        "seed": 3,
        "shuffle_shards": 2,
        "global_batch": 12,
        "micro_batch": 1,
        "rank": 0,
        "world_size": 1,
        "prefetch": 0,
    }
    return TrainingBatches(index, "train", **{**settings, **changes})


def take(data: TrainingBatches, steps: int) -> list[Step]:
    with data:
        return [next(data) for _ in range(steps)]


def content(steps: list[Step]) -> list[tuple[int, list[list[int]], list[list[int]]]]:
    batches = [(step.position, step.micro_batches) for step in steps]
    return [
        (at, [m.samples.tolist() for m in micro], [m.tokens.flatten().tolist() for m in micro]) for at, micro in batches
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_ranks_share_the_global_batch(make_index: Make, corpus: bytes, world_size: int, micro_batch: int) -> None:
    index = make_index(corpus)
    order = Order([shard.tokens for shard in index.split("train").shards], T, 3, 2)
    ranks = [
        take(batches(index, global_batch=36, micro_batch=micro_batch, rank=rank, world_size=world_size), 9)
        for rank in range(world_size)
    ]
    for s in range(9):
        seen = []
        for rank, steps in enumerate(ranks):
            assert steps[s].position == (s + 1) * 36
            assert len(steps[s].micro_batches) == 36 // (micro_batch * world_size)
            for m, batch in enumerate(steps[s].micro_batches):
                first = s * 36 + (m * world_size + rank) * micro_batch
                assert batch.samples.tolist() == list(range(first, first + micro_batch))
                assert batch.tokens.shape == (micro_batch, T) and batch.tokens.dtype == torch.int64
                assert batch.position == (s + 1) * 36
                for sample, row in zip(batch.samples.tolist(), batch.tokens.tolist(), strict=True):
                    shard, sequence = order.locate(sample)
                    start = shard * 1000 + sequence * T
                    assert bytes(row) == corpus[start : start + T]
                seen += batch.samples.tolist()
        assert sorted(seen) == list(range(s * 36, s * 36 + 36))


def test_an_epoch_has_each_sequence_once_and_the_next_follows_inside_a_step(make_index: Make, corpus: bytes) -> None:
    data = batches(make_index(corpus), global_batch=10)
    assert (data.sequences_per_epoch, data.unused_tokens) == (231, 7013 - 231 * T)
    rows = [bytes(b.tokens.flatten().tolist()) for step in take(data, 47) for b in step.micro_batches]
    windows = {corpus[shard * 1000 + i * T :][:T] for shard in range(7) for i in range(33)}
    assert set(rows[:231]) == windows and set(rows[231:462]) == windows
    assert rows[:231] != rows[231:462]


def test_R3_another_number_of_ranks_in_mid_epoch_goes_on_where_the_last_stopped(
    make_index: Make, corpus: bytes
) -> None:
    index = make_index(corpus)
    position, rows = 0, {}
    for world_size, steps in [(2, 3), (1, 2), (4, 5), (3, 12)]:
        ranks = [take(batches(index, rank=r, world_size=world_size, start=position), steps) for r in range(world_size)]
        for step in (step for steps_of_rank in ranks for step in steps_of_rank):
            for batch in step.micro_batches:
                assert int(batch.samples) not in rows
                rows[int(batch.samples)] = batch.tokens
        position = ranks[0][-1].position
    whole = [b.tokens for step in take(batches(index), 22) for b in step.micro_batches]
    assert sorted(rows) == list(range(22 * 12))
    assert all(torch.equal(rows[i], whole[i]) for i in rows)


@pytest.mark.parametrize("prefetch", [1, 2, 7])
def test_R4_prefetch_changes_nothing(make_index: Make, corpus: bytes, prefetch: int) -> None:
    index = make_index(corpus)
    assert content(take(batches(index, prefetch=prefetch), 30)) == content(take(batches(index), 30))


def test_prefetch_hides_the_reading(make_index: Make, corpus: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    index, read = make_index(corpus), ShardReader.read

    def slow(*arguments: Any) -> torch.Tensor:
        time.sleep(0.01)
        return read(*arguments)

    monkeypatch.setattr(ShardReader, "read", slow)
    assert all(step.wait_seconds >= 0.12 for step in take(batches(index), 3))
    with batches(index, prefetch=2) as data:
        assert next(data).wait_seconds >= 0.12
        time.sleep(0.4)
        assert next(data).wait_seconds < 0.06


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_read_error_reaches_the_loop_each_time_it_asks(make_index: Make, corpus: bytes, prefetch: int) -> None:
    index = make_index(corpus)
    path = index.directory / "train-000002.tar"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with batches(index, prefetch=prefetch) as data:
        with pytest.raises(DataError, match=r"train-000002\.tar"):
            for _ in range(20):
                next(data)
        with pytest.raises(DataError, match=r"train-000002\.tar"):
            next(data)


@pytest.mark.parametrize("taken", [0, 1, 5])
@pytest.mark.parametrize("pause", [0.0, 0.3], ids=["while it reads", "while it waits for room"])
def test_close_ends_the_thread(make_index: Make, corpus: bytes, taken: int, pause: float) -> None:
    before = threading.active_count()
    data = batches(make_index(corpus), prefetch=2)
    for _ in range(taken):
        next(data)
    time.sleep(pause)
    closing = threading.Thread(target=data.close, daemon=True)
    closing.start()
    closing.join(5)
    assert threading.active_count() == before
    data.close()
    with pytest.raises(StopIteration):
        next(data)


def test_a_global_batch_that_does_not_divide_names_the_key_and_a_value(make_index: Make, corpus: bytes) -> None:
    with pytest.raises(ConfigError, match=r"training\.global_batch: 12 is not a multiple of .*2 × 4. Set it to (8|16)"):
        batches(make_index(corpus), micro_batch=2, world_size=4)
    with pytest.raises(ConfigError, match=r"Set it to 16,"):
        batches(make_index(corpus), micro_batch=16)


def test_a_sequence_longer_than_every_shard_names_the_key(make_index: Make, corpus: bytes) -> None:
    index = make_index(corpus)
    with pytest.raises(ConfigError, match=r"data\.sequence_length: 1001 tokens, .*\"train\".* at most 1000"):
        batches(index, sequence_length=1001)
    assert batches(index, sequence_length=1000).sequences_per_epoch == 7
