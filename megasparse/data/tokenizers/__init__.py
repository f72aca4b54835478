"""Text (or pixels) to tokens and back. Each file contains a kind of tokenizer, which `build_tokenizer` names."""

from collections.abc import Callable
from pathlib import Path

from megasparse.data.tokenizers.tokenizer import NAMED, Tokenizer
from megasparse.errors import ConfigError, did_you_mean


def build_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names: one of NAMED, or a file's. Raises ConfigError."""
    from megasparse.data.tokenizers.huggingface import HuggingFaceTokenizer
    from megasparse.data.tokenizers.sentence_piece import SentencePieceTokenizer
    from megasparse.data.tokenizers.simple import ByteTokenizer, PixelTokenizer, WordTokenizer

    if name in NAMED:
        return ByteTokenizer() if name == "bytes" else PixelTokenizer()
    kinds: dict[str, Callable[[Path], Tokenizer]] = {
        ".model": SentencePieceTokenizer, ".json": HuggingFaceTokenizer, ".txt": WordTokenizer,
    }  # fmt: skip
    if (kind := kinds.get(Path(name).suffix)) is not None:
        return kind(Path(name))
    hint = f"{did_you_mean(name, NAMED)} Or give the path of a tokenizer: FILE{', FILE'.join(kinds)}"
    raise ConfigError("data.tokenizer", f'there is no tokenizer "{name}"', hint)
