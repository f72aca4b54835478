"""The corpora whose sequences are drawn: duplication and Recall."""

import hashlib
from typing import Any

import pytest

from megasparse.data.corpora import CORPORA
from megasparse.data.corpora.drawn import Duplication, Recall
from megasparse.errors import ConfigError
from tests.data.folders import source_of
from tests.helpers.cases import together
from tests.helpers.commands import refusal

SMALL: dict[str, dict[str, int]] = {
    "duplication": {"sample_bytes": 20, "symbols": 7, "sequences": 1000, "seed": 0},
    "recall": {"sample_bytes": 3000, "pairs": 100, "sequences": 40, "seed": 0},
}
DIGESTS = {
    "duplication": "3a7619a12ef5eb5eceb5a424fdf9b82a5971773e686130540cb674761f385b8c",
    "recall": "61ec81f265bbfd1ebb225d030924f0c2cee3a0237e88734961246e4c9dbaca0e",
}


def draw(corpus: str, **changed: int) -> dict[str, list[bytes]]:
    """The sequences of each split."""
    settings: dict[str, Any] = {**SMALL[corpus], **changed}
    return {name: list(pieces) for name, (pieces,) in CORPORA[corpus].splits(source_of(), settings)}


@pytest.mark.parametrize("corpus", SMALL)
def test_sequences_are_a_function_of_the_seed(corpus):
    drawn = draw(corpus)
    assert drawn == draw(corpus) and drawn != draw(corpus, seed=1)
    assert draw(corpus, sequences=3)["train"] == drawn["train"][:3]
    assert draw(corpus, sequences=3)["test"] == drawn["test"]
    assert hashlib.sha256(b"".join(b"".join(sequences) for sequences in drawn.values())).hexdigest() == DIGESTS[corpus]


@together(
    ("corpus", "changed", "message"),
    [
        ("duplication", {"sample_bytes": 21}, "--length: 21 is not twice .* such as 22"),
        ("duplication", {"symbols": 256}, "--symbols: 256 symbols and the 0 do not fit a byte"),
        ("duplication", {"sequences": 0}, "--sequences: 0"),
        ("duplication", {"seed": -1}, "--seed: -1 is negative"),
        ("recall", {"pairs": 0}, "--pairs"),
        ("recall", {"sample_bytes": 200}, "--length"),
    ],
)
def test_impossible_settings_are_rejected(corpus, changed, message):
    refusal(lambda: draw(corpus, **changed), ConfigError, message)


def test_sequences_are_0w0w_of_all_symbols():
    splits = draw("duplication")
    assert [*splits] == ["train", "validation", "test"]
    assert [*map(len, splits.values())] == [1000, Duplication.HELD_OUT, Duplication.HELD_OUT]
    for sequences in splits.values():
        for sequence in sequences:
            assert len(sequence) == 20 and sequence[:10] == sequence[10:]
            assert sequence[0] == 0 and 0 not in sequence[1:10]
    symbols = [symbol for sequence in splits["train"] for symbol in sequence[1:10]]
    assert set(symbols) == set(range(1, 8))
    expected, deviation = 9000 / 7, (9000 / 7 * 6 / 7) ** 0.5
    assert all(abs(symbols.count(symbol) - expected) < 5 * deviation for symbol in range(1, 8))


def test_a_key_has_one_value_in_a_sequence_and_recurs_far_away():
    splits = draw("recall")
    assert [*splits] == ["train", "validation", "test"]
    assert [*map(len, splits.values())] == [40, Recall.HELD_OUT, Recall.HELD_OUT]
    distances = []
    for sequence in splits["train"]:
        values: dict[bytes, int] = {}
        last: dict[bytes, int] = {}
        for place in range(0, 3000, 3):
            key, value = sequence[place : place + 2], sequence[place + 2]
            assert max(key) < Recall.KEYS <= value < Recall.KEYS + Recall.VALUES
            assert values.setdefault(key, value) == value
            if key in last:
                distances.append(place - last[key])
            last[key] = place
        assert 95 < len(values) <= 100
    assert abs(sum(distances) / len(distances) / 300 - 1) < 0.15
