"""Strict causality: replacing later tokens moves no earlier output, of any mechanism that does not say it leaks."""

import pytest

from megasparse.model.decoder import build_decoder
from megasparse.ops.random import Draws
from tests.helpers.models import attention, random_tokens, small

CAUSAL = {
    "full": attention("full"),
    "full shared": attention("full", shared_qk=True),
    "local": attention("local"),
    "lsh": attention("lsh"),
    "lsh 4 rounds, factorised": attention("lsh", lsh={"rounds": 4, "buckets": [4, 8]}),
    "pattern": attention("local", "local", "lsh", "local"),
}
CHUNK = attention("lsh", lsh={"window": "chunk", "rounds": 1})


def moved_prefix(config, first_changed, seeds=5):
    """The largest change of any nats before `first_changed` (rounding is about 1e-6), over several replacements."""
    model = build_decoder(small(attention=config), seed=0)
    tokens = random_tokens(2, 120)
    draws = Draws.evaluation(0, 2)
    nats = model.token_scores(tokens, draws).nats
    changes = []
    for seed in range(seeds):
        other = tokens.clone()
        other[:, first_changed:] = (
            other[:, first_changed:] + 1 + random_tokens(2, 120 - first_changed, 255, seed)
        ) % 256
        changes.append((model.token_scores(other, draws).nats - nats)[:, :first_changed].abs().max().item())
    return max(changes)


@pytest.mark.parametrize("name", CAUSAL)
def test_no_later_token_moves_an_earlier_output(name):
    assert build_decoder(small(attention=CAUSAL[name]), seed=0).leaks == []
    assert moved_prefix(CAUSAL[name], 60) < 1e-5
    assert moved_prefix(CAUSAL[name], 119) < 1e-5


def test_the_chunk_window_leaks_and_says_so():
    leaks = build_decoder(small(attention=CHUNK), seed=0).leaks
    assert len(leaks) == 3 and "window = band" in leaks[0]
    assert moved_prefix(CHUNK, 60) > 1e-2
