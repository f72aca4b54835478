"""Lossless compression of files with a trained decoder.

Tokens are divided into windows of T as in evaluation. Decoding predicts token by token from a cache in fp64, and so
does encoding, so that both compute identical logits and hash codes on one machine. If rounding cannot change the keys
that activations select (`Attention.selection_gap`), encoding on a CPU computes whole windows: several times as fast,
with the same logits up to rounding. Logits are therefore rounded to a grid of 1/64 nat below the most likely token,
also because other machines round differently. If a logit is within MARGIN of the middle between two grid points, two
computations could round it differently, and the file stores the choice as an exception (a few in ten million bytes). A
different hash code of another machine is only detected by the checksum.

File format: MAGIC; 3 bytes of the model's digest; the text's CRC-32; twice the number of tokens, plus one if exceptions
follow; the number of exceptions and the exceptions; the range coder's words without trailing zeros. CRC and words are
little-endian, other numbers LEB128.

W parallel windows, T their length, V vocabulary.
"""

import dataclasses
import hashlib
import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from megasparse.attention.heads import Padding
from megasparse.attention.observation import each_call
from megasparse.data.tokenizers import Tokenizer
from megasparse.errors import ConfigError, DataError
from megasparse.evaluation.bits_per_dim import refuse_leaks
from megasparse.evaluation.outputs import write_output
from megasparse.evaluation.results import restore, trained_tokenizer
from megasparse.files import read_file
from megasparse.model.decoder import Decoder
from megasparse.ops.random import RngContext

SCALE = 64
"""Grid points per nat. Rounding to the grid costs 1e-5 nats per token."""
DEEPEST = 1100
"""The last grid point, 24.8 bits below the most likely token, which bounds the probability of all tokens."""
MARGIN = 1e-9
"""Fraction of a grid step, and smallest selection gap of whole windows. Machines differ by about 1e-12 in fp64."""
AT_ONCE = 1 << 31


@dataclass(frozen=True)
class Code:
    """words: uint32 words of the range coder. exceptions: (n, 2) int64, sorted rows of logit number (token · V + id)
    and parity of its grid point."""

    words: np.ndarray
    exceptions: np.ndarray


@cache
def weights() -> np.ndarray:
    """Return exp(−k / SCALE) · 2^24 for each grid point k, rounded to integers: the same on every machine."""
    with localcontext() as context:
        context.prec = 40
        exact = [(Decimal(-k) / SCALE).exp() * 2**24 for k in range(DEEPEST + 1)]
        return np.array([int(value.to_integral_value()) for value in exact], dtype=np.int64)


def depths(logits: Tensor) -> np.ndarray:
    """Return the distance of each logit (..., V) to the largest one in grid steps, fp64, not rounded."""
    return ((logits.amax(-1, keepdim=True) - logits.double()) * SCALE).clamp(max=DEEPEST).cpu().numpy()


def probabilities(points: np.ndarray) -> np.ndarray:
    """Return probabilities (n, V) fp64 of grid points (n, V), as quotients of integers."""
    counts = weights()[points]
    return counts / counts.sum(-1, keepdims=True)


def groups(model: Any, tokens: int, length: int) -> Iterator[list[int]]:
    """Yield the starts of windows that are coded in parallel, as many as fit AT_ONCE bytes of caches or streams, and
    logits with arrays computed from them. Only the last window may be shorter.
    """
    layers, config = model.new_cache(1, 0).layers, model.config
    cached = sum(cache.count_bytes() for layer in layers for cache in layer.values())
    streams = 2 * 8 * length * config.d_model
    most = max(1, AT_ONCE // (max(cached, streams) + 100 * config.vocabulary))
    starts = list(range(0, tokens, length))
    for first in range(0, len(starts), most):
        yield starts[first : first + most]


@torch.no_grad()
def walk(
    model: Any, tokens: int, length: int, seed: int, choose: Callable[[Sequence[int], int, np.ndarray], Tensor],
    progress: Callable[[int], object], text: Tensor | None = None,
) -> None:  # fmt: skip
    """Predict windows of `length` token by token, or a known `text` in whole passes if `whole_passes` can. model: in
    fp64. choose: (starts of windows, position, `depths` (W, V)) -> tokens (W,) int64.
    """
    device = next(model.parameters()).device
    for starts in groups(model, tokens, length):
        size = min(length, tokens - starts[0])
        # The same draws as in evaluation, for the same code length.
        rng = dataclasses.replace(RngContext.evaluation(seed, len(starts)), samples=torch.tensor(starts))
        streams = None if text is None else whole_passes(model, text, starts, size, rng)
        if streams is None:
            cache = model.new_cache(len(starts), seed)
            cache.rng = rng
            logits = model.prefill(torch.empty(len(starts), 0, dtype=torch.int64, device=device), cache)
        for t in range(size):
            if streams is not None:
                logits = model.logits([x[:, t] for x in streams])
            unfinished = starts if starts[-1] + t < tokens else starts[:-1]
            symbols = choose(unfinished, t, depths(logits[: len(unfinished)]))
            progress(len(unfinished))
            if streams is None and t + 1 < size:
                symbols = F.pad(symbols, (0, len(starts) - len(unfinished)))  # rows of a cache stay
                logits = model.decode(symbols.to(device), cache)


def whole_passes(
    model: Any, text: Tensor, starts: Sequence[int], size: int, rng: RngContext
) -> list[Tensor] | None:  # fmt: skip
    """Return the streams (W, T, E) of a pass over each window; None if a cache may select other keys."""
    if not next(model.parameters()).is_cpu or model.config.residual_dtype == "bf16":
        return None
    gaps, streams = list[float](), list[Tensor]()
    with each_call(model, lambda call: gaps.append(call.mechanism.selection_gap(call.inputs, call.context))):
        for row, start in enumerate(starts):
            draws = dataclasses.replace(rng, samples=rng.samples[row : row + 1])
            outputs = model.streams(text[None, start : start + size - 1], draws, Padding())[0]
            if not all(gap > MARGIN for gap in gaps):
                return None
            streams = streams or [x.new_zeros(len(starts), size, x.shape[2]) for x in outputs]
            for x, output in zip(streams, outputs, strict=True):
                x[row, : output.shape[1]] = output[0]
    return streams


def encode(
    model: Any, tokens: Tensor, length: int, seed: int, progress: Callable[[int], object] = lambda _: None
) -> Code:
    """Encode tokens (n,) int64, see `walk`."""
    from constriction import stream

    coder, family = stream.queue.RangeEncoder(), stream.model.Categorical(perfect=False)
    exceptions: list[np.ndarray] = []

    def choose(starts: Sequence[int], t: int, below: np.ndarray) -> Tensor:
        points, position = np.floor(below + 0.5).astype(np.int16), np.array(starts) + t
        unsure = np.flatnonzero(np.abs(below - np.floor(below) - 0.5) < MARGIN)
        logit = position[unsure // below.shape[1]] * below.shape[1] + unsure % below.shape[1]
        exceptions.append(np.stack([logit, points.reshape(-1)[unsure] & 1], axis=1))
        symbols = tokens[torch.from_numpy(position)]
        coder.encode(symbols.numpy().astype(np.int32), family, probabilities(points))
        return symbols

    walk(model, len(tokens), length, seed, choose, progress, tokens)
    rows = np.concatenate([np.empty((0, 2), dtype=np.int64), *exceptions])
    return Code(coder.get_compressed(), rows[np.argsort(rows[:, 0])])


def decode(
    model: Any, code: Code, tokens: int, length: int, seed: int, progress: Callable[[int], object] = lambda _: None
) -> Tensor:
    """Return the tokens (n,) int64 of a code; wrong ones if it is damaged."""
    from constriction import stream

    coder, family = stream.queue.RangeDecoder(code.words), stream.model.Categorical(perfect=False)
    by_token: dict[int, list[tuple[int, int]]] = {}
    for logit, parity in code.exceptions.tolist():
        token, v = divmod(logit, model.config.vocabulary)
        by_token.setdefault(token, []).append((v, parity))
    out = torch.empty(tokens, dtype=torch.int64)

    def choose(starts: Sequence[int], t: int, below: np.ndarray) -> Tensor:
        points = np.floor(below + 0.5).astype(np.int16)
        for row, start in enumerate(starts):
            for v, parity in by_token.get(start + t, ()):
                low = int(np.floor(below[row, v]))
                points[row, v] = low + ((low ^ parity) & 1)
        symbols = torch.from_numpy(coder.decode(family, probabilities(points)).astype(np.int64))
        out[torch.tensor(starts) + t] = symbols
        return symbols

    walk(model, tokens, length, seed, choose, progress)
    return out


MAGIC = b"\xb5\x02"
DIGEST = 3


def model_digest(model: Any, seed: int, window: int) -> bytes:
    settings = model.config.model_dump(mode="json", exclude_defaults=True)  # later versions have more keys
    digest = hashlib.sha256(json.dumps([settings, seed, window]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()[:DIGEST]


def pack(code: Code, tokens: int, text: bytes, digest: bytes) -> bytes:
    parts = [MAGIC, digest, zlib.crc32(text).to_bytes(4, "little"), _varint(2 * tokens + (len(code.exceptions) > 0))]
    if len(code.exceptions):
        parts.append(_varint(len(code.exceptions)))
    last = 0
    for logit, odd in code.exceptions.tolist():
        parts.append(_varint((logit - last) << 1 | odd))
        last = logit
    return b"".join(parts) + code.words.astype("<u4").tobytes().rstrip(b"\0")


def unpack(path: Path, raw: bytes, digest: bytes, vocabulary: int) -> tuple[Code, int, int]:
    """Return the code, number of tokens and CRC-32 of a file."""
    if raw[: len(MAGIC)] != MAGIC:
        raise DataError(path, "this file was not written by megasparse compress", "Give a compressed file")
    head = len(MAGIC) + DIGEST + 4
    if (made_with := raw[len(MAGIC) : len(MAGIC) + DIGEST]) != digest:
        problem = f"compressed with another model (digest {made_with.hex()}, not {digest.hex()})"
        raise DataError(path, problem, "Set --checkpoint to the checkpoint used for compression")
    try:
        tokens, at = _read_varint(raw, head)
        tokens, exceptional = divmod(tokens, 2)
        count, at = _read_varint(raw, at) if exceptional else (0, at)
        last, exceptions = 0, []
        for _ in range(count):
            step, at = _read_varint(raw, at)
            last += step >> 1
            exceptions.append((last, step & 1))
    except IndexError:
        raise damaged(path) from None
    words = raw[at:]
    # Least code length of each token, because the probability of every other id is at least 2^-24. `pack` may strip all
    # of it from a run of token 0, whose code is zeros: shorter codes are accepted up to 2^30 tokens, 8 GiB of memory.
    fewest_bits = math.log2(1 + (vocabulary - 1) / 2**25)
    if (tokens > 1 << 30 and tokens * fewest_bits > 8 * len(words) + 64) or last >= max(1, tokens * vocabulary):
        raise damaged(path)
    words += bytes(8 + -len(words) % 4)
    rows = np.array(exceptions, dtype=np.int64).reshape(-1, 2)
    code = Code(np.frombuffer(words, dtype="<u4").astype(np.uint32), rows)
    return code, tokens, int.from_bytes(raw[head - 4 : head], "little")


def damaged(path: Path) -> DataError:
    problem = "damaged, or compressed on a machine whose rounding gives other predictions"
    return DataError(path, problem, "Copy it again, or decompress with the same torch version and processor")


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position and the next position. Raises IndexError."""
    number = 0
    for shift in range(0, 63, 7):
        byte, at = raw[at], at + 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise IndexError(at)


def compress(checkpoint: Path, source: Path, output: Path) -> tuple[int, int, float]:
    """Compress `source` to `output`. Return the bytes before and after, and the seconds."""
    text = read(source, output)
    model, tokenizer, window, seed, digest = open_coder(checkpoint)
    tokens, end = tokenizer.encode(text), model.config.document_separator
    if end is not None and (tokens == end).any():
        raise DataError(source, f"contains the token that ends a text ({end})", "Compress the parts around it")
    started = time.monotonic()
    with tqdm(total=len(tokens), desc="compressing", unit="token", disable=None) as bar:
        code = encode(model, tokens, window, seed, bar.update)
    packed = pack(code, len(tokens), text, digest)
    write_output(output, packed)
    return len(text), len(packed), time.monotonic() - started


def decompress(checkpoint: Path, source: Path, output: Path) -> tuple[int, float]:
    """Restore a compressed file to `output`, if it is not damaged. Return its bytes and the seconds."""
    raw = read(source, output)
    model, tokenizer, window, seed, digest = open_coder(checkpoint)
    code, count, crc = unpack(source, raw, digest, model.config.vocabulary)
    started = time.monotonic()
    with tqdm(total=count, desc="decompressing", unit="token", disable=None) as bar:
        tokens = decode(model, code, count, window, seed, bar.update)
    try:
        text = tokenizer.decode(tokens)
    except ValueError:
        raise damaged(source) from None
    if zlib.crc32(text) != crc:
        raise damaged(source)
    write_output(output, text)
    return len(text), time.monotonic() - started


def open_coder(checkpoint: Path) -> tuple[Any, Tokenizer, int, int, bytes]:
    """Restore a checkpoint, which must be a strictly causal decoder with a lossless tokenizer. Return the model in
    fp64, the tokenizer, the window, the seed and the model's digest.
    """
    model, config, opened, _ = restore(checkpoint)
    tokenizer = trained_tokenizer(config, opened)
    if not isinstance(model, Decoder):
        raise ConfigError("--checkpoint", f"the model is not a decoder ({config.model.kind})", "Give a decoder's")
    if not tokenizer.lossless:
        raise ConfigError("data.tokenizer", f'"{tokenizer.name}" is not lossless', "Train with bytes or sentencepiece")
    refuse_leaks(model.leaks)
    seed, window = config.run.seed, config.evaluation_length
    return model.double(), tokenizer, window, seed, model_digest(model, seed, window)


def read(path: Path, output: Path) -> bytes:
    """Return a file's bytes. Raises DataError if `output` exists."""
    if output.exists():
        raise DataError(output, "this file already exists", "Choose another name with --output")
    with DataError.instead_of(OSError, path, "cannot be read: {}", "Give a file"):
        raw = read_file(path)
    if not raw:
        raise DataError(path, "the file is empty", "There is nothing to do")
    return raw
