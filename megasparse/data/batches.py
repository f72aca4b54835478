"""This rank's micro-batches of each optimizer step, read ahead by a background thread.

With global batch GB, step s takes the global sample numbers [s·GB, (s+1)·GB); micro-batch m of rank r takes
[s·GB + (m·world_size + r)·micro_batch, + micro_batch). Every number of ranks therefore trains on the same batches.
Ranks that share sequences take the same numbers, and each reads its part of every sequence.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megasparse.data.index import Index
from megasparse.data.order import Mixture, Order
from megasparse.data.reader import ShardReader
from megasparse.data.urls import FetchAhead
from megasparse.errors import ConfigError
from megasparse.files import Progress, silent

MOST_OPEN_FILES = 256  # well under the usual limit of 1,024 per process
STEPS_AHEAD = 2
POLL_SECONDS = 0.1
CLOSE_SECONDS = 1.0


class WaitingStopped(Exception):
    """`stop_waiting` ended the wait for data that is slow to come. Nothing is lost: `next` may be called again."""


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    """Tokens, int64 (micro_batch, T)."""
    samples: Tensor
    """Global sample numbers, int64 (micro_batch,)."""


@dataclass(frozen=True)
class Step:
    """The micro-batches that one rank trains on in one optimizer step."""

    micro_batches: list[Batch]
    position: int
    """First global sample number of the next step, stored in checkpoints."""
    wait_seconds: float
    """Time that the training loop waited for this step's data."""


def check_shares(global_batch: int, micro_batch: int, ranks: int, sharing: int = 1) -> None:
    """Raise ConfigError, with possible numbers of ranks, if they cannot divide a global batch equally.

    sharing: ranks that take each sequence together.
    """
    share = micro_batch * ranks // sharing
    if global_batch % share == 0:
        return
    problem = f"{global_batch} is not a multiple of micro_batch × ranks = {micro_batch} × {ranks}"
    if sharing > 1:
        problem += f" / {sharing} (parallel.sequence)"
    hint = f"Set it to {max(1, round(global_batch / share)) * share}, or change micro_batch"
    if global_batch % micro_batch == 0:
        parts = global_batch // micro_batch
        possible = (str(number * sharing) for number in range(1, parts + 1) if parts % number == 0)
        hint += f", or run it on another number of ranks: {', '.join(possible)}"
    raise ConfigError("training.global_batch", problem, hint)


class Steps(Iterator[Step]):
    """Training data of one rank: an endless iterator of `Step`s, and a context manager that closes it."""

    def close(self) -> None:
        """End background threads and close files. May be called twice."""

    def __enter__(self) -> "Steps":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Sequences:
    """Sequences 0, 1, 2, ... of a split, epoch after epoch; each epoch contains every sequence once.

    part: (p, S): of each sequence read the p-th of S equal parts. progress: called while waiting for a shard of a
    remote folder. Raises ConfigError if every shard is shorter than data.sequence_length.
    """

    def __init__(
        self,
        index: Index,
        split: str,
        *,
        sequence_length: int,
        seed: int,
        shuffle_shards: int,
        open_files: int,
        part: tuple[int, int] = (0, 1),
        progress: Progress = silent,
    ):
        shard_tokens = [shard.tokens for shard in index.split(split).shards]
        self.order = Order(shard_tokens, sequence_length, seed, shuffle_shards)
        if self.order.sequences_per_epoch == 0:
            longest = max(shard_tokens)
            problem = f'{sequence_length} tokens, but the longest shard of "{split}" in {index.directory} has {longest}'
            raise ConfigError("data.sequence_length", problem, f"Set it to at most {longest}, or prepare more text")
        self.index = index
        self._length = sequence_length
        number, parts = part
        self._part = slice(number * sequence_length // parts, (number + 1) * sequence_length // parts)
        self._reader = ShardReader(index, split, open_files, progress)
        self._ahead = FetchAhead(index.cache, str(index.directory)) if index.cache else None
        self._group: tuple[int, int] | None = None

    def read(self, number: int) -> Tensor:
        """Return the tokens of (the part of) a sequence: int64 (length,). Raises DataError."""
        if self._ahead and self._group != (group := self.order.group_of(number)):
            self._group = group
            self._ahead.want([self._reader.shards[shard] for shard in self.order.shards_ahead(number)])
        shard, sequence = self.order.locate(number)
        begin = sequence * self._length
        return self._reader.read(shard, begin + self._part.start, begin + self._part.stop)

    def close(self) -> None:
        if self._ahead:
            self._ahead.close()
        self._reader.close()


class TrainingBatches(Steps):
    """Endless iterator of `Step`s over folders of shards. `next` raises the errors of the background thread.

    Args:
        folders: indices, each with its weight among the sequences; see `Sequences`.
        rank: number of this rank among the `world_size` ranks that read the same part of sequences.
        start: first global sample number, 0 or a checkpoint's position.
        stop_waiting: called every 0.1 s while `next` waits; if it returns True, `next` raises WaitingStopped.
        part: (p, S): S ranks share each sequence, and this one reads the p-th of S parts.
        alive: called with the progress of downloads while `next` waits for shards from a URL.

    Raises:
        ConfigError: training.global_batch or data.sequence_length does not fit the ranks or the data.
    """

    def __init__(  # noqa: PLR0913  (settings, by keyword)
        self,
        folders: Sequence[tuple[Index, float]],
        split: str,
        *,
        sequence_length: int,
        seed: int,
        shuffle_shards: int,
        global_batch: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        start: int = 0,
        stop_waiting: Callable[[], bool] = lambda: False,
        part: tuple[int, int] = (0, 1),
        alive: Progress = silent,
    ):
        assert 0 <= rank < world_size and start >= 0
        check_shares(global_batch, micro_batch, world_size * part[1], part[1])
        self.mixture = Mixture([weight for _, weight in folders], seed)
        self.corpora = [
            Sequences(
                index,
                split,
                sequence_length=sequence_length,
                seed=seed,
                shuffle_shards=shuffle_shards,
                open_files=max(1, min(shuffle_shards, MOST_OPEN_FILES // len(folders))),
                part=part,
                progress=self._fetching,
            )
            for index, _ in folders
        ]
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.rank = rank
        self.world_size = world_size
        self._stop_waiting = stop_waiting
        self._alive = alive
        self._signs = (0, "")  # of the background thread's downloads; replaced as one
        self._steps = self._read_steps(start)
        self._queue: queue.Queue[Step | BaseException] = queue.Queue(STEPS_AHEAD)
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._failure: BaseException | None = None

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences in an epoch of all folders."""
        return sum(corpus.order.sequences_per_epoch for corpus in self.corpora)

    @property
    def unused_tokens(self) -> int:
        """Tokens at the ends of shards, too few for a sequence."""
        return sum(corpus.order.unused_tokens for corpus in self.corpora)

    def __next__(self) -> Step:
        if self._failure is not None:
            raise self._failure
        if self._closing.is_set():
            raise StopIteration
        began = time.perf_counter()
        step = self._next_read_ahead()
        if isinstance(step, BaseException):
            self._failure = step
            raise step
        return replace(step, wait_seconds=time.perf_counter() - began)

    def _next_read_ahead(self) -> Step | BaseException:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_ahead, name="data", daemon=True)
            self._thread.start()
        reported = self._signs
        while True:
            try:
                return self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self._signs != reported:
                    reported = self._signs
                    self._alive(reported[1])
                if self._stop_waiting():
                    raise WaitingStopped from None

    def _fetching(self, doing: str) -> None:
        """Report progress of a shard that comes from a URL; called by the background thread."""
        if self._closing.is_set():
            raise WaitingStopped
        self._signs = (self._signs[0] + 1, doing)

    def _read_ahead(self) -> None:
        item: Step | BaseException | None = None
        while not self._closing.is_set() and not isinstance(item, BaseException):
            try:
                item = next(self._steps)
            except BaseException as error:  # the training loop must receive it instead of waiting for ever
                item = error
            while not self._closing.is_set():
                try:
                    self._queue.put(item, timeout=POLL_SECONDS)
                    break
                except queue.Full:
                    continue

    def _read_steps(self, position: int) -> Iterator[Step]:
        micro_batches = self.global_batch // (self.micro_batch * self.world_size)
        while True:
            after = position + self.global_batch
            firsts = [position + (m * self.world_size + self.rank) * self.micro_batch for m in range(micro_batches)]
            yield Step([self._read_micro_batch(first) for first in firsts], after, 0.0)
            position = after

    def _read_micro_batch(self, first: int) -> Batch:
        samples = range(first, first + self.micro_batch)
        rows = [self.corpora[corpus].read(number) for corpus, number in map(self.mixture.locate, samples)]
        return Batch(torch.stack(rows), torch.tensor(samples))

    def close(self) -> None:
        """End the background thread and close the shards. May be called twice.

        A thread stuck in a read (from a dead file server) is abandoned after 1 s, with its open files.
        """
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                return
            self._thread = None
        for corpus in self.corpora:
            corpus.close()
