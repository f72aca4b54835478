"""BigBird attention (Zaheer et al. 2020): a window of blocks, global blocks and random blocks, W in all."""

import torch
from torch import Tensor

from megasparse.attention.baselines.fixed_patterns import BlockSparseAttention
from megasparse.attention.contract import AttentionContext, MechanismSpec
from megasparse.attention.flops import Flops
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Count, Positive
from megasparse.ops.random import derive, random_bits


def random_blocks(blocks: Tensor, key: int, heads: range, global_blocks: int, total: int | None, count: int) -> Tensor:
    """Draw `count` distinct blocks (H, W, count) for each of `blocks` (W,), −1 if there are too few candidates.

    Candidates exclude global blocks, the block itself and its neighbours, and, if `total` is None, later blocks. heads:
    global head indices. Floyd's method: draw i adds one candidate, the last, which also replaces a repetition.
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

    Random blocks are a function of (seed, layer, global head, block).
    """

    def __init__(self, config: BigBirdAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.chunk = min(config.chunk, spec.max_length)
        self.first = config.globals * self.chunk
        self.blocks = -(-spec.max_length // self.chunk)

    def flops(self, length: int) -> Flops:
        work = self.spec.workload(length)
        blocks = self.config.random + self.config.globals * (1 if work.causal else 2)
        return work.pairs(work.chunks(self.chunk) + blocks * self.chunk)

    def extra_blocks(self, blocks: Tensor, heads: int, causal: bool, context: AttentionContext) -> Tensor:
        key = derive(context.rng.seed, context.layer, "bigbird blocks")
        total = None if causal else self.blocks
        return random_blocks(blocks, key, context.heads(heads), self.config.globals, total, self.config.random)
