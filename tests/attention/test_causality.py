"""Strict causality: replacing later tokens changes no bit of an earlier output, of any mechanism that does not say it
leaks."""

import pytest
import torch

from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from tests.helpers.models import attention, causal_names, named, random_tokens, small, strict_names

PATTERNS = {name: named(name) for name in strict_names()} | {
    "pattern": attention("local", "local", "lsh", "local"),
    "split heads": attention({"local": 1, "lsh": 1}),
}
LEAKING = [name for name in causal_names() if name not in strict_names()]


def moved_prefix(config, first_changed, seeds=5, length=120, dtype=torch.float32):
    """The largest change of any nats before `first_changed`, over several replacements."""
    longer = {"max_length": length, "positions": {"kind": "rotary"}} if length > 128 else {}
    model = build_model(small(attention=config, **longer), seed=0).to(dtype)
    tokens = random_tokens(2, length)
    rng = RngContext.evaluation(0, 2)
    with torch.no_grad():
        nats = model.token_scores(tokens, rng).nats
        changes = []
        for seed in range(seeds):
            other = tokens.clone()
            replacement = random_tokens(2, length - first_changed, 255, seed)
            other[:, first_changed:] = (other[:, first_changed:] + 1 + replacement) % 256
            changes.append((model.token_scores(other, rng).nats - nats)[:, :first_changed].abs().max().item())
    return max(changes)


@pytest.mark.parametrize("name", PATTERNS)
def test_no_later_token_moves_an_earlier_output(name):
    assert build_model(small(attention=PATTERNS[name]), seed=0).leaks == []
    assert moved_prefix(PATTERNS[name], 60) == 0.0
    assert moved_prefix(PATTERNS[name], 119) == 0.0


@pytest.mark.parametrize("length", [1024, *(pytest.param(n, marks=pytest.mark.slow) for n in (4096, 16384))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["lsh", "lha", "routing", "ngram", "split heads"])
def test_no_later_token_moves_a_bit_of_hashed_attention(name, dtype, length):
    config = PATTERNS.get(name) or named(name)
    for first_changed in (length // 3 + 5, length - 77):
        assert moved_prefix(config, first_changed, seeds=1, length=length, dtype=dtype) == 0.0


@pytest.mark.parametrize("name", LEAKING)
def test_a_leaking_window_says_so_and_does(name):
    leaks = build_model(small(attention=named(name)), seed=0).leaks
    assert len(leaks) == 3 and "window = band" in leaks[0]
    assert moved_prefix(named(name), 60) > 1e-2
