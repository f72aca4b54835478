"""A few steps of training on synthetic data."""

import random
from pathlib import Path
from typing import Any

from megasparse.data.corpora.source import Source
from megasparse.data.prepare import prepare
from megasparse.errors import report_user_errors
from megasparse.runs.pretraining import pretrain
from megasparse.settings.load import build_config
from tests.helpers.tiny import metrics


def prepare_text(file: Path, output: Path, sample_bytes: int = 256, shard_bytes: int = 2048, **options: str) -> Path:
    """Shards of the corpus `text`, with its options. Returns their folder."""
    sizes: dict[str, Any] = {"sample_bytes": sample_bytes, "shard_bytes": shard_bytes}
    source = Source.open([str(file)], None, output / ".download")
    prepare("text", source, output, options={"split": "80,10,10", **options}, command="a test", **sizes)
    return output


def prepared(folder: Path, size: int = 4000) -> Path:
    """Shards of random bytes: of 4,000 bytes 3,200 to train on, 400 to validate and 400 to test."""
    (folder / "source.txt").write_bytes(random.Random(0).randbytes(size))
    return prepare_text(folder / "source.txt", folder / "data")


def trained(data: Path, run: Path, pattern: list[Any], steps: int, /, **sections: Any) -> list[dict[str, float]]:
    """Train a model of 64 positions, 4 heads and a layer for each entry of the pattern into the folder `run`, and
    end as the command does. Returns the lines of its metrics.jsonl."""
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
