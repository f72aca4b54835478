"""Entropy coding of tokens by a causal decoder's predictions, and back: the code length that evaluation promises, as
bytes.

Tokens are cut into windows of T, each predicted from its own start, as evaluation cuts them. The encoder has a window's
logits from one pass over the whole of it, the decoder one token at a time from a cache. Both are computed in fp64 and
rounded to a grid of 1/64 nat below the likeliest token, so both have the same probabilities, and one range coder serves
both. Where a number of the encoder's lies within MARGIN of the middle between two grid points, the two could be rounded
apart: which one was taken is written down beside the code (an exception; a few in ten million bytes).

W windows side by side, T their length, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cache
from typing import Any

import constriction
import numpy as np
import torch
from torch import Tensor

from megasparse.ops.random import RngContext

SCALE = 64
"""Grid points a nat. Rounding to them costs 1e-5 nats a token."""
DEEPEST = 1100
"""The grid's last point: 24.8 bits below the likeliest token. No token is cheaper to rule out."""
MARGIN = 1e-9
"""Of a grid step. Whole windows and cached decoding differ by 1e-12 or so in fp64."""
AT_ONCE = 1 << 24
"""Numbers W·T·V that one group of windows has at most."""


Progress = Callable[[int], object]
"""Called with the number of tokens that are newly done."""


@dataclass(frozen=True)
class Code:
    """words: the range coder's, uint32. exceptions: (n, 2) int64, sorted: the number of a logit (token · V + id), and
    whether its grid point is odd."""

    words: np.ndarray
    exceptions: np.ndarray


@cache
def weights() -> np.ndarray:
    """exp(−k / SCALE) · 2^24 for each grid point k, rounded to integers: the same on every machine."""
    with localcontext() as context:
        context.prec = 40
        exact = [(Decimal(-k) / SCALE).exp() * 2**24 for k in range(DEEPEST + 1)]
        return np.array([int(value.to_integral_value()) for value in exact], dtype=np.int64)


def depths(logits: Tensor) -> np.ndarray:
    """How far each logit (..., V) lies below the largest, in grid steps: fp64, not rounded."""
    logits = logits.double()
    return ((logits.amax(-1, keepdim=True) - logits) * SCALE).clamp(max=DEEPEST).cpu().numpy()


def grid_points(below: np.ndarray) -> np.ndarray:
    return np.floor(below + 0.5).astype(np.int16)


def uncertain(below: np.ndarray) -> np.ndarray:
    """Where a difference of MARGIN could change the grid point: flat indices."""
    return np.flatnonzero(np.abs(below - np.floor(below) - 0.5) < MARGIN)


def probabilities(points: np.ndarray) -> np.ndarray:
    """Of grid points (n, V): fp64 (n, V), quotients of integers."""
    counts = weights()[points]
    return counts / counts.sum(-1, keepdims=True)


def groups(tokens: int, length: int, vocabulary: int) -> Iterator[tuple[list[int], int]]:
    """Starts of the windows that are coded side by side, and their length; the last, ragged one stands alone."""
    most = max(1, AT_ONCE // (length * vocabulary))
    whole = list(range(0, tokens - length + 1, length))
    for first in range(0, len(whole), most):
        yield whole[first : first + most], length
    if tokens % length:
        yield [tokens - tokens % length], tokens % length


def random_draws(seed: int, starts: Sequence[int]) -> RngContext:
    """As evaluation draws for these windows, so that its code length is this one's."""
    return dataclasses.replace(RngContext.evaluation(seed, len(starts)), samples=torch.tensor(starts))


@torch.no_grad()
def encode(model: Any, tokens: Tensor, length: int, seed: int, progress: Progress = lambda _: None) -> Code:
    """Code tokens (n,) int64 in windows of `length`. model: a strictly causal decoder in fp64.

    seed: of the hash rotations, the run's.
    """
    coder, family = constriction.stream.queue.RangeEncoder(), _family()
    vocabulary, device = model.config.vocabulary, next(model.parameters()).device
    exceptions: list[np.ndarray] = []
    for starts, size in groups(len(tokens), length, vocabulary):
        windows = torch.stack([tokens[start : start + size] for start in starts]).to(device)  # (W, T)
        below = depths(model.window_logits(windows, random_draws(seed, starts))).swapaxes(0, 1)  # (T, W, V)
        points = grid_points(below)
        found = uncertain(below)
        if len(found):
            t, w, v = np.unravel_index(found, below.shape)
            logit = (np.array(starts)[w] + t) * vocabulary + v
            exceptions.append(np.stack([logit, points.reshape(-1)[found] & 1], axis=1))
        symbols = windows.T.cpu().numpy().astype(np.int32)
        for row in range(size):  # all windows' first tokens, then their second ones: as the decoder has them
            coder.encode(np.ascontiguousarray(symbols[row]), family, probabilities(points[row]))
        progress(len(starts) * size)
    kept = np.concatenate(exceptions) if exceptions else np.empty((0, 2), dtype=np.int64)
    return Code(coder.get_compressed(), kept[np.argsort(kept[:, 0])])


@torch.no_grad()
def decode(model: Any, code: Code, tokens: int, length: int, seed: int, progress: Progress = lambda _: None) -> Tensor:
    """The tokens (n,) int64 of a code. What is damaged gives other tokens, never an error: check them."""
    coder, family = constriction.stream.queue.RangeDecoder(code.words), _family()
    vocabulary, device = model.config.vocabulary, next(model.parameters()).device
    odd = {(int(logit) // vocabulary, int(logit) % vocabulary): int(parity) for logit, parity in code.exceptions}
    by_token: dict[int, list[int]] = {}
    for token, v in odd:
        by_token.setdefault(token, []).append(v)
    out = torch.empty(tokens, dtype=torch.int64)
    for starts, size in groups(tokens, length, vocabulary):
        cache = model.new_cache(len(starts), seed)
        cache.rng = random_draws(seed, starts)
        logits = model.prefill(torch.empty(len(starts), 0, dtype=torch.int64, device=device), cache)
        for t in range(size):
            below = depths(logits)
            points = grid_points(below)
            for row, start in enumerate(starts):
                for v in by_token.get(start + t, ()):
                    low = int(np.floor(below[row, v]))
                    points[row, v] = low + ((low ^ odd[start + t, v]) & 1)
            chosen = torch.from_numpy(coder.decode(family, probabilities(points)).astype(np.int64))
            out[torch.tensor(starts) + t] = chosen
            progress(len(starts))
            if t + 1 < size:
                logits = model.decode(chosen.to(device), cache)
    return out


def _family() -> Any:
    return constriction.stream.model.Categorical(perfect=False)
