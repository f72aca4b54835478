"""Files compressed by a trained decoder, and restored."""

import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from megasparse.data.files import replacing
from megasparse.data.tokenizers import Tokenizer
from megasparse.errors import ConfigError, DataError
from megasparse.evaluation.bits_per_dim import refuse_leaks
from megasparse.evaluation.compressed_file import damaged, model_digest, pack, unpack
from megasparse.evaluation.entropy_coder import decode, encode
from megasparse.evaluation.restore import restore, trained_tokenizer
from megasparse.model.decoder import Decoder


class Coder(NamedTuple):
    """What a checkpoint codes with. model: in fp64."""

    model: Any
    tokenizer: Tokenizer
    seed: int
    window: int
    digest: bytes


def compress(checkpoint: Path, source: Path, output: Path) -> tuple[int, int, float]:
    """Write `output`, which `decompress` makes `source` of again. Returns bytes before, bytes after, seconds.

    Raises ConfigError for a model that cannot, DataError for a file that cannot be read, is empty, or exists already.
    """
    refuse_existing(output)
    coder, text = open_coder(checkpoint), read(source)
    tokens = coder.tokenizer.encode(text)
    end = coder.model.config.document_separator
    if end is not None and (tokens == end).any():
        raise DataError(source, f"it holds the token that ends a text ({end})", "Compress what is before and behind it")
    begun = time.monotonic()
    with tqdm(total=len(tokens), desc="compressing", unit="token", disable=None) as bar:
        code = encode(coder.model, tokens, coder.window, coder.seed, bar.update)
    packed = pack(code, len(tokens), text, coder.digest)
    write(output, packed)
    return len(text), len(packed), time.monotonic() - begun


def decompress(checkpoint: Path, source: Path, output: Path) -> tuple[int, float]:
    """Write what `compress` read. Returns its bytes and the seconds taken. Raises DataError for a wrong or damaged
    file, before `output` exists.
    """
    refuse_existing(output)
    coder, raw = open_coder(checkpoint), read(source)
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
    write(output, text)
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


def read(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", "Give a file") from None
    if not raw:
        raise DataError(path, "the file is empty", "There is nothing to do")
    return raw


def refuse_existing(path: Path) -> None:
    if path.exists():
        raise DataError(path, "there is a file already", "Name another with --output")


def write(path: Path, content: bytes) -> None:
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise DataError(path, f"cannot be written: {error.strerror}", "Name another with --output") from None
