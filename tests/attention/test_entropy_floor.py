"""Tokens drawn uniformly at random cannot be predicted: a causal model whose loss on fresh ones is below ln V saw them.

The sharpest test of causality there is: training finds a leak wherever gradients can, however a window hides it."""

import math

import pytest
import torch

from megasparse.config.attention import AttentionConfig
from megasparse.config.schema import PositionsConfig
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from tests.helpers.models import attention, named, random_tokens, small, strict_names

LENGTH, SYMBOLS = 64, 4


def below_the_floor(name: str, mechanism: AttentionConfig, steps: int, fresh: int = 2048) -> float:
    """Standard errors by which the loss on `fresh` new sequences lies below ln V, after `steps` steps of training."""
    config = small(
        attention=mechanism, vocabulary=SYMBOLS, max_length=LENGTH, layers=2, d_model=32, d_ff=64,
        activations="stored", positions=PositionsConfig(kind="learned"),
    )  # fmt: skip
    model = build_model(config, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens = random_tokens(64, LENGTH, SYMBOLS, seed=step)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, step / 20, 1.02 - step / steps)
        samples = torch.arange(step * 64, (step + 1) * 64)
        objective, _ = model(tokens, RngContext(0, step, samples, training=True))
        optimizer.zero_grad()
        objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    nats = []
    for number in range(fresh // 256):
        tokens = random_tokens(256, LENGTH, SYMBOLS, seed=10**6 + number)
        nats.append(model.token_scores(tokens, RngContext.evaluation(0, 256)).nats.double().flatten())
    found = torch.cat(nats)
    above = found.mean().item() - math.log(SYMBOLS)
    error = above / (found.std().item() / len(found) ** 0.5)
    print(f"{name}: {above:+.5f} nats against ln {SYMBOLS}, {error:+.1f} standard errors")
    return -error


@pytest.mark.soak
@pytest.mark.parametrize("name", strict_names())
def test_no_strictly_causal_mechanism_gets_below_the_floor(name):
    assert below_the_floor(name, named(name), steps=1000) < 3


@pytest.mark.soak
def test_the_test_sees_the_leak_of_the_top_k_window():
    """LHA's own window: whether a token is among the best of its bucket is decided against later ones too."""
    section = {"hash": "random", "chunk": 2}
    assert below_the_floor("top_k", attention("lha", lha={"window": "top_k", **section}), steps=800) > 6
    assert below_the_floor("band", attention("lha", lha=section), steps=800) < 3
