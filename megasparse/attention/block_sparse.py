"""Parts that mechanisms with a fixed pattern share: lists of visible blocks, and decoding.

B batch, H heads, L length, D head dim, C tokens in a block, W blocks, M keys of a block.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.contract import AttentionContext, AttentionInputs, AttentionOutput
from megasparse.attention.documents import attend_each
from megasparse.attention.full import KeyValueAttention, KeyValueCache
from megasparse.ops.cluster_attention import ClusterAttentionSpec, cluster_attention


class FixedPatternAttention(KeyValueAttention):
    """Softmax attention to keys that depend on positions alone, counted from each document's first real token."""

    @abstractmethod
    def pattern(self, inputs: AttentionInputs, context: AttentionContext) -> Callable[[AttentionInputs], Tensor]:
        """What attends in one document, which may have padding behind it: a dataclass, as `attend_each` wants it."""

    @abstractmethod
    def visible(self, position: int, context: AttentionContext, device: torch.device) -> Tensor:
        """The tokens (H or 1, n) that a decoder's token at `position` sees, itself among them."""

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        return AttentionOutput(attend_each(inputs, self.pattern(inputs, context)), None, {})

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: KeyValueCache, position: int, context: AttentionContext
    ) -> Tensor:
        cache.put(inputs.k, inputs.v, position)
        head = torch.arange(inputs.q.shape[1], device=cache.k.device)[:, None]
        seen = self.visible(position, context, cache.k.device)
        k, v = (cached[:, head, seen].to(inputs.q.dtype) for cached in (cache.k, cache.v))
        return F.scaled_dot_product_attention(inputs.q, k, v)


@dataclass(frozen=True)
class BlockAttention:
    """Softmax attention (B, H, L, D) of each block of C tokens to itself and both neighbours (causal: the one before),
    the `first` tokens of the sequence, and further blocks. Where not causal, the `first` tokens see all.

    further: blocks (W,) -> (H, W, n) block numbers or −1, none of them a neighbour or among the `first` tokens.
    """

    chunk: int
    first: int
    further: Callable[[Tensor], Tensor] | None = None

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        length, device = inputs.q.shape[2], inputs.q.device
        blocks = torch.arange(-(-length // self.chunk), device=device)
        queries = _tokens(blocks[:, None], self.chunk, length)  # (W, C)
        if not inputs.causal:
            queries = queries.masked_fill(queries < self.first, -1)
        out = _clusters(inputs, queries[None, None], self._keys(blocks, length, inputs.causal))
        if self.first and not inputs.causal:
            whole = torch.arange(length, device=device)[None, None, None]
            out = out + _clusters(inputs, whole[..., : self.first], whole)
        return out

    def _keys(self, blocks: Tensor, length: int, causal: bool) -> Tensor:
        """The keys of each block, (1, H or 1, W, M), −1 for an empty place."""
        block, device = blocks[:, None], blocks.device  # (W, 1)
        near = torch.arange(-1, 1 if causal else 2, device=device)
        # Of the first tokens, those before the window: all others that a query may see by this list are in the window.
        token = torch.arange(min(self.first, length), device=device)
        lists = [_tokens(block + near, self.chunk, length), token.masked_fill(token >= (block - 1) * self.chunk, -1)]
        if self.further is None:
            return torch.cat(lists, dim=-1)[None, None]
        further = _tokens(self.further(blocks), self.chunk, length)
        return torch.cat([*(x.expand(len(further), -1, -1) for x in lists), further], dim=-1)[None]


class BlockSparseAttention(FixedPatternAttention):
    """`BlockAttention` of a mechanism's own `chunk`, `first` tokens and further blocks."""

    chunk: int
    first: int

    def further(self, heads: int, causal: bool, context: AttentionContext) -> Callable[[Tensor], Tensor] | None:
        """What `BlockAttention` takes, of so many heads; of decoders earlier blocks, equally many for each head."""
        return None

    def pattern(self, inputs: AttentionInputs, context: AttentionContext) -> BlockAttention:
        further = self.further(inputs.q.shape[1], inputs.causal, context)
        return BlockAttention(self.chunk, self.first, further)

    def visible(self, position: int, context: AttentionContext, device: torch.device) -> Tensor:
        start = max(0, position // self.chunk - 1) * self.chunk
        near = torch.arange(start, position + 1, device=device)
        seen = torch.cat([torch.arange(min(self.first, start), device=device), near])[None]
        further = self.further(self.spec.here(context.part).heads, True, context)
        if further is None:
            return seen
        blocks = further(torch.tensor([position // self.chunk], device=device))[:, 0]
        blocks = blocks[blocks >= 0].view(len(blocks), -1)
        return torch.cat([seen.expand(len(blocks), -1), _tokens(blocks, self.chunk, position)], dim=-1)


def _tokens(blocks: Tensor, chunk: int, length: int) -> Tensor:
    """The tokens of blocks (..., n): (..., n·C), −1 outside of [0, length)."""
    token = (blocks[..., None] * chunk + torch.arange(chunk, device=blocks.device)).flatten(-2)
    return token.masked_fill((token < 0) | (token >= length), -1)


def _clusters(inputs: AttentionInputs, query_index: Tensor, key_index: Tensor) -> Tensor:
    spec = ClusterAttentionSpec(inputs.causal, inputs.q.shape[-1] ** -0.5, count_clusters=False)
    heads = (inputs.q, inputs.k, inputs.v)
    return cluster_attention(*heads, query_index, key_index, spec, inputs.key_mask, dropout=inputs.dropout)[0]
