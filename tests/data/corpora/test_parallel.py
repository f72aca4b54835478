"""Lines and their translations: what the records hold, what is left out, and what is refused."""

import gzip
from pathlib import Path

import pytest

from megasparse.cli.main import door
from megasparse.data.index import Index
from tests.data.folders import everything

main = door("prepare-data")

SEPARATOR, PADDING = 259, 257
S, T = 12, 9
GERMAN = ["eins", "zwei", "", "drei56789", "acht4567", "fünf", "sechs"]
ENGLISH = ["one", "two", "nothing", "three", "eight", "five 8901 345", "six"]
# the 4th target is too long by 1, the 6th source by more


def prepared(folder: Path, *more: object) -> Index:
    lengths = ["--source-length", str(S), "--target-length", str(T)]
    output = folder / "out"
    main(["parallel", "--output", str(output), *lengths, *map(str, more)])
    return Index.load(output)


def written(folder: Path, name: str, lines: list[str]) -> Path:
    path, text = folder / name, "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return path


def pairs(index: Index, split: str) -> list[tuple[str, str]]:
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
    index = prepared(tmp_path, "--source", english, "--target", german, "--split", "100,0,0")
    assert pairs(index, "train") == FITTING
    assert index.file.source["lines"] == {"train": 7} and index.file.settings["record"] == S + T
    assert index.file.splits["train"].raw_bytes == sum(len(german.encode()) for _, german in FITTING)
    assert index.file.splits["train"].words == 4


def test_splits_of_their_own_files(tmp_path):
    files = {side: written(tmp_path, f"a.{side}", lines) for side, lines in (("en", ENGLISH), ("de", GERMAN))}
    files |= {"vs": written(tmp_path, "v.en", ["a", "b\r"]), "vt": written(tmp_path, "v.de", ["c", "d"])}
    (tmp_path / "v.de").write_text("c\nd")  # without an end
    more = ("--validation-target", files["vt"], "--validation-source", files["vs"])
    index = prepared(tmp_path, *more, "--source", files["en"], "--target", files["de"])
    assert pairs(index, "train") == FITTING and pairs(index, "validation") == [("a", "c"), ("b", "d")]
    assert list(index.file.splits) == ["train", "validation"]


def test_splits_by_percent_of_the_lines(tmp_path):
    english, german = written(tmp_path, "a.en", ENGLISH * 10), written(tmp_path, "a.de", GERMAN * 10)
    index = prepared(tmp_path, "--source", english, "--target", german, "--split", "80,10,10")
    assert index.file.source["lines"] == {"train": 56, "validation": 7, "test": 7}
    assert pairs(index, "train") == FITTING * 8 and pairs(index, "test") == FITTING


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
        prepared(tmp_path, "--source", english, "--target", german, *more)
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and error.startswith("error: ") and reported in error
    assert not (tmp_path / "out" / "index.json").exists()
