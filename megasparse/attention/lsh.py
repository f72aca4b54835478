"""LSH attention (Reformer section 2): a token sees the tokens that random rotations put into its buckets.

B batch, H heads, R rounds, L length, D head dim.
"""

import math

from torch import Tensor

from megasparse.attention.band import BandAttention, Codes
from megasparse.attention.contract import (
    AttentionContext,
    AttentionInputs,
    AttentionOutput,
    Buckets,
    MechanismSpec,
)
from megasparse.attention.costs import Passes
from megasparse.config.attention import LSHAttentionConfig
from megasparse.config.buckets import lsh_buckets
from megasparse.ops.bucketed_attention import Window
from megasparse.ops.hashing import angular_hash
from megasparse.ops.random import rotations


class LSHAttention(BandAttention):
    """Attention inside hash buckets, rounds merged by log-sum-exp, a pair seen in N rounds counted once.

    Shared QK (the paper): logits q·k, k = q/|q|, and a token sees itself only as last resort. Separate QK (the LSH
    baseline of LHA): logits q·k/√D, the same rotations hash queries and keys, and a token may see itself.
    The band window is strictly causal and decodes exactly from each bucket's last M keys. The chunk window is the
    paper's.
    """

    def __init__(self, config: LSHAttentionConfig, spec: MechanismSpec):
        super().__init__(spec)
        self.config = config
        self.shared_qk = config.shared_qk
        self.factors = lsh_buckets(config, spec.max_length)
        self.buckets = math.prod(self.factors)
        scale = 1.0 if self.shared_qk else spec.head_dim**-0.5
        self.rule = {"scale": scale, "exclude_self": self.shared_qk, "count_rounds": config.count_rounds}
        self.window = Window(config.window, min(config.chunk, spec.max_length), config.same_bucket)
        self.local, self.sinks = config.local, config.sinks
        if config.window == "chunk":
            self.leak = (
                "the chunk window's borders depend on later tokens; attention.lsh.window = band is strictly causal"
            )

    def assign(self, inputs: AttentionInputs, context: AttentionContext) -> Codes:
        rng = context.rng
        rounds = self.config.rounds if rng.training else self.config.rounds_in_evaluation
        numbers = range(context.head_offset, context.head_offset + inputs.q.shape[1])
        key = rng.key(context.layer, "lsh rotation")
        matrices = rotations(key, numbers, rng.rounds or rounds, inputs.q.shape[3], self.factors, inputs.q.device)
        queries = angular_hash(inputs.q.detach(), matrices, self.factors)
        return queries, None if self.shared_qk else angular_hash(inputs.k.detach(), matrices, self.factors)

    def band_codes(self, inputs: AttentionInputs, position: int, context: AttentionContext) -> Codes:
        return self.assign(inputs, context)

    def buckets_of(self, inputs: AttentionInputs, context: AttentionContext) -> Buckets:
        queries, keys = self.assign(inputs, context)
        keys = queries if keys is None else keys
        return Buckets(queries.flatten(1, 2), keys.flatten(1, 2), self.buckets)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        queries, keys = context.recompute.keep(lambda: self.assign(inputs, context))
        out, lse = self.attend(inputs, queries, keys, context.part)
        return AttentionOutput(out, None, {}, lse)

    def flops(self, length: int) -> Passes:
        """Pairs in windows. Codes, forward only: in each round 2·D for each of half as many rotation vectors as there
        are buckets (the sum of the factors), for each of queries and keys that has codes of its own.
        """
        hashed, width = 1 if self.shared_qk else 2, self.spec.heads * self.spec.head_dim
        codes = float(self.config.rounds * hashed * width * sum(self.factors))
        work, keys = self.spec.workload(length), self._window_keys(length)
        return work.pairs(keys) * (self.config.rounds + self.local) + work.pairs(self.sinks) + Passes(codes)

    def _window_keys(self, length: int) -> float:
        """Keys of a query in a round, where its bucket has as many."""
        work, chunk = self.spec.workload(length), self.config.chunk
        return work.band(chunk, self.shared_qk) if self.config.window == "band" else work.chunks(chunk)

    def cached_rounds(self, rounds: int | None) -> int:
        return rounds or self.config.rounds_in_evaluation
