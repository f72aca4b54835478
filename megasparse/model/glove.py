"""Initial embeddings out of a GloVe file (Pennington et al. 2014), and Smart Bird's sketches out of their principal
components. V vocabulary, E width, n vectors.
"""

import math
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megasparse.attention.smart_bird import SmartBirdAttention
from megasparse.errors import DataError
from megasparse.model.embedding import Embedding

_LONGEST_LINE = 1 << 20  # bytes: what is longer is no GloVe file


def read_glove(path: str | os.PathLike[str], words: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The vectors (V, W) fp32 of `words` in a GloVe file, and which of them it has, (V,) bool; the others are 0.

    A line is a word and its numbers, separated by single spaces; a word may itself hold spaces, so the last W fields
    are its numbers, W of the first line. Of a word that comes twice the first vector counts. Only lines of wanted words
    have their numbers parsed. Raises DataError, with the line's number, for another number of fields and for what is no
    finite number; and where there is no word of `words`.
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
            problem = f"line {number} has {len(fields)} numbers after the word, the first line {width}"
            raise DataError(path, problem, "Give a GloVe text file, without a line of sizes before the vectors")
        for row in rows.pop(word, []):
            vectors[row] = _numbers(path, number, fields)
    if not vectors:
        raise DataError(path, f"it has none of the {len(words)} words", "Check that it is in the tokenizer's language")
    matrix, found = torch.zeros(len(words), width), torch.zeros(len(words), dtype=torch.bool)
    for row, vector in vectors.items():
        matrix[row], found[row] = torch.tensor(vector), True
    return matrix, found


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """The lines of a file and their numbers from 1 on."""
    if not os.path.isfile(path):
        raise DataError(path, "there is no such file", "Give the path of a GloVe text file")
    with open(path, "rb") as file:
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
    """The directions of the largest variance of n vectors (n, E), as orthonormal columns (E, components) in float64.

    Each one's largest coordinate is positive, so that the same vectors give the same directions everywhere.
    """
    assert components <= matrix.shape[1], "there are no more directions than coordinates"
    centred = matrix.double() - matrix.double().mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)  # by rising variance
    vectors = vectors.flip(1)[:, :components]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0)


@torch.no_grad()
def initialise_from_glove(model: nn.Module, path: str | os.PathLike[str], words: Sequence[str]) -> int:
    """Put the vectors of a GloVe file into the token embeddings of a model, and their principal components into every
    Smart Bird sketch (Smart Bird section 4.1). words: the word of each token, "" of one that is none. Returns how many
    were found.

    A table of E numbers takes the vectors as they are where they have E, their E principal components where they have
    more, and where they have fewer all of them as its first numbers. Tokens that the file does not have keep their own
    initial vector, scaled to the deviation of those it has. The embeddings of a tiny Transformer are a table so filled;
    the projections of a sketch of the layer's input start as the directions of that many components.
    """
    matrix, found = read_glove(path, words)
    known = matrix[found]
    for module in model.modules():
        if isinstance(module, Embedding):
            _fill(module.weight, matrix, found)
    for module in model.modules():
        if isinstance(module, SmartBirdAttention):
            if module.config.objective == "attention":
                continue  # learned from heads and layers as they are, not from words
            if module.embedding is not None:
                _fill(module.embedding.weight, matrix, found)
                continue
            width, components = module.query.weight.shape[1], min(module.config.sketch_dim, known.shape[1])
            table = torch.zeros(len(known), width, dtype=torch.float64)
            vectors = _of_width(known, width)
            table[:, : vectors.shape[1]] = vectors
            directions = pca(table, components).T  # (d, E)
            for part in (module.query, module.key, module.value):
                part.weight[:components] = directions.to(part.weight.dtype)
    return int(found.sum())


def _of_width(vectors: Tensor, width: int) -> Tensor:
    """Vectors (n, W) as (n, min(W, width)) in float64: themselves, or their principal components."""
    vectors = vectors.double()
    return vectors if vectors.shape[1] <= width else vectors @ pca(vectors, width)


def _fill(weight: Tensor, matrix: Tensor, found: Tensor) -> None:
    """Put the vectors of found words (V, W) into a table of embeddings, (V', E) of V' <= V or more tokens."""
    rows = found.nonzero().squeeze(1)
    rows = rows[rows < len(weight)]
    vectors = _of_width(matrix[found], weight.shape[1])[: len(rows)].to(weight.dtype)
    deviation = vectors.std(correction=0) / weight.std(correction=0)
    weight.mul_(deviation)
    weight[rows, : vectors.shape[1]] = vectors
