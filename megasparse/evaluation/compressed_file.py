"""The file of `megasparse compress`, in this order: MAGIC; 3 bytes of the model's digest; the text's CRC-32; twice the
number of tokens, plus one where exceptions follow; these, their number first; the range coder's words without the zeros
at their end. CRC and words are little-endian, other numbers LEB128.
"""

import hashlib
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from megasparse.errors import DataError
from megasparse.evaluation.entropy_coder import Code

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
    kept = np.array(exceptions, dtype=np.int64).reshape(-1, 2)
    return (
        Code(np.frombuffer(words, dtype="<u4").astype(np.uint32), kept),
        tokens,
        int.from_bytes(raw[head - 4 : head], "little"),
    )


def damaged(path: Path) -> DataError:
    return DataError(path, "it is damaged, or this machine computes otherwise than the one that made it", "Get it anew")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it. Raises IndexError where there is none, or one above 2^63."""
    number = 0
    for shift in range(0, 63, 7):
        byte = raw[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise IndexError(at)
