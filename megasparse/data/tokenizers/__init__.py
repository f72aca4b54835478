"""Text (or pixels) to tokens and back, one file a kind of tokenizer.

Adding a kind is writing a Tokenizer, and naming it here.
"""

from collections.abc import Callable
from pathlib import Path

from megasparse.data.tokenizers.contract import Tokenizer
from megasparse.data.tokenizers.huggingface import HuggingFaceTokenizer
from megasparse.data.tokenizers.sentence_piece import SentencePieceTokenizer
from megasparse.data.tokenizers.simple import ByteTokenizer, PixelTokenizer, WordTokenizer
from megasparse.errors import ConfigError, did_you_mean

NAMED: dict[str, type[Tokenizer]] = {"bytes": ByteTokenizer, "pixels": PixelTokenizer}
"""Tokenizers that need no file."""

OF_FILES: dict[str, Callable[[Path], Tokenizer]] = {
    ".model": SentencePieceTokenizer,
    ".json": HuggingFaceTokenizer,
    ".txt": WordTokenizer,
}
"""Tokenizers by the suffix of their file."""


def build_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names: one of NAMED, or a file's. Raises ConfigError."""
    if name in NAMED:
        return NAMED[name]()
    if (kind := OF_FILES.get(Path(name).suffix)) is not None:
        return kind(Path(name))
    hint = f"{did_you_mean(name, NAMED)} Or give the path of a tokenizer: FILE{', FILE'.join(OF_FILES)}"
    raise ConfigError("data.tokenizer", f'there is no tokenizer "{name}"', hint)
