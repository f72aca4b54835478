"""Our model and Hugging Face's on the same tokens. B batch, L length, S of them a source's, V vocabulary."""

import torch
from torch import Tensor

from megasparse.attention.heads import Padding
from megasparse.config.schema import ModelConfig
from megasparse.model.build import Model
from megasparse.model.decoder import Causal, EncoderDecoder
from megasparse.model.stack import padding_of
from megasparse.ops.random import RngContext

TOLERANCE = 1e-4
"""Largest difference of the logits of two models in fp32 that count as the same."""
LONGEST = 512
"""Tokens of a sequence on which they are compared; of a source and its target half of them each."""


def compared_length(config: ModelConfig) -> int:
    """Tokens of a sequence that both models read."""
    if config.source is None:
        return min(config.max_length, LONGEST)
    return min(config.source.length, LONGEST // 2) + min(config.max_length, LONGEST // 2)


def sides(tokens: Tensor, config: ModelConfig) -> list[Tensor]:
    """Source (B, S) and target (B, L − S) of an encoder–decoder's sequences of `compared_length`."""
    assert config.source is not None
    return list(tokens.tensor_split([min(config.source.length, LONGEST // 2)], dim=1))


def padded(tokens: Tensor, config: ModelConfig) -> Tensor:
    """Tokens (B, L) as they are in the model's data: an encoder–decoder's padding stands at the end of a source and of
    a target only, here a quarter of the last sequence's.
    """
    padding = config.padding_token
    if config.source is None or padding is None:
        return tokens
    tokens = tokens.where(tokens != padding, (padding + 1) % config.vocabulary)
    for side in sides(tokens, config):
        side[-1, side.shape[1] - side.shape[1] // 4 :] = padding
    return tokens


@torch.no_grad()
def our_logits(model: Model, tokens: Tensor, seed: int) -> Tensor:
    """Return the logits (B, L, V) in evaluation, with the draws of a run's seed; of an encoder–decoder its target's.

    tokens: (B, L); a decoder's logits at t predict token t from those before it, an encoder reads them as they are.
    """
    rng, padding, source = RngContext.evaluation(seed, len(tokens)), Padding(), None
    if isinstance(model, EncoderDecoder):
        before, tokens = sides(tokens, model.config)
        source, padding = model.encode(before, seed), padding_of(tokens, model.config)
    read = tokens[:, :-1] if isinstance(model, Causal) else tokens
    streams, _, _ = model.streams(read, rng, padding, source=source)
    return model.logits(streams)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two models' logits; infinite where one is not a number."""
    assert ours.shape == theirs.shape, f"{ours.shape} is compared with {theirs.shape}"
    largest = float((ours.double() - theirs.double()).abs().max())
    return largest if largest < torch.inf else torch.inf
