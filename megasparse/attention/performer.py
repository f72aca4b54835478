"""Performer attention (Choromanski et al. 2020, FAVOR+). B batch, H heads, L length, D head dim, F features."""

from dataclasses import dataclass

from torch import Tensor

from megasparse.attention.contract import (
    Attention,
    AttentionContext,
    AttentionInputs,
    AttentionOutput,
    MechanismSpec,
    Passes,
    product,
)
from megasparse.attention.documents import attend_each
from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Positive
from megasparse.ops.linear_attention import State, causal_linear_attention, linear_attention, orthogonal_projections


@dataclass
class PerformerCache:
    """The running sums, of one size at any length, and the projection (H, F, D); None before the first token."""

    state: State | None = None
    projection: Tensor | None = None

    def select(self, rows: Tensor) -> None:
        if self.state is not None:
            self.state = State(self.state.total[rows], self.state.level[rows])


@dataclass(frozen=True)
class PositiveFeatures:
    """Attention by features of the rows ω of a projection (H, F, D). Causal: pairs less than `chunk` apart are scored
    one by one.
    """

    projection: Tensor
    scale: float
    chunk: int

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        if inputs.causal:
            return self.causal(inputs, None)[0]
        heads = inputs.q, inputs.k, inputs.v, self.projection
        return linear_attention(*heads, scale=self.scale, key_mask=inputs.key_mask)

    def causal(self, inputs: AttentionInputs, state: State | None) -> tuple[Tensor, State]:
        """The output, and the sums over these tokens and those of the state."""
        return causal_linear_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            self.projection,
            scale=self.scale,
            chunk=self.chunk,
            key_mask=inputs.key_mask,
            state=state,
        )


class PerformerAttentionConfig(MechanismSection):
    features: Positive = 256
    """Number of positive random features."""
    chunk: Positive = 128
    """Decoders only: pairs of tokens this near are scored one by one, farther ones meet in running sums."""

    no_probabilities = True


@mechanism("performer", PerformerAttentionConfig)
class PerformerAttention(Attention):
    """Softmax attention whose exp(q·k/√D) is the product of positive random features of q and k: time linear in length.

    The projections are orthogonal Gaussians of each head, drawn anew at every training step, fixed in evaluation.
    """

    def __init__(self, config: PerformerAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.scale = spec.head_dim**-0.5

    def projection(self, q: Tensor, context: AttentionContext) -> Tensor:
        key = context.rng.key(context.layer, "performer features")
        heads = range(context.head_offset, context.head_offset + q.shape[1])
        return orthogonal_projections(key, heads, self.config.features, q.shape[3], q.device)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        features = self._features(self.projection(inputs.q, context))
        return AttentionOutput(attend_each(inputs, features), None, {})

    def _features(self, projection: Tensor) -> PositiveFeatures:
        return PositiveFeatures(projection, self.scale, self.config.chunk)

    def flops(self, length: int) -> Passes:
        """Features of q and of k, 6·D each a feature, and 12·D a feature in place of a key; causal: pairs inside a
        chunk, whose scores are products of features.
        """
        dim, features = self.spec.head_dim, self.config.features
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
        out, cache.state = self._features(cache.projection).causal(inputs, cache.state)
        return out
