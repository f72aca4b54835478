"""Lossless tokenizers of sentencepiece, and their training."""

import io
import re
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from megasparse.data.tokenizers.tokenizer import Tokenizer, damaged, special_tokens
from megasparse.errors import ConfigError

SPACE = "\u2581"
"""The space, in a piece."""
LONGEST = 4096
"""Characters per call of sentencepiece, which sums scores in single precision."""

GRID = 128
"""Scores of trained unigram models are multiples of 1/128, so that sums up to 2¹⁷ are exact in single precision."""

CONTROL = ["[CLS]", "[SEP]", "[PAD]", "[MASK]"]
_PARTS = re.compile("([\u2581\udc80-\udcff]+)")
"""Text that sentencepiece would change (U+2581, and bytes that are not UTF-8), in a group for `split`."""
_LINES = re.compile("[^\n]*\n|[^\n]+")


class SentencePieceTokenizer(Tokenizer):
    """Lossless pieces of text; text that sentencepiece would change is encoded by its bytes (`<0xNN>`)."""

    name = "sentencepiece"

    def __init__(self, file: Path):
        """Raise ConfigError for an invalid model, and one that is not lossless."""
        self._processor, self._table = _load(file, self.read(file))
        self.vocabulary = len(self._table)
        self._bytes = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        self.special, self.separator = special_tokens(self._control)

    def ids(self, text: bytes) -> list[int]:
        parts = _PARTS.split(text.decode("utf-8", "surrogateescape"))
        ordinary = [[*segments(part)] for part in parts[::2]]
        encoded = iter(self._processor.encode([*chain.from_iterable(ordinary)], num_threads=1))
        ids: list[int] = []
        for cut, odd in zip_longest(ordinary, parts[1::2], fillvalue=""):
            for segment in cut:
                ids += self._checked(segment, next(encoded))
            ids += self._of_bytes(odd.encode("utf-8", "surrogateescape"))
        return ids

    def pieces(self, tokens: Iterable[int]) -> Iterator[bytes]:
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise ValueError(f"{token} is no token of {self.vocabulary}")
            yield self._table[token]

    def starts(self) -> list[bool]:
        return [piece[:1].isspace() for piece in self._table]

    def _checked(self, text: str, tokens: list[int]) -> list[int]:
        """Return `tokens` if they decode to the text, else its bytes."""
        raw = text.encode()
        return tokens if b"".join([self._table[token] for token in tokens]) == raw else self._of_bytes(raw)

    def _of_bytes(self, raw: bytes) -> list[int]:
        return [self._bytes[byte] for byte in raw]

    def _control(self, name: str) -> int | None:
        token = self._processor.piece_to_id(name)
        return token if self._processor.is_control(token) else None


def segments(text: str) -> Iterator[str]:
    """Cut a text after each line, and longer lines before a space, at which pieces start."""
    for line in _LINES.findall(text):
        start = 0
        while len(line) - start > LONGEST:
            window = line[start : start + LONGEST]
            stop = len(window[: window.rfind(" ") + 1].rstrip(" ")) or LONGEST
            yield window[:stop]
            start += stop
        yield line[start:]


def _load(file: Path, data: bytes) -> tuple[Any, list[bytes]]:
    """Return sentencepiece's processor, and the bytes of each id. Raises ConfigError."""
    from google.protobuf.message import DecodeError
    from sentencepiece import SentencePieceProcessor
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    model = ModelProto()
    try:
        model.ParseFromString(data)
        processor = SentencePieceProcessor(model_proto=data)
        if not model.pieces or not all(isinstance(piece.piece, str) for piece in model.pieces):
            raise RuntimeError  # protobuf returns invalid UTF-8 as bytes
    except (DecodeError, RuntimeError, ValueError):  # the last if sentencepiece's message is not UTF-8
        raise damaged(
            file, "is no model of sentencepiece", "Copy it again, or make one: tokenizers/README.md"
        ) from None
    _require_lossless(file, model)
    kinds = ModelProto.SentencePiece
    table = [
        b""
        if piece.type in (kinds.UNKNOWN, kinds.CONTROL)
        else bytes([int(piece.piece[3:5], 16)])
        if piece.type == kinds.BYTE
        else piece.piece.replace(SPACE, " ").encode()
        for piece in model.pieces
    ]
    return processor, table


def _require_lossless(file: Path, model: Any) -> None:
    """Raise ConfigError for a model (a ModelProto) that does not give back every text."""
    spec, kinds = model.normalizer_spec, type(model).SentencePiece
    single = {piece.piece for piece in model.pieces if piece.type == kinds.BYTE}
    for wrong, problem in (
        (bool(spec.precompiled_charsmap), f"it normalises text (normalization_rule_name {spec.name!r})"),
        (spec.remove_extra_whitespaces, "it removes white space (remove_extra_whitespaces)"),
        (spec.add_dummy_prefix, "it puts a space before a text (add_dummy_prefix)"),
        (not spec.escape_whitespaces, "it does not escape white space (escape_whitespaces)"),
        (single != {f"<0x{byte:02X}>" for byte in range(256)}, "it has no pieces for single bytes (byte_fallback)"),
    ):
        if wrong:
            raise damaged(file, f"text would not come back from it: {problem}", "See megasparse train-tokenizer")


def train_sentencepiece(lines: Iterator[str], vocabulary: int, model_type: str, character_coverage: float) -> bytes:
    """Return the file of a lossless model of sentencepiece: a pure function of the arguments.

    lines: of text, without their ends. model_type: "unigram" or "bpe". character_coverage: share of the text's
    characters that get a piece each. Raises ConfigError if the vocabulary does not fit the text.
    """
    from sentencepiece import SentencePieceTrainer
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    least = 1 + len(CONTROL) + 256
    if vocabulary <= least:
        raise ConfigError("--vocabulary", f"{vocabulary} leaves no room for texts after {least} tokens", "Give more")
    if not 0.9 <= character_coverage <= 1:
        raise ConfigError(
            "--character-coverage", f"{character_coverage} is not from 0.9 to 1", "Give one, such as 0.9995"
        )
    written = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=written,
            model_type=model_type,
            vocab_size=vocabulary,
            character_coverage=character_coverage,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            control_symbols=CONTROL,
            input_sentence_size=0,  # the sample was drawn already
            max_sentence_length=4 * LONGEST,  # bytes
            num_threads=16,  # the sums, and so the model, depend on it
            minloglevel=1,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).rpartition("] ")[2].split())  # without its place in sentencepiece's source
        raise ConfigError("--vocabulary", reason.rstrip("."), "Change it, or the text") from None
    if model_type != "unigram":
        return written.getvalue()
    model = ModelProto()
    model.ParseFromString(written.getvalue())
    for piece in model.pieces:
        piece.score = round(piece.score * GRID) / GRID
    return model.SerializeToString(deterministic=True)
