"""Causal models, which predict every token from those before it: whole sequences or one cached token at a time.

B batch, L length, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megasparse.attention.heads import Padding
from megasparse.attention.sequence_part import WHOLE, DecodingPart, SequencePart
from megasparse.model.block import Pass
from megasparse.model.stack import Transformer
from megasparse.ops.random import RngContext


@dataclass
class DecodingCache:
    """State of cached decoding: each layer's cache, the number of positions in it, what its draws depend on, and which
    of the heads it has.
    """

    layers: list[Any]
    position: int
    rng: RngContext
    part: SequencePart = WHOLE

    def select(self, rows: Tensor) -> None:
        """Becomes the cache of sequences `rows`, (n,) int64 indices into the batch. Each keeps its draws."""
        if rows.tolist() == list(range(len(self.rng.samples))):
            return
        for layer in self.layers:
            for cache in layer.values():
                cache.select(rows)
        self.rng = replace(self.rng, samples=self.rng.samples[rows.to(self.rng.samples.device)])


class Causal(Transformer):
    """Predicts every token from those before it, the first one from a learned start vector. All are scored but padding
    and those before `score_from`.
    """

    @property
    def leaks(self) -> list[str]:
        """The layers in which a later token can move an earlier output, and why; empty for a strictly causal model."""
        return [f"layer {layer}: {mechanism.leak}" for layer, mechanism in self.mechanisms() if mechanism.leak]

    def prepare_inputs(self, tokens: Tensor, rng: RngContext, padding: Padding) -> tuple[Tensor, Tensor]:
        part, scored = padding.part, torch.ones_like(tokens, dtype=torch.bool)
        if padding.key_mask is not None:
            scored = part.own(padding.key_mask, 1).clone()
        scored[:, : max(0, self.config.score_from - rng.first)] = False
        if part.size == 1:
            return tokens[:, :-1], scored
        last = part.gather(tokens[:, -1:], 1)  # (B, S)
        before = last[:, part.rank - 1 : part.rank] if part.rank else last[:, :0]
        return torch.cat([before, tokens[:, :-1]], dim=1), scored

    def count_scored(self, tokens: Tensor, sequence: ProcessGroup | None = None) -> Tensor:
        first = SequencePart.of(sequence).rank * tokens.shape[1]
        real = torch.ones_like(tokens, dtype=torch.bool)
        if self.config.padding_token is not None:
            real = tokens != self.config.padding_token
        return real[:, max(0, self.config.score_from - first) :].sum()

    def window_logits(self, tokens: Tensor, rng: RngContext) -> Tensor:
        """Logits (B, L, V) of every token of whole sequences (B, L), each from the tokens before it."""
        return self.logits(self.streams(tokens[:, :-1], rng, Padding())[0])

    @torch.no_grad()
    def prefill(self, tokens: Tensor, cache: DecodingCache) -> Tensor:
        """Takes a prompt (B, n), n >= 0, into an empty cache at once. Returns the logits (B, V) of token n."""
        assert cache.position == 0, "a prompt goes into an empty cache"
        streams, _, _ = self.streams(tokens, cache.rng, Padding(part=cache.part), caches=cache.layers)
        cache.position = tokens.shape[1] + 1
        return self.head(streams, None)

    @torch.no_grad()
    def decode(self, token: Tensor, cache: DecodingCache) -> Tensor:
        """Takes one more token (B,) into the cache. Returns the logits (B, V) of the token after it."""
        assert cache.position < self.config.max_length, "the cache is full"
        entered = streams = self._enter(token[:, None], cache.position, cache.rng)
        run = Pass(cache.rng, Padding(part=cache.part), tokens=token[:, None])
        for block, layer in zip(self.layers, cache.layers, strict=True):
            streams = block.decode(streams, layer, cache.position, run)
        cache.position += 1
        return self.head(self._leave(streams, entered), None)

    def _empty_cache(self, rng: RngContext, part: SequencePart = WHOLE) -> DecodingCache:
        layers = [block.attention.attention.new_cache(len(rng.samples), rng.rounds, part) for block in self.layers]
        return DecodingCache(layers, 0, rng, part)


class Decoder(Causal):
    """A causal language model."""

    def new_cache(
        self, batch_size: int, seed: int, rounds: int | None = None, sequence: ProcessGroup | None = None
    ) -> DecodingCache:
        """An empty cache for sequences of up to `max_length` tokens. seed: the run's, for rotations of evaluation.
        sequence: ranks that all decode the same tokens, each with the cache of its part of the heads.
        """
        return self._empty_cache(RngContext.evaluation(seed, batch_size, rounds), DecodingPart.of(sequence))
