"""Initial weights from the vectors of a GloVe file (Pennington et al. 2014). E width, V vocabulary, n vectors."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import Attention
from megasparse.errors import DataError
from megasparse.model.embedding import Embedding
from megasparse.tasks.readers.rows import lines, parse_number, strict


def read_glove(path: str | os.PathLike[str], words: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Read the vectors (V, W) fp32 of `words` from a GloVe file, 0 for missing words, and a mask of words in it, (V,).

    A line contains a word, possibly with spaces, and W numbers, separated by single spaces. The first vector of a
    repeated word is used. Only lines of requested words are parsed. Raises DataError for a different number of fields
    or a non-finite number; and if no word matches.
    """
    rows: dict[str, list[int]] = {}
    for row, word in enumerate(words):
        if word:
            rows.setdefault(word, []).append(row)
    vectors: dict[int, list[float | None]] = {}
    width = 0
    for location, line in strict(lines(Path(path))):
        line = line.rstrip(" ")
        width = width or line.count(" ")
        word, *fields = line.rsplit(" ", width)
        if not width or len(fields) != width:
            problem = f"{len(fields)} numbers after the word, but {width} in the first line"
            raise DataError(location, problem, "Give a GloVe text file, without a line of sizes before the vectors")
        for row in rows.pop(word, []):
            numbers = [parse_number(field) for field in fields]
            if None in numbers:
                raise DataError(location, f'"{fields[numbers.index(None)]}" is not a finite number', "Get it again")
            vectors[row] = numbers
    if not vectors:
        raise DataError(path, f"none of the {len(words)} words is in it", "Use one of the tokenizer's language")
    matrix, present = torch.zeros(len(words), width), torch.zeros(len(words), dtype=torch.bool)
    for row, vector in vectors.items():
        matrix[row], present[row] = torch.tensor(vector), True
    return matrix, present


def pca(matrix: Tensor, components: int) -> Tensor:
    """Return the directions of largest variance of n vectors (n, E), as orthonormal columns (E, components) in float64,
    the largest coordinate of each positive.
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
    (Smart Bird section 4.1) from the vectors' principal components. words: the word of each token, "" for none. Returns
    the number of matched tokens.

    A table of width E takes the vectors if their width is E, their first E principal components if they are wider, and
    fills its first columns if they are narrower. Tokens without a vector keep their initial one, scaled to the
    deviation of the others. The projections of a sketch of the layer's input start as principal directions.
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
