"""BigBird attention (Zaheer et al. 2020). H heads, C tokens in a block, W blocks, N blocks of the longest sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megasparse.attention.block_sparse import BlockAttention, FixedPatternAttention, visible_blocks
from megasparse.attention.contract import AttentionContext, AttentionInputs, MechanismSpec
from megasparse.attention.costs import Passes
from megasparse.config.attention import BigBirdAttentionConfig
from megasparse.ops.keys import derive
from megasparse.ops.random import random_bits


@dataclass(frozen=True)
class RandomBlocks:
    """`random_blocks` of one layer: its arguments but the blocks."""

    key: int
    heads: range
    global_blocks: int
    total: int | None
    count: int

    def __call__(self, blocks: Tensor) -> Tensor:
        return random_blocks(self.key, self.heads, blocks, self.global_blocks, self.total, self.count)


class BigBirdAttention(FixedPatternAttention):
    """A window of blocks, global blocks at the start, and random blocks (a decoder's: earlier ones).

    The random blocks are a function of (seed, layer, global head, block), the same in every step and at every length.
    """

    def __init__(self, config: BigBirdAttentionConfig, spec: MechanismSpec):
        super().__init__(spec)
        self.config = config
        self.chunk = min(config.chunk, spec.max_length)
        self.blocks = -(-spec.max_length // self.chunk)

    def pattern(self, inputs: AttentionInputs, context: AttentionContext) -> BlockAttention:
        return BlockAttention(self.chunk, self._first(), self._further(inputs.q.shape[1], inputs.causal, context))

    def flops(self, length: int) -> Passes:
        """Longformer's count, in global blocks, and random blocks."""
        work = self.workload(length)
        blocks = self.config.random + self.config.globals * (1 if work.causal else 2)
        return work.pairs(work.chunks(self.chunk) + blocks * self.chunk)

    def visible(self, position: int, context: AttentionContext, device: torch.device) -> Tensor:
        block = torch.tensor([position // self.chunk], device=device)
        further = self._further(self.spec.here(context.part).heads, True, context)(block)[:, 0]
        # Every head has equally many: only the empty places are left out.
        further = further[further >= 0].view(len(further), -1)
        return visible_blocks(position, self.chunk, self._first(), further, device)

    def _first(self) -> int:
        return self.config.globals * self.chunk

    def _further(self, count: int, causal: bool, context: AttentionContext) -> RandomBlocks:
        key = derive(context.rng.seed, context.layer, "bigbird blocks")
        heads = range(context.head_offset, context.head_offset + count)
        total = None if causal else self.blocks
        return RandomBlocks(key, heads, self.config.globals, total, self.config.random)


def random_blocks(key: int, heads: range, blocks: Tensor, global_blocks: int, total: int | None, count: int) -> Tensor:
    """`count` different blocks (H, W, count) for each of `blocks` (W,), −1 where fewer are left to choose from.

    Neither global, nor the block itself or a neighbour; of all `total` blocks, or, if None, of those before. heads:
    global numbers. Drawn by Floyd's method: the i-th draw is of one number more, and takes that one instead of a
    repetition.
    """
    before = (blocks - 1 - global_blocks).clamp_min(0)  # (W,): candidates before the window
    after = (blocks + 2).clamp_min(global_blocks)  # the first one after it
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
