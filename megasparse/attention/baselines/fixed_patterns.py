"""Attention in fixed patterns of blocks and strides, the base of Sparse Transformer, Longformer and BigBird.

C tokens per block, W blocks, M keys per block.
"""

from abc import abstractmethod
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.cache import KeyValueCache
from megasparse.attention.contract import AttentionContext, AttentionInputs, AttentionOutput
from megasparse.attention.documents import attend_each
from megasparse.attention.full import KeyValueAttention
from megasparse.ops.cluster_attention import ClusterAttentionSpec, cluster_attention


class FixedPatternAttention(KeyValueAttention):
    """Softmax attention to keys that depend only on positions, relative to each document's first real token."""

    @abstractmethod
    def attend(self, inputs: AttentionInputs, context: AttentionContext) -> Tensor:
        """Return the attention (B, H, L, D) of one document, possibly followed by padding."""

    @abstractmethod
    def visible(self, position: int, context: AttentionContext, device: torch.device) -> Tensor:
        """Return the tokens (H or 1, n) visible to a decoder's token at `position`, including itself."""

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        return AttentionOutput(attend_each(inputs, partial(self.attend, context=context)))

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: KeyValueCache, position: int, context: AttentionContext
    ) -> Tensor:
        cache.put(inputs.k, inputs.v, position)
        head = torch.arange(inputs.q.shape[1], device=cache.k.device)[:, None]
        tokens = self.visible(position, context, cache.k.device)
        k, v = (cached[:, head, tokens].to(inputs.q.dtype) for cached in (cache.k, cache.v))
        return F.scaled_dot_product_attention(inputs.q, k, v)


class BlockSparseAttention(FixedPatternAttention):
    """Softmax attention of each block of C tokens to itself and both neighbours (causal: the previous block), the
    `first` tokens of the sequence, and extra blocks. If not causal, the `first` tokens attend to all tokens.
    """

    chunk: int
    first: int

    def extra_blocks(self, blocks: Tensor, heads: int, causal: bool, context: AttentionContext) -> Tensor | None:
        """Return extra blocks (H, W, n) of `blocks` (W,), −1 for none, excluding neighbours and the `first` tokens; in
        decoders only earlier blocks, equally many for each head. None if there are none.
        """
        return None

    def attend(self, inputs: AttentionInputs, context: AttentionContext) -> Tensor:
        length = inputs.q.shape[2]
        device = inputs.q.device
        blocks = torch.arange(-(-length // self.chunk), device=device)
        queries = _tokens(blocks[:, None], self.chunk, length)  # (W, C)
        if not inputs.causal:
            queries = queries.masked_fill(queries < self.first, -1)
        neighbours = torch.arange(-1, 1 if inputs.causal else 2, device=device)
        # First tokens before the window only, because the window already covers the other visible ones.
        token = torch.arange(min(self.first, length), device=device)
        first = token.masked_fill(token >= (blocks[:, None] - 1) * self.chunk, -1)
        lists = [_tokens(blocks[:, None] + neighbours, self.chunk, length)[None], first[None]]
        if (extra := self.extra_blocks(blocks, inputs.q.shape[1], inputs.causal, context)) is not None:
            lists = [*(x.expand(len(extra), -1, -1) for x in lists), _tokens(extra, self.chunk, length)]
        out, _ = attention_of_clusters(inputs, queries[None, None], torch.cat(lists, dim=-1)[None])
        if self.first and not inputs.causal:
            every_token = torch.arange(length, device=device)[None, None, None]
            out = out + attention_of_clusters(inputs, every_token[..., : self.first], every_token)[0]
        return out

    def visible(self, position: int, context: AttentionContext, device: torch.device) -> Tensor:
        start = max(0, position // self.chunk - 1) * self.chunk
        recent = torch.arange(start, position + 1, device=device)
        tokens = torch.cat([torch.arange(min(self.first, start), device=device), recent])[None]
        heads = self.spec.on_rank(context.part).heads
        block = torch.tensor([position // self.chunk], device=device)
        blocks = self.extra_blocks(block, heads, True, context)
        if blocks is None:
            return tokens
        blocks = blocks[blocks >= 0].view(len(blocks), -1)  # (H, n)
        return torch.cat([tokens.expand(len(blocks), -1), _tokens(blocks, self.chunk, position)], dim=-1)


def _tokens(blocks: Tensor, chunk: int, length: int) -> Tensor:
    """Return the tokens of blocks (..., n): (..., n·C), −1 outside [0, length)."""
    token = (blocks[..., None] * chunk + torch.arange(chunk, device=blocks.device)).flatten(-2)
    return token.masked_fill((token < 0) | (token >= length), -1)


def attention_of_clusters(inputs: AttentionInputs, query_index: Tensor, key_index: Tensor) -> tuple[Tensor, Tensor]:
    """Call `cluster_attention` on these inputs; a pair in several clusters must not occur."""
    spec = ClusterAttentionSpec(inputs.causal, inputs.q.shape[-1] ** -0.5, count_clusters=False)
    clusters = query_index, key_index
    return cluster_attention(*inputs[:3], clusters, spec, inputs.key_mask, dropout=inputs.dropout)
