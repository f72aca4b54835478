"""FLOPs against counts made by hand, and against brute force over every query and key."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megasparse.attention import lha
from megasparse.config.schema import ModelConfig
from megasparse.model.build import build_model
from megasparse.ops.kernels import recorded
from megasparse.ops.random import RngContext
from megasparse.planning import flops
from megasparse.planning.flops import hardware_flops_by_part, model_flops_per_token
from megasparse.planning.passes import META, ConfiguredPass, as_on_a_gpu, dummy_records
from megasparse.settings.load import build_config
from megasparse.training.ranks import Ranks
from tests.helpers.cases import together

BASE = {"max_length": 64, "layers": 1, "d_model": 32, "d_ff": 48, "heads": 4, "vocabulary": 256}


def model(**changed) -> ModelConfig:
    return build_config({"model": {**BASE, **changed}, "data": {"sequence_length": BASE["max_length"]}}).model


def attention(pattern: str | dict, **kinds) -> dict:
    return {"pattern": [pattern], **kinds}


def encoder(pattern: str, **kinds) -> float:
    """FLOPs of an encoder with 256 outputs, as the decoders here have, without the contribution of its mask token."""
    made = model(kind="encoder", vocabulary=257, attention=attention(pattern, **kinds))
    return model_flops_per_token(made, 64) - 6 * 64


FEED_FORWARD = 6 * 2 * 32 * 48
HEAD = 6 * 64 * 256  # two streams side by side


def rest(projections: int) -> int:
    return FEED_FORWARD + HEAD + 6 * projections * 32 * 32


def test_ngram_tables_cost_their_projection_and_are_parameters():
    tables = None, {"rows": 9}, {"lengths": [2, 3], "rows": 9, "width": 8}
    plain, summed, projected = (model(ngrams=x, attention=attention("full")) for x in tables)
    assert model_flops_per_token(summed, 64) == model_flops_per_token(plain, 64)
    assert model_flops_per_token(projected, 64) - model_flops_per_token(plain, 64) == 6 * 2 * 8 * 32
    counts = [sum(p.numel() for p in build_model(x, 0).parameters()) for x in (plain, summed, projected)]
    assert counts[1] - counts[0] == 4 * 9 * 32 and counts[2] - counts[0] == 2 * 9 * 8 + 2 * 8 * 32


@together("chunk", [1, 7, 16, 64, 100])
@together("length", [1, 15, 16, 17, 64])
def test_local_attention_by_counting_pairs(chunk, length):
    pairs = sum(1 for q in range(length) for k in range(q + 1) if k // chunk >= q // chunk - 1)
    config = model(attention=attention("local", local={"chunk": chunk}))
    assert model_flops_per_token(config, length) == pytest.approx(rest(4) + 12 * 32 * pairs / length)
    pairs = sum(1 for q in range(length) for k in range(length) if abs(k // chunk - q // chunk) <= 1)
    both = config.model_copy(update={"kind": "encoder"})
    assert model_flops_per_token(both, length) == pytest.approx(rest(4) + 12 * 32 * pairs / length)


BIRD = {"keys": 5, "sketch_dim": 4}
LSH_CODES = 4 * 8 * 8 * 2
HADAMARD = 3 * 3  # operations a sign bit of 8 numbers


def lha_sample(queries, keys, known):
    """Codes of all tokens, thresholds, learning and members by both networks of 96 weights; scores, and 4 buckets."""
    hashed = 2 * 2 * 96
    return hashed + hashed * (known + (queries + keys) * (3 + 1)) / 64 + queries * keys * (2 * 16 + 4 * 4) / 64


@together(
    ("kind", "section", "flops"),
    [  # of 4 heads of 8 numbers at 64 tokens; beside the projections
        ("full", {}, 12 * 32 * 32.5),
        ("full", {"shared_qk": True}, 12 * 32 * 32.5),
        # Each round: a band of 8 keys, and in 4 heads of 8 coordinates products with 8 vectors, for 16 buckets.
        ("lsh", {"chunk": 8, "rounds": 3}, 3 * (12 * 32 * 8 + LSH_CODES)),
        ("lsh", {"chunk": 8, "window": "chunk", "rounds": 1}, 12 * 32 * (4.5 + 8 * 56 / 64) + LSH_CODES),
        ("local", {"chunk": 100, "relative": True}, 18 * 32 * 32.5),
        # Hash networks of 8·8 and 8·4 weights for each side, and the scores of 20 queries.
        ("lha", {"chunk": 16, "joint": False, "utility": "collisions"}, 12 * 32 * 16 + 4 * (2 * 6 * 96 + 20 * 2 * 8)),
        # 20 queries and 24 keys learn, drawn by what they get from all others.
        ("lha", {"chunk": 16}, 12 * 32 * 16 + 4 * (lha_sample(20, 24, 24) + 20 * 2 * 8)),
        ("lha", {"chunk": 16, "hash": "random"}, 12 * 32 * 16 + 4 * 2 * 2 * 8 * 4),
        # 4 buckets of ⌊16·√2⌋ = 22 tokens, each of which sees 11.5 of them.
        ("lha", {"chunk": 16, "hash": "random", "window": "top_k"}, 12 * 32 * 22 * 4 * 11.5 / 64 + 4 * 2 * 2 * 8 * 4),
        ("yoso", {"expectation": True}, 12 * 32 * 32.5),
        ("yoso", {"hashes": 3, "code_bits": 1}, 4 * 3 * (2 * HADAMARD + 32 + 8 * 64)),
        ("yoso", {"hashes": 3, "code_bits": 5}, 4 * 3 * (2 * 5 * HADAMARD + 32 + 6 * 8 * 32.5 / 32)),
        ("smart_bird", BIRD, 12 * 32 * 5 + 4 * (14 * 32.5 + 3 * 4 * 32 + 6 * 256)),
        ("routing", {"chunk": 16}, 12 * 32 * 16 + 4 * 2 * 8 * 4),
        ("random", {"chunk": 16}, 12 * 32 * 16),
        ("sparse_transformer", {"stride": 8}, 12 * 32 * (8 + 32.5 / 8)),
        ("longformer", {"chunk": 8, "globals": 2}, 12 * 32 * (4.5 + 8 * 56 / 64 + 2)),
        ("bigbird", {"chunk": 8, "globals": 1, "random": 1}, 12 * 32 * (4.5 + 8 * 56 / 64 + 16)),
        ("bigbird", {"chunk": 32}, 12 * 32 * 32.5),  # no more than there are
        ("performer", {"features": 16, "chunk": 8}, 4 * (24 * 8 * 16 + 6 * (16 + 8) * 4.5)),
    ],
)
def test_causal_mechanisms_by_hand(kind, section, flops, monkeypatch):
    monkeypatch.setattr(lha, "SAMPLES", 20)
    monkeypatch.setattr(lha, "SAMPLED_KEYS", 24)
    found = model_flops_per_token(model(attention=attention(kind, **{kind: section})), 64)
    shared = section.get("shared_qk", kind in ("lsh", "routing"))  # routing's decoders have no keys of their own
    assert found == pytest.approx(rest(3 if shared else 4) + flops)


@together(
    ("kind", "section", "flops"),
    [
        ("full", {}, 12 * 32 * 64),
        ("lsh", {"chunk": 8, "rounds": 3}, 3 * (12 * 32 * 15 + LSH_CODES)),
        ("lsh", {"chunk": 8, "rounds": 3, "shared_qk": False}, 3 * (12 * 32 * 16 + 2 * LSH_CODES)),
        ("lha", {"chunk": 16, "hash": "random"}, 12 * 32 * 32 + 4 * 2 * 2 * 8 * 4),
        ("lha", {"chunk": 16, "hash": "random", "window": "top_k"}, 12 * 32 * 22 * 4 * 22 / 64 + 4 * 2 * 2 * 8 * 4),
        ("smart_bird", BIRD, 12 * 32 * 5 + 4 * (14 * 64 + 3 * 4 * 32 + 6 * 257)),
        ("smyrf", {"chunk": 8, "rounds": 3}, 3 * (12 * 32 * 8 + 4 * 2 * 2 * 10)),
        ("routing", {"chunk": 16, "window": "top_k"}, 12 * 32 * 16 + 4 * 2 * 2 * 8 * 4),
        ("random", {"chunk": 16}, 12 * 32 * 31),
        ("sparse_transformer", {"stride": 8}, 12 * 32 * (16 + 8)),
        ("longformer", {"chunk": 8, "globals": 2}, 12 * 32 * (8 + 2 * 8 * 56 / 64 + 4)),
        ("bigbird", {"chunk": 8, "globals": 1, "random": 1}, 12 * 32 * (8 + 2 * 8 * 56 / 64 + 24)),
        ("performer", {"features": 16}, 4 * 24 * 8 * 16),
        ("linformer", {"projected": 16}, 4 * 24 * 8 * 16),
    ],
)
def test_bidirectional_mechanisms_by_hand(kind, section, flops):
    shared = section.get("shared_qk", kind == "lsh")
    assert encoder(kind, **{kind: section}) == pytest.approx(rest(3 if shared else 4) + flops)


def test_layers_add_up_by_the_pattern():
    kinds = {"local": {"chunk": 16}, "lsh": {"chunk": 8}}
    one = {k: model_flops_per_token(model(attention=attention(k, **kinds)), 64) - HEAD for k in ("local", "lsh")}
    mixed = model(layers=5, attention={"pattern": ["local", "local", "lsh"], **kinds})
    assert model_flops_per_token(mixed, 64) == pytest.approx(4 * one["local"] + one["lsh"] + HEAD)


def test_an_adaptive_softmax_counts_its_head():
    ordinary, adaptive = (model(attention=attention("full"), adaptive_cutoffs=cutoffs) for cutoffs in ([], [100, 200]))
    saved = 6 * 64 * (256 - 102)
    assert model_flops_per_token(ordinary, 64) - model_flops_per_token(adaptive, 64) == pytest.approx(saved)


@pytest.mark.parametrize("shared", [True, False])
def test_an_encoder_decoder_by_its_own_weights(shared):
    """Each side's matrices once per token of that side, keys and values of the source once per source token."""
    made = {"kind": "encoder_decoder", "layers": 3, "attention": attention("full")}
    source = {"length": 40, "layers": 2, "attention": attention("full"), "shared_embedding": shared}
    values = {"model": {**BASE, **made, "source": source}, "data": {"sequence_length": 64}}
    config = build_config(values).model
    weights = {"source": 0, "target": 0}
    for name, p in build_model(config, 0).named_parameters():
        if p.dim() == 2 and "embedding." not in name:
            of_source = re.search(r"^encoder\.|cross_attention\.attention\.(key|value)\.weight$", name)
            weights["source" if of_source else "target"] += p.numel()
    pairs = 2 * 40 * 40 + 3 * 24 * 25 / 2 + 3 * 24 * 40
    whole = 6 * (40 * weights["source"] + 24 * weights["target"]) + 12 * 32 * pairs
    assert model_flops_per_token(config, 64) == pytest.approx(whole / 64)
    values["model"]["source"] = source | {"attention": attention("full", head_groups=2)}
    one, grouped = (hardware_flops_by_part(c, 64)["projections"] for c in (config, build_config(values).model))
    assert grouped - one == pytest.approx(2 * 6 * 32 * 32 * 40 / 64), "queries, keys and values of 2 layers once more"


@pytest.mark.parametrize(
    "changed",
    [{}, {"blocks": "ordinary", "activations": "checkpoint"}, {"blocks": "ordinary", "activations": "stored"}],
)
@pytest.mark.parametrize(("groups", "tiles"), [(1, 1), (1, 4), (2, 1), (2, 4), (4, 1), (4, 4)])
def test_hardware_flops_equal_the_products_that_run(changed, groups, tiles):
    """All that torch multiplies in a step, counted operation by operation, but for local attention's kernels."""
    tiled = {"feed_forward_tiles": tiles, "loss_tiles": tiles, "feed_forward": "swiglu", "key_heads": 2}
    changed = {**BASE, **changed, **tiled, "attention": attention("local", head_groups=groups)}
    sections = {"model": changed, "data": {"sequence_length": 64}}
    config = build_config(sections)
    built, tokens = ConfiguredPass(config).model, dummy_records(config.model, 1, 64, 0).to(META)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = nullcontext()  # the original does not support the backward passes of head groups
    counter.mod_tracker.parents = ["Global"]
    with recorded(), as_on_a_gpu(), counter:
        built(tokens, RngContext(0, 0, torch.arange(1, device=META), training=True))[0].backward()
    parts = hardware_flops_by_part(config.model, 64)
    assert counter.get_total_flops() == 64 * (sum(parts.values()) - parts["attention"])


def test_ranks_beyond_the_heads_share_out_the_pairs_or_repeat_the_heads():
    """Of 4 heads on 8 ranks: LSH's pairs are shared out; Performer is repeated."""
    for kind, repeated in (("lsh", 1), ("performer", 2)):
        config = model(attention=attention(kind, lsh={"chunk": 8}))
        few, many = (hardware_flops_by_part(config, 64, ranks) for ranks in (4, 8))
        assert few == hardware_flops_by_part(config, 64)
        assert many == pytest.approx(few | {"attention": few["attention"] * repeated})


@together(("precision", "gflops"), [("fp32", 100), ("bf16", 40)])
@together(
    ("hours", "rank", "device", "lines"), [(5, 0, "cpu", 1), (1.9, 0, "cpu", 0), (5, 1, "cpu", 0), (5, 0, "meta", 0)]
)
def test_the_first_rank_on_cpus_warns_of_a_long_run(precision, gflops, hours, rank, device, lines, monkeypatch, capsys):
    assert 1e6 < flops.product_speed("fp32") < 1e15
    monkeypatch.setattr(flops, "product_speed", {"fp32": 100e9, "bf16": 40e9}.get)
    ranks = Ranks(rank=rank, world_size=2, device=torch.device(device))
    flops.warn_if_long(2 * hours * 3600 * 0.3 * gflops * 1e9, precision, ["fewer training.steps"], ranks)
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == lines
    for warning in warnings:
        assert "about 5 hours on this machine" in warning and f"of the {gflops} GFLOP/s" in warning
        assert warning.endswith("fewer training.steps; a GPU")
        assert ('Faster: training.precision="fp32", 2.5 times as fast here; ' in warning) == (precision == "bf16")
