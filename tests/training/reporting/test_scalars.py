"""Every scalar that a run writes is in a table of docs/reference/scalars.md; newer ones have the right values."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megasparse.config.attention import MECHANISMS
from megasparse.config.schema import Config
from megasparse.model.build import build_model
from megasparse.model.stack import average_over_layers
from megasparse.ops.random import RngContext
from megasparse.training.loop import train
from megasparse.training.ranks import Ranks
from megasparse.training.reporting.memory import bytes_of, memory_scalars
from tests.helpers.tiny import TinyModel, make_rng, metrics, tiny_config, tiny_run
from tests.helpers.trained import prepared, trained

DOCUMENT = Path(__file__).parents[3] / "docs/reference/scalars.md"
WORDS = {"REASON": "[A-Za-z0-9_ ]+", "KIND": f"({'|'.join(MECHANISMS)})", "METRIC": "[a-z0-9_]+", "_N": r"_\d+"}
"""Values of the placeholders in the documentation."""


def documented() -> re.Pattern[str]:
    """Every name in the tables."""
    tables: dict[str, list[str]] = {}
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## "):
            tables[line[3:]] = []
        elif row := re.match(r"\| ((`[^`]+`(, )?)+) \|", line):
            [*tables.values()][-1].extend(re.findall(r"`([^`]+)`", row[1]))
    scalars, *others = tables.values()
    within = dict(zip(("model", "quality"), others, strict=True))
    names = [name for name in scalars if "..." not in name]
    for name in set(scalars) - set(names):
        parts = within["quality"] if name.startswith("quality") else within["model"]
        names += [name.replace("KIND/...", part if "/" in part else f"KIND/{part}") for part in parts]
    patterns = [re.escape(name) for name in names]
    for word, meaning in WORDS.items():
        patterns = [pattern.replace(word, meaning) for pattern in patterns]
    return re.compile("|".join(patterns))


def missing(lines: list[dict[str, float]]) -> set[str]:
    table = documented()
    return {name for line in lines for name in line if name != "step" and not table.fullmatch(name)}


def test_the_table_tells_names_and_no_others():
    table = documented()
    for name in ("train/loss", "model/encoder/attention/lha/kl_keys/layer_11", "quality/lsh/bucket_ratio"):
        assert table.fullmatch(name)
    for name in ("train/losses", "model/attention/lha/kl_keys/layer_", "quality/lsh/maps2", "config.json", "a/b"):
        assert not table.fullmatch(name)


def test_every_scalar_of_pretraining_is_in_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr("megasparse.training.reporting.memory._peak", lambda device: 0.1)
    data = prepared(tmp_path)
    attention = {
        "pattern": [{"lha": 1, "yoso": 1, "smart_bird": 1, "lsh": 1}, {"lha": 2, "routing": 1, "yoso": 1}],
        "lha": {"chunk": 16},
        "lsh": {"chunk": 8},
        "smart_bird": {"keys": 4, "sketch_dim": 4},
        "routing": {"chunk": 16},
    }
    size = {"max_length": 64, "layers": 2, "d_model": 32, "d_ff": 48, "heads": 4, "attention": attention}
    lines = trained(
        data,
        tmp_path / "run",
        [],
        12,
        model=size,
        data={"path": str(data), "sequence_length": 64},
        evaluation={"every": 6, "sequences": 2},
        logging={"attention_quality_every": 6, "every": 4},
    )
    assert not missing(lines)
    of_layers = {"model/attention/lha/kl_keys/layer_0", "model/attention/lha/kl_keys/layer_1"}
    assert [of_layers <= line.keys() for line in lines] == [line["step"] % 4 == 0 for line in lines]
    last = lines[-1]
    mean = sum(last[name] for name in of_layers) / 2
    assert last["model/attention/lha/kl_keys"] == pytest.approx(mean, rel=1e-6)
    assert not any("smart_bird" in name and "layer" in name for name in last), "one layer is its own mean"
    assert last["speed/hardware_flops_utilisation"] > last["speed/model_flops_utilisation"]


def test_every_scalar_of_an_encoder_decoder_is_in_the_table(tmp_path):
    lha = {"pattern": ["lha"], "lha": {"chunk": 16}}
    size = {"max_length": 14, "layers": 2, "d_model": 32, "d_ff": 48, "heads": 4, "attention": lha}
    source = {"length": 10, "attention": lha}
    model = {"kind": "encoder_decoder", "positions": {"kind": "rotary"}, "source": source, **size}
    config = tiny_config(tmp_path, model=model, training={"steps": 2})
    lines = run(build_model(config.model, 0), config, Ranks())
    assert not missing(lines)
    assert "model/encoder/attention/lha/kl_queries/layer_1" in lines[-1]


def run(model: Any, config: Config, ranks: Ranks) -> list[dict[str, float]]:
    """Train on dummy sequences of 24 tokens. Returns the lines of metrics.jsonl."""
    draws = make_rng if isinstance(model, TinyModel) else partial(RngContext, 0, training=True)
    with tiny_run(config, model, ranks, draws=draws) as training:
        train(training)
    return metrics(config) if ranks.rank == 0 else []


def test_memory_counts_shared_storage_once():
    whole = torch.zeros(100)
    views = [whole[:10], whole[50:], torch.zeros(7, dtype=torch.bfloat16), torch.zeros(5, device="meta")]
    assert bytes_of(views, torch.device("cpu")) == (414, 20)
    held = {"weights": (400, 0), "gradients": (100, 0), "optimizer": (0, 0)}
    scalars = memory_scalars(torch.device("cpu"), held)
    assert scalars["memory/other_bytes"] == scalars["memory/peak_bytes"] - 500
    assert 1e7 < scalars["memory/resident_bytes"] <= scalars["memory/peak_bytes"] * 1.05


def test_on_a_gpu_memory_has_more_kinds_and_they_are_in_the_table(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 600)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 800)
    held = {"weights": (100, 0), "gradients": (50, 10), "optimizer": (0, 300)}
    scalars = memory_scalars(torch.device("cuda", 0), held)
    assert not missing([scalars])
    assert scalars["memory/other_bytes"] == 450 and scalars["memory/offloaded_bytes"] == 310
    assert scalars["memory/reserved_bytes"] == 800 and scalars["memory/fragmentation"] == 0.25


def test_layers_are_vectors_with_nan_for_those_without():
    one, two, three = (torch.tensor(x) for x in (1.0, 2.0, 3.0))
    result = average_over_layers({"a": {0: one, 3: three}, "b": {1: two}}, 4)
    assert {name: value.tolist() for name, value in result.items() if value.dim() == 0} == {"a": 2.0, "b": 2.0}
    assert result.keys() == {"a", "b", "a/layers"}
    assert torch.equal(result["a/layers"].isnan(), torch.tensor([False, True, True, False]))
    assert result["a/layers"][[0, 3]].tolist() == [1.0, 3.0]
