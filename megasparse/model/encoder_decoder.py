"""The encoder–decoder: one stack reads the source, another predicts the target from it (Vaswani et al. 2017).

B batch, S source length, T target length, E d_model, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megasparse.attention.contract import Targets
from megasparse.attention.cross import Source
from megasparse.attention.heads import Padding
from megasparse.attention.norm import Norm
from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.config.schema import ModelConfig, encoder_part
from megasparse.model.block import mean_stream
from megasparse.model.decoder import Causal, DecodingCache
from megasparse.model.padding import padding_of
from megasparse.model.stack import Scored, Stack, TokenScores
from megasparse.ops.random import RngContext


class SourceEncoder(Stack):
    """Reads the source. Its draws are none of the decoder's: they have a seed of their own."""

    def __init__(self, config: ModelConfig, embedding: nn.Parameter | nn.Module | None):
        super().__init__(config, embedding)
        self.norm = Norm(config)

    def forward(
        self,
        tokens: Tensor,
        rng: RngContext,
        key_mask: Tensor | None,
        targets: Targets | None = None,
        part: SequencePart = WHOLE,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Run the encoder. tokens: (B, S), or what else the embedding takes; of shared sequences those that are here,
        with the mask of all. targets: for the mechanisms, in training. Returns the mean of the streams, normalised,
        (B, S, E) fp32; the sum of auxiliary losses, and the layers' statistics.
        """
        own = rng.of("encoder").at(part.rank * tokens.shape[1])
        streams, auxiliary, statistics = self.streams(tokens, own, Padding(key_mask, part=part), targets)
        return self.norm(mean_stream(streams)), auxiliary, statistics


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
        part = SequencePart.of(sequence)
        return super().count_scored(part.gather(tokens, 1)[:, self.source_length :]) * (part.rank == 0)

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

    def score_targets(self, tokens: Tensor, rng: RngContext, key_mask: Tensor | None, memory: Source) -> Scored:
        """Scores of targets (B, t), given what the encoder has read; see `Scored`. key_mask: of the targets."""
        return self._score_targets(tokens, rng, Padding(key_mask), memory)

    def _scores(self, tokens: Tensor, rng: RngContext, padding: Padding) -> Scored:
        """Scores of (B, S + T) tokens; those of the source are not scored.

        Where ranks share sequences, each has a part of these tokens, from which all ids, 8 bytes a token, are gathered;
        source and target are then shared out each by itself. The scores are those of the target's tokens here.
        """
        assert padding.segments is None, "a sequence is one source and its target"
        part, tokens = padding.part, padding.part.gather(tokens, 1)
        split = [self.source_length, tokens.shape[1] - self.source_length]
        source, target = tokens.split(split, dim=1)
        source_mask, target_mask = (None, None) if padding.key_mask is None else padding.key_mask.split(split, dim=1)
        answer = Targets(target, target_mask, answer=True)
        states, source_loss, of_encoder = self.encoder(part.own(source, 1), rng, source_mask, answer, part)
        target, first = part.own(target, 1), part.rank * (split[1] // part.size)
        scores, cost, loss, statistics = self._score_targets(
            target, rng.at(first), Padding(target_mask, part=part), Source(states, source_mask)
        )
        unscored = (self.source_length if part.size == 1 else 0, 0)
        scores, cost = TokenScores(*(F.pad(x, unscored) for x in scores)), F.pad(cost, unscored)
        of_both = statistics | {f"encoder/{name}": value for name, value in of_encoder.items()}
        return scores, cost, source_loss + loss, of_both
