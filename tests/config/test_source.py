"""What must hold between the two sides of an encoder–decoder."""

import pytest

from megasparse.config.load import build_config
from megasparse.errors import ConfigError
from tests.helpers.refusals import refusal

FULL = {"pattern": ["full"]}
MODEL = {"kind": "encoder_decoder", "max_length": 60, "layers": 2, "attention": FULL}
SOURCE = {"length": 40, "attention": FULL}
SAME, CROSS = {"layers": None}, {"cross_attention": "lsh"}
BIRD = {"pattern": ["smart_bird"]}
POOLED = {**BIRD, "smart_bird": {"objective": "pooled", "labels": 2}}


def built(source, **changes):
    model = {**MODEL, "source": source and {**SOURCE, **source}, **changes}
    return build_config({"model": model, "data": {"sequence_length": 100}})


@pytest.mark.parametrize(
    ("source", "changes", "key", "words"),
    [
        (None, {}, "model.source", ["null", "length"]),
        (SAME, {"kind": "decoder"}, "model.source", ["given", '"decoder"']),
        (SAME, {"score_from": 3}, "model.score_from", ["3"]),
        ({"attention": {"pattern": ["full"] * 3}}, {}, "model.source.attention.pattern", ["3 layers"]),
        ({"attention": BIRD}, {}, "model.source.attention.smart_bird.objective", ['"token"', '"answer"']),
        ({"attention": POOLED}, {}, "model.source.attention.smart_bird.objective", ['"pooled"', '"answer"']),
        (CROSS, {"attention": {**FULL, "lsh": {"buckets": 7, "chunk": 8}}}, "model.attention.lsh.buckets", ["7", "8"]),
        (CROSS, {"attention": {**FULL, "lsh": {"chunk": 61}}}, "model.attention.lsh.chunk", ["61", "60"]),
        ({"length": 100}, {}, "data.sequence_length", ["100", "target"]),
        ({"length": 39}, {}, "data.sequence_length", ["61", "60"]),
    ],
)
def test_rule(source, changes, key, words):
    message = refusal(lambda: built(source, **changes), ConfigError)
    assert message.startswith(f"{key}: ") and all(word in message for word in words), message


def test_just_inside_the_rules():
    lsh = {"chunk": 60}  # of the longer side
    built(CROSS, attention={**FULL, "lsh": lsh})
    built({**CROSS, "length": 90}, max_length=10, attention={**FULL, "lsh": {"chunk": 90}})
    built(SAME, attention={**FULL, "lsh": {"buckets": 7}})
    built({"attention": {"pattern": ["full", "smyrf"]}, "layers": 2}, padding_token=300, vocabulary=301)
