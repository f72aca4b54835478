import random
from collections.abc import Iterator

import pytest

from megasparse.data.corpora import cutting
from megasparse.data.corpora.corpus import ByteStream, cut, split_at, split_sizes, text_pieces
from megasparse.errors import ConfigError


@pytest.mark.parametrize("pieces", [[b"abcdefghij"], [b"a", b"bcd", b"", b"efghi", b"j"]])
def test_cut_and_byte_stream(pieces):
    assert {name: b"".join(part) for name, part in cut(pieces, {"x": 3, "y": 5, "z": 2})} == {
        "x": b"abc",
        "y": b"defgh",
        "z": b"ij",
    }
    stream = ByteStream(pieces)
    assert [stream.read(4), stream.read(4), stream.read(4), stream.read(4)] == [b"abcd", b"efgh", b"ij", b""]
    assert stream.position == 10


def test_a_border_inside_a_character_moves_to_its_end():
    text = "aé€😀b".encode()  # 1 + 2 + 3 + 4 + 1 bytes
    starts = [0, 1, 3, 6, 10, 11]
    for size in range(len(text) + 1):
        found = [b"".join(part) for _, part in cut([text[:4], text[4:]], {"x": size, "y": len(text) - size}, True)]
        assert b"".join(found) == text
        assert len(found[0]) == min(start for start in starts if start >= size)


def in_parts(text: bytes, seed: int) -> Iterator[bytes]:
    draw = random.Random(seed)
    while text:
        size = draw.randrange(1, 40)
        yield text[:size]
        text = text[size:]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (b"one\ntwo\nthree four five", [b"one\ntwo\n", b"three", b" four", b" five"]),
        (b"x\n" * 10, [b"x\n" * 5, b"x\n" * 5]),
        (b"0123456789abc", [b"012345678", b"9abc"]),
        ("ééééééé".encode(), ["éééé".encode(), "ééé".encode()]),
        (b"\x80" * 12, [b"\x80" * 10, b"\x80" * 2]),
        (b" 123456789 x", [b" 12345678", b"9 x"]),
        (b"0123456789", [b"012345678", b"9"]),
        (b"", []),
    ],
)
def test_pieces_end_with_lines_or_words_or_characters(monkeypatch, text, want):
    monkeypatch.setattr(cutting, "PIECE", 10)
    for seed in range(5):
        assert list(text_pieces(in_parts(text, seed))) == want


def test_a_piece_is_a_mebibyte_at_most():
    text = random.Random(0).randbytes(3_000_000)
    pieces = list(text_pieces([text]))
    assert b"".join(pieces) == text and max(map(len, pieces)) <= 1 << 20
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])


def test_split_sizes():
    assert split_sizes("90,5,5", 200) == {"train": 180, "validation": 10, "test": 10}
    assert split_sizes("99.5,0.5,0", 200) == {"train": 199, "validation": 1}
    assert split_sizes("33.3,33.3,33.4", 200) == {"train": 66, "validation": 67, "test": 67}
    for bad in ("90,5", "90,5,6", "0,50,50", "110,-5,-5", "a,b,c", "1/0,5,5", ""):
        with pytest.raises(ConfigError, match="--split"):
            split_sizes(bad, 200)
    assert [split_at(byte, {"x": 2, "y": 1}) for byte in range(3)] == ["x", "x", "y"]
