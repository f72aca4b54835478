"""Performer attention (Choromanski et al. 2020, FAVOR+) and Linformer attention (Wang et al. 2020).

B batch, H heads, L length, D head dim, F features, P projected length.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megasparse.attention.contract import (
    Attention,
    AttentionContext,
    AttentionInputs,
    AttentionOutput,
    Cache,
    MechanismSpec,
    Passes,
    product,
)
from megasparse.attention.documents import attend_each
from megasparse.attention.full import attend_to_all
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
        key = context.rng.key(context.layer, "performer features")
        heads = range(context.head_offset, context.head_offset + q.shape[1])
        return orthogonal_projections(key, heads, self.config.features, q.shape[3], q.device)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        projection = self.projection(inputs.q, context)

        def attend(inputs: AttentionInputs) -> Tensor:
            if inputs.causal:
                return self._causal(inputs, projection, None)[0]
            return linear_attention(*inputs[:3], projection, scale=self.scale, key_mask=inputs.key_mask)

        return AttentionOutput(attend_each(inputs, attend), None, {})

    def _causal(self, inputs: AttentionInputs, projection: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the output, and the sums over the state's tokens and these. projection: (H, F, D)."""
        rule: dict[str, Any] = {"scale": self.scale, "chunk": self.config.chunk, "key_mask": inputs.key_mask}
        return causal_linear_attention(*inputs[:3], projection, state=state, **rule)

    def flops(self, length: int) -> Passes:
        """Features of q and of k, 6·D each per feature, and 12·D per feature instead of per key; causal: pairs inside a
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
        out, cache.state = self._causal(inputs, cache.projection, cache.state)
        return out


class SequenceProjection(nn.Module):
    """Learned matrix (P, max_length) over positions; a shorter sequence uses its first columns."""

    def __init__(self, projected: int, max_length: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(projected, max_length))

    def forward(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return (P, length) in this dtype, as a copy: under ZeRO 3 the weight is gathered only during this call."""
        return self.weight[:, :length].to(dtype, copy=True)


class LinformerAttentionConfig(MechanismSection):
    projected: Positive = 256
    """Length P to which the keys and values of all positions are projected."""

    bidirectional_only = "it projects the whole sequence"


@mechanism("linformer", LinformerAttentionConfig)
class LinformerAttention(Attention):
    """Linformer, softmax(q(E k)ᵀ/√D) F v, with keys and values projected over the sequence to length P by matrices E
    and F that all heads share.

    Padding is projected as zeros. Packed documents are projected separately, with positions relative to their first
    real token. Every projected key mixes all tokens, so a causal form does not exist.
    """

    def __init__(self, config: LinformerAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.keys = SequenceProjection(config.projected, spec.max_length)
        self.values = SequenceProjection(config.projected, spec.max_length)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        inputs = inputs.of_one_dtype()
        keys, values = (side(inputs.k.shape[2], inputs.k.dtype) for side in (self.keys, self.values))

        def attend(inputs: AttentionInputs) -> Tensor:
            k, v, length = inputs.k, inputs.v, inputs.k.shape[2]
            if inputs.key_mask is not None:
                k, v = (x.masked_fill(~inputs.key_mask[:, None, :, None], 0.0) for x in (k, v))
            return attend_to_all(inputs.q, keys[:, :length] @ k, values[:, :length] @ v, None, inputs.dropout)

        return AttentionOutput(attend_each(inputs, attend), None, {})

    def flops(self, length: int) -> Passes:
        """P projected keys, and the projections of keys and of values, 6·D each per projected key."""
        return product(self.spec.heads * 8.0 * self.spec.head_dim * self.keys.weight.shape[0])
