"""Predicted memory against allocations of steps and ranks; the plan's other figures against counts by hand."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megasparse.attention import ranked
from megasparse.cli.main import door
from megasparse.config.schema import Config
from megasparse.data.batches import Batch
from megasparse.errors import ConfigError, UserError
from megasparse.model.build import build_model
from megasparse.ops import sketch
from megasparse.ops.positions import cached_sinusoids
from megasparse.ops.random import RngContext
from megasparse.planning import passes
from megasparse.planning import plan as plans
from megasparse.planning.dry_run import trial_engine
from megasparse.planning.flops import hardware_flops_by_part
from megasparse.planning.hardware import GPUS, hardware, parse_bytes
from megasparse.planning.passes import PERIODS, ConfiguredPass, LiveBytes, count_pass, dummy_records
from megasparse.planning.plan import RESERVE, Plan, duration
from megasparse.planning.states import BUCKET, MemoryPool, States, Zero, memory, require_fit
from megasparse.settings.load import build_config, load_config
from megasparse.training.engines import build_engine
from megasparse.training.ranks import Ranks, start_ranks
from tests.helpers import commands
from tests.helpers.cases import together
from tests.helpers.definitions import use_definitions
from tests.helpers.peak_memory import allocated_peak
from tests.helpers.run_ranks import run_ranks
from tools.bench.training import models

A100 = GPUS["A100"]
MEASURED = Path(__file__).parents[2] / "docs" / "measured"
ORDINARY = {"blocks": "ordinary", "activations": "stored"}
BF16 = {"training": {"precision": "bf16"}}
DECODER = {
    "blocks": "ordinary", "layers": 4, "d_model": 96, "d_ff": 256, "heads": 4, "key_heads": 2, "norm": "rms",
    "feed_forward": "swiglu", "feed_forward_biases": False, "activations": "checkpoint", "vocabulary": 4000,
    "feed_forward_tiles": 4, "loss_tiles": 8, "tied_embeddings": True, "positions": {"kind": "rotary"},
    "attention": {"pattern": ["full"]},
}  # fmt: skip
LOCAL = {"pattern": ["local"], "local": {"chunk": 32}}


def config_of(length=256, model=None, **sections):
    small = {"layers": 2, "d_model": 32, "d_ff": 64, "heads": 4, "attention": LOCAL, **(model or {})}
    run = {"device": "cpu", "engine": "torch"}
    sizes = {"model": {"max_length": length, **small}, "data": {"sequence_length": length}}
    return build_config({"run": run, **sizes, **sections})


ALLOCATED = {
    "stored": (256, ORDINARY, {}),
    "reversible, bf16": (256, {}, BF16),
    "adafactor, accumulated": (
        256,
        {"d_model": 64, "d_ff": 512, "feed_forward_tiles": 4, "loss_tiles": 4},
        {"optimizer": {"name": "adafactor"}, "training": {"global_batch": 2}},
    ),
    "muon": (32, {"layers": 6, "d_model": 128, "d_ff": 256, "vocabulary": 300}, {"optimizer": {"name": "muon"}}),
    "tiles, adapters": (512, DECODER, {**BF16, "lora": {"targets": ["query", "value", "output"]}}),
    "nf4": (1024, DECODER, {**BF16, "lora": {"quantized": "nf4", "dora": True}}),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOCATED)
def test_predicted_peaks_are_within_10_percent_of_the_allocations(name, monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", "blockwise")
    use_definitions(monkeypatch)  # blocks depend on the values of codes, which tensors without memory lack
    length, model, sections = ALLOCATED[name]
    if name == "nf4":
        pytest.importorskip("bitsandbytes")
    sections = {"training": {"global_batch": 1}, **sections}
    sections["training"] = {"global_batch": 1, **sections["training"]}
    config = config_of(length, model, **sections)
    cached_sinusoids.cache_clear()
    predicted = Plan(config, A100).peak - RESERVE
    cached_sinusoids.cache_clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine, batch = trial_engine(config, start_ranks(config.run))
        for step in range(2):
            engine.train_step([batch] * config.training.global_batch, step, 1e-3)
    engine.close()
    assert predicted == pytest.approx(allocated_peak(profiled), rel=0.1)


def test_counting_without_memory_is_counting_with_it(monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", "blockwise")
    use_definitions(monkeypatch)  # blocks depend on the values of codes, which tensors without memory lack
    config = config_of(model=ORDINARY)
    model, tokens = build_model(config.model, 0).train(), dummy_records(config.model, 1, 256, 0)
    real = count_pass(model, lambda: model(tokens, RngContext(0, 0, torch.arange(1), training=True))[0])
    counted = ConfiguredPass(config).count(256)
    assert np.array_equal(counted.gradients, real.gradients)
    assert counted.peak() == pytest.approx(real.peak(), rel=0.02)
    assert counted.peak(0) == pytest.approx(real.peak(0), rel=0.02)


@pytest.mark.parametrize(
    "model",
    [
        {"layers": 11, "attention": {"pattern": ["lsh"]}},
        {**DECODER, "layers": 12, "attention": {"pattern": ["local"]}},
        {**ORDINARY, "layers": 19, "attention": {"pattern": ["local", "full"]}},
    ],
)
def test_a_deep_model_is_continued_from_shallow_ones(model):
    deep = ConfiguredPass(config_of(512, model))
    assert model["layers"] > max(PERIODS) * len(model["attention"]["pattern"])
    line, whole = deep.count(512), deep._count_whole(512)
    for part in (line.peak() / whole.peak(), line.peak(0) / whole.peak(0), line.moved / whole.moved):
        assert part == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(None, id="all", marks=pytest.mark.slow),
        pytest.param({"targets": ["query", "value", "output"]}, id="adapters"),
    ],
)
def test_a_pass_of_many_tiles_is_continued_from_short_ones(lora, monkeypatch):
    monkeypatch.setattr(passes, "SHORTEST", 256)
    tiles = {"feed_forward_tiles": 16, "loss_tiles": 64, "layers": 2, "activations": "checkpoint_cpu"}
    long = ConfiguredPass(config_of(1024, {**DECODER, **tiles}, **BF16, lora=lora))
    line, whole = long.count(1024), long._count_whole(1024)
    assert np.array_equal(line.gradients, whole.gradients)
    assert line.beside == pytest.approx(whole.beside, rel=0.03)
    assert line.moved == pytest.approx(whole.moved, rel=0.1)


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_choice_of_keys_counts_one_of_its_tiles(causal, monkeypatch):
    """Against all tiles on the meta device; of ranked keys, whose tiles depend on data, against those of a CPU."""
    monkeypatch.setenv("MEGASPARSE_OPS", "blockwise")
    monkeypatch.setattr(sketch, "_SCORE_ELEMENTS_ON_GPU", 1 << 13)
    monkeypatch.setattr(sketch, "_WIDE", 64)
    monkeypatch.setattr(ranked, "_TILE", {"cpu": 1 << 13, "cuda": 1 << 13})

    def count(device, choose, *arguments):
        with LiveBytes() as counter:
            choose(*(x.to(device) for x in arguments))
        return counter

    def top(q, k):
        sketch.chosen_keys(q, k, sketch.KeyChoiceSpec(4, causal, "top_k"), None)

    def best(q, k, codes):  # half of the buckets are empty, so that a query meets 2·P/N of the keys
        ranked.ranked_keys(q, k, codes[..., None], codes, ranked.RankingSpec(16, None, 4, causal))

    q, k = torch.randn(2, 2, 512, 8)
    once = count("meta", top, q, k)
    tiles = sketch._query_tiles
    monkeypatch.setattr(
        sketch, "_query_tiles", lambda q, *rest: tiles(SimpleNamespace(shape=q.shape, is_meta=False), *rest)
    )
    each = count("meta", top, q, k)
    assert once.launches == pytest.approx(each.launches, rel=0.15)
    assert once.moved == pytest.approx(each.moved, rel=0.05) and once.peak == pytest.approx(each.peak, rel=0.05)
    codes = (torch.arange(512) % 8).expand(2, -1)
    once, each = (count(device, best, q, k, codes) for device in ("meta", "cpu"))
    assert once.moved == pytest.approx(each.moved, rel=0.1)


@pytest.fixture
def planned(tmp_path, capsys, monkeypatch):
    """Plan from the config.json of a decoder, without weights and tokenizer, for bytes of a GPU and of its host."""
    monkeypatch.setattr(plans, "TILES", (128, 32))
    monkeypatch.setattr(passes, "SHORTEST", 64)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 9, "num_attention_heads": 4}
    values = {"model_type": "llama", "vocab_size": 300, "num_key_value_heads": 2, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps({**values, **sizes}))
    words = ("decoder_64k", "--start", str(tmp_path))

    def plan(host=10**12, memory=10**12, ranks=1, length=512):
        lengths = ("--set", f"model.max_length={length}", "--set", f"data.sequence_length={length}")
        words_of_memory = (*lengths, "--gpu-memory", f"{memory}B", "--host-memory", f"{host}B", "--json")
        shared = ("--gpus", str(ranks), "--set", f"parallel.sequence={ranks}")
        commands.run(door("plan"), *words, *shared, *words_of_memory)
        return json.loads(capsys.readouterr().out)

    return plan


def test_tiles_and_recomputed_layers_are_chosen_for_a_card_and_its_host(planned):
    roomy = planned()
    assert roomy["settings"] == {"feed_forward_tiles": 4, "loss_tiles": 32, "checkpoint_layers": 1}
    inputs = roomy["memory"]["host"]["offloaded activations"]
    assert inputs == 9 * 512 * 64 * 2
    tight = planned(sum(roomy["memory"]["host"].values()) - 3 * inputs // 9, roomy["peak"] - 1)
    assert tight["settings"] == {"feed_forward_tiles": 16, "loss_tiles": 128, "checkpoint_layers": 2}
    assert tight["memory"]["host"]["offloaded activations"] == 6 * inputs / 9
    assert roomy["fits"] and tight["fits"]
    small = planned(inputs, 10**12)  # the optimizer needs more of the host, at any length
    assert not small["fits"] and small["longest"] is None
    assert tight["peak"] < roomy["peak"] and tight["hardware_flops_per_step"] > roomy["hardware_flops_per_step"]


@pytest.mark.slow
def test_the_longest_length_depends_on_the_card_and_its_host_only(planned):
    roomy = planned()
    card = int(roomy["peak"] * 1.01)
    longest = planned(memory=card)["longest"]
    assert planned(memory=card, length=256)["longest"] == pytest.approx(longest, rel=0.05)
    inputs = roomy["memory"]["host"]["offloaded activations"] * longest // 512  # of 9 layers, of which 5 are enough
    on_host = [planned(inputs // part, card)["longest"] for part in (1, 2)]
    assert on_host[0] == longest > on_host[1]
    assert planned(inputs // 2, card, length=on_host[1])["fits"]


@pytest.mark.slow
def test_ranks_that_share_sequences_hold_longer_ones(planned):
    card = int(planned()["peak"] * 1.01)
    one, two = (planned(memory=card, ranks=ranks)["longest"] for ranks in (1, 2))
    assert two > 1.8 * one and planned(memory=card, ranks=2, length=two // 512 * 512)["fits"]


@pytest.mark.slow
def test_tiles_are_chosen_for_ranks_that_share_sequences(planned):
    two, four = planned(ranks=2), planned(ranks=4)
    assert two["settings"] == {"feed_forward_tiles": 2, "loss_tiles": 16, "checkpoint_layers": 1}
    assert two["memory"]["device"]["all-to-all"] == 4 * 128 * 64 * 2
    assert four["settings"]["feed_forward_tiles"] == 16  # as configured: 2 key heads cannot be divided among 4 ranks
    assert four["memory"]["device"]["all-to-all"] == 4 * 128 * 64 * 2


def test_quantised_folders_and_others_are_rejected(planned, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "gptq"}}))
    error = commands.refused(capsys, door("plan"), "decoder_64k", "--start", str(tmp_path), "--gpus", "1")
    assert "its weights are quantised (gptq)" in error
    file.write_text("{}")
    error = commands.refused(capsys, door("plan"), "decoder_64k", "--start", str(tmp_path), "--gpus", "1")
    assert 'its config.json lacks the "model_type" of a Hugging Face model' in error


STATES = States(trained=1000, frozen=0, largest=100, moments=8000, rounded=True)


@together(("stage", "each"), [(0, 2 + 12), (1, 2 + 12 / 4), (2, 2 + 12 / 4), (3, (2 + 12) / 4)])
def test_states_equal_the_zero_paper(stage, each):
    """Rajbhandari et al. 2019, figure 1: 2Ψ + 12Ψ of bf16 weights and Adam's fp32 numbers, shared by 4 ranks."""
    device = memory(STATES, Zero(stage), 4, passing=0, again=0, accumulated=False).device
    assert device["weights"] + device["fp32 weights"] + device["optimizer"] == 1000 * each
    assert device["ZeRO's buffers"] == (2 * BUCKET if stage else 0)


def test_offloaded_state_is_not_on_the_device():
    rank = memory(STATES, Zero(3, True, True), 4, passing=0, again=0, accumulated=False)
    assert rank.device["weights"] == 0 and "optimizer" not in rank.device
    assert rank.host == {"offloaded weights": 500, "offloaded optimizer": 3000, "offloaded gradients": 1000}


def test_a_plan_counts_without_weights_and_finds_the_longest_length():
    config = config_of(2048, {"attention": {"pattern": ["lsh"]}}, training={"precision": "bf16", "global_batch": 4})
    plan = Plan(config, A100, 2, available=RESERVE + 3 * 10**8)
    assert all(weight.is_meta for weight in plan.passes.model.parameters())
    longest, unit = plan.longest, 2048 // 64
    assert longest > 2048 and longest % unit == 0
    for length, fits in ((longest, True), (longest + 2 * unit, False)):
        counted = plan.passes.count(length)
        peak = sum(plan._memory(counted.peak(), counted.peak(0), length).device.values())
        assert peak <= plan.available * 1.01 if fits else peak > plan.available * 0.99


def test_the_longest_length_of_layers_in_tiles_fits_although_another_phase_needs_most(monkeypatch):
    monkeypatch.setattr(passes, "SHORTEST", 64)

    def planned(length, available=None):
        tiles = {"feed_forward_tiles": length // 32, "loss_tiles": length // 32}
        return Plan(config_of(length, DECODER | tiles), A100, available=available)

    available = RESERVE + 4 * (planned(512).peak - RESERVE)
    longest = (planned(512, available).longest or 0) // 32 * 32
    assert planned(longest, available).fits and not planned(longest + 64, available).fits


@pytest.mark.parametrize("activations", ["checkpoint", pytest.param("checkpoint_cpu", marks=pytest.mark.slow)])
def test_full_attention_that_is_recomputed_has_no_scores_on_a_gpu(activations):
    """Scores of 4,096 × 4,096 pairs and 4 heads are not counted; layer inputs are on the configured device."""
    counted = {}
    for layers in (2, 6):
        config = config_of(4096, {**DECODER, "layers": layers, "activations": activations}, **BF16)
        counted[layers] = Plan(config, A100).memory
    assert counted[6].device["activations"] < 4 * 4096**2 * 2
    inputs = 4096 * 96 * 4
    growth = counted[6].device["activations"] - counted[2].device["activations"]
    on_host = [rank.host.get("offloaded activations", 0) for rank in counted.values()]
    if activations == "checkpoint":
        assert abs(growth - 4 * inputs) < inputs and on_host == [0, 0]
    else:
        assert growth < inputs and on_host == [2 * inputs, 6 * inputs]


@pytest.mark.parametrize("kind", ["lha", "performer", "linformer", "ranked"])
@pytest.mark.parametrize("special", [{"padding_token": 257}, {"document_separator": 258}])
def test_passes_with_padding_and_packed_documents_are_counted(kind, special):
    """A pass over single documents needs no values, which the meta device lacks."""
    sections = {"lha": {"chunk": 32}, "performer": {"features": 16}, "linformer": {"projected": 16}}
    attention = {"pattern": [kind], kind: sections.get(kind, {})}
    encoder = {"kind": "encoder", "vocabulary": 300, "layers": 1, "heads": 2, "masking": {"token": 259}}
    assert Plan(config_of(128, {**encoder, "attention": attention, **special}), A100).peak > RESERVE


def test_seconds_by_hand():
    """2 micro-batches of 4,096 tokens on one of 2 ranks that share a sequence."""
    config = config_of(4096, {"attention": {"pattern": ["lsh"]}}, training={"global_batch": 2})
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"sequence": 2})})
    plan = Plan(config, replace(A100, peak=1e9, reach=0.5, bandwidth=1e12), 2)
    counted, flops = plan.passes.count(2048), hardware_flops_by_part(config.model, 4096)
    assert plan.seconds["feed-forward"] == pytest.approx(4096 * flops["feed-forward"] / 5e8)
    assert plan.seconds["attention"] == pytest.approx(4096 * flops["attention"] / 5e8)
    assert plan.seconds["elementwise"] == pytest.approx(2 * counted.moved / 0.8e12)
    assert plan.seconds["optimizer"] == pytest.approx(30 * plan.states.trained / 0.8e12)
    slow = Plan(config, replace(A100, bandwidth=1e6), 2)
    assert slow.seconds["attention"] == pytest.approx(2 * counted.by_attention / 0.8e6)  # bound by the bytes it moves
    assert slow.step_seconds == sum(slow.seconds.values())
    assert slow.seconds["launches"] == 0
    fast = Plan(config, replace(A100, peak=1e18, bandwidth=1e18), 2)
    computing = sum(fast.seconds[part] for part in fast.seconds if part not in ("launches", "optimizer"))
    assert fast.seconds["launches"] + computing == pytest.approx(2 * counted.host)  # the host is slower than the GPU
    assert [duration(seconds) for seconds in (28.0, 1800.0, 36e4)] == ["0.47 minutes", "30 minutes", "100.0 hours"]


@pytest.mark.parametrize("gpu", ["H200", pytest.param("H100", marks=pytest.mark.slow)])
def test_steps_are_planned_as_measured(gpu):
    """A micro-batch of reformer_64k, and of the same with full attention: time and memory."""
    rows = map(json.loads, (MEASURED / f"{gpu.lower()}.jsonl").read_text().splitlines())
    measured = {row["name"]: row["figures"] for row in rows if row["job"].startswith("train") and "s" in row["figures"]}
    config = load_config("reformer_64k", ["run.engine=torch"])
    for name in ("as configured", "all layers full", "hashed layers full"):
        plan, figures = Plan(build_config(models(config)[name]), GPUS[gpu]), measured[f"step, {name}"]
        assert plan.step_seconds / plan.micro_batches == pytest.approx(figures["s"], rel=0.1)
        assert (plan.peak - RESERVE) / 1e9 == pytest.approx(figures["GB"], rel=0.1)


def test_a_published_step_is_predicted_within_20_percent():
    """torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, Table 1: Llama 3.1 8B on 8 H100s of 2.4 TB/s, FSDP with
    selective activation checkpointing, without torch.compile: 5,762 tokens/s per GPU."""
    llama = {
        "vocabulary": 128256, "layers": 32, "d_model": 4096, "d_ff": 14336, "heads": 32, "key_heads": 8, "norm": "rms",
        "feed_forward": "swiglu", "feed_forward_biases": False, **ORDINARY, "positions": {"kind": "rotary"},
        "attention": {"pattern": ["full"]},
    }  # fmt: skip
    zero = {"zero_optimization": {"stage": 3}}
    training = {"precision": "bf16", "global_batch": 16, "micro_batch": 2}
    config = config_of(8192, llama, training=training, deepspeed=zero)
    plan = Plan(config, replace(GPUS["H100"], bandwidth=2.4e12), 8)
    assert plan.step_seconds == pytest.approx(2 * 8192 / 5762, rel=0.2)


@together("text", ["80", "80 gigs", "GiB", "-1GiB", "0GB"])
def test_sizes_need_a_number_and_a_unit(text):
    with pytest.raises(ConfigError, match=r"--gpu-memory: .*Write a number above 0 and a unit, such as 80GiB"):
        parse_bytes("--gpu-memory", text)
    assert parse_bytes("--gpu-memory", "1.5gib") == 3 * 2**29


def test_gpus_must_be_known_and_divide_the_batch():
    with pytest.raises(ConfigError, match=r'--gpu: "V9" is not one of A100, H100, H200\. Also give --peak-tflops'):
        hardware("V9", None)
    assert hardware("V9", 100).peak == 1e14
    config = config_of(training={"global_batch": 4})
    with pytest.raises(ConfigError, match=r"--gpus: 3 GPUs process 3 sequences at once.*Use at most 4 GPUs"):
        Plan(config, A100, 3)
    with pytest.raises(ConfigError, match="--gpus: 12 is not a multiple of --gpus-per-node = 8"):
        Plan(config, A100, 12)


def test_the_command_prints_json(tmp_path, capsys):
    (tmp_path / "config.json").write_text(config_of(training={"global_batch": 4}).model_dump_json())
    words = ["--config", tmp_path / "config.json", "--gpus", 2, "--gpu-memory"]
    commands.run(door("plan"), *words, "2GiB", "--json")
    plan = json.loads(capsys.readouterr().out)
    assert plan["peak"] == sum(plan["memory"]["device"].values()) and plan["fits"] is True
    assert plan["step_seconds"] == pytest.approx(sum(plan["seconds"].values()))
    commands.run(door("plan"), *words, "2GiB")
    assert "longest sequence that fits" in capsys.readouterr().out
    assert "needs a unit" in commands.refused(capsys, door("plan"), *words, "80")


def test_a_run_that_cannot_fit_is_rejected_on_every_rank(capsys):
    pools = [MemoryPool("GPU memory", {"weights": 90}, 100), MemoryPool("CPU memory", {"inputs": 110}, 100)]
    require_fit(pools[:1], Ranks(), "Change x")
    assert capsys.readouterr().err == ""
    require_fit(pools, Ranks(), "Change x")
    (warning,) = capsys.readouterr().err.splitlines()
    assert "may not fit: a step needs about 0.000 MB of CPU memory" in warning
    with pytest.raises(UserError, match=r"this run cannot fit: .* of CPU memory, .* are available\. Change x"):
        require_fit([pools[0], replace(pools[1], available=90)], Ranks(), "Change x")
    other = SimpleNamespace(any=lambda refused: True)
    with pytest.raises(UserError, match="cannot fit on another rank"):
        require_fit(pools[:1], other, "Change x")


def test_a_pretrained_start_is_checked_on_a_gpu_only(monkeypatch):
    from megasparse.planning import plan
    from megasparse.runs.pretraining import require_room

    config = load_config("decoder_64k")
    model = config.model.model_copy(update={"vocabulary": 512, "layers": 2, "d_model": 256, "heads": 4, "key_heads": 2})
    config = config.model_copy(update={"model": model})
    ranks = SimpleNamespace(device=torch.device("cpu"), rank=0, world_size=1, any=bool, say=print)
    require_room(config, ranks)
    ranks.device = torch.device("cuda")
    free = {"cuda": RESERVE // 2, "cpu": 64 * 10**9}
    monkeypatch.setattr(plan, "available_bytes", lambda device: free[device.type])
    with pytest.raises(UserError, match=r"this run cannot fit: .* of GPU memory"):
        require_room(config, ranks)
    free["cuda"] = 80 * 10**9
    require_room(config, ranks)
    free["cpu"] = 65536 * 256 * 2  # half of the inputs of two layers in bf16
    with pytest.raises(UserError, match=r"this run cannot fit: .* of CPU memory"):
        require_room(config, ranks)


RANKS, SHARED_LENGTH = 2, 128
CPU = {"device": "cpu"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{precision}, ZeRO {stage}": (precision, {"stage": stage}) for precision in ("fp32", "bf16") for stage in range(4)
}
CASES["bf16, ZeRO 2, optimizer on the CPU"] = ("bf16", {"stage": 2, "offload_optimizer": CPU})
CASES["fp32, ZeRO 1, Adafactor"] = ("fp32", {"stage": 1})
CASES["bf16, ZeRO 2, Muon"] = ("bf16", {"stage": 2})
CASES["bf16, ZeRO 3, Adafactor"] = ("bf16", {"stage": 3})
CASES["bf16, ZeRO 3, both on the CPU"] = ("bf16", {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU})


def zero_config_of(case: str) -> Config:
    precision, zero = CASES[case]
    model = {"d_model": 128, "d_ff": 512, "attention": {"pattern": ["lsh"], "lsh": {"chunk": 32, "rounds": 1}}}
    return config_of(
        SHARED_LENGTH,
        model,
        run={"device": "cpu", "engine": "deepspeed"},
        training={"global_batch": RANKS, "precision": precision},
        optimizer={"name": next((name for name in ("adafactor", "muon") if name.title() in case), "adamw")},
        deepspeed={"zero_optimization": zero},
    )


def held() -> dict[str, dict[str, int]]:
    torch.set_num_threads(1)
    found = {}
    for case in CASES:
        config = zero_config_of(case)
        ranks = start_ranks(config.run)
        engine = build_engine(build_model(config.model, 0), config, lambda step, x: RngContext(0, step, x, True), ranks)
        batch = Batch(dummy_records(config.model, 1, SHARED_LENGTH, ranks.rank), torch.tensor([ranks.rank]))
        for step in range(2):
            result = engine.train_step([batch], step, 1e-3)
        found[case] = {kind: sum(sizes) for kind, sizes in result.held.items()}
        engine.close()
    return found


def predicted(case: str) -> dict[str, int]:
    plan = Plan(zero_config_of(case), GPUS["A100"], RANKS)
    every = plan.memory.device | plan.memory.host
    names = {"weights": ["weights"], "optimizer": ["fp32 weights", "optimizer"]}
    return {
        kind: sum(every.get(key, 0) for name in parts for key in (name, f"offloaded {name}"))
        for kind, parts in names.items()
    }


@pytest.mark.soak
def test_predicted_memory_per_rank_equals_the_allocations():
    """One launch of two ranks on the CPU. Compiles DeepSpeed's Adam for the CPU where that has not been done."""
    found = run_ranks(held, RANKS, timeout=600)
    for case in CASES:
        for kind, size in predicted(case).items():
            for rank in range(RANKS):
                own = found[rank][case][kind]
                assert size == pytest.approx(own, rel=0.001), (case, kind)  # counts of steps, padding
