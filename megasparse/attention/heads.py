"""One attention layer: projects its input to heads, lets the mechanism attend, projects back. Keeps the decoding cache.

B batch, L length, H heads, D head dim, E width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from megasparse.attention.contract import Attention, AttentionContext, AttentionOutput, Heads
from megasparse.attention.full import FullAttention
from megasparse.attention.local import LocalAttention
from megasparse.attention.lsh import LSHAttention
from megasparse.config.schema import AttentionConfig, ModelConfig


def build_mechanism(kind: str, config: AttentionConfig, max_length: int) -> Attention:
    """The mechanism a configuration names."""
    if kind == "full":
        return FullAttention(config.full, max_length)
    if kind == "local":
        return LocalAttention(config.local, max_length)
    assert kind == "lsh"
    return LSHAttention(config.lsh, max_length)


@dataclass(frozen=True)
class Padding:
    """Which tokens of a batch are real, and which document each belongs to: (B, L) each, or None for all and one."""

    key_mask: Tensor | None = None
    segments: Tensor | None = None


class AttentionLayer(nn.Module):
    """Multi-head attention with one mechanism. With shared QK there is no key projection: k = q/|q| (Reformer section
    2).
    """

    def __init__(self, config: ModelConfig, kind: str):
        super().__init__()
        self.heads = config.heads
        self.head_dim = config.head_dim or config.d_model // config.heads
        self.rotary = config.positions.kind == "rotary"
        self.mechanism = build_mechanism(kind, config.attention, config.max_length)
        width = self.heads * self.head_dim
        self.query = _projection(config.d_model, width)
        self.key = None if self.mechanism.shared_qk else _projection(config.d_model, width)
        self.value = _projection(config.d_model, width)
        self.output = _projection(width, config.d_model)

    def forward(
        self, x: Tensor, context: AttentionContext, padding: Padding, causal: bool = True, cache: Any = None
    ) -> AttentionOutput:
        """x: (B, L, E). Returns the layer's output (B, L, E). A given empty cache takes in the whole sequence."""
        heads = self._project(x, 0, padding, causal)
        output = self.mechanism(x, heads, context)
        if cache is not None:
            self.mechanism.fill_cache(heads, cache, context)
        return output._replace(out=self._merge(output.out))

    def new_cache(self, batch: int, rounds: int | None) -> Any:
        return self.mechanism.new_cache(batch, self.heads, self.head_dim, self.query.weight, rounds)

    def decode(self, x: Tensor, cache: Any, position: int, context: AttentionContext) -> Tensor:
        """x: (B, 1, E), the new token at `position`. Returns (B, 1, E)."""
        heads = self._project(x, position, Padding(), causal=True)
        return self._merge(self.mechanism.decode(heads, cache, position, context))

    def _project(self, x: Tensor, first_position: int, padding: Padding, causal: bool) -> Heads:
        q, v = self._split(self.query(x)), self._split(self.value(x))
        k = q if self.key is None else self._split(self.key(x))
        if self.rotary:
            q, k = rotate(q, first_position), rotate(k, first_position)
        if self.key is None:
            k = normalized(q)
        return Heads(q, k, v, padding.key_mask, padding.segments, causal)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)  # (B, H, L, D)

    def _merge(self, x: Tensor) -> Tensor:
        return self.output(x.transpose(1, 2).flatten(-2))  # (B, L, E)


def _projection(width_in: int, width_out: int) -> nn.Linear:
    """Without torch's own initialisation, which would draw from the global generator."""
    return skip_init(nn.Linear, width_in, width_out, bias=False)


def normalized(q: Tensor) -> Tensor:
    """q/|q| in fp32 at least, cast back; a zero vector stays zero."""
    return F.normalize(_at_least_fp32(q), dim=-1).to(q.dtype)


def rotate(x: Tensor, first_position: int) -> Tensor:
    """Rotary positions (Su et al., RoFormer): the pair (x_i, x_{i+D/2}) turned by position·10000^(−2i/D). x: (B, H,
    L, D).
    """
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    position = torch.arange(first_position, first_position + x.shape[2], dtype=torch.float64, device=x.device)
    angle = position[:, None] * frequency  # (L, D/2)
    wide = _at_least_fp32(x)
    cosine, sine = torch.cos(angle).to(wide.dtype), torch.sin(angle).to(wide.dtype)
    first, second = wide[..., :half], wide[..., half:]
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x.dtype)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
