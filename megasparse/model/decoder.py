"""Causal models, which predict every token from the tokens before it: the decoder, and the encoder–decoder, whose
decoder also attends to an encoded source (Vaswani et al. 2017).

B batch, L length, S source length, T target length, E d_model, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megasparse.attention.contract import Targets
from megasparse.attention.cross import EncoderOutput
from megasparse.attention.heads import LayerCache, Padding
from megasparse.attention.sequence_part import WHOLE, DecodingPart, SequencePart
from megasparse.config.schema import ModelConfig, encoder_part
from megasparse.files import UNSCORED
from megasparse.model.branch import Pass, Streams, mean_stream
from megasparse.model.stack import Scored, Stack, TokenScores, Transformer, padding_of
from megasparse.ops.normalize import Norm
from megasparse.ops.operator import device_of
from megasparse.ops.random import RngContext


@dataclass
class DecodingCache:
    """State of cached decoding. position: number of cached positions. recent: tokens that the next n-gram embedding
    needs, (B, n − 1).
    """

    layers: list[LayerCache]
    position: int
    rng: RngContext
    part: SequencePart = WHOLE
    recent: Tensor | None = None

    def remember(self, tokens: Tensor) -> Tensor | None:
        """Keep the last of the tokens (B, m) for later n-grams. Returns the tokens kept so far and these."""
        if self.recent is None:
            return None
        joined = torch.cat([self.recent, tokens], dim=1)
        self.recent = joined[:, tokens.shape[1] :]
        return joined

    def select(self, rows: Tensor) -> None:
        """Keep the sequences `rows`, (n,) indices into the batch, with their random draws. In place."""
        if rows.tolist() == list(range(len(self.rng.samples))):
            return
        for layer in self.layers:
            for cache in layer.values():
                cache.select(rows)
        self.recent = None if self.recent is None else self.recent[rows.to(self.recent.device)]
        self.rng = replace(self.rng, samples=self.rng.samples[rows.to(self.rng.samples.device)])


class Causal(Transformer):
    """Model that predicts every token from the tokens before it, the first one from a learned start vector. All tokens
    are scored except padding, positions before `score_from`, and tokens with a mark (`files.UNSCORED`).
    """

    @property
    def leaks(self) -> list[str]:
        """Layers in which a later token can change an earlier output, with the reason; empty if strictly causal."""
        return [f"layer {layer}: {mechanism.leak}" for layer, mechanism in self.mechanisms() if mechanism.leak]

    def prepare_inputs(self, tokens: Tensor, rng: RngContext, padding: Padding) -> tuple[Tensor, Tensor]:
        part = padding.part
        scored = tokens < UNSCORED if self.marked else torch.ones_like(tokens, dtype=torch.bool)
        if padding.key_mask is not None:
            scored &= part.local_part(padding.key_mask, 1)
        scored[:, : max(0, self.config.score_from - rng.first)] = False
        if self.marked:
            tokens = tokens % UNSCORED
        if part.size == 1:
            return tokens[:, :-1], scored
        last = part.gather(tokens[:, -1:], 1)  # (B, S)
        before = last[:, part.rank - 1 : part.rank] if part.rank else last[:, :0]
        return torch.cat([before, tokens[:, :-1]], dim=1), scored

    def count_scored(self, tokens: Tensor, sequence: ProcessGroup | None = None) -> Tensor:
        first = SequencePart.of(sequence).rank * tokens.shape[1]
        real = tokens < UNSCORED
        if self.config.padding_token is not None:
            real &= tokens != self.config.padding_token
        return real[:, max(0, self.config.score_from - first) :].sum()

    @torch.no_grad()
    def prefill(self, tokens: Tensor, cache: DecodingCache) -> Tensor:
        """Prefill an empty cache with a prompt (B, n), n >= 0. Returns the logits (B, V) of token n."""
        return self.logits(tuple(x[:, -1] for x in self.fill(tokens, cache)))  # (B, V)

    def fill(self, tokens: Tensor, cache: DecodingCache) -> Streams:
        """Prefill an empty cache with a prompt (B, n). Returns the streams of n + 1 positions."""
        assert cache.position == 0, "only an empty cache can be prefilled"
        streams, _, _ = self.streams(tokens, cache.rng, Padding(part=cache.part), caches=cache.layers)
        cache.position = tokens.shape[1] + 1
        cache.remember(tokens)
        return streams

    @torch.no_grad()
    def decode(self, token: Tensor, cache: DecodingCache) -> Tensor:
        """Append a token (B,) to the cache. Returns the logits (B, V) of the next token."""
        assert cache.position < self.config.max_length, "the cache is full"
        read = cache.remember(token[:, None])
        codes = None if read is None else self.embedding.ngrams.codes(read, Padding())[..., -1:]
        streams = self._enter(token[:, None], cache.position, cache.rng, codes)
        initial = streams[1] if self.embedding_once else None
        run = Pass(cache.rng, Padding(part=cache.part), tokens=token[:, None])
        for block, layer in zip(self.layers, cache.layers, strict=True):
            streams = block(block.decode, run, layer, cache.position, streams)
        cache.position += 1
        streams = streams if initial is None else (streams[0], streams[1] - initial)
        return self.logits(tuple(x[:, 0] for x in streams))  # (B, V)

    def _empty_cache(self, rng: RngContext, part: SequencePart = WHOLE) -> DecodingCache:
        layers = [block.attention.attention.new_cache(len(rng.samples), rng.rounds, part) for block in self.layers]
        recent = None
        if (ngrams := self.config.ngrams) is not None:
            shape = (len(rng.samples), max(ngrams.lengths) - 1)
            recent = torch.full(shape, -1, dtype=torch.int64, device=device_of(self.embedding))
        return DecodingCache(layers, 0, rng, part, recent)


class Decoder(Causal):
    """Causal language model."""

    def new_cache(
        self, batch_size: int, seed: int, rounds: int | None = None, sequence: ProcessGroup | None = None
    ) -> DecodingCache:
        """Return an empty cache for sequences of up to `max_length` tokens. seed: the run's, for the rotations of
        evaluation. sequence: ranks that decode the same tokens, each with the cache of its heads.
        """
        return self._empty_cache(RngContext.evaluation(seed, batch_size, rounds), DecodingPart.of(sequence))


class SourceEncoder(Stack):
    """Encoder of the source. Its random draws are independent of the decoder's."""

    embedding_once = True

    def __init__(self, config: ModelConfig, embedding: nn.Parameter | nn.Module | None):
        super().__init__(config, embedding)
        self.norm = Norm(config.norm, config.d_model, config.norm_eps)

    def forward(
        self,
        tokens: Tensor,
        rng: RngContext,
        key_mask: Tensor | None,
        targets: Targets | None = None,
        part: SequencePart = WHOLE,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Run the encoder. tokens: (B, S), or another input of the embedding; with sequence parallelism, this rank's
        tokens with the whole mask. Returns the normalised mean of the streams, (B, S, E) fp32; the sum of auxiliary
        losses; and the layers' statistics.
        """
        rng = rng.of("encoder").at(part.rank * tokens.shape[1])
        streams, auxiliary, statistics = self.streams(tokens, rng, Padding(key_mask, part=part), targets)
        return self.norm(mean_stream(streams)), auxiliary, statistics


class EncoderDecoder(Causal):
    """Encoder–decoder on sequences (B, S + T): `source.length` tokens for the encoder, followed by the tokens that the
    decoder predicts. The decoder's modules equal `Decoder`'s, plus a cross-attention per block.
    """

    embedding_once = True

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        assert config.source is not None
        shared = self.embedding.weight if config.source.shared_embedding else None
        self.encoder = SourceEncoder(encoder_part(config), shared)
        weights = [mechanism.task_weight for _, mechanism in self.encoder.mechanisms()]
        self.source_length = config.source.length
        self.task_weight = min(self.task_weight, *weights)

    def count_scored(self, tokens: Tensor, sequence: ProcessGroup | None = None) -> Tensor:
        part = SequencePart.of(sequence)
        return super().count_scored(part.gather(tokens, 1)[:, self.source_length :]) * (part.rank == 0)

    @torch.no_grad()
    def encode(self, tokens: Tensor, seed: int, rounds: int | None = None) -> EncoderOutput:
        """Encode sources (B, s), s <= S. seed: the run's seed, for the rotations of evaluation."""
        assert tokens.shape[1] <= self.source_length, "the source is too long"
        key_mask = padding_of(tokens, self.config).key_mask
        return EncoderOutput(
            self.encoder(tokens, RngContext.evaluation(seed, len(tokens), rounds), key_mask)[0], key_mask
        )

    @torch.no_grad()
    def new_cache(
        self, batch_size: int, seed: int, rounds: int | None = None, *, memory: EncoderOutput
    ) -> DecodingCache:
        """Return a cache for targets of up to `max_length` tokens, given `encode`'s output for the same seed and
        rounds.
        """
        assert len(memory.states) == batch_size, "one source per sequence"
        return self.cache_beside(memory, RngContext.evaluation(seed, batch_size, rounds))

    @torch.no_grad()
    def cache_beside(self, memory: EncoderOutput, rng: RngContext) -> DecodingCache:
        """Return `new_cache` for a source that was encoded with the draws of rng."""
        cache = self._empty_cache(rng)
        for block, layer in zip(self.layers, cache.layers, strict=True):
            assert block.cross_attention is not None
            layer["cross"] = block.cross_attention.new_cache(memory, cache.rng)
        return cache

    def score_targets(self, tokens: Tensor, rng: RngContext, key_mask: Tensor | None, memory: EncoderOutput) -> Scored:
        """Score target tokens (B, t), given the encoder output; see `Scored`. key_mask: of the targets."""
        return Transformer.score(self, tokens, rng, Padding(key_mask), memory)

    def score(self, tokens: Tensor, rng: RngContext, padding: Padding, source: EncoderOutput | None = None) -> Scored:
        """Score (B, S + T) tokens; source tokens are not scored.

        With sequence parallelism, ranks gather all ids, then divide source and target separately. Scores are of this
        rank's target tokens.
        """
        assert padding.segments is None, "a sequence contains one source and its target"
        part = padding.part
        tokens = padding.part.gather(tokens, 1)
        split = [self.source_length, tokens.shape[1] - self.source_length]
        source_tokens, target = tokens.split(split, dim=1)
        source_mask, target_mask = (None, None) if padding.key_mask is None else padding.key_mask.split(split, dim=1)
        states, source_loss, of_encoder = self.encoder(
            part.local_part(source_tokens, 1), rng, source_mask, Targets(target, target_mask, answer=True), part
        )
        target = part.local_part(target, 1)
        first = part.rank * (split[1] // part.size)
        scores, cost, loss, statistics = super().score(
            target, rng.at(first), Padding(target_mask, part=part), EncoderOutput(states, source_mask)
        )
        unscored = (self.source_length if part.size == 1 else 0, 0)
        scores = TokenScores(*(F.pad(x, unscored) for x in scores))
        cost = F.pad(cost, unscored)
        of_both = statistics | {f"encoder/{name}": value for name, value in of_encoder.items()}
        return scores, cost, source_loss + loss, of_both
