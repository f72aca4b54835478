"""FLOPs and bytes against counts made by hand."""

import pytest
import torch

from megasparse.attention.contract import Attention
from megasparse.attention.costs import Passes
from megasparse.attention.heads import build_mechanism
from megasparse.attention.mechanisms import MECHANISMS
from megasparse.config.attention import AttentionConfig
from megasparse.config.schema import ModelConfig
from megasparse.planning.hardware import Hardware
from megasparse.planning.roofline import PEAKS, least_seconds, peaks_of
from tests.helpers.models import can_be_causal

LENGTH, HEADS, DIM, SIZE = 64, 2, 8, 2
ROW, NUMBER, CODE = 2 * 8 * 2, 2 * 4, 2 * 2  # bytes of both heads: a vector in bf16, a 4-byte number, a bucket
WITH_KERNELS = ["full", "local", "lsh", "lha", "yoso", "smart_bird", "ngram"]


def built(kind, **settings) -> Attention:
    attention = AttentionConfig.model_validate({"pattern": [kind], kind: settings})
    model = ModelConfig(max_length=LENGTH, layers=1, d_model=16, d_ff=16, heads=HEADS, attention=attention)
    return build_mechanism(kind, model, HEADS)


def operators(kind, **settings):
    return built(kind, **settings).operators(LENGTH, SIZE)


def close(work, flops, moved):
    for found, wanted in ((work.flops, flops), (work.moved, moved)):
        assert (found.forward, found.backward) == pytest.approx(wanted)


def test_full_attention():
    pairs = 4 * HEADS * DIM * 32.5  # 1 to 64 keys a query
    # q, k, v, out; then q, k, v, out, dout, dq, dk, dv; a log-sum-exp written and read.
    close(operators("full")["attention"], (pairs, 2 * pairs), (4 * ROW + NUMBER, 8 * ROW + NUMBER))


def test_local_attention():
    pairs = 4 * HEADS * DIM * sum(q - max(0, q // 16 - 1) * 16 + 1 for q in range(LENGTH)) / LENGTH
    found = operators("local", chunk=16)["attention"]
    close(found, (pairs, 2 * pairs), (4 * ROW + NUMBER, 8 * ROW + NUMBER))


@pytest.mark.parametrize("kind,settings", [("local", {"chunk": 16}), ("lsh", {"chunk": 8}), ("lha", {"chunk": 8})])
def test_sinks(kind, settings):
    """Their softmax, numbers of 3 tokens for all heads, and two outputs written and read to be merged."""
    plain, found = (operators(kind, sinks=sinks, **settings)["attention"] for sinks in (0, 3))
    pairs = 4 * HEADS * DIM * (3 * 32 / 64 if kind == "local" else 3)  # the window of the first 32 has them
    moved = (4 * ROW + NUMBER + 12 + 4 * ROW, 8 * ROW + NUMBER + 12 + 6 * ROW)
    more = (found.flops.forward - plain.flops.forward, found.flops.backward - plain.flops.backward)
    assert more == pytest.approx((pairs, 2 * pairs))
    assert (found.moved.forward - plain.moved.forward, found.moved.backward - plain.moved.backward) == moved
    flops = [built(kind, sinks=sinks, **settings).flops(LENGTH).forward for sinks in (0, 3)]
    assert flops[1] - flops[0] == pytest.approx(pairs)


def test_lsh_attention():
    """16 buckets of 4 tokens in each of 3 rounds: a query sees 32.5/16 keys on average, of a window of 8."""
    found = operators("lsh", chunk=8, rounds=3)
    pairs = 3 * 4 * HEADS * DIM * 32.5 / 16
    moved = (3 * (3 * ROW + NUMBER) + ROW + NUMBER, 3 * (4 * ROW + NUMBER) + 4 * ROW + NUMBER)
    close(found["attention"], (pairs, 2 * pairs), moved)
    close(found["hashing"], (3 * HEADS * 2 * DIM * 8, 0), (ROW + 3 * CODE, 0))  # 8 rotation vectors a round
    close(found["sort"], (0, 0), (3 * (CODE + NUMBER), 0))
    few = operators("lsh", chunk=8, rounds=3, buckets=2)["attention"]
    assert few.flops.forward == pytest.approx(3 * 4 * HEADS * DIM * 8)  # no more than the window
    separate = operators("lsh", chunk=8, shared_qk=False, rounds=3)
    assert separate["hashing"].moved.forward == 2 * found["hashing"].moved.forward


def test_lha():
    found = operators("lha", chunk=16, samples=20)  # 4 buckets, half of whose 16 are earlier
    pairs = 4 * HEADS * DIM * 32.5 / 4
    close(found["attention"], (pairs, 2 * pairs), (4 * ROW + 2 * NUMBER, 8 * ROW + 2 * NUMBER))
    weights = 8 * 8 + 8 * 4
    both = 2 * 2 * weights  # of a token; of 64 tokens 20 queries and all keys learn, and have members, and thresholds
    forward = both + both * (2 * (20 + 64) + 64) / 64 + 20 * 64 * (3 * 2 * 8 + 2 * 2 * 4) / 64
    close(found["hashing"], (HEADS * forward, HEADS * 2 * both * (20 + 64) / 64), (4 * ROW + CODE, 0))


def test_yoso():
    found = operators("yoso", hashes=3, code_bits=5, backward="tables")["attention"]
    table = 32 * DIM * 4 * HEADS / LENGTH
    moved = (2 * ROW + 2 * 3 * CODE + 3 * (ROW + 2 * CODE + table) + ROW, 3 * (4 * ROW + 2 * CODE + table) + 4 * ROW)
    bits = 2 * 5 * 3 * 3  # fast Hadamard of 8 numbers
    close(found, (3 * HEADS * (bits + 2 * DIM), 3 * HEADS * (2 * DIM + 8 * DIM**2)), moved)


def test_smart_bird():
    found = operators("smart_bird", keys=5, sketch_dim=4)
    pairs = 4 * HEADS * DIM * 5
    moved = (5 * (2 * ROW + NUMBER) + 2 * ROW + NUMBER, 5 * (4 * ROW + 2 * NUMBER) + 6 * ROW + NUMBER)
    close(found["gather"], (pairs, 2 * pairs), moved)
    read = (16 + 3 * 4 * 2) * SIZE
    assert found["sketch"].moved == Passes(read + 5 * NUMBER, read)
    beside = operators("smart_bird", keys=5, sinks=2, local=True, chunk=16)
    assert beside["gather"].flops.forward == pytest.approx(4 * HEADS * DIM * 7)
    near = operators("local", chunk=16)["attention"]
    moved = (near.moved.forward + 4 * ROW, near.moved.backward + 6 * ROW)
    close(beside["window"], (near.flops.forward, near.flops.backward), moved)


@pytest.mark.parametrize("kind", WITH_KERNELS)
def test_no_more_flops_than_the_mechanism_counts(kind):
    """The mechanism's count takes windows as full; everything else is the same."""
    counted = built(kind).flops(LENGTH).both
    found = sum(work.flops.both for work in operators(kind).values())
    assert found <= counted * (1 + 1e-9)
    assert found == pytest.approx(counted) or kind in ("lsh", "lha")


def test_other_mechanisms_have_no_kernels():
    others = [kind for kind in MECHANISMS if kind not in WITH_KERNELS and can_be_causal(kind)]
    assert others and all(operators(kind) is None for kind in others)
    assert least_seconds(built("performer"), LENGTH, 1, torch.bfloat16, PEAKS["H200"]) is None


def test_the_least_time_is_the_slower_of_arithmetic_and_memory():
    mechanism = built("full")
    work = mechanism.operators(LENGTH, 4)["attention"]
    tokens = 3 * LENGTH

    def least(dtype, **peaks):
        return least_seconds(mechanism, LENGTH, 3, dtype, Hardware("a GPU", link=0, pcie=0, **peaks))

    slow_memory = least(torch.float32, peak=1.0, single=1e30, bandwidth=10.0)
    assert slow_memory.both == pytest.approx(tokens * work.moved.both / 10.0)
    slow_arithmetic = least(torch.float32, peak=1.0, single=5.0, bandwidth=1e30)
    assert slow_arithmetic.forward == pytest.approx(tokens * work.flops.forward / 5.0)
    half = least(torch.bfloat16, peak=7.0, single=5.0, bandwidth=1e30)
    assert half.backward == pytest.approx(tokens * work.flops.backward / 7.0)


def test_full_attention_of_an_h100_is_bound_by_arithmetic_and_lsh_by_memory():
    model = ModelConfig(max_length=65536, heads=8, d_model=512)
    peaks = peaks_of("NVIDIA H100 80GB HBM3")
    assert peaks is PEAKS["H100 80GB HBM3"] and peaks_of("some GPU") is None
    full, lsh = (
        least_seconds(build_mechanism(kind, model, 8), 65536, 1, torch.bfloat16, peaks) for kind in ("full", "lsh")
    )
    assert full.both == pytest.approx(12 * 512 * 65536 * 32768.5 / 989e12)
    assert 0.2e-3 < lsh.both < 0.5e-3
