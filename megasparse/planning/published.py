"""Published training steps with full attention, to hold the planner's seconds to. No figure here is ours."""

from dataclasses import dataclass, replace
from typing import Any

from megasparse.config.load import build_config
from megasparse.config.schema import Config
from megasparse.planning.hardware import GPUS, Hardware

TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_H100 = replace(GPUS["H100"], bandwidth=2.4e12, memory=96 * 10**9)
"""As stated there: HBM2e of 2.4 TB/s, limited to 500 W."""
LLAMA_8B = {
    "vocabulary": 128256, "layers": 32, "d_model": 4096, "d_ff": 14336, "heads": 32, "key_heads": 8, "norm": "rms",
    "feed_forward": "swiglu", "feed_forward_biases": False, "blocks": "ordinary", "positions": {"kind": "rotary"},
    "attention": {"pattern": ["full"]},
}  # fmt: skip
QWEN3_8B = LLAMA_8B | {"vocabulary": 151936, "layers": 36, "d_ff": 12288, "query_key_norm": True}


@dataclass(frozen=True)
class Published:
    """A step of `tokens` that took `seconds`; `about` how it was trained that the planner does not know."""

    name: str
    source: str
    about: str
    config: Config
    gpus: int
    gpu: Hardware
    seconds: float

    @property
    def tokens(self) -> int:
        return self.config.training.global_batch * self.config.data.sequence_length


def _config(model: dict[str, Any], length: int, batch: int, micro: int, sequence: int, **own: Any) -> Config:
    return build_config(
        {
            "model": {**model, "max_length": length, **own},
            "data": {"sequence_length": length},
            "training": {"precision": "bf16", "global_batch": batch, "micro_batch": micro},
            "parallel": {"sequence": sequence},
            "deepspeed": {"zero_optimization": {"stage": 3}},
        }
    )


def _titan(name: str, gpus: int, micro: int, gpu: Hardware, rate: float, source: str, about: str) -> Published:
    config = _config(LLAMA_8B, 8192, gpus * micro, micro, 1, activations="stored")
    return Published(name, source, about, config, gpus, gpu, micro * 8192 / rate)


def published() -> list[Published]:
    selective = "FSDP, selective activation checkpointing, no torch.compile"
    million = _config(QWEN3_8B, 1 << 20, 1, 1, 8, activations="checkpoint", loss_tiles=512)
    return [
        Published(
            "Qwen3-8B, 1,048,576 tokens, 8 H100s", "TRL 1.13 release notes", "FSDP, ring attention, checkpointing",
            million, 8, GPUS["H100"], 380.0,
        ),
        _titan("Llama 3.1 8B, 8,192 tokens, 8 H100s", 8, 2, TITAN_H100, 5762, f"{TITAN}, Table 1", selective),
        _titan("Llama 3.1 8B, 8,192 tokens, 128 H100s", 128, 2, TITAN_H100, 5605, f"{TITAN}, Table 3", selective),
        _titan(
            "Llama 3 8B, 8,192 tokens, 64 A100s", 64, 1, GPUS["A100"], 2973,
            "torchtitan, docs/performance.md of 2024", "FSDP2, selective activation checkpointing",
        ),
    ]  # fmt: skip
