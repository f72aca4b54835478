"""Text files cut into windows of tokens."""

from pathlib import Path
from typing import Any

from megasparse.errors import DataError


def windows(tokenizer: Any, paths: list[Path], length: int) -> list[list[int]]:
    """Token ids of all windows of all files, `length` at most with special tokens. DataError: a file cannot be read."""
    files = [file for path in paths for file in (sorted(path.rglob("*.txt")) if path.is_dir() else [path])]
    found: list[list[int]] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(file, f"cannot be read as UTF-8 text ({error})", "Give text files") from None
        cut = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
        found += cut if cut and isinstance(cut[0], list) else [cut]
    return found
