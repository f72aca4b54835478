"""Longformer attention (Beltagy et al. 2020): a window of blocks and global tokens."""

from megasparse.attention.baselines.fixed_patterns import BlockSparseAttention
from megasparse.attention.contract import MechanismSpec
from megasparse.attention.flops import Flops
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Count, Positive


class LongformerAttentionConfig(MechanismSection):
    chunk: Positive = 64
    """Block size: a token attends to its own block and the neighbouring blocks."""
    globals: Count = 1
    """Global tokens: the first tokens, which attend to every token and which every token attends to."""


@mechanism("longformer", LongformerAttentionConfig)
class LongformerAttention(BlockSparseAttention):
    """The paper's window in blocks, and global tokens that attend to all tokens and that all tokens attend to (causal
    in decoders). The paper gives global tokens separate projections; here they share the others' projections.
    """

    def __init__(self, config: LongformerAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.chunk = min(config.chunk, spec.max_length)
        self.first = config.globals

    def flops(self, length: int) -> Flops:
        """Neighbouring blocks and G global tokens; bidirectional: G queries of all keys, G more per query."""
        work = self.spec.workload(length)
        return work.pairs(work.chunks(self.chunk) + self.first * (1 if work.causal else 2))
