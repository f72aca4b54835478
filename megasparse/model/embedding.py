"""Token and position embeddings. B batch, L length, E d_model, V vocabulary."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.norm import Norm
from megasparse.config.schema import ModelConfig
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.positions import sinusoids


class Positions(nn.Module):
    """Position embeddings, (n, E) for the positions [first, first + n).

    axial: positions are cells of a grid; the embeddings of the axes stand side by side, Σ n_a·d_a numbers in place of
    L·E (the Reformer's released enwik8 and imagenet64 configurations). learned: a vector each.
    sinusoidal: Vaswani et al. 2017.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind, self.width, self.offset = config.positions.kind, config.d_model, config.positions.offset
        self.axial_shape = config.positions.axial_shape or []
        if self.kind == "axial":
            dims = config.positions.axial_dims or []
            pairs = zip(self.axial_shape, dims, strict=True)
            self.axes = nn.ParameterList(nn.Parameter(torch.empty(size, dim)) for size, dim in pairs)
        elif self.kind == "learned":
            self.table = nn.Parameter(torch.empty(self.offset + config.max_length, config.d_model))

    def forward(self, first: int, count: int, device: torch.device) -> Tensor | None:
        if self.kind == "axial":
            return self._axial(first, count)
        if self.kind == "learned":
            return self.table[self.offset + first : self.offset + first + count]
        if self.kind == "sinusoidal":
            return sinusoids(first, count, self.width, device)
        return None  # rotary positions turn queries and keys instead

    def _axial(self, first: int, count: int) -> Tensor:
        position = torch.arange(first, first + count, device=self.axes[0].device)
        parts, below = [], math.prod(self.axial_shape)
        for table, size in zip(self.axes, self.axial_shape, strict=True):
            below //= size
            parts.append(table[position // below % size])
        return torch.cat(parts, dim=-1)


class Embedding(nn.Module):
    """The input at position t, in fp32: position t plus the embedding of token t in an encoder, of token t − 1 in a
    decoder (at 0 a learned start vector, or the embedding of `model.start_token`). With `style` bert the embedding of
    the first token type is added, behind the first separator of model.sentence_order that of the second one, and the
    sum is normalised.
    """

    def __init__(self, config: ModelConfig, weight: nn.Parameter | None = None):
        """Make the table of embeddings. weight: (V, E), of another embedding that shares it."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.d_model)) if weight is None else weight
        self.start_token = config.start_token
        learned = config.kind != "encoder" and self.start_token is None
        self.start = nn.Parameter(torch.empty(1, config.d_model)) if learned else None
        self.token_types = nn.Parameter(torch.empty(config.token_types, config.d_model)) if config.token_types else None
        self.separator = config.sentence_order.separator if config.sentence_order else None
        self.positions = Positions(config)
        self.norm = Norm(config) if config.style == "bert" else None

    def forward(self, tokens: Tensor, first: int) -> Tensor:
        """Embed tokens. tokens: (B, n), those of the positions [first, first + n); in a decoder those before each
        position, at first = 0 without the start: (B, n − 1).

        Returns (B, n, E) fp32, or fp64 of an fp64 model.
        """
        if first == 0 and self.start_token is not None:
            tokens = F.pad(tokens, (1, 0), value=self.start_token)
        x = F.embedding(tokens, self.weight)
        if first == 0 and self.start is not None:
            x = torch.cat([self.start.expand(tokens.shape[0], 1, -1), x], dim=1)
        elif self.start is not None and torch.is_grad_enabled():
            x = x + 0.0 * self.start  # where ranks share a sequence, ZeRO expects a gradient of it from every one
        x = at_least_fp32(x)
        if self.token_types is not None:
            x = x + at_least_fp32(self._types(tokens))
        positions = self.positions(first, x.shape[1], x.device)
        if positions is not None:
            x = x + positions.to(x.device, x.dtype)
        return x if self.norm is None else self.norm(x)

    def _types(self, tokens: Tensor) -> Tensor:
        """The embeddings of the tokens' types: of the first one, and behind the first separator of the second one."""
        assert self.token_types is not None
        if self.separator is None or len(self.token_types) < 2:
            return self.token_types[0]
        ends = (tokens == self.separator).long()
        behind = ends.cumsum(1) > ends
        return torch.where(behind.unsqueeze(-1), self.token_types[1], self.token_types[0])
