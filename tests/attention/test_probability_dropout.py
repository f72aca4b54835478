"""Dropout of attention probabilities: a mechanism computes P ∘ M from its probabilities P and the masks M made here."""

import pytest
import torch

from megasparse.config.attention import MECHANISMS, AttentionConfig
from megasparse.errors import ConfigError
from megasparse.ops.random import RngContext
from megasparse.settings.checks import check_model
from tests.helpers.comparing import assert_same_with_gradients
from tests.helpers.definitions import use_definitions
from tests.helpers.models import CASES, Single, by_path, kind_of, named, small

RATE, LENGTH = 0.3, 40
NOT_PAIRS = ["linformer", *(kind for kind in MECHANISMS if getattr(AttentionConfig(), kind).no_probabilities)]
DROPPING = [case for case in CASES if kind_of(case[0]) not in NOT_PAIRS]


def mixed(x: int) -> int:
    """The mixer of `ops.random`, on Python's whole numbers."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) % 2**32
    return x


def mask(key: int, samples: list[int], heads: range, queries: int, keys: int) -> torch.Tensor:
    """0 where a pair is dropped, else 1/(1 − rate): (B, H, Lq, Lk)."""
    low, high = key % 2**32, key >> 32
    found = torch.zeros(len(samples), len(heads), queries, keys, dtype=torch.float64)
    columns = [mixed((j + high) % 2**32) for j in range(keys)]
    for b, sample in enumerate(samples):
        for h, head in enumerate(heads):
            for i in range(queries):
                row = mixed(mixed((i + low) % 2**32) ^ mixed((sample + high) % 2**32))
                query = mixed((row + mixed((head + low) % 2**32)) % 2**32)
                for j in range(keys):
                    bits = mixed((query + columns[j]) % 2**32)
                    signed = bits - 2**32 if bits >= 2**31 else bits
                    found[b, h, i, j] = (signed >= round(RATE * 2**32) - 2**31) / (1 - RATE)
    return found


@pytest.fixture(scope="module")
def masks():
    key = RngContext(0, 0, torch.arange(2), True).key(0, "attention probability dropout")
    return mask(key, [0, 1], range(3, 5), LENGTH, LENGTH)


@by_path("name,causal", DROPPING)
def test_a_mechanism_drops_its_probabilities_by_pairs(name, causal, masks):
    dropping, whole = (Single(name, causal, rate) for rate in (RATE, 0.0))
    for single in (dropping, whole):
        single.mechanism.double()
    x, *heads = (t.double() for t in whole.inputs(LENGTH))

    def probabilities(q, k):
        """(B, H, L, L): the outputs of unit vectors for values, as many at a time as the head dim."""
        unit = torch.eye(LENGTH, 48, dtype=q.dtype).expand(*q.shape[:2], -1, -1)
        parts = [whole(x, q, k, v, training=True, head_offset=3).out for v in unit.split(16, dim=-1)]
        return torch.cat(parts, dim=-1)[..., :LENGTH]

    assert_same_with_gradients(
        lambda q, k, v: dropping(x, q, k, v, training=True, head_offset=3).out,
        lambda q, k, v: (probabilities(q, k) * masks) @ v,
        heads,
        unread=[1] if whole.mechanism.shared_qk else [],
    )


@pytest.mark.parametrize("name,causal", [("full", True), ("local relative", True)])
def test_the_definition_drops_as_blocks_do_and_kernels_are_rejected(name, causal, monkeypatch):
    single = Single(name, causal, RATE)
    monkeypatch.setenv("MEGASPARSE_OPS", "blockwise")
    found = single(*single.inputs(LENGTH), training=True).out
    with monkeypatch.context() as patch:
        use_definitions(patch)
        expected = single(*single.inputs(LENGTH), training=True).out
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")
    with pytest.raises(ConfigError, match="kernels do not support dropout of attention probabilities"):
        single(*single.inputs(LENGTH), training=True)


def test_evaluation_drops_nothing():
    dropping, whole = (Single("lsh", True, rate) for rate in (RATE, 0.0))
    assert torch.equal(dropping(*whole.inputs(LENGTH)).out, whole(*whole.inputs(LENGTH)).out)


def test_a_projected_sequence_is_dropped_too():
    """Linformer's keys are projections of the sequence, numbered by themselves."""
    single = Single("linformer", False, RATE)
    single.mechanism.double()
    x, q, k, v = (t.double() for t in single.inputs(LENGTH))
    mechanism, rng = single.mechanism, RngContext(0, 0, torch.arange(2), True)
    keys, values = mechanism.keys.weight[:, :LENGTH] @ k, mechanism.values.weight[:, :LENGTH] @ v
    drawn = mask(rng.key(0, "attention probability dropout"), [0, 1], range(2), LENGTH, keys.shape[2])
    probability = torch.softmax(q @ keys.transpose(-1, -2) / 4.0, dim=-1)
    torch.testing.assert_close(single(x, q, k, v, training=True).out, (probability * drawn) @ values)


def test_a_mechanism_without_probabilities_refuses_the_rate():
    attention = named("yoso").model_copy(update={"dropout": RATE})
    with pytest.raises(ConfigError, match=r'attention\.dropout: 0\.3 is given, but "yoso" computes no'):
        check_model(small(attention=attention))
