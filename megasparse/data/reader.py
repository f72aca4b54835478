"""Read tokens of the shards of a split by position."""

from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate

import torch
from torch import Tensor

from megasparse.data.index import Index
from megasparse.data.shard_file import ShardFile
from megasparse.files import Progress, silent


class ShardReader:
    """Reads any range of tokens of any shard of a split; keeps the `open_files` shards last used open."""

    def __init__(self, index: Index, split: str, open_files: int = 16, progress: Progress = silent):
        self.index = index
        self.shards = index.split(split).shards
        self.open_files = open_files
        self._progress = progress
        self._open: OrderedDict[int, ShardFile] = OrderedDict()

    def read(self, shard: int, start: int, stop: int) -> Tensor:
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
        self._borders = [*accumulate((shard.tokens for shard in self._reader.shards), initial=0)]

    def read(self, start: int, stop: int) -> Tensor:
        """Return tokens start..stop of the split: int64 (stop - start,). 0 <= start <= stop <= tokens."""
        assert 0 <= start <= stop <= self.tokens, (start, stop, self.tokens)
        pieces = [torch.empty(0, dtype=torch.long)]
        shard = bisect_right(self._borders, start) - 1
        while start < stop:
            begin, end = self._borders[shard : shard + 2]
            pieces.append(self._reader.read(shard, start - begin, min(stop, end) - begin))
            start, shard = end, shard + 1
        return torch.cat(pieces)

    def close(self) -> None:
        self._reader.close()
