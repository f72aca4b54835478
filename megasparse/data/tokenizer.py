"""Text to tokens and back. So far one way: a token is a byte."""

import hashlib

import torch
from torch import Tensor

from megasparse.errors import ConfigError, did_you_mean


class ByteTokenizer:
    """Token i is the byte i: any bytes go in, and come out again unchanged."""

    name = "bytes"
    vocabulary = 256
    sha256 = hashlib.sha256(b"token i is the byte i, for i in 0..255").hexdigest()
    """Identifies what the tokens mean; an index made under another meaning is refused."""

    def encode(self, text: str | bytes) -> Tensor:
        """Tokens of a text: int64 (length,). A str is taken as UTF-8; lone surrogates are kept ("surrogatepass")."""
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long() if raw else torch.empty(0, dtype=torch.long)

    def decode(self, tokens: Tensor) -> bytes:
        """Bytes of tokens (length,). Raises ValueError for a number that is no byte."""
        return bytes(tokens.tolist())


TOKENIZERS = {ByteTokenizer.name: ByteTokenizer}


def build_tokenizer(name: str) -> ByteTokenizer:
    """The tokenizer of this name. Raises ConfigError naming data.tokenizer."""
    if name not in TOKENIZERS:
        raise ConfigError("data.tokenizer", f'there is no tokenizer "{name}"', did_you_mean(name, TOKENIZERS))
    return TOKENIZERS[name]()
