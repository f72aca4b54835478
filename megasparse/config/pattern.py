"""The attention of each layer, read from `model.attention.pattern`."""

from typing import get_args

from megasparse.config.attention import AttentionKind
from megasparse.config.schema import ModelConfig


def heads_of_layer(model: ModelConfig, layer: int) -> dict[str, int]:
    """The mechanisms of a layer and how many heads each has, the first heads first.

    In the order of AttentionKind, whatever the file's: keys of a JSON object have none, and checkpoints sort them.
    """
    entry = model.attention.pattern[layer % len(model.attention.pattern)]
    if isinstance(entry, str):
        return {entry: model.heads}
    return {kind: entry[kind] for kind in get_args(AttentionKind) if kind in entry}


def layers_with(model: ModelConfig, kind: str) -> int:
    """Number of layers that have heads of this kind."""
    return sum(kind in heads_of_layer(model, layer) for layer in range(model.layers))


WITHOUT_WEIGHTS = ("lsh", "smyrf")
"""Softmax attention inside what hashing alone finds: full attention has the very same weights. The others of the kind
train hashes or a sketch of their own, which full attention would leave untrained."""


def attends_fully(model: ModelConfig, kind: str) -> bool:
    """Whether full attention takes the place of this kind, by `model.attention.full_below`."""
    full_below = model.attention.full_below
    return kind in WITHOUT_WEIGHTS and full_below is not None and model.max_length < full_below


def kinds(model: ModelConfig) -> list[str]:
    """The mechanisms of a model, each once, in the order of their first layers."""
    layers = range(min(model.layers, len(model.attention.pattern)))
    return list(dict.fromkeys(kind for layer in layers for kind in heads_of_layer(model, layer)))


def evaluation_rounds(model: ModelConfig) -> dict[str, int]:
    """Hash rounds (YOSO: hashes) in evaluation, of each of a model's mechanisms that has any."""
    lsh, smyrf, yoso = model.attention.lsh, model.attention.smyrf, model.attention.yoso
    rounds = {
        "lsh": lsh.evaluation_rounds or lsh.rounds,
        "smyrf": smyrf.evaluation_rounds or smyrf.rounds,
        "yoso": yoso.evaluation_hashes or yoso.hashes,
    }
    return {kind: rounds[kind] for kind in kinds(model) if kind in rounds}
