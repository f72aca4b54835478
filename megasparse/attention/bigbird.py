"""BigBird attention (Zaheer et al. 2020). H heads, C tokens in a block, W blocks, N blocks of the longest sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megasparse.attention.block_sparse import BlockSparseAttention
from megasparse.attention.contract import AttentionContext, MechanismSpec
from megasparse.attention.costs import Passes
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Count, Positive
from megasparse.ops.random import derive, random_bits


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
