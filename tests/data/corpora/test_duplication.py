import hashlib
from pathlib import Path
from typing import Any

import pytest

from megasparse.data.corpora import duplication
from megasparse.data.corpora.source import Source
from megasparse.data.index import Index
from megasparse.data.prepare import prepare
from megasparse.data.reader import EvaluationStream
from megasparse.errors import ConfigError


def draw(**changed: int) -> dict[str, list[bytes]]:
    """The sequences of each split."""
    settings: dict[str, Any] = {"sample_bytes": 20, "symbols": 7, "sequences": 1000, "seed": 0, **changed}
    return {name: list(pieces) for name, (pieces,) in duplication.splits(Source.open([], None, Path()), settings)}


def test_sequences_are_0w0w_of_all_symbols():
    splits = draw()
    assert [*splits] == ["train", "validation", "test"]
    assert [*map(len, splits.values())] == [1000, duplication.HELD_OUT, duplication.HELD_OUT]
    for sequences in splits.values():
        for sequence in sequences:
            assert len(sequence) == 20 and sequence[:10] == sequence[10:]
            assert sequence[0] == 0 and 0 not in sequence[1:10]
    symbols = [symbol for sequence in splits["train"] for symbol in sequence[1:10]]
    assert set(symbols) == set(range(1, 8))
    expected, deviation = 9000 / 7, (9000 / 7 * 6 / 7) ** 0.5
    assert all(abs(symbols.count(symbol) - expected) < 5 * deviation for symbol in range(1, 8))


def test_no_two_sequences_are_alike_in_any_split():
    splits = draw(sample_bytes=64, symbols=127)
    everything = [sequence for sequences in splits.values() for sequence in sequences]
    assert len(set(everything)) == len(everything) == 1000 + 2 * duplication.HELD_OUT


def test_sequences_are_a_function_of_the_seed():
    assert draw() == draw() and draw() != draw(seed=1)
    assert draw(sequences=3)["train"] == draw()["train"][:3]
    assert draw(sequences=3)["test"] == draw()["test"]
    digest = hashlib.sha256(b"".join(b"".join(sequences) for sequences in draw().values())).hexdigest()
    assert digest == "3a7619a12ef5eb5eceb5a424fdf9b82a5971773e686130540cb674761f385b8c"


def test_a_sample_of_the_shards_is_a_sequence(tmp_path):
    source = Source.open([], None, tmp_path / "data" / ".download")
    options = {"symbols": 7, "sequences": 50, "seed": 0}
    sizes = {"sample_bytes": 20, "shard_bytes": 200}
    assert prepare("duplication", source, tmp_path / "data", options=options, **sizes, command="a test")
    index, want = Index.load(tmp_path / "data"), draw(sequences=50)
    assert [shard.samples for shard in index.split("train").shards] == [10] * 5
    for name, sequences in want.items():
        stream = EvaluationStream(index, name)
        assert index.split(name).samples == len(sequences)
        assert bytes(stream.read(0, stream.tokens).tolist()) == b"".join(sequences)
    assert not prepare("duplication", source, tmp_path / "data", options=options, **sizes, command="a test")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sample_bytes": 21}, "--length: 21 is not twice .* such as 22"),
        ({"sample_bytes": 2}, "--length: 2 is not twice .* such as 4"),
        ({"sample_bytes": -3}, "--length: -3 is not twice .* such as 4"),
        ({"symbols": 256}, "--symbols: 256 symbols and the 0 do not fit a byte"),
        ({"symbols": 0}, "--symbols: 0"),
        ({"sequences": 0}, "--sequences: 0"),
        ({"seed": -1}, "--seed: -1 is negative"),
    ],
)
def test_settings_that_cannot_be_are_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        draw(**changed)


def test_extremes_are_possible():
    assert draw(sample_bytes=4, symbols=1, sequences=1)["train"] == [b"\x00\x01\x00\x01"]
    assert max(max(sequence) for sequence in draw(symbols=255)["train"]) == 255
