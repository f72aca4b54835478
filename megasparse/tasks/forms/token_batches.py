"""Micro-batches of about equally many tokens, of like length (Vaswani et al. 2017, section 5.1). N examples."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megasparse.data.batches import Batch, Step, Steps
from megasparse.data.order import permutation
from megasparse.errors import ConfigError, DataError
from megasparse.tasks.batches import Collate
from megasparse.tasks.forms.texts import EncodedText
from megasparse.training.ranks import Ranks

POOL = 8192
"""Number of examples that are sorted by length together."""
PACKS = 1
"""Key of the permutation of an epoch's packs, beside that of its examples."""


def sizes_of(examples: Sequence[EncodedText], most: int) -> np.ndarray:
    """Tokens of each source and target (N, 2). Raises DataError for an example that fits into no pack of `most`."""
    sizes = np.array([(len(x.source), 0 if x.target is None else len(x.target)) for x in examples], dtype=np.int64)
    if (too_long := np.flatnonzero(sizes.sum(1) > most)).size:
        example, tokens = examples[too_long[0]], sizes[too_long[0]].sum()
        problem = f"{tokens:,} tokens with its answer's are more than training.micro_batch = {most:,}"
        hint = f"Raise it to {sizes.sum(1).max()} or more, or lower task.max_length"
        raise DataError(str(example.location), problem, hint)
    return sizes


def packed(sizes: np.ndarray, most: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The numbers of the examples of each pack of an epoch: a pure function of the arguments, every example once.

    Examples in random order are sorted in pools, by their source's length, of equal ones by their target's; a pack
    takes the next ones as long as its padded sources and targets together are at most `most` tokens. Packs are then put
    in random order.
    """
    order = permutation(len(sizes), seed, epoch)
    packs: list[np.ndarray] = []
    for first in range(0, len(order), POOL):
        pool = order[first : first + POOL]
        pool = pool[np.lexsort((sizes[pool, 1], sizes[pool, 0]))]
        begin = longest_source = longest_target = 0
        for index, (source, target) in enumerate(sizes[pool].tolist()):
            longest_source, longest_target = max(longest_source, source), max(longest_target, target)
            if (index + 1 - begin) * (longest_source + longest_target) > most:
                packs.append(pool[begin:index])
                begin, longest_source, longest_target = index, source, target
        packs.append(pool[begin:])
    return [packs[i] for i in permutation(len(packs), seed, epoch, PACKS)]


class TokenBatches(Steps):
    """Endless iterator of `Step`s over examples in memory: the packs of one epoch follow those of another.

    A step takes the next global_batch/micro_batch packs whatever the number of ranks, of which rank r has every
    world_size-th from the r-th on. Its position counts examples, and each keeps the global sample number that its draws
    depend on.
    """

    def __init__(
        self,
        examples: Sequence[EncodedText],
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        ranks: Ranks,
        collate: Collate,
        start: int = 0,
    ):
        """Prepare the batches of a run. global_batch, micro_batch: in tokens, the first a multiple of the second times
        the ranks. start: a checkpoint's position.

        Raises DataError as `sizes_of` does, and ConfigError where other packs led to `start`.
        """
        assert global_batch % (micro_batch * ranks.world_size) == 0
        self.examples, self.seed, self.most = examples, seed, micro_batch
        self.packs_a_step, self.ranks, self.collate = global_batch // micro_batch, ranks, collate
        self.sizes, self.position = sizes_of(examples, micro_batch), start
        epoch, passed = divmod(start, len(examples))
        self._packs = self._from(epoch)
        while passed > 0:
            passed -= len(next(self._packs))
        if passed:
            problem = f"{micro_batch}, and the checkpoint's position ({start}) is the end of no batch of such a size"
            raise ConfigError("training.micro_batch", problem, "Put back the one that the run began with")

    def __next__(self) -> Step:
        found: list[tuple[np.ndarray, torch.Tensor]] = []
        for _ in range(self.packs_a_step):
            pack = next(self._packs)
            found.append((pack, torch.arange(self.position, self.position + len(pack))))
            self.position += len(pack)
        batches = [
            Batch(self.collate([self.examples[i] for i in pack]), samples, self.position)
            for pack, samples in found[self.ranks.rank :: self.ranks.world_size]
        ]
        return Step(batches, self.position, 0.0)

    def _from(self, epoch: int) -> Iterator[np.ndarray]:
        while True:
            yield from packed(self.sizes, self.most, self.seed, epoch)
            epoch += 1
