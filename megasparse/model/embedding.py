"""Token and position embeddings. B batch, L length, E d_model, V vocabulary, n positions."""

import math
from functools import partial, reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.heads import Padding, projection
from megasparse.attention.ngram import ngram_codes
from megasparse.config.schema import ModelConfig
from megasparse.ops.normalize import Norm
from megasparse.ops.operator import ParameterList, at_least_fp32
from megasparse.ops.positions import sinusoids


class Positions(nn.Module):
    """Position embeddings, (n, E) for the positions [first, first + n).

    axial: positions are cells of a grid, and the axes' embeddings are concatenated: Σ n_a·d_a numbers instead of L·E
    (Reformer). learned: one vector per position. sinusoidal: Vaswani et al. 2017.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind = config.positions.kind
        self.width = config.d_model
        self.offset = config.positions.offset
        self.axial_shape = config.positions.axial_shape or []
        if self.kind == "axial":
            pairs = zip(self.axial_shape, config.positions.axial_dims or [], strict=True)
            self.axes = ParameterList(nn.Parameter(torch.empty(size, dim)) for size, dim in pairs)
        elif self.kind == "learned":
            self.table = nn.Parameter(torch.empty(self.offset + config.max_length, config.d_model))

    def forward(self, first: int, count: int, device: torch.device) -> Tensor | None:
        if self.kind == "axial":
            return self.axes(partial(self._cells, first, count))
        if self.kind == "learned":
            return self.table[self.offset + first : self.offset + first + count]
        if self.kind == "sinusoidal":
            return sinusoids(first, count, self.width, device)
        return None  # rotary positions rotate queries and keys instead

    def _cells(self, first: int, count: int, axes: list[Tensor]) -> Tensor:
        position = torch.arange(first, first + count, device=axes[0].device)
        parts = []
        below = math.prod(self.axial_shape)
        for table, size in zip(axes, self.axial_shape, strict=True):
            below //= size
            parts.append(table[position // below % size])
        return torch.cat(parts, dim=-1)


def lengthened(table: Tensor, rows: int, offset: int = 0) -> Tensor:
    """Return a position table of more rows: position i gets the embedding of position i mod P. table: (offset + P, E),
    or the first axis of axial positions. offset: rows before position 0.
    """
    position = torch.arange(rows - offset, device=table.device) % (len(table) - offset)
    return torch.cat([table[:offset], table[offset + position]])


class NgramEmbedding(nn.Module):
    """Sum over n of row h_n(last n tokens) of table n, or a projection of these rows; initially 0 (`model.ngrams`)."""

    sparse_gradients = False
    """Set by an engine whose optimizer updates only the rows in use."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.ngrams is not None
        self.lengths = config.ngrams.lengths
        self.rows = config.ngrams.rows
        self.behind = 0 if config.kind == "encoder" else 1
        width = config.ngrams.width or config.d_model
        count = len(self.lengths)
        self.tables = ParameterList(nn.Parameter(torch.empty(self.rows, width)) for _ in self.lengths)
        self.projection = None if width == config.d_model else projection(count * width, config.d_model, biased=False)

    def codes(self, tokens: Tensor, padding: Padding) -> Tensor:
        """Return each table's row at each position, (N, B, L) int32. tokens: (B, L), see `ngram_codes`."""
        return ngram_codes(tokens, self.lengths, self.rows, padding.key_mask, padding.segments, self.behind).int()

    def forward(self, codes: Tensor) -> Tensor:
        """Return the embeddings of the codes (N, B, n): (B, n, E) in fp32 or wider."""
        sparse = self.sparse_gradients
        codes = codes.long() if sparse else codes  # sparse gradients need int64
        rows = self.tables(
            lambda tables: [F.embedding(code, table, sparse=sparse) for code, table in zip(codes, tables, strict=True)]
        )
        if self.projection is not None:
            return at_least_fp32(self.projection(torch.cat(rows, dim=-1)))
        return reduce(torch.add, map(at_least_fp32, rows))


class Embedding(nn.Module):
    """Input at position t, in fp32: position t plus the embedding of token t in an encoder, of token t − 1 in a decoder
    (at 0 a learned start vector, or the embedding of `model.start_token`), plus n-gram embeddings. With `style` bert a
    token type is added, the second one after the first separator of model.sentence_order, and the sum is normalised.
    """

    def __init__(self, config: ModelConfig, weight: nn.Parameter | None = None):
        """Create the embedding table. weight: (V, E), shared with another embedding, or None."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.d_model)) if weight is None else weight
        self.start_token = config.start_token
        learned = config.kind != "encoder" and self.start_token is None
        self.start = nn.Parameter(torch.empty(1, config.d_model)) if learned else None
        self.token_types = nn.Parameter(torch.empty(config.token_types, config.d_model)) if config.token_types else None
        self.separator = config.sentence_order.separator if config.sentence_order else None
        self.positions = Positions(config)
        self.ngrams = NgramEmbedding(config) if config.ngrams else None
        self.norm = Norm(config.norm, config.d_model, config.norm_eps) if config.style == "bert" else None

    def forward(self, tokens: Tensor, first: int = 0, codes: Tensor | None = None) -> Tensor:
        """Embed tokens. tokens: (B, n), tokens at the positions [first, first + n); in a decoder the token before each
        position, (B, n − 1) at first = 0, because the start is added. codes: of their n-grams, for `model.ngrams`.

        Returns (B, n, E) in fp32, or in fp64 if the weights are fp64.
        """
        if first == 0 and self.start_token is not None:
            tokens = F.pad(tokens, (1, 0), value=self.start_token)
        x = F.embedding(tokens, self.weight)
        if first == 0 and self.start is not None:
            x = torch.cat([self.start.expand(tokens.shape[0], 1, -1), x], dim=1)  # (B, 1 + n, E)
        elif self.start is not None and torch.is_grad_enabled():
            x = x + 0.0 * self.start  # with sequence parallelism, ZeRO expects its gradient on every rank
        x = at_least_fp32(x)
        if self.ngrams is not None:
            x = x + self.ngrams(codes)
        if self.token_types is not None:
            types = self.token_types[0]
            if self.separator is not None and len(self.token_types) > 1:
                ends = (tokens == self.separator).long()
                behind = ends.cumsum(1) > ends
                types = torch.where(behind.unsqueeze(-1), self.token_types[1], types)
            x = x + at_least_fp32(types)
        positions = self.positions(first, x.shape[1], x.device)
        if positions is not None:
            x = x + positions.to(x.device, x.dtype)
        return x if self.norm is None else self.norm(x)
