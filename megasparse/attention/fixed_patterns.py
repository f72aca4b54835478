"""Attention in fixed patterns of blocks and strides: Sparse Transformer, Longformer, BigBird, and their decoding.

B batch, H heads, L length, D head dim, C tokens in a block, W blocks, N blocks of the longest sequence, M keys of a
block.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

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
        tokens = self.visible(position, context, cache.k.device)
        k, v = (cached[:, head, tokens].to(inputs.q.dtype) for cached in (cache.k, cache.v))
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
            every_token = torch.arange(length, device=device)[None, None, None]
            out = out + _clusters(inputs, every_token[..., : self.first], every_token)
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
        tokens = torch.cat([torch.arange(min(self.first, start), device=device), near])[None]
        further = self.further(self.spec.on_rank(context.part).heads, True, context)
        if further is None:
            return tokens
        blocks = further(torch.tensor([position // self.chunk], device=device))[:, 0]
        blocks = blocks[blocks >= 0].view(len(blocks), -1)
        return torch.cat([tokens.expand(len(blocks), -1), _tokens(blocks, self.chunk, position)], dim=-1)


def _tokens(blocks: Tensor, chunk: int, length: int) -> Tensor:
    """The tokens of blocks (..., n): (..., n·C), −1 outside of [0, length)."""
    token = (blocks[..., None] * chunk + torch.arange(chunk, device=blocks.device)).flatten(-2)
    return token.masked_fill((token < 0) | (token >= length), -1)


def _clusters(inputs: AttentionInputs, query_index: Tensor, key_index: Tensor) -> Tensor:
    spec = ClusterAttentionSpec(inputs.causal, inputs.q.shape[-1] ** -0.5, count_clusters=False)
    heads = (inputs.q, inputs.k, inputs.v)
    return cluster_attention(*heads, query_index, key_index, spec, inputs.key_mask, dropout=inputs.dropout)[0]


@dataclass(frozen=True)
class StridedAttention:
    """The merged pattern, (B, H, L, D)."""

    stride: int

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        near, near_lse = self._near(inputs)
        far, far_lse = self._strided(inputs)
        lse = torch.logaddexp(near_lse, far_lse)
        out = near * torch.exp(near_lse - lse).unsqueeze(-1) + far * torch.exp(far_lse - lse).unsqueeze(-1)
        return out.to(inputs.q.dtype)

    def _near(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Over the other tokens nearer than S; the token itself is among the strided ones."""
        spec = BucketedAttentionSpec(Window("band", self.stride), inputs.causal, inputs.q.shape[-1] ** -0.5)
        out, lse = inputs.in_buckets(None, spec)
        blind = torch.arange(lse.shape[-1], device=lse.device) == 0
        if self.stride == 1 or lse.shape[-1] == 1:
            blind = torch.ones_like(blind)
        elif not inputs.causal:
            blind = torch.zeros_like(blind)
        return out, lse.masked_fill(blind, -torch.inf)  # where there is no other, the operator gives the token itself

    def _strided(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        length, stride = inputs.q.shape[2], min(self.stride, inputs.q.shape[2])
        rows = -(-length // stride)
        token = torch.arange(rows * stride, device=inputs.q.device)
        token = token.masked_fill(token >= length, -1).view(rows, stride).T[None, None]  # (1, 1, S, L/S)
        spec = ClusterAttentionSpec(inputs.causal, inputs.q.shape[-1] ** -0.5, count_clusters=False)
        return cluster_attention(inputs.q, inputs.k, inputs.v, token, token, spec, dropout=inputs.dropout)


class SparseTransformerAttentionConfig(MechanismSection):
    stride: Positive | None = None
    """A token sees the tokens of the last `stride` positions and every stride-th one; null takes √max_length."""


@mechanism("sparse_transformer", SparseTransformerAttentionConfig)
class SparseTransformerAttention(FixedPatternAttention):
    """One softmax over the last S positions, i − S < j <= i, and every S-th one, (i − j) mod S = 0.

    In an encoder |i − j| < S, and every S-th one on both sides. The paper's two patterns share a head here (its merged
    form). Time grows as L·(S + L/S).
    """

    def __init__(self, config: SparseTransformerAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.stride = config.stride or round(spec.max_length**0.5)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        if inputs.key_mask is not None and inputs.segments is None:
            # Without padding a token's rank, which makes the window, is its position, which makes the stride.
            inputs = inputs._replace(segments=torch.zeros_like(inputs.key_mask, dtype=torch.int64))
        return super().forward(x, inputs, context)

    def pattern(self, inputs: AttentionInputs, context: AttentionContext) -> StridedAttention:
        return StridedAttention(self.stride)

    def flops(self, length: int) -> Passes:
        """The last S positions (both ways S on either side) and every S-th one."""
        work = self.spec.workload(length)
        return work.pairs(self.stride * (1 if work.causal else 2) + work.visible / self.stride)

    def visible(self, position: int, context: AttentionContext, device: torch.device) -> Tensor:
        near = torch.arange(max(0, position - self.stride + 1), position + 1, device=device)
        return torch.cat([torch.arange(position % self.stride, position, self.stride, device=device), near])[None]


class LongformerAttentionConfig(MechanismSection):
    chunk: Positive = 64
    """Block size: a token sees its own block and its neighbours."""
    globals: Count = 1
    """First tokens that every token sees, and that see every token."""


@mechanism("longformer", LongformerAttentionConfig)
class LongformerAttention(BlockSparseAttention):
    """A window of blocks, and global tokens that see everyone and are seen by everyone (a decoder's: what is before).

    A token sees its own block and the neighbours (a decoder's: the one before), the paper's window in blocks. The
    paper gives global tokens projections of their own; here they share those of the others.
    """

    def __init__(self, config: LongformerAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.chunk, self.first = min(config.chunk, spec.max_length), config.globals

    def flops(self, length: int) -> Passes:
        """Neighbouring blocks and G global tokens; both ways G queries see all keys, G more a query on average."""
        work = self.spec.workload(length)
        return work.pairs(work.chunks(self.chunk) + self.first * (1 if work.causal else 2))


@dataclass(frozen=True)
class RandomBlocks:
    """`count` different blocks (H, W, count) for each of `blocks` (W,), −1 where fewer are left to choose from.

    Neither global, nor the block itself or a neighbour; of all `total` blocks, or, if None, of those before. heads:
    global numbers. Drawn by Floyd's method: the i-th draw is of one number more, and takes that one instead of a
    repetition.
    """

    key: int
    heads: range
    global_blocks: int
    total: int | None
    count: int

    def __call__(self, blocks: Tensor) -> Tensor:
        before = (blocks - 1 - self.global_blocks).clamp_min(0)  # (W,): candidates before the window
        after = (blocks + 2).clamp_min(self.global_blocks)  # the first one after it
        candidates = before if self.total is None else before + (self.total - after).clamp_min(0)
        head = torch.arange(self.heads.start, self.heads.stop, device=blocks.device)[:, None] * (1 << 32)
        bits = random_bits(self.key, head + blocks, self.count).to(torch.int64) + (1 << 31)  # (H, W, count) in [0, 2³²)
        chosen = torch.full_like(bits, -1)
        for i in range(self.count):
            last = candidates - self.count + i
            drawn = (bits[..., i] * (last + 1)) >> 32
            drawn = torch.where((chosen[..., :i] == drawn[..., None]).any(-1), last, drawn)
            chosen[..., i] = drawn.masked_fill(last < 0, -1)
        block = torch.where(chosen < before[:, None], self.global_blocks + chosen, (after - before)[:, None] + chosen)
        return block.masked_fill(chosen < 0, -1)


class BigBirdAttentionConfig(MechanismSection):
    chunk: Positive = 64
    """Block size: a token sees its own block and its neighbours."""
    globals: Count = 1
    """First blocks that every block sees, and that see every block."""
    random: Count = 3
    """Blocks more that each block sees, drawn at random."""


@mechanism("bigbird", BigBirdAttentionConfig)
class BigBirdAttention(BlockSparseAttention):
    """A window of blocks, global blocks at the start, and random blocks (a decoder's: earlier ones).

    The random blocks are a function of (seed, layer, global head, block), the same in every step and at every length.
    """

    def __init__(self, config: BigBirdAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.chunk = min(config.chunk, spec.max_length)
        self.first, self.blocks = config.globals * self.chunk, -(-spec.max_length // self.chunk)

    def flops(self, length: int) -> Passes:
        """Longformer's count, in global blocks, and random blocks."""
        work = self.spec.workload(length)
        blocks = self.config.random + self.config.globals * (1 if work.causal else 2)
        return work.pairs(work.chunks(self.chunk) + blocks * self.chunk)

    def further(self, heads: int, causal: bool, context: AttentionContext) -> RandomBlocks:
        key = derive(context.rng.seed, context.layer, "bigbird blocks")
        total = None if causal else self.blocks
        numbers = range(context.head_offset, context.head_offset + heads)
        return RandomBlocks(key, numbers, self.config.globals, total, self.config.random)
