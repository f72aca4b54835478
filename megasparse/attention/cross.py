"""Cross-attention of a decoder's tokens to the encoded source.

B batch, H heads, R rounds, S source length, T target length, D head dim, E width.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megasparse.attention.contract import AttentionContext, Passes, product
from megasparse.attention.full import Cache, attend_to_all
from megasparse.attention.heads import head_dim, merge_heads, projection, split_heads
from megasparse.attention.lsh import lsh_buckets
from megasparse.config.schema import ModelConfig
from megasparse.ops.bucketed_attention import windows_by_key_rank
from megasparse.ops.gathered_attention import gathered_attention
from megasparse.ops.hashing import angular_hash
from megasparse.ops.random import PairDropout, rotations


class EncoderOutput(NamedTuple):
    """Output of the encoder. states: (B, S, E). key_mask: (B, S) bool, true for real tokens, or None. With sequence
    parallelism, states cover this rank's tokens and the mask covers all.
    """

    states: Tensor
    key_mask: Tensor | None


@dataclass
class SourceKeys(Cache):
    """Keys and values (B, H, S, D) of the sources in one layer, cached for decoding.

    codes: (B, H, R, S), the keys' buckets, or None in full attention. With sequence parallelism, H are this rank's
    heads.
    """

    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    codes: Tensor | None


class CrossAttention(nn.Module):
    """Cross-attention, softmax(qkᵀ/√D)v of target queries and source keys; queries without a real key get 0.

    `full`: every query attends to every real key. `lsh`: in each round the same rotations hash queries and keys, and a
    query at position i attends to its bucket's last M keys at or before i and the M keys after; a key that several
    rounds select is included once. Memory is then linear in S and T. The number of buckets follows from the larger of
    the two maximum lengths.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.source is not None
        self.heads, self.head_dim, self.lsh = config.heads, head_dim(config), config.attention.lsh
        self.hashed = config.source.cross_attention == "lsh"
        longest = max(config.max_length, config.source.length)
        self.factors = lsh_buckets(self.lsh, longest) if self.hashed else []
        self.chunk = min(self.lsh.chunk, longest)
        self.dropout = config.attention.dropout
        width = self.heads * self.head_dim
        self.query, self.key, self.value = (projection(config.d_model, width, biased=False) for _ in range(3))
        self.output = projection(width, config.d_model, biased=False)

    def forward(
        self, x: Tensor, source: EncoderOutput | SourceKeys, context: AttentionContext, first_position: int = 0
    ) -> Tensor:
        """Attend to the source. x: (B, T, E), target tokens from `first_position` on; with sequence parallelism, this
        rank's tokens. Returns (B, T, E).
        """
        keys = source if isinstance(source, SourceKeys) else self.read(source, context)
        part = context.part.of_heads(self.heads)
        (q,) = part.to_heads(split_heads(self.query(x), self.head_dim))
        dropout = self._dropout(q, context)
        if keys.codes is None:
            out = attend_to_all(q, keys.k, keys.v, keys.key_mask, dropout)
        else:
            codes = context.recompute.keep(lambda: self._codes(q, context))
            rule = {"causal": False, "distinct": self.lsh.count_rounds}
            index = windows_by_key_rank(
                codes, keys.codes, self.chunk, key_mask=keys.key_mask, first_query=first_position, **rule
            )
            out, _ = gathered_attention(q, keys.k, keys.v, index, scale=self.head_dim**-0.5, dropout=dropout)
        return self.output(merge_heads(part.to_tokens(out)))

    def read(self, source: EncoderOutput, context: AttentionContext) -> SourceKeys:
        """Return the keys and values of the sources."""
        states = source.states.to(self.query.weight.dtype)
        part = context.part.of_heads(self.heads)
        k, v = part.to_heads(*(split_heads(side(states), self.head_dim) for side in (self.key, self.value)))
        codes = context.recompute.keep(lambda: self._codes(k, context)) if self.hashed else None
        return SourceKeys(k, v, source.key_mask, codes)

    def flops(self, source: int, target: int) -> Passes:
        """Return the FLOPs of a whole sequence, including projections: queries and outputs of the target, keys and
        values of the source, and their pairs; if hashed, as LSH with separate queries and keys and a two-sided window.
        """
        width = self.heads * self.head_dim
        projections = product(4.0 * self.query.weight.shape[1] * width * (source + target))
        if not self.hashed:
            return projections + product(4.0 * width * source * target)
        codes = float(self.lsh.rounds * width * sum(self.factors) * (source + target))
        pairs = product(4.0 * min(2 * self.chunk, source) * target * self.lsh.rounds * width)
        return projections + pairs + Passes(codes)

    def _dropout(self, q: Tensor, context: AttentionContext) -> PairDropout | None:
        rng = context.rng
        if not rng.training or self.dropout == 0.0:
            return None
        key = rng.key(context.layer, "cross-attention probability dropout")
        return PairDropout.of(self.dropout, key, rng.at(0).rows(q.shape[2], q.device), self._rows(q, context))

    @torch.no_grad()
    def _codes(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Return the buckets of queries or keys (B, H, L, D) in every round: (B, H, R, L)."""
        rng = context.rng
        key = rng.key(context.layer, "cross-attention rotation")
        rounds = rng.rounds or (self.lsh.rounds if rng.training else self.lsh.rounds_in_evaluation)
        matrices = rotations(key, self._rows(x, context), rounds, self.head_dim, self.factors, x.device)
        return angular_hash(x, matrices, self.factors)

    def _rows(self, x: Tensor, context: AttentionContext) -> range:
        """Return the global indices of this rank's heads x (B, H, L, D)."""
        first = context.part.of_heads(self.heads).way * x.shape[1]
        return range(first, first + x.shape[1])
