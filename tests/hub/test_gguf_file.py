import os
import struct
from pathlib import Path
from typing import Any

import pytest

from megasparse.errors import HubError
from megasparse.hub.gguf_file import check_gguf
from megasparse.hub.importing import HFModel


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf(**changed: Any) -> bytes:
    """A file of two tensors by the format's definition."""
    given = {"layers": 1, "width": 4, "tensors": 2, "entries": 5, "count": 2, "dimensions": 2, "kind": 9, **changed}
    entries = [
        text(b"general.name") + struct.pack("<I", 8) + text(b"small"),
        text(b"llama.block_count") + struct.pack("<II", 4, given["layers"]),
        text(b"llama.embedding_length") + struct.pack("<II", 4, given["width"]),
        text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", given["kind"], 8, 2) + text(b"a") + text(b"b"),
        text(b"tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, given["count"]) + struct.pack("<2f", 0.5, 1.5),
    ]
    infos = [
        text(name) + struct.pack("<I2QIQ", given["dimensions"], 4, 2, 0, 32 * number)
        for number, name in enumerate((b"token_embd.weight", b"output.weight"))
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, given["tensors"], given["entries"])
    body = head + b"".join(entries) + b"".join(infos)
    return body.ljust(-(-len(body) // 32) * 32, b"\0") + bytes(64)


def test_a_whole_file_passes_and_every_cut_header_does_not(tmp_path):
    whole, path = gguf(), tmp_path / "a.gguf"
    path.write_bytes(whole)
    check_gguf(path)
    header = whole.index(b"output.weight") + 13 + 4 + 16 + 4 + 8
    for size in range(0, header):
        path.write_bytes(whole[:size])
        with pytest.raises(HubError, match=r"a\.gguf: damaged GGUF file"):
            check_gguf(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": 10**9}, "it has 1,000,000,000 layers, more than its 2 tensors"),
        ({"width": 10**9}, "llama.embedding_length is 1,000,000,000, larger than any size of a tensor, at most 4"),
        ({"tensors": 2**62}, "cannot contain 4,611,686,018,427,387,904 tensors"),
        ({"entries": 2**63}, "cannot contain 2 tensors and"),
        ({"count": 2**60}, "an array of 1,152,921,504,606,846,976 values of type 6"),
        ({"dimensions": 2**32 - 1}, "a tensor has 4,294,967,295 dimensions"),
        ({"kind": 77}, "a value of type 77"),
    ],
)
def test_forged_sizes_are_rejected_before_an_allocation(tmp_path, monkeypatch, changed, message):
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf(**changed))
    with pytest.raises(HubError, match=message) as caught:
        HFModel.open(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda _: None])
def test_missing_and_irregular_files_are_rejected(tmp_path, make):
    make(tmp_path / "a.gguf")
    with pytest.raises(HubError, match=r"a\.gguf: "):
        check_gguf(tmp_path / "a.gguf")
