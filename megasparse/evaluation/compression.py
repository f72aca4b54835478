"""Files compressed by a trained decoder and restored: the code length that evaluation promises, as bytes. And what gzip
and xz need for the same bytes.

Tokens are cut into windows of T, each predicted from its own start, as evaluation cuts them. One loop encodes and
decodes: it predicts one token after another from a cache, in fp64 whatever the precision of training, so both have the
same bits, and hash codes, on one machine. Machines differ by rounding. Logits are rounded to a grid of 1/64 nat below
the likeliest token; if a number is within MARGIN of the middle between two grid points, two machines could round it
apart: the file then says which one was taken (an exception; a few in ten million bytes). Only the checksum notices a
hash code that flips.

The file: MAGIC; 3 bytes of the model's digest; the text's CRC-32; twice the number of tokens, plus one where exceptions
follow; these, their number first; the range coder's words without the zeros at their end. CRC and words are
little-endian, other numbers LEB128.

W windows side by side, T their length, V vocabulary.
"""

import dataclasses
import hashlib
import json
import lzma
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from megasparse.data.tokenizers import Tokenizer
from megasparse.errors import ConfigError, DataError
from megasparse.evaluation.bits_per_dim import Stream, refuse_leaks
from megasparse.evaluation.outputs import whole_file
from megasparse.evaluation.results import restore, trained_tokenizer
from megasparse.files import read_file
from megasparse.model.decoder import Decoder
from megasparse.ops.random import RngContext

SCALE = 64
"""Grid points a nat. Rounding to them costs 1e-5 nats a token."""
DEEPEST = 1100
"""The grid's last point: 24.8 bits below the likeliest token. No token is cheaper to rule out."""
MARGIN = 1e-9
"""Part of a grid step. Machines differ by 1e-12 or so in fp64."""
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
    """Distance of each logit (..., V) below the largest, in grid steps: fp64, not rounded."""
    logits = logits.double()
    return ((logits.amax(-1, keepdim=True) - logits) * SCALE).clamp(max=DEEPEST).cpu().numpy()


def grid_points(below: np.ndarray) -> np.ndarray:
    return np.floor(below + 0.5).astype(np.int16)


def probabilities(points: np.ndarray) -> np.ndarray:
    """Probabilities of grid points (n, V): fp64 (n, V), quotients of integers."""
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


@torch.no_grad()
def walk(
    model: Any, tokens: int, length: int, seed: int, choose: Callable[[Sequence[int], int, np.ndarray], Tensor],
    progress: Progress,
) -> None:  # fmt: skip
    """Predict tokens in windows of `length`, one after another from a cache. model: a strictly causal decoder in fp64.

    choose: from the starts of windows, the number of a token in them and the `depths` of its logits (W, V), this token
    of each window, (W,) int64. seed: of the hash rotations, the run's.
    """
    vocabulary, device = model.config.vocabulary, next(model.parameters()).device
    for starts, size in groups(tokens, length, vocabulary):
        cache = model.new_cache(len(starts), seed)
        # As evaluation draws for these windows, so that its code length is this one's.
        cache.rng = dataclasses.replace(RngContext.evaluation(seed, len(starts)), samples=torch.tensor(starts))
        logits = model.prefill(torch.empty(len(starts), 0, dtype=torch.int64, device=device), cache)
        for t in range(size):
            symbols = choose(starts, t, depths(logits))
            progress(len(starts))
            if t + 1 < size:
                logits = model.decode(symbols.to(device), cache)


def encode(model: Any, tokens: Tensor, length: int, seed: int, progress: Progress = lambda _: None) -> Code:
    """Code tokens (n,) int64, see `walk`."""
    import constriction

    stream = constriction.stream
    coder, family = stream.queue.RangeEncoder(), stream.model.Categorical(perfect=False)
    exceptions: list[np.ndarray] = []

    def choose(starts: Sequence[int], t: int, below: np.ndarray) -> Tensor:
        points, position = grid_points(below), np.array(starts) + t
        unsure = np.flatnonzero(np.abs(below - np.floor(below) - 0.5) < MARGIN)
        logit = position[unsure // below.shape[1]] * below.shape[1] + unsure % below.shape[1]
        exceptions.append(np.stack([logit, points.reshape(-1)[unsure] & 1], axis=1))
        symbols = tokens[torch.from_numpy(position)]
        coder.encode(symbols.numpy().astype(np.int32), family, probabilities(points))
        return symbols

    walk(model, len(tokens), length, seed, choose, progress)
    noted = np.concatenate([np.empty((0, 2), dtype=np.int64), *exceptions])
    return Code(coder.get_compressed(), noted[np.argsort(noted[:, 0])])


def decode(model: Any, code: Code, tokens: int, length: int, seed: int, progress: Progress = lambda _: None) -> Tensor:
    """The tokens (n,) int64 of a code. What is damaged gives other tokens, never an error: check them."""
    import constriction

    stream = constriction.stream
    coder, family = stream.queue.RangeDecoder(code.words), stream.model.Categorical(perfect=False)
    by_token: dict[int, list[tuple[int, int]]] = {}
    for logit, parity in code.exceptions.tolist():
        token, v = divmod(logit, model.config.vocabulary)
        by_token.setdefault(token, []).append((v, parity))
    out = torch.empty(tokens, dtype=torch.int64)

    def choose(starts: Sequence[int], t: int, below: np.ndarray) -> Tensor:
        points = grid_points(below)
        for row, start in enumerate(starts):
            for v, parity in by_token.get(start + t, ()):
                low = int(np.floor(below[row, v]))
                points[row, v] = low + ((low ^ parity) & 1)
        symbols = torch.from_numpy(coder.decode(family, probabilities(points)).astype(np.int64))
        out[torch.tensor(starts) + t] = symbols
        return symbols

    walk(model, tokens, length, seed, choose, progress)
    return out


# The file

MAGIC = b"\xb5\x01"
DIGEST = 3


def model_digest(model: Any, seed: int, window: int) -> bytes:
    """Identifies what predicts: configuration and weights, the seed of the hashes, and the length of windows."""
    digest = hashlib.sha256(json.dumps([model.config.model_dump(mode="json"), seed, window]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.digest()[:DIGEST]


def pack(code: Code, tokens: int, text: bytes, digest: bytes) -> bytes:
    """The file's bytes. digest: see `model_digest`. text: what the tokens stand for."""
    parts = [MAGIC, digest, zlib.crc32(text).to_bytes(4, "little"), _varint(2 * tokens + (len(code.exceptions) > 0))]
    if len(code.exceptions):
        parts.append(_varint(len(code.exceptions)))
    last = 0
    for logit, odd in code.exceptions.tolist():
        parts.append(_varint((logit - last) << 1 | odd))
        last = logit
    return b"".join(parts) + code.words.astype("<u4").tobytes().rstrip(b"\0")


def unpack(path: Path, raw: bytes, digest: bytes, vocabulary: int) -> tuple[Code, int, int]:
    """The code, number of tokens and CRC-32 of a file. Raises DataError for one that is damaged, no file of ours, or
    made with another model.
    """
    if raw[: len(MAGIC)] != MAGIC:
        raise DataError(path, "it was not made by megasparse compress", "Give a file that was")
    head = len(MAGIC) + DIGEST + 4
    made_with = raw[len(MAGIC) : len(MAGIC) + DIGEST]
    if made_with != digest:
        problem = f"it was made with another model (digest {made_with.hex()}; this one has {digest.hex()})"
        raise DataError(path, problem, "Give --checkpoint the one that it was made with")
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
    # The likeliest token costs this much at least, as every other one has a probability of 2^-24 or more.
    fewest_bits = math.log2(1 + (vocabulary - 1) / 2**25)
    if tokens * fewest_bits > 8 * len(words) + 64 or last >= max(1, tokens * vocabulary):
        raise damaged(path)
    words += bytes(8 + -len(words) % 4)
    noted = np.array(exceptions, dtype=np.int64).reshape(-1, 2)
    code = Code(np.frombuffer(words, dtype="<u4").astype(np.uint32), noted)
    return code, tokens, int.from_bytes(raw[head - 4 : head], "little")


def damaged(path: Path) -> DataError:
    problem = "it is damaged, or this machine rounds otherwise than the one that made it, so that predictions differ"
    return DataError(path, problem, "Copy it again, or decompress with the torch version and processor that made it")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it. Raises IndexError for none, or one above 2^63."""
    number = 0
    for shift in range(0, 63, 7):
        byte = raw[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise IndexError(at)


class Coder(NamedTuple):
    """A restored checkpoint that codes. model: in fp64."""

    model: Any
    tokenizer: Tokenizer
    seed: int
    window: int
    digest: bytes


def compress(checkpoint: Path, source: Path, output: Path) -> tuple[int, int, float]:
    """Write `output`, which `decompress` makes `source` of again. Returns bytes before, bytes after, seconds.

    Raises ConfigError for a model that cannot, DataError for a file that cannot be read, is empty, or exists already.
    """
    text = read(source, output)
    coder = open_coder(checkpoint)
    tokens = coder.tokenizer.encode(text)
    end = coder.model.config.document_separator
    if end is not None and (tokens == end).any():
        raise DataError(source, f"it holds the token that ends a text ({end})", "Compress what is before and behind it")
    begun = time.monotonic()
    with tqdm(total=len(tokens), desc="compressing", unit="token", disable=None) as bar:
        code = encode(coder.model, tokens, coder.window, coder.seed, bar.update)
    packed = pack(code, len(tokens), text, coder.digest)
    with whole_file(output) as file:
        file.write(packed)
    return len(text), len(packed), time.monotonic() - begun


def decompress(checkpoint: Path, source: Path, output: Path) -> tuple[int, float]:
    """Write what `compress` read. Returns its bytes and the seconds taken. Raises DataError for a wrong or damaged
    file, before `output` exists.
    """
    raw = read(source, output)
    coder = open_coder(checkpoint)
    code, count, crc = unpack(source, raw, coder.digest, coder.model.config.vocabulary)
    begun = time.monotonic()
    with tqdm(total=count, desc="decompressing", unit="token", disable=None) as bar:
        tokens = decode(coder.model, code, count, coder.window, coder.seed, bar.update)
    try:
        text = coder.tokenizer.decode(tokens)
    except ValueError:
        raise damaged(source) from None
    if zlib.crc32(text) != crc:
        raise damaged(source)
    with whole_file(output) as file:
        file.write(text)
    return len(text), time.monotonic() - begun


def open_coder(checkpoint: Path) -> Coder:
    """Restore a checkpoint. Raises ConfigError unless it is a strictly causal decoder whose tokenizer keeps bytes."""
    model, config, opened, _ = restore(checkpoint)
    tokenizer = trained_tokenizer(config, opened)
    if not isinstance(model, Decoder):
        raise ConfigError("--checkpoint", f"its model is no decoder ({config.model.kind})", "Give a decoder's")
    if not tokenizer.lossless:
        problem = f'"{tokenizer.name}" does not give every text back'
        raise ConfigError("data.tokenizer", problem, "Train with bytes or pieces that keep them")
    refuse_leaks(model.leaks)
    # Tokens predicted from one start: as many as the model was trained and is evaluated with.
    seed, window = config.run.seed, config.data.sequence_length
    return Coder(model.double(), tokenizer, seed, window, model_digest(model, seed, window))


def read(path: Path, output: Path) -> bytes:
    """Return a file's bytes. Raises DataError where it cannot be read or is empty, and where `output` exists."""
    if output.exists():
        raise DataError(output, "there is a file already", "Name another with --output")
    try:
        raw = read_file(path)
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", "Give a file") from None
    if not raw:
        raise DataError(path, "the file is empty", "There is nothing to do")
    return raw


# gzip and xz

PIECE = 1 << 20
GZIP_CONTAINER = 16 + zlib.MAX_WBITS  # zlib's way of asking for gzip's header and trailer


def gzip_size(pieces: Iterable[bytes]) -> int:
    """Bytes that gzip -9 -n needs for the concatenated pieces, to within 0.01 %: zlib's search is not GNU gzip's to the
    last match, and with the same buffers (memLevel 9) as near as it gets."""
    return _size(zlib.compressobj(9, zlib.DEFLATED, GZIP_CONTAINER, zlib.DEF_MEM_LEVEL + 1), pieces)


def xz_size(pieces: Iterable[bytes]) -> int:
    """Bytes that xz -9 needs for the concatenated pieces; takes about 700 MB of memory."""
    return _size(lzma.LZMACompressor(lzma.FORMAT_XZ, lzma.CHECK_CRC64, preset=9), pieces)


def bits_per_byte(stream: Stream) -> dict[str, float]:
    """Return {"gzip", "xz"}: bits per byte of a split of byte tokens."""
    starts = range(0, stream.tokens, PIECE)
    sizes = {}
    for name, size in (("gzip", gzip_size), ("xz", xz_size)):
        pieces = (bytes(stream.read(start, min(start + PIECE, stream.tokens)).tolist()) for start in starts)
        sizes[name] = 8 * size(pieces) / stream.tokens
    return sizes


def _size(compressor: "zlib._Compress | lzma.LZMACompressor", pieces: Iterable[bytes]) -> int:
    return sum(len(compressor.compress(piece)) for piece in pieces) + len(compressor.flush())
