"""The sequences of one folder of shards by their number, the damaged ones replaced."""

from torch import Tensor

from megasparse.callbacks import Progress, silent
from megasparse.data.damage import Damage, DamagedSample
from megasparse.data.index import Index
from megasparse.data.index_file import AGAIN
from megasparse.data.order import Order
from megasparse.data.reader import ShardReader
from megasparse.data.remote import FetchAhead
from megasparse.errors import ConfigError, DataError


class Sequences:
    """Sequences 0, 1, 2, ... of a split: epochs follow each other, in each every sequence comes exactly once.

    `max_damaged`: part of the split's samples that may be damaged; with 0 the first one is an error. `damage` counts
    them. `open_files`: shards kept open. `part` (p, S): of each sequence read the p-th of S equal parts. Of a remote
    folder the next shards of the order are fetched ahead, and `progress` is called while one must be waited for.

    Raises ConfigError naming data.sequence_length when no shard has one.
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
        max_damaged: float = 0.0,
        part: tuple[int, int] = (0, 1),
        progress: Progress = silent,
    ):
        shard_tokens = [shard.tokens for shard in index.split(split).shards]
        self.order = Order(shard_tokens, sequence_length, seed, shuffle_shards)
        if self.order.sequences_per_epoch == 0:
            longest = max(shard_tokens)
            problem = f'{sequence_length} tokens, but the longest shard of "{split}" in {index.directory} has {longest}'
            hint = f"Set it to at most {longest}, or prepare more text"
            raise ConfigError("data.sequence_length", problem, hint)
        self.index = index
        self.damage = Damage(index, split, max_damaged)
        self._length = sequence_length
        place, parts = part
        self._part = slice(place * sequence_length // parts, (place + 1) * sequence_length // parts)
        self._split = split
        self._reader = ShardReader(index, split, open_files, self.damage if max_damaged > 0 else None, progress)
        self._ahead = FetchAhead(index.remote) if index.remote else None
        self._group: tuple[int, int] | None = None

    def read(self, number: int) -> tuple[Tensor, bool]:
        """Tokens of (the part of) a sequence, int64, and whether they replace damaged ones. Raises DataError."""
        if self._ahead and self._group != (group := self.order.group_of(number)):
            self._group = group
            self._ahead.want([self._reader.shards[shard] for shard in self.order.shards_ahead(number)])
        try:
            return self._read_window(*self.order.locate(number)), False
        except DamagedSample:
            pass
        for place in self.order.substitutes(number, self._reader.is_lost):
            try:
                return self._read_window(*place), True
            except DamagedSample:
                continue
        raise DataError(self.index.directory, f'no sequence of "{self._split}" is undamaged', AGAIN)

    def _read_window(self, shard: int, sequence: int) -> Tensor:
        begin = sequence * self._length
        if self.damage.limit > 0:  # damage of any part must make all ranks take the same other sequence
            return self._reader.read(shard, begin, begin + self._length)[self._part]
        return self._reader.read(shard, begin + self._part.start, begin + self._part.stop)

    def close(self) -> None:
        if self._ahead:
            self._ahead.close()
        self._reader.close()
