"""A tokenizer's file: read, identified, and its special tokens found by their usual names."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from megasparse.data.tokenizers.contract import SpecialTokens
from megasparse.errors import ConfigError

BEGIN = ("[CLS]", "<s>", "<cls>")
SEPARATOR = ("[SEP]", "</s>", "<sep>", "<|endoftext|>", "<|end_of_text|>")
PADDING = ("[PAD]", "<pad>")
MASK = ("[MASK]", "<mask>")
USUAL = (BEGIN, SEPARATOR, PADDING, MASK)


def read(path: Path) -> bytes:
    """All of a tokenizer's file. Raises ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        hint = "Give the path of a tokenizer's file; tokenizers/README.md says how one is made"
        raise ConfigError("data.tokenizer", f"{path} cannot be read ({error.strerror or error})", hint) from None


def identity(kind: str, data: bytes) -> str:
    """Return the sha256 of a file of a kind of tokenizer."""
    return hashlib.sha256(kind.encode() + b"\0" + data).hexdigest()


def damaged(path: Path, problem: str, hint: str) -> ConfigError:
    """The error that a tokenizer's file cannot be used."""
    return ConfigError("data.tokenizer", f"{path}: {' '.join(problem.split())}", hint)


def special_tokens(find: Callable[[str], int | None]) -> tuple[SpecialTokens | None, int | None]:
    """The special tokens, where all four are there, and the documents' separator. find: a name's id, or None."""
    ids = [next((token for name in names if (token := find(name)) is not None), None) for names in USUAL]
    begin, separator, padding, mask = ids
    if begin is None or separator is None or padding is None or mask is None:
        return None, separator
    return SpecialTokens(begin, separator, padding, mask), separator
