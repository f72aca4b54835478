"""Whether a pretrained decoder fits a GPU, said before any weight is made."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megasparse.config.load import load_config
from megasparse.errors import UserError
from megasparse.planning.hardware import GPUS
from megasparse.planning.plan import RESERVE, Assumptions, Plan
from megasparse.runs import fit

GB = 10**9
LLAMA = {
    "norm": "rms", "feed_forward": "swiglu", "feed_forward_biases": False, "attention_biases": "none",
    "logit_scale": 1.0, "start_token": 1,
}  # fmt: skip
LLAMA_8B = {"vocabulary": 128256, "layers": 32, "d_model": 4096, "d_ff": 14336, "heads": 32, "key_heads": 8}
SMALL = {"vocabulary": 512, "layers": 2, "d_model": 256, "d_ff": 1024, "heads": 4, "key_heads": 2}


def plan(available, lora=True, **sizes):
    config = load_config("decoder_64k")
    model = config.model.model_copy(update={**LLAMA, **(sizes or SMALL)})
    config = config.model_copy(update={"model": model, "lora": config.lora if lora else None})
    return Plan(config, Assumptions(GPUS["A100"], available=available))


@pytest.fixture(scope="module")
def small():
    return plan(80 * GB)


def on(found, available):
    """The same plan on a GPU of another size."""
    return Plan(found.config, replace(found.on, available=int(available)), found.passes)


def test_what_fits_is_not_mentioned(small):
    assert fit.shortage(small, host=64 * GB) is None


def test_a_gpu_too_small_is_refused_with_what_helps(small):
    certain, problem = fit.shortage(on(small, 0.84 * small.peak), host=64 * GB)
    assert certain and "of GPU memory" in problem and "data.sequence_length=" in problem
    certain, problem = fit.shortage(on(small, 0.95 * small.peak), host=64 * GB)
    assert not certain


def test_cpu_memory_for_block_inputs_is_asked_for_too(small):
    inputs = small.memory.host["offloaded activations"]
    assert inputs == 65536 * 256 * 4 * 2  # tokens, width, fp32, layers
    certain, problem = fit.shortage(small, host=inputs // 2)
    assert certain and "CPU memory" in problem


def test_a_start_that_does_not_fit_whole_is_none():
    """8 billion weights in fp32 are on the GPU before they are rounded; frozen ones are rounded before."""
    adapters, whole = plan(None, **LLAMA_8B), plan(None, lora=False, **LLAMA_8B)
    number = whole.passes.states.trained
    assert number == 8_030_261_248  # as published
    assert whole.starting == RESERVE + 4 * number
    trained = adapters.passes.states.trained
    assert trained == 16 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024))  # rank, layers, A and B of q, o, k, v
    assert adapters.starting == RESERVE + 2 * number + 4 * trained


def test_a_run_asks_on_a_gpu_alone(monkeypatch, small):
    config = small.config
    ranks = SimpleNamespace(device=torch.device("cpu"), rank=0, world_size=1, any=bool)
    fit.require_fit(config, ranks)
    ranks.device = torch.device("cuda")
    free = {"cuda": RESERVE // 2, "cpu": 64 * GB}
    monkeypatch.setattr(fit, "available_bytes", lambda device: free[device.type])
    with pytest.raises(UserError, match=r"this run cannot fit: it takes about .* of GPU memory"):
        fit.require_fit(config, ranks)
    free["cuda"] = 80 * GB
    fit.require_fit(config, ranks)
