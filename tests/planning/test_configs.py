"""Every file of configs/ loads, and trains one step at a small size with its own layers, positions and precision."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megasparse.config.attention import AttentionConfig
from megasparse.config.schema import Config, ModelConfig
from megasparse.model.build import empty_model
from megasparse.planning.dry_run import dry_run
from megasparse.settings.load import build_config, load_config

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))
LENGTH, CHUNK, HEAD_DIM, VOCABULARY = 64, 8, 4, 420


def reduced(config: Config, length: int = LENGTH) -> Config:
    values: dict[str, Any] = config.model_dump(mode="json")
    values["model"] = reduced_model(config.model, length)
    before = values["model"]["source"]["length"] if config.model.source else 0
    values["data"]["sequence_length"] = before + length
    values["evaluation"] |= {"sample_tokens": min(config.evaluation.sample_tokens, length), "sequence_length": None}
    values["training"] |= {"global_batch": 2, "micro_batch": 2}
    values["run"]["device"] = "cpu"
    return build_config(values)


def reduced_model(model: ModelConfig, length: int = LENGTH) -> dict[str, Any]:
    """The values of a model with each entry of its pattern once, heads of 4, and few tokens."""
    values: dict[str, Any] = model.model_dump(mode="json")
    attention = reduced_attention(model.attention)
    width = HEAD_DIM * model.heads
    values |= {"attention": attention, "layers": len(attention["pattern"]), "max_length": length, "d_model": width}
    values |= {"head_dim": HEAD_DIM, "d_ff": 8, "score_from": min(model.score_from, length // 2)}
    if shape := model.positions.axial_shape:
        rest = len(shape) - 1
        small = [2] * rest + [length // 2**rest]
        values["positions"] |= {"axial_shape": small, "axial_dims": [4] * rest + [width - 4 * rest]}
    values["vocabulary"] = min(model.vocabulary, VOCABULARY)
    if model.masking:
        values["masking"]["token"] = min(model.masking.token, VOCABULARY - 1)
    values["adaptive_cutoffs"] = list(range(VOCABULARY - 32 * len(model.adaptive_cutoffs), VOCABULARY, 32))
    if model.ngrams:
        values["ngrams"]["rows"] = 64
    if model.source:
        of_source = reduced_attention(model.source.attention)
        values["source"] |= {"length": length, "attention": of_source}
        values["source"]["layers"] = len(of_source["pattern"])
    return values


def reduced_attention(attention: AttentionConfig) -> dict[str, Any]:
    values: dict[str, Any] = attention.model_dump(mode="json")
    for section in values.values():
        if isinstance(section, dict) and "chunk" in section:
            section["chunk"] = CHUNK
    values["lsh"] |= {"buckets": None, "evaluation_buckets": None}
    values["yoso"] |= {"hashes": 4, "code_bits": 4}
    pattern = attention.pattern
    return values | {"pattern": [entry for i, entry in enumerate(pattern) if entry not in pattern[:i]]}


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
