import hashlib
import zipfile

import pytest

from megasparse.cli.main import door
from megasparse.data.corpora import wikitext103
from megasparse.data.index import Index
from megasparse.errors import DataError
from tests.data.folders import everything, source_of
from tests.helpers.shard_server import serving

main = door("prepare-data")

TEXTS = {
    "train": " \n = Title = \n \n A <unk> word \u3000 and 3 @.@ 5 . \n \n",
    "valid": " \n = Other = \n x \n",
    "test": " \n y z \n",
}
SETTINGS = {"tokenizer": "bytes"}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "wikitext-103"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"wiki.{name}.tokens").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def archive(folder):
    """Archive as the official one: the files in a folder, which is an entry of its own."""
    path = folder.parent / "wikitext-103-v1.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder, "wikitext-103/")
        for file in folder.iterdir():
            archive.write(file, f"wikitext-103/{file.name}")
    return path


@pytest.fixture
def official(monkeypatch):
    """Pretend that TEXTS are the published files."""
    texts = {split: TEXTS[infix].encode() for split, infix in wikitext103.SPLITS.items()}
    digests = {split: hashlib.sha1(text).hexdigest() for split, text in texts.items()}
    monkeypatch.setitem(wikitext103.SHA1, "tokens", digests)
    monkeypatch.setattr(wikitext103, "LINES", {split: text.count(b"\n") for split, text in texts.items()})


@pytest.fixture
def server(archive):
    with serving(archive.parent) as server:
        yield server


@pytest.mark.usefixtures("official")
def test_the_command_takes_the_folder_the_archive_and_its_url(folder, archive, server, tmp_path, capsys):
    sources = {"folder": folder, "archive": archive, "url": f"{server.url}/wikitext-103-v1.zip"}
    for name, source in sources.items():
        main(["wikitext103", "--source", str(source), "--output", str(tmp_path / name), "--workers", "1"])
        index = Index.load(tmp_path / name)
        assert index.file.source["official"] is True and index.file.source["kind"] == "tokens"
        assert list(index.file.splits) == list(wikitext103.SPLITS)
        for split, infix in wikitext103.SPLITS.items():
            text = TEXTS[infix]
            assert bytes(everything(index, split).tolist()).decode() == text
            # What everyone counts on WikiText-103: sum(len(line.split() + ["<eos>"]) for line in file)
            lines = text.split("\n")[:-1]
            assert index.split(split).words == sum(len([*line.split(), "<eos>"]) for line in lines)
            assert index.split(split).raw_bytes == len(text.encode())
    assert "test: 8 tokens in 1 samples, 1 shards (4 words)" in capsys.readouterr().out


@pytest.mark.usefixtures("official")
def test_a_wrong_checksum_is_refused_and_a_part_is_not_called_official(folder):
    (folder / "wiki.train.tokens").write_text(TEXTS["train"] + " more \n", encoding="utf-8")
    assert wikitext103.about(source_of(folder), SETTINGS) == {"kind": "tokens", "official": False}
    (folder / "wiki.train.tokens").write_text(TEXTS["train"].replace("word", "wort"), encoding="utf-8")
    with pytest.raises(
        DataError, match=r"wiki\.train\.tokens: its sha1 is \w{40}, the official file's is \w{40}\. Down"
    ):
        wikitext103.about(source_of(folder), SETTINGS)
    some = source_of(folder / "wiki.test.tokens", folder / "wiki.valid.tokens")
    assert wikitext103.about(some, SETTINGS) == {"kind": "tokens", "official": False}
    assert [name for name, _ in wikitext103.splits(some, SETTINGS)] == ["validation", "test"]


def test_no_two_published_checksums_are_alike():
    assert {len(sha1) for kind in wikitext103.SHA1.values() for sha1 in kind.values()} == {40}
    assert len({sha1 for kind in wikitext103.SHA1.values() for sha1 in kind.values()}) == 6


def test_what_is_not_wikitext_is_one_line(folder, archive, tmp_path):
    with pytest.raises(DataError, match=r"wiki\.test\.tokens is the same split\. Give one of the two"):
        wikitext103.about(source_of(folder, archive), SETTINGS)
    (folder / "wiki.test.raw").write_text("x\n")
    with pytest.raises(DataError, match=r"there are both \.tokens and \.raw files\. Give wiki\.train"):
        wikitext103.about(source_of(folder), SETTINGS)
    (tmp_path / "x.txt").write_text("x\n")
    with pytest.raises(DataError, match=r"x\.txt: there is no wiki\.train\.tokens\. Give"):
        wikitext103.about(source_of(tmp_path / "x.txt"), SETTINGS)
    (folder / "wiki.test.raw").write_bytes(b"x\xe9\n")
    with pytest.raises(DataError, match=r"wiki\.test\.raw: byte 1 is not UTF-8"):
        wikitext103.about(source_of(folder / "wiki.test.raw"), SETTINGS)
    torn = tmp_path / "torn.zip"
    torn.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"torn\.zip: this zip archive is damaged: its end is missing\. Get it again"):
        source_of(torn)
