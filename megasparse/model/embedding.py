"""Token and position embeddings, and their initialisation from a GloVe file (Pennington et al. 2014).

B batch, L length, E d_model, V vocabulary, n vectors.
"""

import math
import os
from collections.abc import Iterator, Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import Attention
from megasparse.attention.heads import Norm, Padding, projection
from megasparse.attention.ngram import ngram_codes
from megasparse.config.schema import ModelConfig
from megasparse.errors import DataError
from megasparse.files import open_file
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.positions import sinusoids


class Positions(nn.Module):
    """Position embeddings, (n, E) for the positions [first, first + n).

    axial: positions are cells of a grid, and the axes' embeddings are concatenated: Σ n_a·d_a numbers instead of L·E
    (Reformer's released enwik8 and imagenet64 configurations). learned: one vector per position. sinusoidal: Vaswani et
    al. 2017.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind, self.width, self.offset = config.positions.kind, config.d_model, config.positions.offset
        self.axial_shape = config.positions.axial_shape or []
        if self.kind == "axial":
            pairs = zip(self.axial_shape, config.positions.axial_dims or [], strict=True)
            self.axes = nn.ParameterList(nn.Parameter(torch.empty(size, dim)) for size, dim in pairs)
        elif self.kind == "learned":
            self.table = nn.Parameter(torch.empty(self.offset + config.max_length, config.d_model))

    def forward(self, first: int, count: int, device: torch.device) -> Tensor | None:
        if self.kind == "axial":
            position = torch.arange(first, first + count, device=self.axes[0].device)
            parts, below = [], math.prod(self.axial_shape)
            for table, size in zip(self.axes, self.axial_shape, strict=True):
                below //= size
                parts.append(table[position // below % size])
            return torch.cat(parts, dim=-1)
        if self.kind == "learned":
            return self.table[self.offset + first : self.offset + first + count]
        if self.kind == "sinusoidal":
            return sinusoids(first, count, self.width, device)
        return None  # rotary positions rotate queries and keys instead


class NgramEmbedding(nn.Module):
    """Sum over n of row h_n(last n tokens) of table n, or a projection of these rows; initially 0 (`model.ngrams`)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.ngrams is not None
        self.lengths, self.rows = config.ngrams.lengths, config.ngrams.rows
        self.behind = 0 if config.kind == "encoder" else 1
        width, count = config.ngrams.width or config.d_model, len(self.lengths)
        self.tables = nn.ParameterList(nn.Parameter(torch.empty(self.rows, width)) for _ in self.lengths)
        self.projection = None if width == config.d_model else projection(count * width, config.d_model, biased=False)

    def codes(self, tokens: Tensor, padding: Padding) -> Tensor:
        """Return each table's row at each position, (N, B, L) int32. tokens: (B, L), see `ngram_codes`."""
        masks = padding.key_mask, padding.segments, self.behind
        return torch.stack([ngram_codes(tokens, n, self.rows, *masks).int() for n in self.lengths])

    def forward(self, codes: Tensor) -> Tensor:
        """Return the embeddings of the codes (N, B, n): (B, n, E) in fp32 or wider."""
        rows = (F.embedding(code, table) for code, table in zip(codes, self.tables, strict=True))
        if self.projection is not None:
            return at_least_fp32(self.projection(torch.cat(list(rows), dim=-1)))
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
        self.norm = Norm(config) if config.style == "bert" else None

    def forward(self, tokens: Tensor, first: int = 0, codes: Tensor | None = None) -> Tensor:
        """Embed tokens. tokens: (B, n), tokens at the positions [first, first + n); in a decoder the token before each
        position, (B, n − 1) at first = 0, because the start is added. codes: of their n-grams, for `model.ngrams`.

        Returns (B, n, E) in fp32, or in fp64 if the weights are fp64.
        """
        if first == 0 and self.start_token is not None:
            tokens = F.pad(tokens, (1, 0), value=self.start_token)
        x = F.embedding(tokens, self.weight)
        if first == 0 and self.start is not None:
            x = torch.cat([self.start.expand(tokens.shape[0], 1, -1), x], dim=1)
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


_LONGEST_LINE = 1 << 20  # bytes, more than in any GloVe file


def read_glove(path: str | os.PathLike[str], words: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Read the vectors (V, W) fp32 of `words` from a GloVe file, 0 for missing words, and a mask of words in it, (V,).

    A line contains a word and W numbers, separated by single spaces; W follows from the first line. A word may contain
    spaces. The first vector of a repeated word is used. Only lines of requested words are parsed. Raises DataError,
    with the line number, for a different number of fields or a non-finite number; and if no word matches.
    """
    rows: dict[str, list[int]] = {}
    for row, word in enumerate(words):
        if word:
            rows.setdefault(word, []).append(row)
    vectors: dict[int, list[float]] = {}
    width = 0
    for number, line in _lines(path):
        width = width or line.count(" ")
        word, *fields = line.rsplit(" ", width)
        if not width or len(fields) != width:
            problem = f"line {number} contains {len(fields)} numbers after the word, but the first line {width}"
            raise DataError(path, problem, "Give a GloVe text file, without a line of sizes before the vectors")
        for row in rows.pop(word, []):
            vectors[row] = _numbers(path, number, fields)
    if not vectors:
        raise DataError(
            path, f"none of the {len(words)} words is in it", "Check that it is in the tokenizer's language"
        )
    matrix, present = torch.zeros(len(words), width), torch.zeros(len(words), dtype=torch.bool)
    for row, vector in vectors.items():
        matrix[row], present[row] = torch.tensor(vector), True
    return matrix, present


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, starting at 1."""
    if not os.path.isfile(path):
        raise DataError(path, "there is no such file", "Give the path of a GloVe text file")
    with open_file(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
            if len(line) == _LONGEST_LINE:
                raise DataError(path, f"line {number} is longer than 1 MiB", "Give a GloVe text file, uncompressed")
            try:
                yield number, line.decode("utf-8").rstrip(" \r\n")
            except UnicodeDecodeError as error:
                raise DataError(path, f"line {number} is not UTF-8", "Give a GloVe text file, uncompressed") from error


def _numbers(path: str | os.PathLike[str], line: int, fields: list[str]) -> list[float]:
    numbers = []
    for field in fields:
        try:
            numbers.append(float(field))
        except ValueError:
            numbers.append(math.nan)
        if not math.isfinite(numbers[-1]):
            raise DataError(path, f'line {line}: "{field}" is not a finite number', "Download the file again")
    return numbers


def pca(matrix: Tensor, components: int) -> Tensor:
    """Return the directions of largest variance of n vectors (n, E), as orthonormal columns (E, components) in float64.

    The largest coordinate of each is positive, so that the result is deterministic.
    """
    assert components <= matrix.shape[1], "there are no more directions than coordinates"
    centred = matrix.double() - matrix.double().mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)  # by rising variance
    vectors = vectors.flip(1)[:, :components]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0)


@torch.no_grad()
def initialise_from_glove(model: nn.Module, path: str | os.PathLike[str], words: Sequence[str]) -> int:
    """Initialise the token embeddings of a model from a GloVe file, and weights of mechanisms that start from words
    (Smart Bird section 4.1) from the vectors' principal components. words: the word of each token, "" for tokens that
    are not words. Returns the number of matched tokens.

    A table of width E takes the vectors if their width is E, their first E principal components if they are wider, and
    fills its first columns if they are narrower. Tokens without a vector keep their initial one, scaled to the
    deviation of the others. The embeddings of a tiny Transformer are filled likewise; the projections of a sketch of
    the layer's input start as principal directions.
    """
    matrix, present = read_glove(path, words)
    file_vectors = matrix[present]
    for module in model.modules():
        if isinstance(module, Embedding):
            _fill(module.weight, matrix, present)
    for module in model.modules():
        if isinstance(module, Attention):
            tables, projections = module.word_weights()
            for table in tables:
                _fill(table, matrix, present)
            for weight in projections:
                components, width = min(len(weight), file_vectors.shape[1]), weight.shape[1]
                vectors = _of_width(file_vectors, width)
                weight[:components] = pca(F.pad(vectors, (0, width - vectors.shape[1])), components).T.to(weight.dtype)
    return int(present.sum())


def _of_width(vectors: Tensor, width: int) -> Tensor:
    """Return vectors (n, W) as (n, min(W, width)) in float64: unchanged, or their principal components."""
    vectors = vectors.double()
    return vectors if vectors.shape[1] <= width else vectors @ pca(vectors, width)


def _fill(weight: Tensor, matrix: Tensor, present: Tensor) -> None:
    """Write the vectors of matched words (V, W) into an embedding table (V', E), where V' may differ from V."""
    rows = present.nonzero().squeeze(1)
    rows = rows[rows < len(weight)]
    vectors = _of_width(matrix[present], weight.shape[1])[: len(rows)].to(weight.dtype)
    weight.mul_(vectors.std(correction=0) / weight.std(correction=0))
    weight[rows, : vectors.shape[1]] = vectors
