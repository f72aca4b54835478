import bz2
import gzip
import lzma
import random
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from megasparse.data.corpora import CORPORA
from megasparse.data.corpora import source as source_module
from megasparse.data.corpora.corpus import lines
from megasparse.data.corpora.source import Source
from megasparse.data.corpora.text import Enwik8
from megasparse.errors import ConfigError, DataError
from tests.data.corpora.pictures import write_files, write_zip
from tests.data.folders import source_of
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.peak_memory import traced_peak

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".txt": lambda raw: raw,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".XZ": lzma.compress,
}


def open_source(*locations: Path, member: str | None = None) -> Source:
    return source_of(*locations, kind="stream", member=member)


@together("suffix", COMPRESS)
@together("zipped", [False, True])
def test_compressed_files_and_members_are_decompressed(tmp_path, suffix, zipped):
    raw = bytes(range(256)) * 10_000  # several pieces
    path = tmp_path / f"x{suffix}"
    path.write_bytes(COMPRESS[suffix](raw))
    if zipped:
        with zipfile.ZipFile(tmp_path / "x.whl", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(path, f"deep/x{suffix}")
        path = tmp_path / "x.whl"
    source = open_source(path)
    assert source.total_bytes == len(raw)
    assert b"".join(source.pieces()) == raw


def test_members_of_an_archive(tmp_path):
    files = {"books/": b"", "books/one.txt": b"1", "books/two.txt": b"2", "notes.md": b"3"}
    path = write_zip(tmp_path / "x.zip", files)
    assert b"".join(open_source(path, member="books/two.txt").pieces()) == b"2"
    assert b"".join(open_source(path, member="books/*.txt").pieces()) == b"12"
    refusal(lambda: open_source(path), match=r"x\.zip: this archive has 3 files \(books/one\.txt, .*--member NAME")
    with pytest.raises(DataError, match=r'no "books/tow\.txt" in this archive\. Did you mean "books/two\.txt"'):
        open_source(path, member="books/tow.txt")
    (tmp_path / "plain").write_text("plain")
    refusal(lambda: open_source(tmp_path / "plain", member="x"), ConfigError, r"--member: .*plain is not a zip archive")


def test_a_folder_in_the_order_of_paths_without_hidden_files(tmp_path, capsys):
    content = {"b.txt": b"2", "a/z.txt": b"1", "c.txt.gz": gzip.compress(b"3"), ".hidden": b"x", ".git/y": b"x"}
    write_files(tmp_path, {**content, "more": b"4"})
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    assert b"".join(open_source(tmp_path).pieces()) == b"1234"
    said = capsys.readouterr().err
    assert f"{tmp_path}: 4 files are read, 3 left out (.git/y, .hidden, linked): they are hidden, " in said
    assert b"".join(open_source(tmp_path / "more", tmp_path / "b.txt").pieces()) == b"42"
    with pytest.raises(DataError, match="the output is inside this folder"):
        Source.open([str(tmp_path)], None, tmp_path / "out" / ".download")


TAR = bytes(257) + b"ustar\0" + bytes(250)
PACKED = {
    "x.tar": TAR, "x.tar.gz": gzip.compress(TAR), "x.tgz": gzip.compress(TAR), "x.txt": gzip.compress(b"one"),
    "x.bin": bz2.compress(b"one"), "x.parquet": b"PAR1\0", "be.csv": b"\xfe\xff\0o", "le.txt": "one".encode("utf-16"),
    "32.txt": "one".encode("utf-32"),
}  # fmt: skip


@together("name", PACKED)
def test_a_packed_file_is_not_taken_for_text(tmp_path, name):
    (tmp_path / name).write_bytes(PACKED[name])
    hint = {"le.txt": "iconv -f utf-16 -t", "be.csv": "iconv -f utf-16 -t", "32.txt": "iconv -f utf-32 -t",
            "x.parquet": "Write its rows to .jsonl"}  # fmt: skip
    hint = hint.get(name, "Unpack it")
    for path in (tmp_path / name, write_zip(tmp_path / "x.zip", {name: PACKED[name]})):
        refusal(partial(open_source, path), match=rf"{name}: this is .*, not plain text\. .*{hint}")


@together("coding", ["utf-16le", "utf-16be"])
def test_utf16_without_a_mark_is_not_taken_for_text(tmp_path, coding):
    for text in ("plain English words\n" * 90, "Größe – 5 €\n" * 90):
        (tmp_path / "a.txt").write_bytes(text.encode(coding))
        refusal(lambda: open_source(tmp_path / "a.txt"), match=rf"every second byte is 0.*iconv -f {coding} -t utf-8")


@together("suffix", source_module.DOCUMENTS)
def test_a_document_is_not_taken_for_an_archive_of_texts(tmp_path, suffix):
    path = write_zip(tmp_path / f"a{suffix.upper()}", {"word/document.xml": b"<w:t>one</w:t>"})
    refusal(lambda: open_source(path), match=rf"this is a \{suffix} document, not plain text\. Extract its text first")


def test_the_hint_about_a_long_zstd_window_names_the_option(tmp_path):
    frame = (
        b"\x28\xb5\x2f\xfd\0" + bytes([(31 - 10) << 3]) + b"\x09\0\0x"
    )  # RFC 8878: a window of 2^31 bytes, one block
    (tmp_path / "a.zst").write_bytes(frame)
    refusal(lambda: open_source(tmp_path / "a.zst"), match=r"a\.zst: cannot be read: .*zstd -d --long=31")


def test_latin1_is_read_as_bytes_with_a_notice(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes("café au lait".encode("latin1"))
    options = {"split": "100,0,0", "tokenizer": "bytes"}
    source = CORPORA["text"].open([str(tmp_path / "a.txt")], None, tmp_path, options, 1)
    assert [name for name, _ in CORPORA["text"].splits(source, options)] == ["train"]
    assert "a.txt: byte 3 is not UTF-8, so it is read as bytes. If it is Latin-1, convert" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz", "x.zip"])
def test_a_byte_order_mark_is_removed(tmp_path, name):
    marked = b"\xef\xbb\xbfa \xef\xbb\xbf"
    write_files(tmp_path, {"x.txt": marked, "x.txt.gz": gzip.compress(marked), "only": marked[:3]})
    write_zip(tmp_path / "x.zip", {"x.txt": marked})
    source = open_source(tmp_path / name, tmp_path / name, tmp_path / "only")
    assert b"".join(source.pieces()) == 2 * marked[3:] and source.total_bytes == 10
    assert source.empty == (str(tmp_path / "only"),) and not source.parts[0].not_utf8
    assert b"".join(source_of(tmp_path / "x.txt", kind="raw").pieces()) == marked


def test_a_zip_member_with_a_flipped_bit_is_named(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:  # stored as it is
        archive.writestr("one.txt", "hello")
    path.write_bytes(path.read_bytes().replace(b"hello", b"hellp"))
    refusal(lambda: open_source(path), match=r"x\.zip: one\.txt: cannot be read: Bad CRC")
    write_zip(path, {"é.txt": b"one"})
    for count in (1, -1):  # the name in the member's header, and in the directory
        path.write_bytes(path.read_bytes().replace("é".encode(), b"\x9d\x9d", count))
        refusal(lambda: open_source(path), match=r"x\.zip: .*cannot be read: 'utf-8' codec")


@together("path", ["no/such/file", "pipe:touch marker", "| touch marker"])
def test_a_missing_source_or_a_command_is_named(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal(lambda: Source.open([path], None, Path("/nowhere")), match="there is no such file or folder")
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_source(tmp_path):
    path = tmp_path / "zeros.bz2"
    path.write_bytes(bz2.compress(bytes(50_000_000)))

    def read():
        assert open_source(path).total_bytes == 50_000_000

    assert traced_peak(read) < 10_000_000


def test_files_are_kept_apart_and_empty_ones_left_out(tmp_path, capsys):
    write_files(tmp_path / "in", {"b/x.txt": b"one", "a.txt.gz": gzip.compress(b"two"), "nothing.txt": b""})
    names = ("z/2.txt", "z/10.txt", "__MACOSX/._2.txt", ".hidden", "z/")
    write_zip(tmp_path / "in" / "c.zip", {name: name if name != "z/" else "" for name in names})
    source = source_of(tmp_path / "in")
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path}/in/c.zip: 2 files are read, 2 left out (.hidden, __MACOSX/._2.txt): they are hidden",
        f"{tmp_path}/in: 4 files are read, 1 left out ({tmp_path}/in/nothing.txt): they are empty",
    ]
    found = [(part.name, b"".join(part.pieces()), part.size) for part in source.parts]
    want = {"a.txt.gz": b"two", "b/x.txt": b"one", "z/10.txt": b"z/10.txt", "z/2.txt": b"z/2.txt"}
    assert found == [(name, content, len(content)) for name, content in want.items()]
    assert source.empty == (str(tmp_path / "in" / "nothing.txt"),) and source.total_bytes == 21
    assert str(source.parts[2]) == f"{tmp_path}/in/c.zip: z/10.txt"
    (tmp_path / "in" / "b" / "x.txt").rename(tmp_path / "in" / "b" / "y.txt")
    renamed = source_of(tmp_path / "in")
    assert renamed.sha256 == source.sha256 and renamed.layout != source.layout

    raw = source_of(tmp_path / "in", kind="raw")
    assert [part.name for part in raw.parts] == ["a.txt.gz", "b/y.txt", "c.zip"]
    assert all(b"".join(part.pieces()) == part.path.read_bytes() for part in raw.parts)
    for empty in (tmp_path / "in" / "nothing.txt", tmp_path / "empty.gz"):
        empty.write_bytes(gzip.compress(b"") if empty.suffix == ".gz" else b"")
        refusal(partial(open_source, empty), match=r"(nothing\.txt|empty\.gz): there is nothing in it\. Check --source")


@pytest.mark.parametrize("longest", [2, 5, 100])
def test_lines_of_any_pieces_equal_the_whole(longest):
    draw = random.Random(longest)
    for _ in range(2000):
        text = bytes(draw.choice(b"ab \n\n\r\t") for _ in range(draw.randrange(30)))
        cuts = [0, *sorted(draw.choices(range(len(text) + 1), k=draw.randrange(4))), len(text)]
        whole = [(number, line.lstrip()) for number, line in enumerate(text.split(b"\n"), 1)]
        lasting = [(number, line) for number, line in whole if line or number == len(whole)]
        want = [(number, line if len(line) <= longest else None) for number, line in lasting]
        assert list(lines((text[a:b] for a, b in pairwise(cuts)), longest)) == want


@together(
    ("content", "offset"),
    [
        (b"x" * ((1 << 20) - 1) + "é".encode(), None),
        (b"x" * ((1 << 20) - 1) + b"\xc3x", (1 << 20) - 1),
        (b"x" * (1 << 20) + b"\xff", 1 << 20),
        ("€".encode()[:2], 0),
        (b"ab" + "€".encode()[:2], 2),
        (b"a\xed\xa0\x80", 1),
    ],
)
def test_the_first_byte_that_is_not_utf8(tmp_path, content, offset):
    (tmp_path / "x").write_bytes(content)
    source = open_source(tmp_path / "x")
    assert source.parts[0].not_utf8 == offset
    if offset is not None:
        refusal(lambda: source.require_text(), match=rf"/x: byte {offset:,} is not UTF-8")


@together("size", [30, 100, 1000])
@together("name", ["x.zip", "x.txt"])
def test_a_torn_zip_is_named(tmp_path, size, name):
    whole = write_zip(tmp_path / "whole.zip", {"one.txt": random.Random(0).randbytes(2560)})
    (tmp_path / name).write_bytes(whole.read_bytes()[:-size])
    with pytest.raises(DataError, match=rf"{name}: this zip archive is damaged: its end is missing\. Get it again"):
        open_source(tmp_path / name)
    (tmp_path / "x.zip").write_bytes(b"<html>404</html>")
    refusal(lambda: open_source(tmp_path / "x.zip"), match=r"x\.zip: this zip archive is damaged")


@together("name", ["x.zip", "x.gz", "x.bz2", "x.xz", "x.gz.zip"])
def test_a_bomb_is_not_unfolded(tmp_path, monkeypatch, name):
    monkeypatch.setattr(source_module, "BOMB_BYTES", 3_000_000)
    zeros = bytes(10_000_000)
    path = tmp_path / name
    if path.suffix == ".zip":
        write_zip(path, {path.stem: gzip.compress(zeros) if ".gz" in name else zeros})
    else:
        path.write_bytes(COMPRESS[path.suffix](zeros))
    read: list[int] = []
    counting = SimpleNamespace(crc32=lambda piece, start: read.append(len(piece)) or 0)  # ours alone: gzip has its own
    monkeypatch.setattr(source_module, "zlib", counting)
    refusal(lambda: open_source(path), match=rf"{name}.*: its [\d,]+ bytes unfold to 200 times as many and more")
    assert sum(read) <= 5_000_000


def test_only_the_official_enwik8_is_accepted(tmp_path, monkeypatch):
    path = tmp_path / "enwik8"
    path.write_bytes(bytes(range(100)))
    with pytest.raises(DataError, match=r"enwik8 has 100,000,000 bytes, this 100\."):
        CORPORA["enwik8"].splits(open_source(path), {})
    assert list(Enwik8.SPLITS.values()) == [90_000_000, 5_000_000, 5_000_000]
    monkeypatch.setattr(Enwik8, "SPLITS", {"train": 90, "validation": 5, "test": 5})
    with pytest.raises(DataError, match=r"md5 is \w+, enwik8's is a1fa5ffddb56f4953e226637dabbb36a"):
        CORPORA["enwik8"].splits(open_source(path), {})
    monkeypatch.setattr(Enwik8, "MD5", open_source(path).md5)
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path, "enwik8")
    for source in (open_source(path), open_source(tmp_path / "enwik8.zip")):
        found = {name: b"".join(part) for name, (part,) in CORPORA["enwik8"].splits(source, {})}
        assert found == {"train": bytes(range(90)), "validation": bytes(range(90, 95)), "test": bytes(range(95, 100))}
