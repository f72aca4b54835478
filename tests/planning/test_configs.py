"""Every file of configs/ loads, and trains one step at a small size with its own layers, positions and precision."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megasparse.config.schema import Config
from megasparse.model.build import empty_model
from megasparse.planning.dry_run import dry_run
from megasparse.settings.load import build_config, load_config

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))
LENGTH, CHUNK, HEAD_DIM, VOCABULARY = 64, 8, 4, 288


def reduced(config: Config) -> Config:
    model = config.model
    width = HEAD_DIM * model.heads
    values: dict[str, Any] = config.model_dump(mode="json")
    pattern = [entry for i, entry in enumerate(model.attention.pattern) if entry not in model.attention.pattern[:i]]
    for section in values["model"]["attention"].values():
        if isinstance(section, dict) and "chunk" in section:
            section["chunk"] = CHUNK
    values["model"]["attention"]["pattern"] = pattern
    values["model"]["attention"]["lsh"] |= {"buckets": None, "evaluation_buckets": None}
    values["model"]["attention"]["yoso"] |= {"hashes": 4, "code_bits": 4}
    values["model"] |= {"max_length": LENGTH, "layers": len(pattern), "d_model": width, "head_dim": HEAD_DIM, "d_ff": 8}
    values["model"]["score_from"] = min(model.score_from, LENGTH // 2)
    if shape := model.positions.axial_shape:
        rest = len(shape) - 1
        small = [2] * rest + [LENGTH // 2**rest]
        values["model"]["positions"] |= {"axial_shape": small, "axial_dims": [4] * rest + [width - 4 * rest]}
    values["model"]["vocabulary"] = min(model.vocabulary, VOCABULARY)
    cutoffs = len(model.adaptive_cutoffs)
    values["model"]["adaptive_cutoffs"] = list(range(VOCABULARY - 32 * cutoffs, VOCABULARY, 32))
    before = LENGTH if model.source else 0
    if model.source:
        values["model"]["source"] |= {"length": before}
    values["data"]["sequence_length"] = before + LENGTH
    values["evaluation"] |= {"sample_tokens": min(config.evaluation.sample_tokens, LENGTH), "sequence_length": None}
    values["training"] |= {"global_batch": 2, "micro_batch": 2}
    values["run"]["device"] = "cpu"
    return build_config(values)


# One for each kind of model, positions, objective and softmax; the others in `make test-all`
QUICK = {"quickstart", "reformer_64k", "llama_8b_1m", "yoso_bert", "lha_wikitext103", "small_translation"}


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[] if p.stem in QUICK else pytest.mark.slow) for p in FILES]
)
def test_a_configuration_loads_and_trains_a_step_at_a_small_size(path):
    config = reduced(load_config(path))
    result = dry_run(config)
    assert abs(result.loss - math.log(config.model.vocabulary)) < 2.5  # random weights know nothing
    assert result.flops_per_step > 0


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("lha_wikitext103", 149e6, 154e6), ("yoso_bert", 109e6, 111e6), ("yoso_bert_4096", 112e6, 114e6)],
)
def test_sizes_equal_the_papers(name, least, most):
    """LHA: 153M, of which 110M embed 267,735 words. BERT-base: 110M, and 3M for 4,096 positions."""
    config = load_config(next(path for path in FILES if path.stem == name)).model
    with torch.device("meta"):
        model = empty_model(config)
    assert least < sum(p.numel() for p in model.parameters()) < most
