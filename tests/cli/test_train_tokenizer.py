import bz2
import random
from pathlib import Path

import pytest

from megasparse.cli.main import door
from megasparse.data.corpora.corpus import HELD_OUT_EVERY, LineSample
from megasparse.data.corpora.source import Source
from megasparse.data.tokenizers import build_tokenizer
from tests.helpers.tokenizers import PROSE

main = door("train-tokenizer")


def opened(*paths: Path) -> Source:
    return Source.open([str(path) for path in paths], None, Path("nowhere"), "files")


def train(kind: str, *options: object) -> None:
    main([kind, *map(str, options)])


@pytest.fixture
def books(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "a.txt").write_text(PROSE)
    (folder / "b.txt.bz2").write_bytes(bz2.compress(PROSE.upper().encode().rstrip()))
    (folder / "c.txt").write_text("x" * 20_000 + " " + "words " * 5_000 + "\r\n")
    return folder


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_model_is_made_the_same_again(tmp_path, books, capfd, kind):
    for name in ("one", "two"):
        train(
            "sentencepiece", "--source", books, "--vocabulary", 500, "--model-type", kind, "--sample-bytes", 15_000,
            "--character-coverage", 0.999, "--output", tmp_path / "new" / f"{name}.model",
        )  # fmt: skip
    reported = capfd.readouterr().out
    assert all(text in reported for text in ("one.model: 500 tokens", "bytes per token on", "decoding restored"))
    made = [path.read_bytes() for path in sorted((tmp_path / "new").iterdir())]
    assert len(made) == 2 and made[0] == made[1]
    model = build_tokenizer(str(tmp_path / "new" / "one.model"))
    assert model.special is not None and model.separator is not None
    assert model.decode(model.encode(b" a\n\xff\t  b ")) == b" a\n\xff\t  b "


def test_words_are_counted(tmp_path, books, capfd):
    train("words", "--source", books, "--output", tmp_path / "all.txt")
    train("words", "--source", books, "--vocabulary", 20, "--output", tmp_path / "some.txt")
    lines = (tmp_path / "all.txt").read_text().split("\n")
    assert lines[0] == "words" and set(PROSE.upper().split()) < set(lines)
    assert len(build_tokenizer(str(tmp_path / "some.txt")).encode(PROSE)) == len(PROSE.split()) + PROSE.count("\n")
    assert build_tokenizer(str(tmp_path / "some.txt")).vocabulary == 20
    assert "not lossless" in capfd.readouterr().out


def test_the_end_of_a_file_ends_its_last_word_and_line(tmp_path):
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("two\n")
    assert b"".join(LineSample(opened(tmp_path / "a", tmp_path / "b"), 0).all()) == b"one\ntwo\n"


@pytest.mark.parametrize("size", [1_000, 30_000, 10_000_000])
def test_a_sample_is_bounded_spread_evenly_and_holds_lines_out(tmp_path, size):
    drawn = random.Random(0)
    lines = [f"{number} " + "x" * drawn.randrange(30) for number in range(5_000)]
    (tmp_path / "a").write_text("\n".join(lines) + "\n")
    sample = LineSample(opened(tmp_path / "a"), size)
    found = list(sample.lines())
    held_out = [line for number, line in enumerate(lines) if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    assert sample.held_out.decode().split("\n")[:-1] == held_out and sample.is_held_out
    assert not set(found) & set(held_out)
    taken = sum(len(line) + 1 for line in found)
    everything = sum(len(line) + 1 for line in lines) - len(sample.held_out)
    assert min(size, everything) - 100 < taken <= size
    numbers = [int(line.split()[0]) for line in found]
    assert numbers == sorted(numbers)
    halves = sum(number < 2_500 for number in numbers), sum(number >= 2_500 for number in numbers)
    assert abs(halves[0] - halves[1]) < 0.1 * len(numbers) + 5


def test_a_source_of_few_lines_is_measured_on_itself(tmp_path):
    (tmp_path / "a").write_text("one\n\ntwo\n")
    sample = LineSample(opened(tmp_path / "a"), 100)
    assert list(sample.lines()) == ["one", "two"]
    assert sample.held_out == b"one\n\ntwo\n" and not sample.is_held_out


def test_invalid_requests_are_rejected_and_leave_no_file(tmp_path, books, capfd):
    (tmp_path / "there.model").write_text("x")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_bytes(b"")
    out, there = tmp_path / "out.model", tmp_path / "there.model"
    pieces = ("sentencepiece", "--source", books, "--vocabulary")
    for words, problem in (
        ((*pieces, 400, "--output", there), "already exists"),
        ((*pieces, 400, "--output", there / "x.model"), "cannot be written"),
        ((*pieces, 400, "--output", tmp_path / "x.txt"), "end in .model"),
        (("words", "--source", books, "--output", out), "end in .txt"),
        ((*pieces, 261, "--output", out), "--vocabulary: 261 leaves no"),
        ((*pieces, 90_000, "--output", out), "--vocabulary: Vocabulary size too high (90000)"),
        (("sentencepiece", "--source", tmp_path / "latin.txt", "--vocabulary", 400, "--output", out), "not UTF-8"),
        (("words", "--source", tmp_path / "empty.txt", "--output", tmp_path / "x.txt"), "nothing in it"),
        ((*pieces, 400, "--character-coverage", 2, "--output", out), "--character-coverage: 2.0"),
    ):
        with pytest.raises(SystemExit) as stop:
            train(*words)
        reported = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        assert stop.value.code == 2 and len(reported) == 1 and problem in reported[0], (reported, problem)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["books", "empty.txt", "latin.txt", "there.model"]
    assert (tmp_path / "there.model").read_text() == "x"


def test_a_lossy_tokenizer_is_not_written(tmp_path, books, monkeypatch):
    from megasparse.data.tokenizers import sentence_piece

    encode = sentence_piece.SentencePieceTokenizer.encode
    monkeypatch.setattr(sentence_piece.SentencePieceTokenizer, "encode", lambda self, text: encode(self, text)[1:])
    with pytest.raises(SystemExit):
        train("sentencepiece", "--source", books, "--vocabulary", 400, "--output", tmp_path / "x.model")
    assert not (tmp_path / "x.model").exists()
