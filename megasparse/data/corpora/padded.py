"""The common part of encoders of padded records of text."""

from collections.abc import Sequence

import numpy as np

from megasparse.data.text_encoder import TextEncoder, width_for
from megasparse.errors import ConfigError


class PaddedEncoder(TextEncoder):
    """Text with special tokens between, before and behind. Raises ConfigError for a tokenizer that has none."""

    record: int

    def __init__(self, tokenizer: str):
        super().__init__(tokenizer)
        special = self.tokenizer.special
        if special is None:
            problem = f'the tokenizer "{tokenizer}" has no special tokens for beginning, separator, padding and mask'
            raise ConfigError("--tokenizer", problem, "Take one that has, such as bytes or tokenizers/bert.json")
        self.special = special
        self.width = width_for(max(self.tokenizer.vocabulary - 1, *special))

    def ids(self, text: str) -> np.ndarray:
        """The tokens of a text, (n,)."""
        return self.tokenizer.encode(text).numpy()

    def padded(self, parts: Sequence[np.ndarray | int], length: int) -> np.ndarray:
        """Parts of a record one after another and padding, (length,) of the encoder's width."""
        tokens = np.concatenate([np.atleast_1d(part) for part in parts])
        record = np.full(length, self.special.padding, dtype=f"<u{self.width}")
        record[: len(tokens)] = tokens
        return record

    def joined(self, records: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype=f"<u{self.width}"), *records])
