"""A launched run whose two ranks share every sequence, and which resumes on one: losses equal one process."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import pretrain
from megasparse.config.schema import Config
from megasparse.data.index import Index
from megasparse.errors import ConfigError
from megasparse.settings.checks import check_parallel
from megasparse.training.ranks import start_ranks
from tests.data.folders import batches
from tests.helpers.commands import run
from tests.helpers.run_ranks import ROOT
from tests.helpers.tiny import read_metrics, tiny_config
from tests.helpers.trained import prepared

SHARED = {"parallel": {"sequence": 2}}


def write_run(path: Path, data: Path, **sections: Any) -> Path:
    """A run of 6 steps into the folder `path`, evaluated every second one. Returns its configuration file."""
    size = {"max_length": 64, "layers": 2, "d_model": 32, "d_ff": 64, "heads": 4, "dropout": 0.1}
    attention = {"pattern": [{"local": 2, "lsh": 2}, "lsh"], "local": {"chunk": 8}, "lsh": {"chunk": 8}}
    config = {
        "model": size | {"attention": attention},
        "data": {"path": str(data), "sequence_length": 64},
        "training": {"steps": 6, "global_batch": 2, "micro_batch": 1},
        "evaluation": {"every": 2, "sample_tokens": 8},
        "logging": {"attention_quality_every": 2},
        **sections,
        "run": {"directory": str(path), "device": "cpu", "engine": "deepspeed" if "deepspeed" in sections else "torch"},
    }
    path.with_suffix(".json").write_text(json.dumps(config))
    return path.with_suffix(".json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    prepared(folder, 4010)  # the last held-out window is of 17 tokens
    return folder


@pytest.mark.slow
def test_a_launched_run_resumes_on_one_rank(folder):
    run(pretrain, "--config", write_run(folder / "alone", folder / "data"))
    shared, zero = folder / "shared", {"zero_optimization": {"stage": 2}}
    config = write_run(shared, folder / "data", deepspeed=zero, **SHARED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch = [ROOT / "launch/pretrain.py", "--config", config, "--stop-at", "4"]
    subprocess.run([*torchrun, *map(str, launch)], check=True)
    assert [line["step"] for line in read_metrics(shared)] == [1, 2, 3, 4]
    run(pretrain, "--config", write_run(shared, folder / "data"))
    expected, reported = read_metrics(folder / "alone"), read_metrics(shared)
    assert len(reported) == len(expected) == 6
    for one, other in zip(reported, expected, strict=True):
        for name in (
            "train/loss", "evaluation/loss", "evaluation/accuracy", "optimizer/gradient_norm", "quality/lsh/utility",
        ):  # fmt: skip
            assert (name in one) == (name in other)
            assert one.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-5), (name, one["step"])


def test_each_rank_reads_its_part_of_every_sequence(folder):
    parts = [(place, 3) for place in range(3)]
    readers = [batches([(Index.load(folder / "data"), 1.0)], part=part) for part in [(0, 1), *parts]]
    for whole, *others in itertools.islice(zip(*readers, strict=True), 4):
        for number, batch in enumerate(whole.micro_batches):
            joined = torch.cat([other.micro_batches[number].tokens for other in others], dim=1)
            assert torch.equal(joined, batch.tokens)
            assert all(torch.equal(other.micro_batches[number].samples, batch.samples) for other in others)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": {"engine": "torch"}}, 'parallel.sequence: 2 ranks per sequence, but run.engine = "torch"'),
        ({"data": {"sequence_length": 23}}, "data.sequence_length: 23 tokens cannot be divided evenly among"),
        ({"model": {"sentence_order": {"separator": 9}}}, "model.sentence_order: given"),
        ({"model": {"source": {"length": 7}}}, "model.source.length: 7 tokens cannot be divided evenly among"),
    ],
)
def test_models_that_cannot_share_sequences_are_rejected(tmp_path, changes, message):
    model = {"layers": 2, "heads": 6, "d_model": 18, "attention": {"pattern": [{"local": 2, "lsh": 4}]}}
    config = tiny_config(tmp_path, "deepspeed", model=model, data={"sequence_length": 24}, **SHARED)
    values = config.model_dump(mode="json")
    for section, keys in changes.items():
        values[section] |= keys
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_parallel(Config.model_validate_json(json.dumps(values)))


def test_a_number_of_ranks_that_is_not_a_multiple_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"parallel\.sequence: 3 ranks .* do not divide the world size 1"):
        start_ranks(tiny_config(tmp_path, "deepspeed").run, 3)
