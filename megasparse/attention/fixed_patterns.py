"""Attention in fixed patterns of blocks and strides: Sparse Transformer, Longformer, BigBird, and their decoding.

B batch, H heads, L length, D head dim, C tokens per block, W blocks, N blocks of the longest sequence, M keys per
block.
"""

from abc import abstractmethod
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.contract import AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec, Passes
from megasparse.attention.documents import attend_each
from megasparse.attention.full import KeyValueAttention, KeyValueCache
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Count, Positive
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window
from megasparse.ops.cluster_attention import ClusterAttentionSpec, cluster_attention
from megasparse.ops.random import derive, random_bits


class FixedPatternAttention(KeyValueAttention):
    """Softmax attention to keys that depend only on positions, relative to each document's first real token."""

    @abstractmethod
    def attend(self, inputs: AttentionInputs, context: AttentionContext) -> Tensor:
        """Return the attention (B, H, L, D) of one document, possibly followed by padding."""

    @abstractmethod
    def visible(self, position: int, context: AttentionContext, device: torch.device) -> Tensor:
        """Return the tokens (H or 1, n) visible to a decoder's token at `position`, including itself."""

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        return AttentionOutput(attend_each(inputs, partial(self.attend, context=context)), None, {})

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
    `first` tokens of the sequence, and further blocks. If not causal, the `first` tokens attend to all tokens.
    """

    chunk: int
    first: int

    def further(self, blocks: Tensor, heads: int, causal: bool, context: AttentionContext) -> Tensor | None:
        """Return further blocks (H, W, n) of `blocks` (W,), −1 for none, excluding neighbours and the `first` tokens;
        in decoders only earlier blocks, equally many for each head. None if there are none. heads: H on this rank.
        """
        return None

    def attend(self, inputs: AttentionInputs, context: AttentionContext) -> Tensor:
        length, device = inputs.q.shape[2], inputs.q.device
        blocks = torch.arange(-(-length // self.chunk), device=device)
        queries = _tokens(blocks[:, None], self.chunk, length)  # (W, C)
        if not inputs.causal:
            queries = queries.masked_fill(queries < self.first, -1)
        near = torch.arange(-1, 1 if inputs.causal else 2, device=device)
        # First tokens before the window only, because the window already covers the other visible ones.
        token = torch.arange(min(self.first, length), device=device)
        first = token.masked_fill(token >= (blocks[:, None] - 1) * self.chunk, -1)
        lists = [_tokens(blocks[:, None] + near, self.chunk, length)[None], first[None]]
        if (further := self.further(blocks, inputs.q.shape[1], inputs.causal, context)) is not None:
            lists = [*(x.expand(len(further), -1, -1) for x in lists), _tokens(further, self.chunk, length)]
        out, _ = _clusters(inputs, queries[None, None], torch.cat(lists, dim=-1)[None])
        if self.first and not inputs.causal:
            every_token = torch.arange(length, device=device)[None, None, None]
            out = out + _clusters(inputs, every_token[..., : self.first], every_token)[0]
        return out

    def visible(self, position: int, context: AttentionContext, device: torch.device) -> Tensor:
        start = max(0, position // self.chunk - 1) * self.chunk
        near = torch.arange(start, position + 1, device=device)
        tokens = torch.cat([torch.arange(min(self.first, start), device=device), near])[None]
        heads, block = self.spec.on_rank(context.part).heads, torch.tensor([position // self.chunk], device=device)
        blocks = self.further(block, heads, True, context)
        if blocks is None:
            return tokens
        blocks = blocks[blocks >= 0].view(len(blocks), -1)
        return torch.cat([tokens.expand(len(blocks), -1), _tokens(blocks, self.chunk, position)], dim=-1)


def _tokens(blocks: Tensor, chunk: int, length: int) -> Tensor:
    """Return the tokens of blocks (..., n): (..., n·C), −1 outside [0, length)."""
    token = (blocks[..., None] * chunk + torch.arange(chunk, device=blocks.device)).flatten(-2)
    return token.masked_fill((token < 0) | (token >= length), -1)


def _clusters(inputs: AttentionInputs, query_index: Tensor, key_index: Tensor) -> tuple[Tensor, Tensor]:
    spec = ClusterAttentionSpec(inputs.causal, inputs.q.shape[-1] ** -0.5, count_clusters=False)
    return cluster_attention(*inputs[:3], query_index, key_index, spec, inputs.key_mask, dropout=inputs.dropout)


class SparseTransformerAttentionConfig(MechanismSection):
    stride: Positive | None = None
    """A token attends to the last `stride` positions and to every stride-th one; null means √max_length."""


@mechanism("sparse_transformer", SparseTransformerAttentionConfig)
class SparseTransformerAttention(FixedPatternAttention):
    """One softmax over the last S positions, i − S < j <= i, and every S-th one, (i − j) mod S = 0.

    In an encoder |i − j| < S, and every S-th one on both sides. The paper's two patterns are merged in each head (its
    merged form). Time grows as L·(S + L/S).
    """

    computed_by_document = True

    def __init__(self, config: SparseTransformerAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.stride = config.stride or round(spec.max_length**0.5)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        if inputs.key_mask is not None and inputs.segments is None:
            # Separate padding: the window uses ranks and the stride positions, equal only without padding.
            inputs = inputs._replace(segments=torch.zeros_like(inputs.key_mask, dtype=torch.int64))
        return super().forward(x, inputs, context)

    def attend(self, inputs: AttentionInputs, context: AttentionContext) -> Tensor:
        near, near_lse = self._near(inputs)
        length, stride = inputs.q.shape[2], min(self.stride, inputs.q.shape[2])
        rows = -(-length // stride)
        token = torch.arange(rows * stride, device=inputs.q.device)
        token = token.masked_fill(token >= length, -1).view(rows, stride).T[None, None]  # (1, 1, S, L/S)
        far, far_lse = _clusters(inputs, token, token)
        lse = torch.logaddexp(near_lse, far_lse)
        out = near * torch.exp(near_lse - lse).unsqueeze(-1) + far * torch.exp(far_lse - lse).unsqueeze(-1)
        return out.to(inputs.q.dtype)

    def _near(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Attend to the other tokens nearer than S; the token itself is in the strided pattern."""
        spec = BucketedAttentionSpec(Window("band", self.stride), inputs.causal, inputs.q.shape[-1] ** -0.5)
        out, lse = inputs.in_buckets(None, spec)
        blind = torch.arange(lse.shape[-1], device=lse.device) == 0
        if self.stride == 1 or lse.shape[-1] == 1:
            blind = torch.ones_like(blind)
        elif not inputs.causal:
            blind = torch.zeros_like(blind)
        return out, lse.masked_fill(blind, -torch.inf)  # without other keys, the operator returns the token's own value

    def flops(self, length: int) -> Passes:
        """The last S positions (bidirectional: S on either side) and every S-th one."""
        work = self.spec.workload(length)
        return work.pairs(self.stride * (1 if work.causal else 2) + work.visible / self.stride)

    def visible(self, position: int, context: AttentionContext, device: torch.device) -> Tensor:
        near = torch.arange(max(0, position - self.stride + 1), position + 1, device=device)
        return torch.cat([torch.arange(position % self.stride, position, self.stride, device=device), near])[None]


class LongformerAttentionConfig(MechanismSection):
    chunk: Positive = 64
    """Block size: a token attends to its own block and the neighbouring blocks."""
    globals: Count = 1
    """Global tokens: the first tokens, which attend to every token and which every token attends to."""


@mechanism("longformer", LongformerAttentionConfig)
class LongformerAttention(BlockSparseAttention):
    """Window of blocks, and global tokens that attend to all tokens and that all tokens attend to (causal in decoders).

    A token attends to its own block and the neighbouring blocks (in a decoder the previous one), the paper's window in
    blocks. The paper gives global tokens separate projections; here they share the projections of the other tokens.
    """

    def __init__(self, config: LongformerAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.chunk, self.first = min(config.chunk, spec.max_length), config.globals

    def flops(self, length: int) -> Passes:
        """Neighbouring blocks and G global tokens; bidirectional: G queries of all keys, G more per query."""
        work = self.spec.workload(length)
        return work.pairs(work.chunks(self.chunk) + self.first * (1 if work.causal else 2))


def random_blocks(blocks: Tensor, key: int, heads: range, global_blocks: int, total: int | None, count: int) -> Tensor:
    """Draw `count` distinct blocks (H, W, count) for each of `blocks` (W,), −1 if there are too few candidates.

    Candidates exclude global blocks, the block itself and its neighbours, and, if `total` is None, later blocks; else
    there are `total` blocks. heads: global head indices. Floyd's method: draw i adds one candidate, the last, which
    also replaces a repetition.
    """
    before = (blocks - 1 - global_blocks).clamp_min(0)  # (W,): number of candidates before the window
    after = (blocks + 2).clamp_min(global_blocks)  # (W,): first candidate after the window
    candidates = before if total is None else before + (total - after).clamp_min(0)
    head = torch.arange(heads.start, heads.stop, device=blocks.device)[:, None] * (1 << 32)
    bits = random_bits(key, head + blocks, count).to(torch.int64) + (1 << 31)  # (H, W, count) in [0, 2³²)
    chosen = torch.full_like(bits, -1)
    for i in range(count):
        last = candidates - count + i
        drawn = (bits[..., i] * (last + 1)) >> 32
        drawn = torch.where((chosen[..., :i] == drawn[..., None]).any(-1), last, drawn)
        chosen[..., i] = drawn.masked_fill(last < 0, -1)
    block = torch.where(chosen < before[:, None], global_blocks + chosen, (after - before)[:, None] + chosen)
    return block.masked_fill(chosen < 0, -1)


class BigBirdAttentionConfig(MechanismSection):
    chunk: Positive = 64
    """Block size: a token attends to its own block and the neighbouring blocks."""
    globals: Count = 1
    """Global blocks: the first blocks, which attend to every block and which every block attends to."""
    random: Count = 3
    """Additional random blocks per block."""


@mechanism("bigbird", BigBirdAttentionConfig)
class BigBirdAttention(BlockSparseAttention):
    """Window of blocks, global blocks at the start, and random blocks (in a decoder earlier ones).

    Random blocks are a function of (seed, layer, global head, block), the same in every step and at every length.
    """

    def __init__(self, config: BigBirdAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.chunk = min(config.chunk, spec.max_length)
        self.first, self.blocks = config.globals * self.chunk, -(-spec.max_length // self.chunk)

    def flops(self, length: int) -> Passes:
        """As in Longformer, with global blocks, plus random blocks."""
        work = self.spec.workload(length)
        blocks = self.config.random + self.config.globals * (1 if work.causal else 2)
        return work.pairs(work.chunks(self.chunk) + blocks * self.chunk)

    def further(self, blocks: Tensor, heads: int, causal: bool, context: AttentionContext) -> Tensor:
        key = derive(context.rng.seed, context.layer, "bigbird blocks")
        numbers = range(context.head_offset, context.head_offset + heads)
        total = None if causal else self.blocks
        return random_blocks(blocks, key, numbers, self.config.globals, total, self.config.random)
