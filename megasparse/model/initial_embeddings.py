"""Token embeddings out of a GloVe file, and Smart Bird's sketches out of their principal components.

V vocabulary, E d_model, d width of the sketch, n vectors.
"""

import math
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megasparse.attention.smart_bird import SmartBirdAttention
from megasparse.errors import DataError
from megasparse.model.stack import Transformer

_LONGEST_LINE = 1 << 20  # bytes: what is longer is no GloVe file


def read_glove(path: str | os.PathLike[str], words: Sequence[str], width: int) -> tuple[Tensor, Tensor]:
    """The vectors (V, width) fp32 of `words` in a GloVe-format file, and which ones it has, (V,) bool; others are 0.

    A line is a word and its numbers, separated by single spaces; a word may itself hold spaces, so the last `width`
    fields are its numbers. Of a word that comes twice the first vector counts. The file is read line by line; only
    lines of wanted words have their numbers parsed.
    Raises DataError, with the line's number, for another width and for what is not a finite number; and if there is no
    word of `words`.
    """
    rows: dict[str, list[int]] = {}
    for row, word in enumerate(words):
        rows.setdefault(word, []).append(row)
    matrix, found = torch.zeros(len(words), width), torch.zeros(len(words), dtype=torch.bool)
    for number, line in _lines(path):
        word, *fields = line.rsplit(" ", width)
        # Only in the first line are further fields taken as numbers: it tells of a file of another width.
        given = line.count(" ") if number == 1 else len(fields)
        if given != width:
            raise DataError(
                path,
                f"line {number} has {given} numbers after the word, but d_model is {width}",
                f"Take a file of {width}-dimensional vectors without a header line, or set model.d_model to its width",
            )
        for row in rows.pop(word, []):
            matrix[row], found[row] = torch.tensor(_numbers(path, number, fields)), True
    if not found.any():
        raise DataError(path, f"it has none of the {len(words)} words", "Check that it is in the tokenizer's language")
    return matrix, found


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """The lines of a file and their numbers from 1 on."""
    if not os.path.isfile(path):
        raise DataError(path, "there is no such file", "Give the path of a GloVe text file")
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
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
def initialise_from_glove(model: Transformer, path: str | os.PathLike[str], words: Sequence[str]) -> int:
    """Puts the vectors of a GloVe file into the token embeddings, and their principal components into the projections
    of every Smart Bird sketch (Smart Bird section 4.1). words: the token of each id. Returns how many were found.

    Tokens that the file does not have keep their own initial vector, scaled to the deviation of those it has.
    A sketch's queries, keys and values all start as the PCA of its input. For the first layer this is the paper's tiny
    transformer on PCA-reduced GloVe, up to positions and the norm before it; deeper layers read mixed vectors and only
    start alike. Call it before the engine shards the parameters.
    """
    weight = model.embedding.weight
    assert len(words) == len(weight), "one word a token id"
    matrix, found = read_glove(path, words, weight.shape[1])
    known = matrix[found]
    deviation = known.std(correction=0) / weight.float().std(correction=0)
    embeddings = torch.where(found[:, None], matrix, weight.float().cpu() * deviation.cpu())
    weight.copy_(embeddings)
    for module in model.modules():
        if isinstance(module, SmartBirdAttention):
            projection = pca(known, module.config.sketch_dim)  # (E, d)
            for part in (module.query, module.key, module.value):
                part.weight.copy_(projection.T)
    return int(found.sum())
