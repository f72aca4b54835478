"""The causal decoder: embedding, a stack of blocks, a tiled output projection; whole sequences or one cached token at
a time.

B batch, L length, E d_model, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fairscale.nn import checkpoint_wrapper
from torch import Tensor, nn

from megasparse.attention.contract import Memory
from megasparse.attention.heads import Padding
from megasparse.config.schema import ModelConfig
from megasparse.model.block import Block, Pass, Streams
from megasparse.model.embedding import Embedding
from megasparse.model.head import OutputHead, TokenScores
from megasparse.model.reversible import reversible
from megasparse.ops.random import Draws, derive, dropout


@dataclass
class DecodingCache:
    """What cached decoding keeps: each layer's cache, how many positions were taken in, and what its draws depend
    on.
    """

    layers: list[Any]
    position: int
    draws: Draws


class Decoder(nn.Module):
    """A causal language model. Every token is scored, the first one from a learned start vector."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        pattern = config.attention.pattern
        self.layers = [Block(config, i, pattern[i % len(pattern)]) for i in range(config.layers)]
        self.blocks = nn.ModuleList(self.layers)
        self.head = OutputHead(config)
        if config.tied_embeddings:  # one parameter of both modules: under ZeRO 3 the call of either gathers it
            self.head.weight = self.embedding.weight
        if config.activations in ("checkpoint", "checkpoint_cpu"):
            for block in self.layers:
                checkpoint_wrapper(block, offload_to_cpu=config.activations == "checkpoint_cpu")

    @property
    def leaks(self) -> list[str]:
        """The layers in which a later token can move an earlier output, and why; empty for a strictly causal model."""
        mechanisms = [(i, block.attention.attention.mechanism) for i, block in enumerate(self.layers)]
        return [f"layer {i}: {mechanism.leak}" for i, mechanism in mechanisms if mechanism.leak]

    def forward(self, tokens: Tensor, draws: Draws, padding: Padding | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """tokens: (B, L) int64. Returns the objective, mean nats a token plus auxiliary losses, and statistics.

        statistics: `nats` the sum over scored tokens and `tokens` their number; any others are means to log, among them
        `accuracy`, the share of scored tokens that were the likeliest. Not scored: padding, and positions before
        `score_from`.
        """
        padding = padding or Padding()
        run = self._new_pass(draws, padding)
        scores, auxiliary = self._scores(tokens, run)
        scored = torch.ones_like(tokens, dtype=torch.bool) if padding.key_mask is None else padding.key_mask.clone()
        scored[:, : self.config.score_from] = False
        total, count = torch.where(scored, scores.nats, 0.0).sum(), scored.sum()
        statistics = {name: torch.stack(values).mean() for name, values in run.statistics.items()}
        accuracy = (scores.correct & scored).sum() / count
        statistics |= {"nats": total.detach(), "tokens": count, "accuracy": accuracy}
        return total / count + auxiliary, statistics

    @torch.no_grad()
    def token_scores(self, tokens: Tensor, draws: Draws, padding: Padding | None = None) -> TokenScores:
        """−ln p(token | all before it) of every token, and whether it was the likeliest: (B, L) each."""
        return self._scores(tokens, self._new_pass(draws, padding or Padding()))[0]

    def _new_pass(self, draws: Draws, padding: Padding) -> Pass:
        return Pass(draws, padding, [Memory() for _ in self.blocks])

    def _scores(self, tokens: Tensor, run: Pass) -> tuple[TokenScores, Tensor]:
        streams, auxiliary = self._stack(self._enter(tokens[:, :-1], 0, run.draws), run)
        return self.head(streams, tokens, self._tied_weight()), auxiliary

    def _tied_weight(self) -> Tensor | None:
        return self.embedding.weight if self.config.tied_embeddings else None

    def _enter(self, tokens: Tensor, first: int, draws: Draws) -> Streams:
        x = self.embedding(tokens, first)
        if draws.training:
            x = dropout(x, self.config.dropout, draws.key(-1, "embedding dropout"), draws.rows(x.shape[1], x.device))
        return (x, x) if self.config.blocks == "reversible" else (x,)

    def _stack(self, streams: Streams, run: Pass, caches: Sequence[Any] | None = None) -> tuple[Streams, Tensor]:
        if self.config.activations == "reversible" and torch.is_grad_enabled():
            return reversible(self.layers, streams, run)
        total = torch.zeros((), device=streams[0].device)
        for i, block in enumerate(self.layers):
            auxiliary, *streams = block(run, caches[i] if caches is not None else None, *streams)
            if auxiliary is not None:
                total = total + auxiliary
        return tuple(streams), total

    def new_cache(self, batch_size: int, seed: int, rounds: int | None = None) -> DecodingCache:
        """An empty cache for sequences of up to `max_length` tokens. seed: of the run, for the rotations of
        evaluation.
        """
        layers = [block.attention.attention.new_cache(batch_size, rounds) for block in self.layers]
        return DecodingCache(layers, 0, Draws.evaluation(seed, batch_size, rounds))

    @torch.no_grad()
    def prefill(self, tokens: Tensor, cache: DecodingCache) -> Tensor:
        """Takes a prompt (B, n), n >= 0, into an empty cache at once. Returns the logits (B, V) of token n."""
        assert cache.position == 0, "a prompt goes into an empty cache"
        run = self._new_pass(cache.draws, Padding())
        streams, _ = self._stack(self._enter(tokens, 0, cache.draws), run, cache.layers)
        cache.position = tokens.shape[1] + 1
        return self.head(streams, None, self._tied_weight())

    @torch.no_grad()
    def decode(self, token: Tensor, cache: DecodingCache) -> Tensor:
        """Takes one more token (B,) into the cache. Returns the logits (B, V) of the token after it."""
        assert cache.position < self.config.max_length, "the cache is full"
        streams = self._enter(token[:, None], cache.position, cache.draws)
        for block, layer in zip(self.layers, cache.layers, strict=True):
            streams = block.decode(streams, layer, cache.position, cache.draws)
        cache.position += 1
        return self.head(streams, None, self._tied_weight())


def build_decoder(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder whose every weight is a pure function of (seed, its name).

    Embeddings are standard normal; projections normal with deviation 1/√fan-in, those into a stream divided by
    √(2·layers) so that the streams' scale does not grow with depth; norms 1, biases 0.
    """
    model = Decoder(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            generator = torch.Generator().manual_seed(derive(seed, "initial weights", name) >> 1)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * _deviation(name, parameter, config))
    return model.to(dtype)


def _deviation(name: str, parameter: Tensor, config: ModelConfig) -> float:
    if name.startswith("embedding."):
        return 1.0
    scale = parameter.shape[1] ** -0.5
    return scale * (2 * config.layers) ** -0.5 if name.endswith((".output.weight", ".down")) else scale
