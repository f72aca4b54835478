"""Read tokens of the shards of a split by position."""

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from megasparse.data.index import Index
from megasparse.data.shard_file import ShardFile
from megasparse.files import Progress, silent

if TYPE_CHECKING:
    from torch import Tensor


class ShardReader:
    """Reads any range of tokens of any shard of a split; keeps the `open_files` shards last used open."""

    def __init__(self, index: Index, split: str, open_files: int = 16, progress: Progress = silent):
        self.index = index
        self.shards = index.split(split).shards
        self.open_files = open_files
        self._progress = progress
        self._open: OrderedDict[int, ShardFile] = OrderedDict()

    def read(self, shard: int, start: int, stop: int) -> "Tensor":
        """Return tokens start..stop of a shard by its number, see `ShardFile.read`."""
        if shard not in self._open:
            while len(self._open) >= self.open_files:
                self._open.popitem(last=False)[1].close()
            self._open[shard] = self.index.open(self.shards[shard], self._progress)
        self._open.move_to_end(shard)
        return self._open[shard].read(start, stop)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


class EvaluationStream:
    """A split as one stream of tokens, contiguous across its shards, for evaluation. `tokens`: its length."""

    def __init__(self, index: Index, split: str, progress: Progress = silent):
        self.tokens = index.split(split).tokens
        self._reader = ShardReader(index, split, open_files=2, progress=progress)
        counts = np.asarray([shard.tokens for shard in self._reader.shards], dtype=np.int64)
        self._stops = np.cumsum(counts)
        self._starts = self._stops - counts

    def read(self, start: int, stop: int) -> "Tensor":
        """Return tokens start..stop of the split: int64 (stop - start,). 0 <= start <= stop <= tokens."""
        import torch

        assert 0 <= start <= stop <= self.tokens, (start, stop, self.tokens)
        if start == stop:
            return torch.empty(0, dtype=torch.long)
        first = int(np.searchsorted(self._stops, start, side="right"))
        last = int(np.searchsorted(self._starts, stop, side="left"))
        pieces = []
        for shard in range(first, last):
            begin, end = int(self._starts[shard]), int(self._stops[shard])
            pieces.append(self._reader.read(shard, max(start, begin) - begin, min(stop, end) - begin))
        return torch.cat(pieces)

    def close(self) -> None:
        self._reader.close()
