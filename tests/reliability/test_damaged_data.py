"""A whole run over damaged data: what it says of it, and that it goes on exactly."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trained import prepared, trained


@pytest.fixture
def damaged(tmp_path):
    """A bit of one of the thirteen training samples of 256 bytes is flipped."""
    folder = prepared(tmp_path)
    path = sorted(folder.glob("train-*.tar"))[0]
    whole = bytearray(path.read_bytes())
    whole[512 + 100] ^= 1  # of the first sample's text: a header of 512 bytes is before it
    path.write_bytes(whole)
    return folder


def run(data: Path, folder: Path, steps: int, limit: float) -> list[dict[str, Any]]:
    section = {"path": str(data), "sequence_length": 64, "max_damaged": limit}
    training = {"steps": 40, "global_batch": 2, "micro_batch": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["launcher"])
        return trained(data, folder, ["local"], steps, data=section, training=training, checkpoint={"every": steps})


def test_a_tolerant_run_counts_what_it_passes_over_and_a_strict_one_stops(damaged, tmp_path, capsys):
    lines = run(damaged, tmp_path / "tolerant", 40, 0.1)
    said = capsys.readouterr().err
    assert "train-000000.tar" in said and "member 0" in said and "crc32" in said
    assert len(lines) == 40 and lines[-1]["data/skipped_sequences"] >= 4, "one sample is four sequences of an epoch"
    reasons = {name: line[name] for line in lines for name in line if name.startswith("data/damaged_samples/")}
    assert reasons == {"data/damaged_samples/its crc32 differs": 1}
    events = (tmp_path / "tolerant" / "events.jsonl").read_text().splitlines()
    assert any("others took their place" in json.loads(event)["message"] for event in events)

    for limit in (0.0, 0.01):  # strict; and one in thirteen is more than one in a hundred
        with pytest.raises(SystemExit) as ended:
            run(damaged, tmp_path / f"limit-{limit}", 40, limit)
        assert ended.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "train-000000.tar" in errors[0] and "member 0 at byte 0" in errors[0] and "data.max_damaged" in errors[1]
