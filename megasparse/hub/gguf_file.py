"""Unpacking of a GGUF file into a folder by transformers, after validation of its header: counts, lengths and sizes
must fit the file.
Version 2 or 3, little endian: "GGUF", uint32 version, uint64 tensors, uint64 entries; entries; tensors; their data.

    a text: uint64 length, UTF-8
    an entry: text key, uint32 type, value; an array: uint32 type, uint64 count, values
    a tensor: text name, uint32 dimensions n, n uint64 sizes, uint32 type, uint64 offset
"""

import json
import struct
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import torch

from megasparse.errors import HubError, one_line
from megasparse.files import open_file

MAGIC, VERSIONS = b"GGUF", (2, 3)
TEXT, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letter for each numeric type."""
LONGEST_TEXT = 1 << 20  # a chat template has thousands of bytes
MOST_DIMENSIONS = 8
LAYERS = "block_count"
WIDTHS = (
    *(".embedding_length", ".feed_forward_length", ".head_count", ".head_count_kv", ".key_length", ".value_length"),
    *(".vocab_size", ".dimension_count", ".expert_count", ".expert_feed_forward_length"),
)
"""Suffixes of the keys of sizes, which may not exceed the largest size of a tensor."""


class _Bad(Exception):
    pass


def unpack_gguf(path: Path) -> TemporaryDirectory[str]:
    """Unpack the model of a GGUF file into a folder, dequantised to fp32 by transformers. Raises HubError."""
    if path.exists():
        check_gguf(path)
    if find_spec("gguf") is None:
        raise HubError("gguf", "is not installed; it reads GGUF files", "Install it: pip install gguf")
    import transformers

    from megasparse.hub.export import write_tensors

    source = {"gguf_file": path.name, "local_files_only": True}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **source)
    except Exception as error:  # gguf raises errors of any type
        problem = f"transformers cannot load it ({' '.join(str(error).split())})"
        raise HubError(path, problem, "Use a GGUF file that transformers can load") from None
    folder = TemporaryDirectory()
    tokenizer.save_pretrained(folder.name)
    values = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    (Path(folder.name) / "config.json").write_text(json.dumps(values), encoding="utf-8")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    write_tensors(((name, x) for name, x in model.state_dict().items() if name not in tied), Path(folder.name))
    return folder


def check_gguf(path: Path) -> None:
    """Raise HubError if the header contradicts the file's size: readers trust it, and would loop or allocate.

    Each layer has at least one tensor, and each width is a size of some tensor.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise _Bad("it is not a regular file")
        with open_file(path) as stream:
            _check(stream, size)
    except _Bad as error:
        raise HubError(path, f"damaged GGUF file: {error}", "Download it again") from None
    except OSError as error:
        raise HubError(path, f"cannot be read: {error.strerror}", "Use the path of a GGUF file") from None


def _check(stream: IO[bytes], size: int) -> None:
    if stream.read(4) != MAGIC or _number(stream, "I") not in VERSIONS:
        raise _Bad("its first bytes are not those of version 2 or 3")
    tensors, entries = _number(stream, "Q"), _number(stream, "Q")
    if 24 * tensors + 12 * entries > size:
        raise _Bad(f"its {size:,} bytes cannot contain {tensors:,} tensors and {entries:,} entries")
    numbers: dict[str, int] = {}
    for _ in range(entries):
        key = _text(stream, size).decode(errors="replace")
        value = _value(stream, _number(stream, "I"), size)
        if value is not None:
            numbers[key] = value
    widest = 0
    for _ in range(tensors):
        _text(stream, size)
        if (dimensions := _number(stream, "I")) > MOST_DIMENSIONS:
            raise _Bad(f"a tensor has {dimensions:,} dimensions")
        widest = max(widest, *(_number(stream, "Q") for _ in range(dimensions)), 0)
        _number(stream, "I")
        if (offset := _number(stream, "Q")) > size:
            raise _Bad(f"a tensor starts at byte {offset:,} of {size:,}")
    for key, value in numbers.items():
        if key.endswith(f".{LAYERS}") and value > tensors:
            raise _Bad(f"it has {value:,} layers, more than its {tensors:,} tensors")
        if key.endswith(WIDTHS) and value > widest:
            raise _Bad(f"{one_line(key, 60)} is {value:,}, larger than any size of a tensor, at most {widest:,}")


def _number(stream: IO[bytes], letter: str) -> int:
    width = struct.calcsize(f"<{letter}")
    raw = stream.read(width)
    if len(raw) < width:
        raise _Bad("its header is cut off")
    return int(struct.unpack(f"<{letter}", raw)[0]) if letter not in "fd" else 0


def _text(stream: IO[bytes], size: int) -> bytes:
    length = _number(stream, "Q")
    if length > min(LONGEST_TEXT, size - stream.tell()):
        raise _Bad(f"a text of {length:,} bytes")
    return stream.read(length)


def _value(stream: IO[bytes], kind: int, size: int) -> int | None:
    """Skip a value. Return it if it is an integer, else None."""
    if kind in SCALARS:
        return _number(stream, SCALARS[kind])
    if kind == TEXT:
        _text(stream, size)
        return None
    if kind != ARRAY:
        raise _Bad(f"a value of type {kind}")
    inner, count = _number(stream, "I"), _number(stream, "Q")
    width = struct.calcsize(f"<{SCALARS[inner]}") if inner in SCALARS else 8 if inner == TEXT else 0
    if not width or count * width > size - stream.tell():
        raise _Bad(f"an array of {count:,} values of type {inner}")
    if inner == TEXT:
        for _ in range(count):
            _text(stream, size)
    else:
        stream.seek(count * width, 1)
    return None
