"""A few steps of training on synthetic data."""

import random
from pathlib import Path
from typing import Any

from megasparse.config.load import build_config
from megasparse.data.corpora.source import Source
from megasparse.data.prepare import prepare
from megasparse.errors import report_user_errors
from megasparse.runs.pretraining import pretrain
from tests.helpers.tiny import metrics


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
    """Train a model of 64 positions, 4 heads and a layer for each entry of the pattern into the folder `run`, and
    end as the command does. Returns the lines of its metrics.jsonl.
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
    built = build_config(config, [])
    report_user_errors(pretrain)(built)
    return metrics(built)
