"""Cross-attention of a decoder's T tokens to S tokens of the encoded source."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from megasparse.attention.cache import Cache
from megasparse.attention.contract import AttentionContext
from megasparse.attention.flops import Flops, product
from megasparse.attention.full import attend_to_all
from megasparse.attention.heads import head_dim, merge_heads, projection, split_heads
from megasparse.config.schema import ModelConfig
from megasparse.ops.random import PairDropout


class EncoderOutput(NamedTuple):
    """Output of the encoder. states: (B, S, E), with sequence parallelism of this rank's tokens. key_mask: (B, S) bool,
    true for real tokens, or None.
    """

    states: Tensor
    key_mask: Tensor | None


@dataclass
class SourceKeys(Cache):
    """Keys and values (B, H, S, D) of the sources in one layer, of this rank's heads."""

    k: Tensor
    v: Tensor
    key_mask: Tensor | None


class CrossAttention(nn.Module):
    """Cross-attention, softmax(qkᵀ/√D)v of target queries and source keys; queries without a real key get 0."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.head_dim = head_dim(config)
        self.dropout = config.attention.dropout
        width = self.heads * self.head_dim
        self.query, self.key, self.value = (projection(config.d_model, width, biased=False) for _ in range(3))
        self.output = projection(width, config.d_model, biased=False)

    def forward(self, x: Tensor, source: EncoderOutput | SourceKeys, context: AttentionContext) -> Tensor:
        """Attend from target tokens x (B, T, E), this rank's, to the source. Returns (B, T, E)."""
        keys = source if isinstance(source, SourceKeys) else self.read(source, context)
        part = context.part.of_heads(self.heads)
        (q,) = part.to_heads(split_heads(self.query(x), self.head_dim))
        dropout = None
        if context.rng.training and self.dropout > 0.0:
            first = part.head_rank * q.shape[1]
            rows = context.rng.at(0).rows(q.shape[2], q.device)
            key = context.key("cross-attention probability dropout")
            dropout = PairDropout.of(self.dropout, key, rows, range(first, first + q.shape[1]))
        out = attend_to_all(q, keys.k, keys.v, keys.key_mask, dropout)
        return self.output(merge_heads(part.start_to_tokens(out)()))

    def read(self, source: EncoderOutput, context: AttentionContext) -> SourceKeys:
        """Return the keys and values of the sources."""
        states = source.states.to(self.query.weight.dtype)
        part = context.part.of_heads(self.heads)
        k, v = part.to_heads(*(split_heads(side(states), self.head_dim) for side in (self.key, self.value)))
        return SourceKeys(k, v, source.key_mask)

    def flops(self, source: int, target: int) -> Flops:
        """Return the FLOPs of a whole sequence, with queries, outputs, keys, values and pairs."""
        width = self.heads * self.head_dim
        projections = product(4.0 * self.query.weight.shape[1] * width * (source + target))
        return projections + product(4.0 * width * source * target)
