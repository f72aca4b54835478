"""Longformer attention (Beltagy et al. 2020)."""

from megasparse.attention.block_sparse import BlockSparseAttention
from megasparse.attention.contract import MechanismSpec
from megasparse.attention.costs import Passes
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Count, Positive


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
