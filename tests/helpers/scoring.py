"""The inputs of an evaluation: a split of given tokens, and its protocol."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megasparse.config.schema import Config
from megasparse.evaluation.results import Protocol
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from tests.helpers.hub import write_model


class Stream:
    """A split as one run of tokens."""

    def __init__(self, tokens: Sequence[int] | torch.Tensor):
        self.values = torch.as_tensor(tokens).flatten()
        self.tokens = len(self.values)

    def read(self, start: int, stop: int) -> torch.Tensor:
        assert 0 <= start <= stop <= self.tokens
        return self.values[start:stop]


def likeliest(model: Any, tokens: Sequence[int], ids: Sequence[int] = range(256)) -> int:
    """The likeliest of those next tokens, by a pass over the whole sequence with each."""
    rows = torch.tensor([[*tokens, token] for token in ids])
    return ids[int(model.token_scores(rows, RngContext.evaluation(0, len(rows))).nats[:, -1].argmin())]


def write_uniform(config: Config, run: Path) -> None:
    """A checkpoint of a model that predicts every token alike: its output weights are all 0."""
    model = build_model(config.model, 0)
    for name, weight in model.named_parameters():
        weight.data *= not name.startswith("head.")
    write_model(config, model, run)


def protocol_with(tokenizer: str, **changed: object) -> Protocol:
    """The protocol of windows of 16 tokens; `changed`: its other values."""
    values = {"split": "test", "sequence_length": 16, "stride": 16, "score_from": 0, "rounds": 2, "seeds": [0]}
    values |= {"configured_rounds": {}, "checkpoint_step": 5, "record": None, "lossless": True, "data_settings": {}}
    values |= {"tokenizer": {"name": tokenizer, "sha256": "x"}, "split_bytes": None, "split_words": None}
    names = ("precision", "checkpoint", "data_fingerprint", "trained_on_fingerprint")
    return Protocol(**{**values, **dict.fromkeys(names, "x"), **changed})
