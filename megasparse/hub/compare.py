"""Two models on the same tokens, layer by layer. B batch, L length, E d_model, V vocabulary."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megasparse.attention.heads import Padding
from megasparse.model.build import Model
from megasparse.model.decoder import Causal
from megasparse.ops.random import Draws

TOLERANCE = 1e-4
"""Largest difference of any number of two models in fp32 that count as the same."""

Outputs = Iterator[tuple[str, Tensor]]


@torch.no_grad()
def our_outputs(model: Model, tokens: Tensor, seed: int) -> Outputs:
    """In evaluation, with the draws of a run's seed: "embedding" (B, L, E); "layer 0 attention" and "layer 0
    feed-forward", what each adds to its stream, (B, L, E); ...; "logits" (B, L, V). All fp32.

    tokens: (B, L); a decoder's logits at t tell token t from those before it, an encoder reads the tokens as they are.
    """
    with observed(model) as outputs:
        read = tokens[:, :-1] if isinstance(model, Causal) else tokens
        streams, _, _ = model.streams(read, Draws.evaluation(seed, len(tokens)), Padding())
        yield from outputs
    yield "logits", model.logits(streams)


@contextmanager
def observed(model: Any) -> Iterator[list[tuple[str, Tensor]]]:
    """A list that gets what `our_outputs` names, but the logits, as a model of ours (a bundled copy's, too) runs."""
    outputs: list[tuple[str, Tensor]] = []

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            outputs.append((name, output[0] if isinstance(output, tuple) else output))

        return hook

    handles = [model.embedding.register_forward_hook(keep("embedding"))]
    for number, block in enumerate(model.layers):
        handles.append(block.attention.register_forward_hook(keep(f"layer {number} attention")))
        handles.append(block.feed_forward.register_forward_hook(keep(f"layer {number} feed-forward")))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


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
        if not difference <= tolerance:
            return name, difference
    return None
