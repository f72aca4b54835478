import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megasparse.data.corpora import recall
from megasparse.data.corpora.source import Source
from megasparse.errors import ConfigError


def draw(**changed: int) -> dict[str, list[bytes]]:
    """The sequences of each split."""
    settings: dict[str, Any] = {"sample_bytes": 3000, "pairs": 100, "sequences": 40, "seed": 0, **changed}
    return {name: list(pieces) for name, (pieces,) in recall.splits(Source.open([], None, Path()), settings)}


def test_a_key_has_one_value_in_a_sequence_and_comes_back_far_away():
    splits = draw()
    assert [*splits] == ["train", "validation", "test"]
    assert [*map(len, splits.values())] == [40, recall.HELD_OUT, recall.HELD_OUT]
    distances = []
    for sequence in splits["train"]:
        values: dict[bytes, int] = {}
        last: dict[bytes, int] = {}
        for place in range(0, 3000, 3):
            key, value = sequence[place : place + 2], sequence[place + 2]
            assert max(key) < recall.KEYS <= value < recall.KEYS + recall.VALUES
            assert values.setdefault(key, value) == value
            if key in last:
                distances.append(place - last[key])
            last[key] = place
        assert 95 < len(values) <= 100
    assert abs(sum(distances) / len(distances) / 300 - 1) < 0.15


def test_keys_and_values_are_drawn_evenly_and_anew():
    first = [sequence[:3] for sequence in draw(sequences=4000)["train"]]
    counts = Counter(part[2] for part in first)
    assert len(counts) == recall.VALUES and max(counts.values()) < 4000 / recall.VALUES * 2
    assert len({part[:2] for part in first}) > 3500


def test_sequences_are_a_function_of_the_seed():
    assert draw() == draw() and draw() != draw(seed=1)
    assert draw(sequences=3)["train"] == draw()["train"][:3]
    digest = hashlib.sha256(b"".join(b"".join(sequences) for sequences in draw().values())).hexdigest()
    assert digest == "61ec81f265bbfd1ebb225d030924f0c2cee3a0237e88734961246e4c9dbaca0e"


@pytest.mark.parametrize(
    "changed,key",
    [
        ({"pairs": 0}, "--pairs"),
        ({"sample_bytes": 200}, "--length"),
        ({"sequences": 0}, "--sequences"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_impossible_settings_are_refused(changed, key):
    with pytest.raises(ConfigError, match=key):
        draw(**changed)
