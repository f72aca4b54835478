"""Text (or pixels) to tokens and back, one file a kind of tokenizer.

Adding a kind is writing a Tokenizer, and naming it here.
"""

from pathlib import Path

from megasparse.data.tokenizers.byte import ByteTokenizer, PixelTokenizer
from megasparse.data.tokenizers.contract import Tokenizer
from megasparse.errors import ConfigError

NAMED: dict[str, type[Tokenizer]] = {"bytes": ByteTokenizer, "pixels": PixelTokenizer}
"""Those that need no file."""


def build_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: one of NAMED, or a file's. Raises ConfigError naming that key."""
    if name in NAMED:
        return NAMED[name]()
    known = ", ".join(f'"{known}"' for known in NAMED)
    raise ConfigError("data.tokenizer", f'there is no tokenizer "{Path(name)}"', f"Write {known}, or a file's path")
