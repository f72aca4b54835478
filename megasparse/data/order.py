"""The order of sequences: a pure function of (seed, epoch, index), computed when it is asked for.

A sequence is a window of T tokens inside one shard; the remaining tokens at the end of a shard are not used
(`unused_tokens`). In each epoch the shards are permuted and divided into groups, and the sequences of each group are
permuted: a run keeps few shards open, and one group's permutation in memory.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

SHARDS, SEQUENCES, MIXTURE = 0, 1, 2  # purposes of permutations, which must not share random numbers


def permutation(n: int, seed: int, *key: int) -> np.ndarray:
    """Return a permutation of range(n), int64 (n,), a pure function of its arguments in every version of numpy.

    It sorts raw Philox words, which numpy keeps stable across versions, unlike `Generator.permutation`.
    """
    return np.argsort(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)).random_raw(n), kind="stable")


class Order:
    """The endless order of global sample numbers 0, 1, 2, ...: epoch = number // sequences_per_epoch.

    shard_tokens: tokens in each shard. group: shards whose sequences are mixed with each other.
    """

    def __init__(self, shard_tokens: Sequence[int], sequence_length: int, seed: int, group: int):
        self.sequences = np.asarray(shard_tokens, dtype=np.int64) // sequence_length  # of each shard
        self.sequences_per_epoch = int(self.sequences.sum())
        self.unused_tokens = int(sum(shard_tokens)) - self.sequences_per_epoch * sequence_length
        self.seed = seed
        self.group = group
        self._shards = lru_cache(maxsize=1)(self._permute_shards)
        self._mix = lru_cache(maxsize=1)(self._permute_group)

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (shard number, sequence number inside the shard) of global sample number `sample`."""
        epoch, group = self.group_of(sample)
        members = self._members(epoch, group)
        starts, mixed = self._mix(epoch, group)
        sequence = mixed[sample % self.sequences_per_epoch - self._shards(epoch)[1][group]]
        member = int(np.searchsorted(starts, sequence, side="right")) - 1
        return int(members[member]), int(sequence - starts[member])

    def group_of(self, sample: int) -> tuple[int, int]:
        """Return (epoch, number of the group of shards in it) of global sample number `sample`."""
        epoch, position = divmod(sample, self.sequences_per_epoch)
        return epoch, int(np.searchsorted(self._shards(epoch)[1], position, side="right")) - 1

    def shards_ahead(self, sample: int) -> list[int]:
        """Return the shards of the sample's group and of the next group, each once, in the order of reading."""
        epoch, group = self.group_of(sample)
        current = self._members(epoch, group)
        end = epoch * self.sequences_per_epoch + int(self._shards(epoch)[1][group] + self.sequences[current].sum())
        following = self._members(*self.group_of(end))
        return [shard for shard in dict.fromkeys([*current.tolist(), *following.tolist()]) if self.sequences[shard]]

    def _members(self, epoch: int, group: int) -> np.ndarray:
        return self._shards(epoch)[0][group * self.group : (group + 1) * self.group]

    def _permute_shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards in the order of an epoch, and the first sequence of each group."""
        shards = permutation(len(self.sequences), self.seed, epoch, SHARDS)
        return shards, _starts(self.sequences[shards])[:: self.group]

    def _permute_group(self, epoch: int, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first sequence of each shard of the group, and the group's permutation."""
        counts = self.sequences[self._members(epoch, group)]
        return _starts(counts), permutation(int(counts.sum()), self.seed, epoch, SEQUENCES, group)


def _starts(counts: np.ndarray) -> np.ndarray:
    """Return the first positions of consecutive runs of these lengths."""
    return np.cumsum(counts) - counts


MIXTURE_BLOCK = 1024
"""Global sample numbers that are dealt out to the corpora together."""


class Mixture:
    """Deals the global sample numbers 0, 1, 2, ... out to corpora, in proportion to their weights.

    Each corpus receives its sample numbers 0, 1, 2, ... once and in order.
    """

    def __init__(self, weights: Sequence[float], seed: int):
        exact = [Fraction(weight) for weight in weights]
        self._shares = [weight / sum(exact[i:]) for i, weight in enumerate(exact)]  # of the remainder
        self._seed = seed
        self._block = lru_cache(maxsize=1)(self._deal)

    def counts(self, blocks: int) -> list[int]:
        """Return the number of sequences of each corpus in the first `blocks` blocks.

        Each in turn takes its rounded share of the remainder, so that the sum is exact and no count ever falls.
        """
        remaining, counts = blocks * MIXTURE_BLOCK, []
        for share in self._shares:
            counts.append(int(share * remaining + Fraction(1, 2)))
            remaining -= counts[-1]
        return counts

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (corpus, sample number in that corpus) of global sample number `sample`."""
        block, position = divmod(sample, MIXTURE_BLOCK)
        corpora, numbers = self._block(block)
        return int(corpora[position]), int(numbers[position])

    def _deal(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus of each position of a block, and its number there: int64 (MIXTURE_BLOCK,) each."""
        before, after = self.counts(block), self.counts(block + 1)
        quotas = np.subtract(after, before)
        corpora = np.repeat(np.arange(len(quotas)), quotas)[permutation(MIXTURE_BLOCK, self._seed, block, MIXTURE)]
        numbers = np.empty(MIXTURE_BLOCK, dtype=np.int64)
        for corpus, first in enumerate(before):
            numbers[corpora == corpus] = first + np.arange(quotas[corpus])
        return corpora, numbers
