"""The encoder–decoder: one stack reads the source, another predicts the target from it (Vaswani et al. 2017).

B batch, S source length, T target length, E d_model, V vocabulary.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megasparse.attention.contract import Targets
from megasparse.attention.cross import Source
from megasparse.attention.heads import Padding
from megasparse.attention.norm import Norm
from megasparse.config.parts import encoder_part
from megasparse.config.schema import ModelConfig
from megasparse.model.decoder import Causal, DecodingCache
from megasparse.model.padding import padding_of
from megasparse.model.stack import Stack, TokenScores
from megasparse.ops.keys import derive
from megasparse.ops.random import RngContext


class SourceEncoder(Stack):
    """Reads the source. Its draws are none of the decoder's: they have a seed of their own."""

    def __init__(self, config: ModelConfig, embedding: nn.Parameter | nn.Module | None):
        super().__init__(config, embedding)
        self.norm = Norm(config)

    def forward(
        self, tokens: Tensor, rng: RngContext, key_mask: Tensor | None, targets: Targets | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Run the encoder. tokens: (B, S), or what else the embedding takes. targets: for the mechanisms, in training.
        Returns the mean of the streams, normalised, (B, S, E) fp32; the sum of auxiliary losses, and the layers'
        statistics.
        """
        own = replace(rng, seed=derive(rng.seed, "encoder"))
        streams, auxiliary, statistics = self.streams(tokens, own, Padding(key_mask), targets)
        return self.norm(torch.stack(streams).mean(0)), auxiliary, statistics


class EncoderDecoder(Causal):
    """Sequences are (B, S + T): `source.length` tokens that the encoder reads, and those that the decoder predicts, the
    first from a learned start vector.

    The modules of the decoder are those of a Decoder, whose blocks have a cross-attention too.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        assert config.source is not None
        shared = self.embedding.weight if config.source.shared_embedding else None
        self.encoder = SourceEncoder(encoder_part(config), shared)
        weights = [mechanism.task_weight for _, mechanism in self.encoder.mechanisms()]
        self.source_length, self.task_weight = config.source.length, min(self.task_weight, *weights)

    def count_scored(self, tokens: Tensor, sequence: ProcessGroup | None = None) -> Tensor:
        assert sequence is None, "the configuration would have refused this"
        return super().count_scored(tokens[:, self.source_length :])

    @torch.no_grad()
    def encode(self, tokens: Tensor, seed: int, rounds: int | None = None) -> Source:
        """Reads sources (B, s), s <= S. seed: of the run, for the rotations of evaluation."""
        assert tokens.shape[1] <= self.source_length, "the source is too long"
        key_mask = padding_of(tokens, self.config).key_mask
        return Source(self.encoder(tokens, RngContext.evaluation(seed, len(tokens), rounds), key_mask)[0], key_mask)

    @torch.no_grad()
    def new_cache(self, batch_size: int, seed: int, rounds: int | None = None, *, memory: Source) -> DecodingCache:
        """A cache for targets of up to `max_length` tokens of what `encode` read with the same seed and rounds; each
        layer's entry "cross" has its keys and values.
        """
        assert len(memory.states) == batch_size, "a source a sequence"
        return self.cache_beside(memory, RngContext.evaluation(seed, batch_size, rounds))

    @torch.no_grad()
    def cache_beside(self, memory: Source, rng: RngContext) -> DecodingCache:
        """`new_cache` with the draws of evaluation that the source was read with."""
        cache = self._empty_cache(rng)
        for block, layer in zip(self.layers, cache.layers, strict=True):
            assert block.cross_attention is not None
            layer["cross"] = block.cross_attention.new_cache(memory, cache.rng)
        return cache

    def score_targets(
        self, tokens: Tensor, rng: RngContext, key_mask: Tensor | None, memory: Source
    ) -> tuple[TokenScores, Tensor, Tensor, dict[str, Tensor]]:
        """Scores of targets (B, t), given what the encoder has read: the scores, what each token adds to the objective
        (B, t), the sum of the decoder's auxiliary losses, and its layers' statistics. key_mask: of the targets.
        """
        return self._score_targets(tokens, rng, Padding(key_mask), memory)

    def _scores(
        self, tokens: Tensor, rng: RngContext, padding: Padding
    ) -> tuple[TokenScores, Tensor, Tensor, dict[str, Tensor]]:
        """Scores of (B, S + T) tokens; those of the source are not scored."""
        assert padding.segments is None, "a sequence is one source and its target"
        split = [self.source_length, tokens.shape[1] - self.source_length]
        source, target = tokens.split(split, dim=1)
        source_mask, target_mask = (None, None) if padding.key_mask is None else padding.key_mask.split(split, dim=1)
        states, source_loss, of_encoder = self.encoder(
            source, rng, source_mask, Targets(target, target_mask, answer=True)
        )
        scores, cost, loss, statistics = self.score_targets(target, rng, target_mask, Source(states, source_mask))
        whole = TokenScores(*(F.pad(x, (self.source_length, 0)) for x in scores))
        of_both = statistics | {f"encoder/{name}": value for name, value in of_encoder.items()}
        return whole, F.pad(cost, (self.source_length, 0)), source_loss + loss, of_both
