import bz2
import gzip
import lzma
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megasparse.data.corpora import enwik8, text
from megasparse.data.corpora.source import ByteStream, Source, cut
from megasparse.errors import ConfigError, DataError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".txt": lambda raw: raw,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".XZ": lzma.compress,
}


def open_source(*locations: Path, member: str | None = None) -> Source:
    return Source.open([str(location) for location in locations], member, Path("/nowhere/.download"))


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("zipped", [False, True])
def test_compressed_files_and_members_are_decompressed(tmp_path: Path, suffix: str, zipped: bool) -> None:
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


def test_members_of_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.mkdir("books") if hasattr(archive, "mkdir") else None
        archive.writestr("books/one.txt", "1")
        archive.writestr("books/two.txt", "2")
    assert b"".join(open_source(path, member="books/two.txt").pieces()) == b"2"
    with pytest.raises(DataError, match=r"x\.zip: this archive has 2 files \(books/one\.txt, .*--member NAME"):
        open_source(path)
    with pytest.raises(DataError, match=r'no "books/tow\.txt" in this archive\. Did you mean "books/two\.txt"'):
        open_source(path, member="books/tow.txt")
    (tmp_path / "plain").write_text("plain")
    with pytest.raises(ConfigError, match=r"--member: .*plain is not a zip archive"):
        open_source(tmp_path / "plain", member="x")


def test_a_folder_in_the_order_of_paths_without_hidden_files(tmp_path: Path) -> None:
    for name, content in {"b.txt": "2", "a/z.txt": "1", "c.txt.gz": "", ".hidden": "x", ".git/y": "x"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"3"))
    (tmp_path / "more").write_text("4")
    assert b"".join(open_source(tmp_path).pieces()) == b"1234"
    assert b"".join(open_source(tmp_path / "more", tmp_path / "b.txt").pieces()) == b"42"
    with pytest.raises(DataError, match="the output is inside this folder"):
        Source.open([str(tmp_path)], None, tmp_path / "out" / ".download")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("damage", [lambda raw: raw[:-12], lambda raw: b"plain text"], ids=["truncated", "garbage"])
def test_a_damaged_source_is_named(tmp_path: Path, suffix: str, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(damage(COMPRESS[suffix](bytes(range(256)))))
    with pytest.raises(DataError, match=rf"x\{suffix}: cannot be read"):
        open_source(path)


def test_a_zip_member_with_a_flipped_bit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("one.txt", "hello")
    path.write_bytes(path.read_bytes().replace(b"hello", b"hellp"))
    with pytest.raises(DataError, match=r"x\.zip: cannot be read: Bad CRC"):
        open_source(path)


@pytest.mark.parametrize("url", ["ftp://x/y", "pipe://touch marker", "file:///etc/passwd", "data://x"])
def test_D6_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--source"):
        Source.open([url], None, Path("/nowhere"))


@pytest.mark.parametrize("path", ["no/such/file", "pipe:touch marker", "| touch marker"])
def test_D6_a_missing_source_or_a_command_is_named(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="there is no such file or folder"):
        Source.open([path], None, Path("/nowhere"))
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    path = tmp_path / "zeros.bz2"
    path.write_bytes(bz2.compress(bytes(50_000_000)))
    tracemalloc.start()
    assert open_source(path).total_bytes == 50_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


@pytest.mark.parametrize("pieces", [[b"abcdefghij"], [b"a", b"bcd", b"", b"efghi", b"j"]])
def test_cut_and_byte_stream(pieces: list[bytes]) -> None:
    assert {name: b"".join(part) for name, part in cut(pieces, {"x": 3, "y": 5, "z": 2})} == {
        "x": b"abc",
        "y": b"defgh",
        "z": b"ij",
    }
    stream = ByteStream(pieces)
    assert [stream.read(4), stream.read(4), stream.read(4), stream.read(4)] == [b"abcd", b"efgh", b"ij", b""]


def test_text_splits_by_percent(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(200)))

    def lengths(split: str) -> dict[str, int]:
        return {name: len(b"".join(part)) for name, part in text.splits(open_source(path), {"split": split})}

    assert lengths("90,5,5") == {"train": 180, "validation": 10, "test": 10}
    assert lengths("99.5,0.5,0") == {"train": 199, "validation": 1}
    assert lengths("33.3,33.3,33.4") == {"train": 66, "validation": 67, "test": 67}
    with pytest.raises(DataError, match="too few to give validation any"):
        lengths("99.9,0.05,0.05")
    for bad in ("90,5", "90,5,6", "0,50,50", "110,-5,-5", "a,b,c", "1/0,5,5", ""):
        with pytest.raises(ConfigError, match="--split"):
            lengths(bad)


def test_enwik8_is_the_official_file_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "enwik8"
    path.write_bytes(bytes(range(100)))
    with pytest.raises(DataError, match=r"enwik8 has 100,000,000 bytes, this has 100\. .*`text`"):
        enwik8.splits(open_source(path), {})
    assert list(enwik8.SPLITS.values()) == [90_000_000, 5_000_000, 5_000_000]
    monkeypatch.setattr(enwik8, "SPLITS", {"train": 90, "validation": 5, "test": 5})
    with pytest.raises(DataError, match=r"md5 is \w+, enwik8's is a1fa5ffddb56f4953e226637dabbb36a"):
        enwik8.splits(open_source(path), {})
    monkeypatch.setattr(enwik8, "MD5", open_source(path).md5)
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path, "enwik8")
    for source in (open_source(path), open_source(tmp_path / "enwik8.zip")):
        found = {name: b"".join(part) for name, part in enwik8.splits(source, {})}
        assert found == {"train": bytes(range(90)), "validation": bytes(range(90, 95)), "test": bytes(range(95, 100))}
