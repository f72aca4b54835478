"""Samples of a source's lines, which a tokenizer learns from; and sentencepiece's training on them."""

import io
import re
from collections.abc import Iterator
from typing import NoReturn

from tqdm import tqdm

from megasparse.data.corpora.corpus import text_pieces
from megasparse.data.corpora.source import Source
from megasparse.data.tokenizers.sentence_piece import GRID, LONGEST, segments
from megasparse.errors import ConfigError

HELD_OUT_EVERY = 100
HELD_OUT_BYTES = 1_000_000
CONTROL = ["[CLS]", "[SEP]", "[PAD]", "[MASK]"]


class Sample:
    """Sample of at most `size` bytes of a source of UTF-8, as whole lines spread evenly over it; a pure function of it.

    Every hundredth line is not among them but held out, up to `HELD_OUT_BYTES`; a source of fewer lines holds nothing
    out. Memory: a piece of up to 1 MiB, and what is held out. Raises DataError for what is not UTF-8.
    """

    def __init__(self, source: Source, size: int):
        source.require_text()
        self._source, self._size = source, size
        self.held_out = b""
        """Bytes of the lines held out; known once `lines` or `all` is through."""
        self.is_held_out = False

    def lines(self) -> Iterator[str]:
        """Lines without their ends; those of over `LONGEST` characters come in parts."""
        held_out, first = bytearray(), bytearray()
        seen = taken = 0
        for number, line in enumerate(self._all_lines()):
            raw = line.encode()
            seen += len(raw)
            if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 and len(held_out) + len(raw) <= HELD_OUT_BYTES:
                held_out += raw
            elif taken + len(raw) <= self._size * seen / self._source.total_bytes:
                taken += len(raw)
                if len(first) + len(raw) <= HELD_OUT_BYTES:
                    first += raw
                if text := line.rstrip("\r\n"):
                    yield text
        self.held_out, self.is_held_out = bytes(held_out or first), bool(held_out)

    def all(self) -> Iterator[bytes]:
        """Everything, with nothing held out: pieces that end with a line, or with a file."""
        self.held_out = b""
        with self._bar() as bar:
            for part in self._source.parts:
                piece = b""
                for piece in text_pieces(part.pieces()):
                    self.held_out = self.held_out or piece[:HELD_OUT_BYTES]
                    bar.update(len(piece))
                    yield piece
                yield b"" if piece.endswith(b"\n") else b"\n"

    def _all_lines(self) -> Iterator[str]:
        with self._bar() as bar:
            for part in self._source.parts:
                for piece in text_pieces(part.pieces()):
                    bar.update(len(piece))
                    yield from segments(piece.decode())

    def _bar(self) -> "tqdm[NoReturn]":
        return tqdm(desc="learning from", total=self._source.total_bytes, unit="B", unit_scale=True, disable=None)


def train_sentencepiece(sample: Sample, vocabulary: int, model_type: str, character_coverage: float) -> bytes:
    """The file of a lossless model of sentencepiece's: a pure function of what is given.

    model_type: "unigram" or "bpe". character_coverage: part of the characters, as often as they stand in the text, that
    get a piece each; others are encoded by their bytes. Raises ConfigError for a vocabulary that is too small or too
    large for the text.
    """
    from sentencepiece import SentencePieceTrainer

    least = 1 + len(CONTROL) + 256
    if vocabulary <= least:
        problem = f"{vocabulary} leaves no room beside {least} tokens for bytes, <unk> and {' '.join(CONTROL)}"
        raise ConfigError("--vocabulary", problem, "Give more, such as 32000")
    if not 0.9 <= character_coverage <= 1:
        raise ConfigError(
            "--character-coverage", f"{character_coverage} is not from 0.9 to 1", "Give one, such as 0.9995"
        )
    written = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=sample.lines(),
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
        raise _as_config_error(vocabulary, str(error)) from None
    return _rounded(written.getvalue()) if model_type == "unigram" else written.getvalue()


def _rounded(model: bytes) -> bytes:
    """The same model with its scores on the `GRID`."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    proto = ModelProto()
    proto.ParseFromString(model)
    for piece in proto.pieces:
        piece.score = round(piece.score * GRID) / GRID
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


def _as_config_error(vocabulary: int, problem: str) -> ConfigError:
    """The error for what sentencepiece says of a vocabulary that does not fit the text."""
    if found := re.search(r"too high.*<= (\d+)", problem):
        hint = f"Give at most {found[1]}, or more text"
        return ConfigError("--vocabulary", f"{vocabulary} pieces are not in so little text", hint)
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", problem):
        return ConfigError(
            "--vocabulary", f"{vocabulary} is too small for the characters", f"Give more than {found[1]}"
        )
    return ConfigError("--vocabulary", f"sentencepiece: {' '.join(problem.split())}", "Give another one, or other text")
