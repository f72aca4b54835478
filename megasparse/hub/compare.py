"""Two models on the same tokens, layer by layer. B batch, L length, S of them a source's, E d_model, V vocabulary."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasparse.attention.heads import Padding
from megasparse.config.schema import ModelConfig
from megasparse.model.build import Model
from megasparse.model.decoder import Causal
from megasparse.model.encoder_decoder import EncoderDecoder
from megasparse.model.padding import padding_of
from megasparse.ops.random import RngContext

TOLERANCE = 1e-4
"""Largest difference of any number of two models in fp32 that count as the same. Inside them it is a part of a layer's
largest number where that is above 1: pretrained decoders have some of thousands, whose last bits are more."""

LONGEST = 512
"""Tokens of a sequence on which they are compared; of a source and its target half of them each."""

Outputs = Iterator[tuple[str, Tensor]]


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
    a target alone, here a quarter of the last sequence's.
    """
    padding = config.padding_token
    if config.source is None or padding is None:
        return tokens
    tokens = tokens.where(tokens != padding, (padding + 1) % config.vocabulary)
    for side in sides(tokens, config):
        side[-1, side.shape[1] - side.shape[1] // 4 :] = padding
    return tokens


@torch.no_grad()
def our_outputs(model: Model, tokens: Tensor, seed: int) -> Outputs:
    """Outputs in evaluation, with the draws of a run's seed: "embedding" (B, L, E); "layer 0 attention" and "layer 0
    feed-forward", what each adds to its stream, (B, L, E); ...; "logits" (B, L, V). All fp32. Of an encoder–decoder
    the encoder's output comes first, behind "source"; each layer of its decoder has a "cross-attention", too.

    tokens: (B, L); a decoder's logits at t predict token t from those before it, an encoder reads them as they are.
    """
    rng, padding, source = RngContext.evaluation(seed, len(tokens)), Padding(), None
    with observed(model) as outputs:
        if isinstance(model, EncoderDecoder):
            before, tokens = sides(tokens, model.config)
            source, padding = model.encode(before, seed), padding_of(tokens, model.config)
        read = tokens[:, :-1] if isinstance(model, Causal) else tokens
        streams, _, _ = model.streams(read, rng, padding, source=source)
        yield from outputs
    yield "logits", model.logits(streams)


@contextmanager
def watched(modules: dict[str, nn.Module]) -> Iterator[list[tuple[str, Tensor]]]:
    """A list that gets the output of each module (of several, the first) in fp32, in the order of their calls."""
    outputs: list[tuple[str, Tensor]] = []

    def keep(name: str, module: Any, inputs: Any, output: Any) -> None:
        outputs.append((name, (output[0] if isinstance(output, tuple) else output).float()))

    handles = [module.register_forward_hook(partial(keep, name)) for name, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def watched_outputs(modules: dict[str, nn.Module], logits: Callable[[], Tensor]) -> Outputs:
    """What `watched` finds as `logits` runs, and what that returns."""
    with watched(modules) as found:
        last = logits()
    return iter([*found, ("logits", last)])


def observed(model: Any) -> AbstractContextManager[list[tuple[str, Tensor]]]:
    """A list that gets what `our_outputs` names, but the logits, as a model of ours (a bundled copy's, too) runs."""
    named: dict[str, nn.Module] = {}
    encoder = getattr(model, "encoder", None)
    for stack, prefix in ((encoder, "source "), (model, "")) if encoder is not None else ((model, ""),):
        named[f"{prefix}embedding"] = stack.embedding
        for number, block in enumerate(stack.layers):
            parts = {"attention": block.attention, "cross-attention": block.cross_attention}
            parts |= {"feed-forward": block.feed_forward}
            named |= {f"{prefix}layer {number} {part}": module for part, module in parts.items() if module is not None}
    if encoder is not None:
        named["source norm"] = encoder.norm
    return watched(named)


def first_difference(
    ours: Iterable[tuple[str, Tensor]], theirs: Iterable[tuple[str, Tensor]], tolerance: float = TOLERANCE
) -> tuple[str, float] | None:
    """The first layer whose outputs differ by more than `tolerance` anywhere, and by how much; None where none does.

    NaN differs from everything.
    """
    for (name, mine), (other, yours) in zip(ours, theirs, strict=True):
        assert name == other and mine.shape == yours.shape, (
            f"{name} {mine.shape} is compared with {other} {yours.shape}"
        )
        difference = float((mine.double() - yours.double()).abs().max())
        largest = 1.0 if name == "logits" else max(1.0, float(yours.abs().max()))
        if not difference <= tolerance * largest < torch.inf:
            return name, difference
    return None
