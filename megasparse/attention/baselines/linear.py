"""Linear attention with a feature map φ. B batch, H heads, L length, D head dim, F features."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, AttentionOutput
from megasparse.attention.documents import attend_each
from megasparse.attention.flops import Flops, product
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.section import Positive
from megasparse.ops.normalize import unit_vectors
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.random import normal_by_head


class LinearAttentionConfig(MechanismSection):
    features: Literal["elu", "fourier"] = "elu"
    """φ(x): elu(x) + 1 (Katharopoulos et al. 2020), or sines and cosines of random projections of x/|x| (random feature
    attention without its gate, Peng et al. 2021)."""
    projections: Positive = 64
    """With fourier: number of random projections, each with a sine and a cosine."""

    no_probabilities = True
    bidirectional_only = "it sums over the whole sequence"


@mechanism("linear", LinearAttentionConfig)
class LinearAttention(Attention):
    """Linear attention, out_i = φ(q_i)·Σ_j φ(k_j)v_jᵀ / φ(q_i)·Σ_j φ(k_j). Fourier features are redrawn at every
    training step; as their products can be negative, the divisor is at least 1e-3 of the number of keys.
    """

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        heads = context.heads(inputs.q.shape[1])
        key = context.key("linear features")
        lines = normal_by_head(key, heads, self.config.projections, inputs.q.shape[3], inputs.q.device)  # (H, F/2, D)

        def features(x: Tensor) -> Tensor:
            if self.config.features == "elu":
                return F.elu(at_least_fp32(x)) + 1
            x = at_least_fp32(unit_vectors(x))
            angles = x @ lines.to(x.dtype).transpose(-1, -2)
            return torch.cat([angles.sin(), angles.cos()], dim=-1) / self.config.projections**0.5

        def attend(inputs: AttentionInputs) -> Tensor:
            q = features(inputs.q)
            k = inputs.without_padding(features(inputs.k))
            v = inputs.without_padding(inputs.v.to(k.dtype))
            total = k.transpose(-1, -2) @ v  # (B, H, F, D)
            weight = q @ k.sum(2).unsqueeze(-1)  # (B, H, L, 1)
            keys = k.shape[2] if inputs.key_mask is None else inputs.key_mask.sum(-1).clamp_min(1).view(-1, 1, 1, 1)
            return (q @ total / torch.maximum(weight, weight.new_tensor(1e-3) * keys)).to(inputs.q.dtype)

        return AttentionOutput(attend_each(inputs, attend))

    def flops(self, length: int) -> Flops:
        """Sums over keys and their products with queries, 4·D per feature; projections 2·D, of q and of k."""
        dim = self.spec.head_dim
        fourier = self.config.features == "fourier"
        features = 2 * self.config.projections if fourier else dim
        drawn = 4.0 * dim * self.config.projections if fourier else 0.0
        return product(self.spec.heads * (4.0 * dim * features)) + Flops(drawn, drawn) * self.spec.heads
