"""A few steps of training on made-up data, through the commands that a user types."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from launch import pretrain
from megasparse.data.corpora.source import Source
from megasparse.data.prepare import prepare


def prepared(folder: Path, size: int = 4000) -> Path:
    """Shards of random bytes: of 4,000 bytes 3,200 to train on, 400 to validate and 400 to test."""
    (folder / "source.txt").write_bytes(random.Random(0).randbytes(size))
    source = Source.open([str(folder / "source.txt")], None, folder / "download")
    options = {"split": "80,10,10"}
    prepare("text", source, folder / "data", options=options, sample_bytes=256, shard_bytes=2048, command="a test")
    return folder / "data"


def trained(
    data: Path, run: Path, pattern: list[Any], steps: int, /, **sections: dict[str, Any]
) -> list[dict[str, float]]:
    """Trains a model of 64 positions, 4 heads and a layer for each entry of the pattern into the folder `run`. Returns
    the lines of its metrics.jsonl.
    """
    attention = {"pattern": pattern, "local": {"chunk": 8}, "lsh": {"chunk": 8}}
    size = {"max_length": 64, "layers": len(pattern), "d_model": 32, "d_ff": 64, "heads": 4}
    config = {
        "run": {"directory": str(run), "engine": "torch", "device": "cpu"},
        "model": {**size, "dropout": 0.1, "attention": attention},
        "data": {"path": str(data), "sequence_length": 64},
        "training": {"steps": steps, "global_batch": 2, "micro_batch": 2},
        **sections,
    }
    path = run.with_suffix(".json")
    path.write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["launcher", "--config", str(path)])
        pretrain.main()
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
