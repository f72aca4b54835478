"""Predicted memory is held against what steps allocate; the plan's other figures against hand counts."""

import copy
import json

import pytest
import torch

from megasparse.cli.main import door
from megasparse.config.load import build_config
from megasparse.errors import ConfigError
from megasparse.planning.further import longest_that_fits, pretraining_hints, scaled
from megasparse.planning.hardware import GPUS, hardware, parse_bytes
from megasparse.planning.plan import RESERVE, Assumptions, Plan
from megasparse.planning.states import BUCKET, States, Zero, memory
from megasparse.planning.traffic import Cluster, communication, offload
from tests.helpers import commands
from tests.helpers.allocated import predicted_and_allocated

BASE = {
    "run": {"device": "cpu", "engine": "torch"},
    "model": {"layers": 3, "d_model": 128, "d_ff": 512, "heads": 4, "feed_forward_tiles": 4, "loss_tiles": 4},
    "training": {"global_batch": 1, "micro_batch": 1},
}
ORDINARY = {"blocks": "ordinary"}


def attention(*pattern, **sections):
    return {"pattern": list(pattern), **sections}


LSH = attention("lsh", lsh={"chunk": 64, "rounds": 2})
LHA = attention("lha", lha={"chunk": 64})
BOTH = attention({"local": 2, "lha": 2}, local={"chunk": 64}, lha={"chunk": 64})
BIRD = attention("smart_bird", smart_bird={"keys": 16})
YOSO = attention("yoso", yoso={"hashes": 8})
BF16 = {"training": {"precision": "bf16"}}
ENCODER = {"kind": "encoder", "vocabulary": 300}
CASES = {
    "lsh, reversible, 64K": (65536, {"layers": 2, "d_model": 64, "d_ff": 128, "attention": LSH}, {}),
    "lsh, stored": (8192, {**ORDINARY, "activations": "stored", "attention": LSH}, {}),
    "lsh, checkpoint, bf16": (
        16384,
        {**ORDINARY, "activations": "checkpoint", "attention": LSH, "feed_forward_tiles": 1},
        BF16,
    ),
    "lha, bf16": (16384, {"layers": 2, "d_model": 64, "attention": LHA}, BF16),
    "lha, encoder, batch 4": (
        4096,
        {"layers": 2, "d_model": 64, **ENCODER, "attention": LHA},
        {"training": {"micro_batch": 4, "global_batch": 4}},
    ),
    "yoso, causal, bf16": (8192, {"attention": YOSO}, BF16),
    "smart_bird": (8192, {"layers": 1, "d_model": 64, "attention": BIRD}, {}),
    "full, stored, vocabulary of 8,000": (
        4096,
        {**ORDINARY, "activations": "stored", "vocabulary": 8000, "attention": attention("full"), "loss_tiles": 1},
        {},
    ),
    "local and lha in one layer": (
        16384,
        {"layers": 2, "d_model": 64, "attention": BOTH},
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
        8192,
        {"layers": 2, "d_model": 256, "d_ff": 2048, "vocabulary": 8000, "attention": LSH, "feed_forward_tiles": 1},
        {"optimizer": {"name": "adafactor"}},
    ),
    "lsh, no tiles, bert": (
        4096,
        {
            **ORDINARY, "kind": "encoder", "style": "bert", "activations": "stored", "vocabulary": 2000,
            "feed_forward_tiles": 1, "loss_tiles": 1, "padding_token": 300, "attention": LSH,
        },
        {"training": {"micro_batch": 2, "global_batch": 2}},
    ),
    # Whose blocks are not full in short passes: a line through passes with whole blocks is too steep.
    "smart_bird, 3 layers": (4096, {"attention": BIRD}, {}),
    "smart_bird, 2 layers": (4096, {"layers": 2, "d_model": 64, "attention": BIRD}, {}),
    "yoso, encoder": (8192, {**ENCODER, "attention": YOSO}, {}),
    "yoso, encoder, 32K": (32768, {**ENCODER, "layers": 2, "d_model": 64, "attention": YOSO}, {}),
    "adafactor, wide, short": (
        2048,
        {"layers": 2, "d_model": 256, "d_ff": 2048, "vocabulary": 8000, "attention": LSH, "feed_forward_tiles": 1},
        {"optimizer": {"name": "adafactor"}},
    ),
    "lsh, heads of 16, 1 layer": (8192, {"layers": 1, "d_model": 64, "d_ff": 128, "attention": LSH}, {}),
    "lsh, heads of 16, 2 layers": (8192, {"layers": 2, "d_model": 64, "attention": LSH}, {}),
    "lsh, heads of 16, dropout": (16384, {"layers": 2, "d_model": 64, "dropout": 0.1, "attention": LSH}, {}),
    "routing": (8192, {"layers": 2, "d_model": 64, "attention": attention("routing")}, {}),
    "performer, encoder": (16384, {"layers": 2, "d_model": 64, **ENCODER, "attention": attention("performer")}, {}),
}  # fmt: skip


DECODER = {
    **ORDINARY, "layers": 4, "d_model": 96, "d_ff": 256, "key_heads": 2, "norm": "rms", "feed_forward": "swiglu",
    "feed_forward_biases": False, "activations": "checkpoint", "vocabulary": 4000, "loss_tiles": 8,
    "tied_embeddings": True, "positions": {"kind": "rotary"}, "attention": attention("full"),
}  # fmt: skip
QUICK = {
    "quick: lsh, reversible": (8192, {"layers": 1, "d_model": 64, "d_ff": 128, "attention": LSH}, {}),
    "quick: blocks not full in passes": (2048, {"layers": 1, "d_model": 64, "d_ff": 128, "attention": LSH}, {}),
    "quick: full, stored, bf16": (
        4096,
        {**ORDINARY, "layers": 2, "d_model": 32, "d_ff": 64, "activations": "stored", "attention": attention("full")},
        BF16,
    ),
    "quick: adafactor, accumulated": (
        256,
        {"layers": 2, "d_model": 64, "d_ff": 512, "attention": attention("local", local={"chunk": 32})},
        {"optimizer": {"name": "adafactor"}, "training": {"global_batch": 2}},
    ),
    "quick: decoder, adapters": (2048, DECODER, {**BF16, "lora": {"targets": ["query", "value", "output"]}}),
}


def values(name):
    length, model, sections = (CASES | QUICK)[name]
    found = copy.deepcopy(BASE)
    found["model"] |= {"max_length": length, **model}
    found["data"] = {"sequence_length": length}
    for key, section in sections.items():
        found[key] = {**found.get(key, {}), **section}
    return found


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.soak) for name in CASES)])
def test_peaks_are_within_10_percent_of_what_is_allocated(name):
    """`pytest -s -m soak` prints them. The pass that a prediction takes is a quarter as long as the run, or shorter."""
    predicted, measured, longest = predicted_and_allocated(build_config(values(name)))
    length = values(name)["data"]["sequence_length"]
    reported = f"predicted {predicted / 1e6:.1f} MB from {longest} tokens, measured {measured / 1e6:.1f} MB of {length}"
    print(f"{name:34} {reported}: {predicted / measured - 1:+.1%}")
    assert longest <= length / 4 or length <= 1024
    assert abs(predicted / measured - 1) < 0.1, reported


STATES = States(trained=1000, frozen=0, largest=100, moments=8000, rounded=True)


@pytest.mark.parametrize(("stage", "each"), [(0, 2 + 12), (1, 2 + 12 / 4), (2, 2 + 12 / 4), (3, (2 + 12) / 4)])
def test_states_are_those_of_the_zero_paper(stage, each):
    """Rajbhandari et al. 2019, figure 1: 2Ψ + 12Ψ of bf16 weights and Adam's fp32 numbers, shared by 4 ranks."""
    found = memory(STATES, Zero(stage), 4, passing=0, again=0, accumulated=False).device
    assert found["weights"] + found["fp32 weights"] + found["optimizer"] == 1000 * each
    assert found["ZeRO's buffers"] == (2 * BUCKET if stage else 0)


def test_what_is_offloaded_is_not_on_the_device():
    found = memory(STATES, Zero(3, "nvme", "cpu"), 4, passing=0, again=0, accumulated=False)
    assert found.device["weights"] == 0 and "optimizer" not in found.device
    assert found.host == {"offloaded weights": 500} and found.nvme["offloaded optimizer"] == 3000


def small(**sections):
    model = {"max_length": 2048, "layers": 2, "d_model": 32, "d_ff": 64, "heads": 4, "attention": LSH}
    return build_config({"model": model, "data": {"sequence_length": 2048}, **sections})


def test_traffic_counts_every_pass():
    config, cluster = small(), Cluster(16, 8, 1)
    sent = {s: communication(config, STATES, Zero(s), cluster, 3, GPUS["A100"]).zero for s in range(4)}
    assert sent == {0: 2 * 1875, 1: 2 * 1875, 2: 4 * 1875, 3: 9 * 1875}  # 2,000 bytes of weights, 15/16 of them
    split = config.model_copy(update={"parallel": config.parallel.model_copy(update={"sequence": 4})})
    moved = communication(split, STATES, Zero(3), Cluster(16, 8, 4), 1, GPUS["A100"]).sequence
    assert moved == 2 * 3 * 3 * (2048 // 4) * 32 * 4 * 3 / 4  # layers, passes, q v out (shared keys), fp32
    beyond = config.model_copy(update={"parallel": config.parallel.model_copy(update={"sequence": 16})})
    moved = communication(beyond, STATES, Zero(3), Cluster(16, 16, 16), 1, GPUS["A100"]).sequence
    each = 2 * 8 * 4 * 15 + (8 * 4 + 4) * 15  # q and v, and out with its log-sum-exps, of one of 4 heads of 8 numbers
    assert moved == 2 * 3 * (2048 // 16) * each
    swap = offload(STATES, Zero(3, "nvme", "cpu"), cluster, 3, GPUS["A100"])
    assert (swap.weights, swap.gradients, swap.nvme) == (7 * 125, 3 * 125, 2 * 12 * 1000 / 16)


def test_a_plan_counts_without_weights_and_finds_the_longest_length():
    config = small(training={"precision": "bf16", "global_batch": 4})
    plan = Plan(config, Assumptions(GPUS["A100"], gpus=2, available=RESERVE + 3 * 10**9))
    assert all(weight.is_meta for weight in plan.passes.model.parameters())
    longest = longest_that_fits(plan)
    assert plan.at_length(longest.length) <= plan.on.available < plan.at_length(longest.length + 2048 // 64)
    assert longest.changed["model.max_length"] == longest.length > 2048
    found = {hint.change: hint.peak for hint in pretraining_hints(plan)}
    assert "parallel.sequence=2" in found and list(found.values()) == sorted(found.values())
    assert max(found.values()) < plan.peak
    assert plan.hides_from(plan.communication.seconds) is not None


def test_axial_positions_and_buckets_grow_with_the_length():
    positions = {"kind": "axial", "axial_shape": [32, 64], "axial_dims": [16, 16]}
    lsh = {"pattern": ["lsh"], "lsh": {"chunk": 64, "buckets": 64}}
    values = {"max_length": 2048, "d_model": 32, "heads": 4, "layers": 1, "attention": lsh, "positions": positions}
    config, changed = scaled(build_config({"model": values, "data": {"sequence_length": 2048}}), 5000)
    assert changed["model.positions.axial_shape"] == [79, 64] == config.model.positions.axial_shape
    assert changed["model.attention.lsh.buckets"] == 156


@pytest.mark.parametrize("text", ["80", "80 gigs", "GiB", "-1GiB", "0GB"])
def test_sizes_need_a_number_and_a_unit(text):
    with pytest.raises(ConfigError, match=r"--gpu-memory: .*Write a number above 0 and a unit, such as 80GiB"):
        parse_bytes("--gpu-memory", text)
    assert parse_bytes("--gpu-memory", "1.5gib") == 3 * 2**29


def test_gpus_must_be_known_and_divide_the_batch():
    with pytest.raises(ConfigError, match=r'--gpu: "V9" is not one of A100, H100, H200\. Give --peak-tflops'):
        hardware("V9", None)
    assert hardware("V9", 100).peak == 1e14
    config = small(training={"global_batch": 4})
    with pytest.raises(ConfigError, match=r"--gpus: 3 GPUs take 3 sequences at once.*At most 4 GPUs have work"):
        Plan(config, Assumptions(GPUS["A100"], gpus=3))
    with pytest.raises(ConfigError, match="--gpus: 12 is no multiple of --gpus-per-node = 8"):
        Plan(config, Assumptions(GPUS["A100"], gpus=12))


def test_the_command_prints_json(tmp_path, capsys):
    (tmp_path / "config.json").write_text(small(training={"global_batch": 4}).model_dump_json())
    words = ["--config", tmp_path / "config.json", "--gpus", 2, "--gpu-memory"]
    commands.run(door("plan"), *words, "2GiB", "--json")
    plan = json.loads(capsys.readouterr().out)
    assert plan["peak"] == sum(plan["memory"]["device"].values()) and plan["memory"]["path"] == "counted"
    assert "no unit" in commands.refused(capsys, door("plan"), *words, "80")


def test_counting_allocates_what_torch_allocates(monkeypatch):
    """What is counted without memory is what exists with it, where the same operators run."""
    monkeypatch.setenv("MEGASPARSE_OPS", "reference")
    settings = {"blocks": "ordinary", "activations": "stored", "attention": attention("local", local={"chunk": 32})}
    model = {"max_length": 256, "layers": 2, "d_model": 32, "d_ff": 64, "heads": 2, **settings}
    config = build_config({"model": model, "data": {"sequence_length": 256}})
    counted, real = (
        Plan(config, Assumptions(GPUS["A100"], path=path)).passes.curve for path in ("counted", "measured")
    )
    assert counted.ends == real.ends and torch.equal(*(torch.from_numpy(x.gradients) for x in (counted, real)))
    assert counted.bytes(1, 256) == pytest.approx(real.bytes(1, 256), rel=0.02)


def encoder(kind, section, **special):
    attended = attention(kind, **{kind: section})
    model = {**ENCODER, "max_length": 128, "layers": 1, "d_model": 32, "heads": 2, "attention": attended, **special}
    return build_config({"model": {**model, "masking": {"token": 259}}, "data": {"sequence_length": 128}})


@pytest.mark.parametrize("kind", ["lha", "performer", "linformer"])
@pytest.mark.parametrize("special", [{"padding_token": 257}, {"document_separator": 258}])
def test_passes_with_padding_and_packed_documents_are_counted(kind, special):
    """A pass over single documents needs no values, which the meta device lacks."""
    section = {"lha": {"chunk": 32}, "performer": {"features": 16}, "linformer": {"projected": 16}}
    config = encoder(kind, section[kind], **special)
    assert Plan(config, Assumptions(GPUS["A100"], path="counted")).passes.curve.bytes(1, 128) > 0


@pytest.mark.parametrize("kind", ["lsh", "smyrf"])
def test_fewer_rounds_are_a_hint(kind):
    config = encoder(kind, {"chunk": 32, "rounds": 8})
    hints = pretraining_hints(Plan(config, Assumptions(GPUS["A100"])))
    assert f"model.attention.{kind}.rounds=4" in [hint.change for hint in hints]


@pytest.mark.parametrize("activations", ["checkpoint", "checkpoint_cpu"])
def test_full_attention_that_is_recomputed_has_no_scores_on_a_gpu(activations):
    """Nor is a score of 4,096 × 4,096 pairs and 4 heads counted; inputs of layers are where the configuration says."""
    counted = {}
    for layers in (2, 6):
        model = {**DECODER, "layers": layers, "activations": activations, "max_length": 4096}
        config = build_config({**BASE, "model": {**BASE["model"], **model}, "data": {"sequence_length": 4096}, **BF16})
        counted[layers] = Plan(config, Assumptions(GPUS["A100"])).memory
    assert counted[6].device["activations"] < 4 * 4096**2 * 2
    inputs = 4096 * 96 * 4
    grown = counted[6].device["activations"] - counted[2].device["activations"]
    on_host = [each.host.get("offloaded activations", 0) for each in counted.values()]
    if activations == "checkpoint":
        assert abs(grown - 4 * inputs) < inputs and on_host == [0, 0]
    else:
        assert grown < inputs and on_host == [2 * inputs, 6 * inputs]
