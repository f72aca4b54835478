"""The corpus that the i-th sequence is from, and its number there: a pure function of (weights, seed, i).

The global sample numbers are cut into blocks. After each whole block every one of K corpora has had its weight's part
of all numbers so far, to within (K − 1) / 2 of them; inside a block, which number is whose is permuted.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from megasparse.data.order import MIXTURE, permutation

BLOCK = 1024


class Mixture:
    """Deals the global sample numbers 0, 1, 2, ... out to corpora, in proportion to their weights.

    Each corpus gets numbers 0, 1, 2, ... of its own, each once and in order.
    """

    def __init__(self, weights: Sequence[float], seed: int):
        exact = [Fraction(weight) for weight in weights]
        self._shares = [weight / sum(exact[i:]) for i, weight in enumerate(exact)]  # of what those before leave over
        self._seed = seed
        self._block: tuple[int, np.ndarray, np.ndarray] | None = None

    def counts(self, blocks: int) -> list[int]:
        """How many sequences of each corpus the first `blocks` blocks have.

        Each in turn takes its share, rounded, of what is left over. So, unlike with parts of the whole that are rounded
        each by itself, the sum is exact, and no count ever falls.
        """
        left, counts = blocks * BLOCK, []
        for share in self._shares:
            counts.append(int(share * left + Fraction(1, 2)))
            left -= counts[-1]
        return counts

    def locate(self, sample: int) -> tuple[int, int]:
        """(corpus, sample number in that corpus) of global sample number `sample`."""
        block, place = divmod(sample, BLOCK)
        if self._block is None or self._block[0] != block:
            self._block = (block, *self._deal(block))
        _, corpora, numbers = self._block
        return int(corpora[place]), int(numbers[place])

    def _deal(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The corpus of each place of a block, and its number there: int64 (BLOCK,) each."""
        before, after = self.counts(block), self.counts(block + 1)
        quotas = np.subtract(after, before)
        corpora = np.repeat(np.arange(len(quotas)), quotas)[permutation(BLOCK, self._seed, block, MIXTURE)]
        numbers = np.empty(BLOCK, dtype=np.int64)
        for corpus, first in enumerate(before):
            numbers[corpora == corpus] = first + np.arange(quotas[corpus])
        return corpora, numbers
