"""Pairs of segments and translations: records of whole sentences, and one line for each bad source."""

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megasparse.cli.main import door
from megasparse.data.corpora.pairs import PairEncoder, Words, segments, sentences
from megasparse.data.index import Index
from megasparse.errors import ConfigError, DataError
from tests.data.folders import everything, prepared, source_of

BEGIN, SEPARATOR, PADDING = 258, 259, 257
LENGTH = 96


def book(number: int, count: int) -> list[str]:
    """Sentences that say which they are."""
    return [f"This is {'very ' * (i % 5)}sentence {i} of book {number}." for i in range(count)]


def prepared_pairs(files: dict[str, str], folder: Path, **options: Any) -> Index:
    for name, text in files.items():
        (folder / "source").mkdir(exist_ok=True)
        (folder / "source" / name).write_text(text, encoding="utf-8")
    settings = {"tokenizer": "bytes", "split": "100,0,0", "length": LENGTH, "documents": "empty-lines", "seed": 0}
    return prepared("pairs", source_of(folder / "source"), folder / "data", 1000, 4000, **settings | options)


def records(index: Index, split: str = "train") -> list[tuple[str, str]]:
    """Segments A and B of each record, after a check of what is around them."""
    found = []
    for row in everything(index, split).reshape(-1, LENGTH).tolist():
        first, second = (i for i, token in enumerate(row) if token == SEPARATOR)
        a, b = row[1:first], row[first + 1 : second]
        assert row[0] == BEGIN and a and b and row[second + 1 :] == [PADDING] * (LENGTH - second - 1)
        found.append((bytes(a).decode(), bytes(b).decode()))
    return found


@pytest.mark.parametrize("ends", ["empty-lines", "files", "doc-tags"])
def test_segments_follow_each_other_in_one_document(tmp_path, ends):
    books = [book(number, 40) for number in range(6)]
    if ends == "empty-lines":  # a sentence a line
        files = {"a.txt": "\n\n\n".join("\n".join(text) for text in books[:4]), "b.txt": "\r\n".join(books[4])}
        files |= {"c.txt": "\n".join(books[5]) + "\n"}
    elif ends == "files":  # paragraphs
        files = {
            f"{n}.txt": "\n\n".join(" ".join(text[i : i + 7]) for i in range(0, 40, 7)) for n, text in enumerate(books)
        }
    else:
        tags = '<doc id="{}" url="x" title="y">\n{}\n</doc>\n'
        files = {"wiki": "".join(tags.format(n, "\n\n".join(text)) for n, text in enumerate(books))}
    index = prepared_pairs(files, tmp_path, documents=ends)
    whole = {number: " " + " ".join(text) for number, text in enumerate(books)}
    found = records(index)
    covered = dict.fromkeys(whole, 0)
    for a, b in found:
        here = [n for n, text in whole.items() if a + b in text]
        assert here and all(segment.startswith(" This") and segment.endswith(".") for segment in (a, b))
        assert len(set(re.findall(r"of book (\d)", a + b))) <= 1
        covered[here[0]] += len(a) + len(b)
    assert all(covered[number] > 0.5 * len(text) for number, text in whole.items())
    assert index.file.settings["record"] == LENGTH and index.file.settings["sample_bytes"] == 1000 // 192 * 192
    assert index.file.splits["train"].raw_bytes and index.file.splits["train"].shards[0].width == 2


def test_documents_go_whole_to_the_split_in_which_they_begin(tmp_path):
    text = "\n\n".join("\n".join(book(number, 9)) for number in range(10))
    index = prepared_pairs({"a.txt": text}, tmp_path, split="45,30,25")
    names = {}
    for split in ("train", "validation", "test"):
        names[split] = {name for a, b in records(index, split) for name in re.findall(r"of book (\d)", a + b)}
    assert names == {"train": set("01234"), "validation": set("567"), "test": set("89")}


def test_only_seed_and_text_decide(tmp_path):
    encoder = PairEncoder("bytes", 4 * LENGTH, 0)
    documents = ["\n".join(book(number, 30)) + "\n\n" for number in range(3)]
    alone = [encoder.encode(document.encode()).tokens for document in documents]
    together = encoder.encode("".join(documents).encode())
    assert np.array_equal(np.concatenate(alone), together.tokens)
    assert together.raw_bytes == len("".join(documents)) and together.words == len(" ".join(documents).split())
    assert not np.array_equal(PairEncoder("bytes", 4 * LENGTH, 1).encode(documents[0].encode()).tokens, alone[0])
    # Of raw Philox words: another numpy gives the same.
    assert [Words(0, "x").below(1000) for _ in range(2)] == [Words(0, "x").below(1000)] * 2


def test_segments_are_of_whole_sentences_and_fit():
    rng = np.random.default_rng(0)
    for case in range(200):
        lengths = rng.integers(1, 14, size=rng.integers(1, 9)).tolist()
        tokens = [np.full(n, i) for i, n in enumerate(lengths)]
        numbered: list[int] = []
        for first, second in segments(tokens, 12, Words(0, str(case))):
            here = np.concatenate([first, second])
            numbers = np.unique(here).tolist()
            assert len(here) <= 12 and first[-1] + 1 == second[0]
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            assert len(here) == sum(lengths[n] for n in numbers)
            numbered += numbers
        assert numbered == sorted(set(numbered))
    assert not list(segments([], 12, Words(0, ""))) and not list(segments([np.zeros(3)], 12, Words(0, "")))
    five = [np.full(2, number) for number in range(5)]
    assert {len(next(iter(segments(five, 10, Words(0, str(i)))))[0]) for i in range(60)} == {2, 4, 6, 8}


def test_lengths_of_sentences_do_not_predict_the_order():
    """The two outermost of exchangeable sentences of a record are alike; filled up to the brim they are not."""
    rng = np.random.default_rng(1)
    outer = []
    for case in range(1500):
        tokens = [np.full(n, i) for i, n in enumerate(rng.geometric(0.05, size=40).tolist())]
        for first, second in segments(tokens, 125, Words(0, str(case))):
            outer.append(int((first == first[0]).sum()) - int((second == second[-1]).sum()))
    assert len(outer) > 5000
    assert abs(np.mean(outer)) < 4 * np.std(outer) / len(outer) ** 0.5


def test_sentences():
    line = 'He saw Mr. Smith, J. Doe etc. and "left." Then? "No!" said 5 of them. È un po\' . Élan vital… ok. 7 days.'
    assert sentences(line) == [
        'He saw Mr. Smith, J. Doe etc. and "left."', "Then?", '"No!" said 5 of them.', "È un po' .",
        "Élan vital… ok.", "7 days.",
    ]  # fmt: skip
    assert sentences(" ") == [] and sentences("no end") == ["no end"]


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="--length: 4 tokens"):
        PairEncoder("bytes", 4, 0)
    with pytest.raises(ConfigError, match="no special tokens"):
        PairEncoder("pixels", 64, 0)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.txt").write_bytes(b"ab \xff.")
    with pytest.raises(DataError, match=r"a\.txt: byte 3 is not UTF-8"):
        prepared_pairs({}, tmp_path)
    assert not (tmp_path / "data").exists()
    with pytest.raises(DataError, match="no document begins in the part that is for validation"):
        prepared_pairs({"a.txt": "One. Two."}, tmp_path, split="50,50,0")


main = door("prepare-data")

SEPARATOR, PADDING = 259, 257
S, T = 12, 9
GERMAN = ["eins", "zwei", "", "drei56789", "acht4567", "fünf", "sechs"]
ENGLISH = ["one", "two", "nothing", "three", "eight", "five 8901 345", "six"]
# the 4th target is too long by 1, the 6th source by more


def prepared_parallel(folder: Path, *more: object) -> Index:
    lengths = ["--source-length", str(S), "--target-length", str(T)]
    output = folder / "out"
    main(["parallel", "--output", str(output), *lengths, *map(str, more)])
    return Index.load(output)


def written(folder: Path, name: str, lines: list[str]) -> Path:
    path, text = folder / name, "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def translations(index: Index, split: str) -> list[tuple[str, str]]:
    found = []
    for row in everything(index, split).reshape(-1, S + T).tolist():
        sides = []
        for side in (row[:S], row[S:]):
            end = side.index(SEPARATOR)
            assert side[end + 1 :] == [PADDING] * (len(side) - end - 1)
            sides.append(bytes(side[:end]).decode())
        found.append((sides[0], sides[1]))
    return found


FITTING = [("one", "eins"), ("two", "zwei"), ("eight", "acht4567"), ("six", "sechs")]


def test_pairs_that_fit_are_taken_and_the_others_counted(tmp_path):
    english, german = written(tmp_path, "a.en", ENGLISH), written(tmp_path, "a.de.gz", GERMAN)
    index = prepared_parallel(tmp_path, "--source", english, "--target", german, "--split", "100,0,0")
    assert translations(index, "train") == FITTING
    assert index.file.source["lines"] == {"train": 7} and index.file.settings["record"] == S + T
    assert index.file.splits["train"].raw_bytes == sum(len(german.encode()) for _, german in FITTING)
    assert index.file.splits["train"].words == 4


def test_splits_of_their_own_files(tmp_path):
    files = {side: written(tmp_path, f"a.{side}", lines) for side, lines in (("en", ENGLISH), ("de", GERMAN))}
    files |= {"vs": written(tmp_path, "v.en", ["a", "b\r"]), "vt": written(tmp_path, "v.de", ["c", "d"])}
    (tmp_path / "v.de").write_text("c\nd")  # without an end
    more = ("--validation-target", files["vt"], "--validation-source", files["vs"])
    index = prepared_parallel(tmp_path, *more, "--source", files["en"], "--target", files["de"])
    assert translations(index, "train") == FITTING and translations(index, "validation") == [("a", "c"), ("b", "d")]
    assert list(index.file.splits) == ["train", "validation"]


def test_splits_by_percent_of_the_lines(tmp_path):
    english, german = written(tmp_path, "a.en", ENGLISH * 10), written(tmp_path, "a.de", GERMAN * 10)
    index = prepared_parallel(tmp_path, "--source", english, "--target", german, "--split", "80,10,10")
    assert index.file.source["lines"] == {"train": 56, "validation": 7, "test": 7}
    assert translations(index, "train") == FITTING * 8 and translations(index, "test") == FITTING


@pytest.mark.parametrize(
    ("target", "more", "reported"),
    [
        (GERMAN[:-1], [], "train has 7 lines of the source and 6 of the target"),
        ([], [], "2 files are given, and 1 are found that are not empty"),
        (GERMAN, ["--split", "50,25"], "--split"),
        (["x"] * 7, ["--split", "1,1,98"], "too few to give train any"),
        (["too long, all of them"] * 7, ["--split", "100,0,0"], "nothing of it is left for train"),
        (GERMAN, ["--validation-source", "SOURCE", "--validation-target", "SOURCE", "--split", "1,2,97"], "--split"),
        (GERMAN, ["--test-source", "SOURCE"], "test has 7 lines of the source and 0 of the target"),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path, capsys, target, more, reported):
    english, german = written(tmp_path, "a.en", ENGLISH), written(tmp_path, "a.de", target)
    more = [str(english) if word == "SOURCE" else word for word in more]
    with pytest.raises(SystemExit) as end:
        prepared_parallel(tmp_path, "--source", english, "--target", german, *more)
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and error.startswith("error: ") and reported in error
    assert not (tmp_path / "out" / "index.json").exists()
