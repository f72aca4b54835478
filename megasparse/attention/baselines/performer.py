"""Performer attention (Choromanski et al. 2020, FAVOR+). F features."""

from dataclasses import dataclass

from torch import Tensor

from megasparse.attention.cache import Cache
from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec
from megasparse.attention.documents import attend_each
from megasparse.attention.flops import Flops, product
from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Positive
from megasparse.ops.linear_attention import State, causal_linear_attention, linear_attention, orthogonal_projections


@dataclass
class PerformerCache(Cache):
    """Running sums, of constant size, and the projection (H, F, D); None before the first token."""

    state: State | None = None
    projection: Tensor | None = None

    def select(self, rows: Tensor) -> None:
        if self.state is not None:
            self.state = State(self.state.total[rows], self.state.level[rows])


class PerformerAttentionConfig(MechanismSection):
    features: Positive = 256
    """Number of positive random features."""
    chunk: Positive = 128
    """Decoders only: tokens per chunk. Pairs inside a chunk are scored one by one, others through running sums."""

    no_probabilities = True


@mechanism("performer", PerformerAttentionConfig)
class PerformerAttention(Attention):
    """Softmax attention with exp(q·k/√D) approximated by a product of positive random features: time linear in length.

    The projections are orthogonal Gaussians per head, redrawn at every training step and fixed in evaluation.
    """

    computed_by_document = True

    def __init__(self, config: PerformerAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.scale = spec.head_dim**-0.5

    def projection(self, q: Tensor, context: AttentionContext) -> Tensor:
        heads = context.heads(q.shape[1])
        key = context.key("performer features")
        return orthogonal_projections(key, heads, self.config.features, q.shape[3], q.device)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        projection = self.projection(inputs.q, context)

        def attend(inputs: AttentionInputs) -> Tensor:
            if inputs.causal:
                return self._causal(inputs, projection, None)[0]
            return linear_attention(*inputs[:3], projection, scale=self.scale, key_mask=inputs.key_mask)

        return AttentionOutput(attend_each(inputs, attend))

    def _causal(self, inputs: AttentionInputs, projection: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the output, and the sums over the state's tokens and these. projection: (H, F, D)."""
        return causal_linear_attention(
            *inputs[:3], projection, scale=self.scale, chunk=self.config.chunk, key_mask=inputs.key_mask, state=state
        )

    def flops(self, length: int) -> Flops:
        """Features of q and of k, 6·D each per feature, and 12·D per feature instead of per key; causal: pairs inside a
        chunk, whose scores are products of features.
        """
        dim = self.spec.head_dim
        features = self.config.features
        inside = (min(self.config.chunk, length) + 1) / 2 if self.spec.causal else 0.0
        return product(self.spec.heads * (8.0 * dim * features + 2.0 * (features + dim) * inside))

    def new_cache(self, batch: int, like: Tensor, rounds: int | None, part: SequencePart = WHOLE) -> PerformerCache:
        return PerformerCache()

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: PerformerCache, context: AttentionContext) -> None:
        self.decode(x, inputs, cache, 0, context)

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: PerformerCache, position: int, context: AttentionContext
    ) -> Tensor:
        if cache.projection is None:
            cache.projection = self.projection(inputs.q, context)
        out, cache.state = self._causal(inputs, cache.projection, cache.state)
        return out
