"""The inputs of an evaluation: a split of given tokens, and its protocol."""

from collections.abc import Sequence

import torch

from megasparse.evaluation.protocol import Protocol


class Stream:
    """A split as one run of tokens."""

    def __init__(self, tokens: Sequence[int] | torch.Tensor):
        self.values = torch.as_tensor(tokens).flatten()
        self.tokens = len(self.values)

    def read(self, start: int, stop: int) -> torch.Tensor:
        assert 0 <= start <= stop <= self.tokens
        return self.values[start:stop]


def protocol_with(tokenizer: str, **changed: object) -> Protocol:
    """The protocol of windows of 16 tokens; `changed`: its other values."""
    values = {"split": "test", "sequence_length": 16, "stride": 16, "score_from": 0, "rounds": 2, "seeds": [0]}
    values |= {"configured_rounds": {}, "checkpoint_step": 5, "record": None, "lossless": True, "data_settings": {}}
    values |= {"tokenizer": {"name": tokenizer, "sha256": "x"}, "split_bytes": None, "split_words": None}
    names = ("precision", "checkpoint", "data_fingerprint", "trained_on_fingerprint")
    return Protocol(**{**values, **dict.fromkeys(names, "x"), **changed})
