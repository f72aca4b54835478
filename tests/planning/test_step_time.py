"""Seconds of a step by part: against counts by hand, whole passes, and published steps."""

from dataclasses import replace

import pytest

from megasparse.config.load import build_config
from megasparse.errors import ConfigError
from megasparse.planning.flops import hardware_flops_by_part
from megasparse.planning.goodput import MTBF_GPU_HOURS, READ, SAVED, START, goodput
from megasparse.planning.hardware import GPUS
from megasparse.planning.launches import count_step, total
from megasparse.planning.plan import Assumptions, Plan
from megasparse.planning.published import published
from megasparse.planning.states import States, Zero
from megasparse.planning.step_time import bytes_a_token, step_time
from megasparse.planning.traffic import Cluster

MODEL = {
    "max_length": 4096, "layers": 5, "d_model": 64, "d_ff": 96, "heads": 4, "key_heads": 2, "norm": "rms",
    "feed_forward": "swiglu", "feed_forward_tiles": 8, "loss_tiles": 16, "positions": {"kind": "rotary"},
}  # fmt: skip


def config(**model):
    return build_config(
        {
            "model": {**MODEL, **model},
            "data": {"sequence_length": 4096},
            "training": {"precision": "bf16", "global_batch": 4},
        }
    )


@pytest.mark.parametrize("pattern", [["lsh"], ["lha"], ["full"], ["local", "lsh"]])
def test_bytes_continued_from_short_and_shallow_passes_are_those_of_the_whole(pattern):
    lha = {"samples": 64, "sampled_keys": 128}
    of = config(attention={"pattern": pattern, "lsh": {"local": True, "sinks": 4}, "lha": lha})
    whole = total(count_step(of)).by_work
    for work, moved in bytes_a_token(of).items():
        assert moved * 4096 == pytest.approx(whole[work], rel=0.01), work


def test_every_byte_is_of_products_of_attention_or_elementwise():
    counts = total(count_step(config(layers=1, attention={"pattern": ["lsh"]})))
    assert sum(counts.by_work.values()) == counts.moved
    outside = ("kernel norm", "kernel loss")
    kernels = {name for name in counts.by_name if name.startswith("kernel ") and not name.startswith(outside)}
    attention = sum(counts.by_name[name][1] for name in kernels)
    products = sum(counts.by_name[name][1] for name in ("mm", "addmm", "bmm") if name in counts.by_name)
    assert counts.by_work["products"] == products and counts.by_work["attention"] <= attention


def test_parts_by_hand():
    """2 micro-batches of 4,096 tokens on one of 2 ranks that share a sequence; 1,000 weights, offloaded or not."""
    of = config(attention={"pattern": ["lsh"]})
    of = of.model_copy(update={"parallel": of.parallel.model_copy(update={"sequence": 2})})
    gpu = replace(GPUS["A100"], peak=1e9, single=1e8, reach=0.5, bandwidth=1e12, host=2e3)
    states = States(1000, 0, 100, 8000, True)
    rest = {"states": states, "cluster": Cluster(2, 8, 2), "micro_batches": 2, "gpu": gpu}
    found = step_time(of, {"attention": 1.0, "elementwise": 8e8}, zero=Zero(3), **rest)
    flops = hardware_flops_by_part(of.model, 4096)
    assert found.feed_forward == pytest.approx(4096 * flops["feed-forward"] / 5e8)
    assert found.hashing == pytest.approx(4096 * flops["hashing"] / 5e7)
    assert found.attention == pytest.approx(4096 * flops["attention"] / 5e8)
    assert found.elementwise == pytest.approx(4096 * 8e8 / 0.8e12)
    assert found.optimizer == pytest.approx(30 * 500 / 0.8e12)
    assert found.total == pytest.approx(found.passes + found.optimizer)
    slow = step_time(of, {"attention": 1e12, "elementwise": 0.0}, zero=Zero(3, "cpu", "cpu"), **rest)
    assert slow.attention == pytest.approx(4096 * 1e12 / 0.8e12)  # bound by what it moves
    assert slow.optimizer == pytest.approx(30 * 500 / (0.8 * 2e3 / 2))  # two ranks share the CPUs' memory


@pytest.mark.parametrize("number", [0, 1, 3])
def test_published_steps_are_predicted_within_20_percent(number):
    each = published()[number]
    plan = Plan(each.config, Assumptions(each.gpu, each.gpus))
    assert each.source and plan.tokens == each.tokens
    assert plan.counted_seconds == pytest.approx(each.seconds, rel=0.2)
    assert 0 <= plan.exposed < 0.1


def test_goodput_by_hand():
    plan = Plan(config(layers=1, attention={"pattern": ["local"]}), Assumptions(GPUS["A100"], gpus=4))
    saved = 12 * plan.passes.states.trained
    save, failure = saved / SAVED, MTBF_GPU_HOURS * 3600 / 4
    interval = (2 * save * failure) ** 0.5
    lost = save / interval + (interval / 2 + 120 + START + saved / READ) / failure
    assert goodput(plan).share == pytest.approx(1 - lost)


def test_two_stacks_have_no_seconds_by_part():
    with pytest.raises(ConfigError, match=r'model\.kind: "encoder_decoder" has no seconds by part'):
        bytes_a_token(config(kind="encoder_decoder", source={"length": 64}))
