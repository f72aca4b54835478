"""A corpus defined only in this file, added as CONTRIBUTING.md describes: the command finds it."""

from itertools import pairwise

import pytest

from megasparse.cli.main import door
from megasparse.data.corpora import CORPORA
from megasparse.data.corpora.drawn import DrawnCorpus
from megasparse.data.index import Index
from megasparse.errors import ConfigError
from tests.data.folders import everything
from tests.helpers.commands import refused

main = door("prepare-data")


class Counting(DrawnCorpus):
    """Sequences that count upwards."""

    EXAMPLE = "--output data/counting"
    LENGTH, SEQUENCES, HELD_OUT = 64, 8, 2

    def add_arguments(self, parser):
        super().add_arguments(parser)
        parser.add_argument("--step", type=int, default=1)

    def draw(self, settings):
        length, step = settings["sample_bytes"], settings["step"]
        if step < 1:
            raise ConfigError("--step", f"{step} goes nowhere", "Give 1 or more")

        def sequence(words):
            first = int(words.random_raw() % 256)
            return bytes((first + step * i) % 256 for i in range(length))

        return sequence


@pytest.fixture(autouse=True)
def counting(monkeypatch):
    """The line of CORPORA."""
    monkeypatch.setitem(CORPORA, "counting", Counting())


def test_its_help_has_its_words_and_its_example(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["counting", "--help"])
    said = capsys.readouterr().out
    assert "Sequences that count upwards." in said and "megasparse prepare-data counting --output data/counting" in said


def test_it_is_prepared_and_read_back(tmp_path, capsys):
    main(["counting", "--step", "3", "--output", str(tmp_path / "data"), "--workers", "1"])
    assert "train: 8 records, 512 tokens" in capsys.readouterr().out
    index = Index.load(tmp_path / "data")
    tokens = everything(index, "validation")[:64].tolist()
    assert index.record == 64 and [(b - a) % 256 for a, b in pairwise(tokens)] == [3] * 63


def test_its_mistakes_are_one_line(tmp_path, capsys):
    error = refused(capsys, main, "counting", "--step", 0, "--output", tmp_path / "data")
    assert error == "error: --step: 0 goes nowhere. Give 1 or more\n"
    assert not (tmp_path / "data").exists()
