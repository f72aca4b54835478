"""Predicted memory is held against what steps allocate."""

import copy

import pytest

from megasparse.planning.measure import alone
from tests.helpers.plan_accuracy import predicted_and_measured

BASE = {
    "run": {"device": "cpu", "engine": "torch"},
    "model": {"layers": 3, "d_model": 128, "d_ff": 512, "heads": 4, "feed_forward_tiles": 4, "loss_tiles": 4},
    "training": {"global_batch": 1, "micro_batch": 1},
}
ORDINARY = {"blocks": "ordinary"}


def attention(*pattern, **sections):
    return {"pattern": list(pattern), **sections}


LSH = attention("lsh", lsh={"chunk": 64, "rounds": 2})
CASES = {
    "lsh, reversible, 64K": (65536, {"layers": 2, "d_model": 64, "d_ff": 128, "attention": LSH}, {}),
    "lsh, stored": (8192, {**ORDINARY, "activations": "stored", "attention": LSH}, {}),
    "lsh, checkpoint, bf16": (
        16384,
        {**ORDINARY, "activations": "checkpoint", "attention": LSH, "feed_forward_tiles": 1},
        {"training": {"precision": "bf16"}},
    ),
    "lha, bf16": (16384, {"attention": attention("lha", lha={"chunk": 64})}, {"training": {"precision": "bf16"}}),
    "lha, encoder, batch 4": (
        4096,
        {"kind": "encoder", "vocabulary": 300, "attention": attention("lha", lha={"chunk": 64})},
        {"training": {"micro_batch": 4, "global_batch": 4}},
    ),
    "yoso, encoder": (
        8192,
        {"kind": "encoder", "vocabulary": 300, "attention": attention("yoso", yoso={"hashes": 8})},
        {},
    ),
    "yoso, causal, bf16": (8192, {"attention": attention("yoso", yoso={"hashes": 8})}, {"training": {"precision": "bf16"}}),
    "smart_bird": (4096, {"layers": 2, "attention": attention("smart_bird", smart_bird={"keys": 16})}, {}),
    "full, stored, vocabulary of 8,000": (
        4096,
        {**ORDINARY, "activations": "stored", "vocabulary": 8000, "attention": attention("full"), "loss_tiles": 1},
        {},
    ),
    "local and lha in one layer": (
        16384,
        {"attention": attention({"local": 2, "lha": 2}, local={"chunk": 64}, lha={"chunk": 64})},
        {"training": {"global_batch": 2}},
    ),
    "local, lsh, accumulated, bf16": (
        16384,
        {"attention": attention("local", "lsh", local={"chunk": 64}, lsh=LSH["lsh"]), "dropout": 0.1},
        {"training": {"global_batch": 3, "precision": "bf16"}},
    ),
    "encoder-decoder": (
        8192,
        {"kind": "encoder_decoder", "max_length": 4096, "attention": LSH, "source": {"length": 4096, "attention": LSH}},
        {},
    ),
    "adafactor, wide": (
        2048,
        {"d_model": 512, "d_ff": 2048, "vocabulary": 8000, "attention": LSH, "feed_forward_tiles": 1},
        {"optimizer": {"name": "adafactor"}},
    ),
    "lsh, no tiles, bert": (
        4096,
        {
            **ORDINARY, "kind": "encoder", "style": "bert", "activations": "stored", "vocabulary": 2000,
            "feed_forward_tiles": 1, "loss_tiles": 1, "padding_token": 0, "attention": LSH,
        },
        {"training": {"micro_batch": 2, "global_batch": 2}},
    ),
}  # fmt: skip


def values(name):
    length, model, sections = CASES[name]
    found = copy.deepcopy(BASE)
    found["model"] |= {"max_length": length, **model}
    found["data"] = {"sequence_length": length}
    for key, section in sections.items():
        found[key] = {**found.get(key, {}), **section}
    return found
