import os
import threading
from typing import Any

import pytest
import torch

from megasparse.data.batches import Step, TrainingBatches, WaitingStopped
from megasparse.data.index import Index
from megasparse.data.order import Order
from megasparse.errors import ConfigError, DataError
from tests.data.folders import batches as mixed
from tests.data.folders import do, flip, rows, take, wait_until
from tests.helpers.cases import together
from tests.helpers.commands import refusal

T = 30  # 33 sequences in each of seven shards of 1,000 tokens, none in the last of 13: 231 an epoch


def batches(index: Index, **changes: Any) -> TrainingBatches:
    return mixed([(index, 1.0)], **changes)


def content(steps: list[Step]) -> list[tuple[int, list[tuple[int, list[int]]]]]:
    return [(step.position, list(rows([step]).items())) for step in steps]


@together("world_size", [1, 2, 3, 4])
@together("micro_batch", [1, 3])
def test_ranks_share_the_global_batch(index, corpus, world_size, micro_batch):
    order = Order([shard.tokens for shard in index.split("train").shards], T, 3, 2)
    way = {"global_batch": 36, "micro_batch": micro_batch, "world_size": world_size}
    ranks = [take(batches(index, rank=rank, **way), 9) for rank in range(world_size)]
    for s in range(9):
        seen = []
        for rank, steps in enumerate(ranks):
            assert steps[s].position == (s + 1) * 36
            assert len(steps[s].micro_batches) == 36 // (micro_batch * world_size)
            for m, batch in enumerate(steps[s].micro_batches):
                first = s * 36 + (m * world_size + rank) * micro_batch
                assert batch.samples.tolist() == list(range(first, first + micro_batch))
                assert batch.tokens.shape == (micro_batch, T) and batch.tokens.dtype == torch.int64
                for sample, row in zip(batch.samples.tolist(), batch.tokens.tolist(), strict=True):
                    shard, sequence = order.locate(sample)
                    start = shard * 1000 + sequence * T
                    assert bytes(row) == corpus[start : start + T]
                seen += batch.samples.tolist()
        assert sorted(seen) == list(range(s * 36, s * 36 + 36))


def test_an_epoch_has_each_sequence_once_and_the_next_follows_inside_a_step(index, corpus):
    data = batches(index, global_batch=10)
    assert (data.sequences_per_epoch, data.unused_tokens) == (231, 7013 - 231 * T)
    found = [bytes(row) for row in rows(take(data, 47)).values()]
    windows = {corpus[shard * 1000 + i * T :][:T] for shard in range(7) for i in range(33)}
    assert set(found[:231]) == windows and set(found[231:462]) == windows
    assert found[:231] != found[231:462]


@pytest.mark.parametrize("micro_batches", [(1, 1, 1), (1, 3, 7), (7, 2, 3)])
def test_from_two_ranks_to_one_and_back_inside_an_epoch(index, micro_batches):
    """231 sequences in 5.5 steps of 42: the epoch ends inside a step."""
    order = Order([1000] * 7 + [13], T, 3, 2)
    position, global_batches, consumed = 0, [], []
    for (world_size, steps), micro_batch in zip([(2, 2), (1, 2), (2, 2)], micro_batches, strict=True):
        way = {"global_batch": 42, "micro_batch": micro_batch, "world_size": world_size, "start": position}
        ranks = [take(batches(index, rank=r, **way), steps) for r in range(world_size)]
        for s in range(steps):
            global_batches.append(rows(rank[s] for rank in ranks))
            consumed += [order.locate(i) for i in global_batches[-1] if i < 231]
        position += 42 * steps
    assert [sorted(batch) for batch in global_batches] == [list(range(s * 42, s * 42 + 42)) for s in range(6)]
    assert sorted(consumed) == [(shard, i) for shard in range(7) for i in range(33)]
    assert global_batches == [rows([step]) for step in take(batches(index, global_batch=42), 6)]


def test_steps_are_read_ahead_while_the_loop_computes(index):
    with batches(index) as data:
        next(data)
        wait_until(data._queue.full)


def test_a_read_error_reaches_the_loop_each_time_it_asks(index):
    do(flip(-1), index.directory / "train-000002.tar")
    with batches(index) as data:
        with pytest.raises(DataError, match=r"train-000002\.tar"):
            for _ in range(20):
                next(data)
        refusal(lambda: next(data), match=r"train-000002\.tar")


@pytest.mark.parametrize("taken,full", [(0, False), (5, False), (5, True)], ids=str)
def test_close_ends_the_thread(index, taken, full):
    before = threading.active_count()
    data = batches(index)
    for _ in range(taken):
        next(data)
    if full:  # the thread waits for room
        wait_until(data._queue.full)
    closing = threading.Thread(target=data.close, daemon=True)
    closing.start()
    closing.join(60)
    assert threading.active_count() == before
    data.close()
    with pytest.raises(StopIteration):
        next(data)


def test_a_global_batch_that_does_not_divide_names_the_key_and_a_value(make_index, corpus):
    refused = r"training\.global_batch: 12 is not a multiple of .*2 × 4. Set it to (8|16), .* of ranks: 1, 2, 3, 6$"
    refusal(lambda: batches(make_index(corpus), micro_batch=2, world_size=4), ConfigError, refused)
    refusal(lambda: batches(make_index(corpus), micro_batch=16), ConfigError, r"Set it to 16, or change micro_batch$")
    shared = r"micro_batch × ranks = 2 × 16 / 2 \(parallel.sequence\)\. Set it to 16, .* of ranks: 2, 4, 6, 12$"
    refusal(lambda: batches(make_index(corpus), micro_batch=2, world_size=8, part=(0, 2)), ConfigError, shared)


def test_a_sequence_longer_than_every_shard_names_the_key(index):
    with pytest.raises(ConfigError, match=r"data\.sequence_length: 1001 tokens, .*\"train\".* at most 1000"):
        batches(index, sequence_length=1001)
    assert batches(index, sequence_length=1000).sequences_per_epoch == 7


# Reads that take their time
class Slow:
    """Holds up every read of a shard until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.go = threading.Event()
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda *arguments: self.go.wait(60) and preadv(*arguments))


def test_waiting_for_slow_data_can_be_stopped_and_nothing_is_lost(index, monkeypatch):
    want = content(take(batches(index), 5))
    slow, asked = Slow(monkeypatch), threading.Event()
    with batches(index, stop_waiting=asked.is_set) as data:
        threading.Timer(0.3, asked.set).start()
        for _ in range(3):
            with pytest.raises(WaitingStopped):
                next(data)
            assert asked.is_set()
        slow.go.set()
        wait_until(data._queue.full)
        assert content([next(data)]) == want[:1]  # what is there is given, whatever is asked
        asked.clear()
        assert content([next(data) for _ in range(4)]) == want[1:]


def test_close_does_not_wait_for_a_read_that_never_returns(index, monkeypatch):
    slow = Slow(monkeypatch)
    data = batches(index, stop_waiting=lambda: True)
    with pytest.raises(WaitingStopped):
        next(data)
    data.close()
    assert not slow.go.is_set() and data.corpora[0]._reader._open  # the thread may still use its files
    slow.go.set()
    data._thread.join(60)
    data.close()
    assert not data.corpora[0]._reader._open
