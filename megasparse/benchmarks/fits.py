"""Pretrained decoders of several sizes on one GPU: the longest sequences that the planner finds room for.

Nothing is measured and no weight is made: the plans count what GPU kernels would allocate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megasparse.config.checks import check
from megasparse.config.schema import Config
from megasparse.evaluation.outputs import write_json
from megasparse.planning.further import longest_that_fits
from megasparse.planning.hardware import GPUS, gigabytes
from megasparse.planning.plan import Assumptions, Plan

LLAMA: dict[str, Any] = {
    "norm": "rms",
    "feed_forward": "swiglu",
    "feed_forward_biases": False,
    "attention_biases": "none",
    "logit_scale": 1.0,
    "start_token": 1,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.1B (SmolLM2-135M)": {
        "vocabulary": 49152, "layers": 30, "d_model": 576, "d_ff": 1536, "heads": 9, "key_heads": 3,
        "tied_embeddings": True,
    },
    "1B (Llama 3.2)": {
        "vocabulary": 128256, "layers": 16, "d_model": 2048, "d_ff": 8192, "heads": 32, "key_heads": 8,
        "tied_embeddings": True,
    },
    "8B (Llama 3.1)": {
        "vocabulary": 128256, "layers": 32, "d_model": 4096, "d_ff": 14336, "heads": 32, "key_heads": 8,
    },
}  # fmt: skip
"""Published sizes of Llamas, by name."""


def bench_fits(config: Config, memories: Sequence[int], command: str, output: Path | None = None) -> Iterator[str]:
    """Yield the rows of a Markdown table, one for each shape with adapters and with all weights, and write them to
    `output` as JSON.

    config: all but the model's sizes; its `lora` is that of the adapters. memories: of GPUs, in bytes. A cell is the
    longest sequence that fits, in tokens. Raises ConfigError where the configuration does not go with a shape.
    """
    rows: list[dict[str, Any]] = []
    heads = " | ".join(f"on {memory / 1e9:g} GB" for memory in memories)
    yield f"| decoder | trained | GPU | CPU | {heads} |\n|---|---|---|---|{'---|' * len(memories)}"
    for shape, sizes in SHAPES.items():
        for trained, lora in (("adapters", config.lora), ("all weights", None)):
            model = config.model.model_copy(update={**LLAMA, **sizes})
            row = _row(config.model_copy(update={"model": model, "lora": lora}), memories)
            rows.append({"shape": shape, "trained": trained, **row})
            cells = " | ".join(f"{longest:,}" if longest else "no" for longest in row["longest"])
            sizes_of = f"{gigabytes(row['gpu'])} | {gigabytes(row['cpu'])}"
            yield f"| {shape} | {trained}, {row['weights']:,} | {sizes_of} | {cells} |"
    if output is not None:
        length = config.data.sequence_length
        write_json(output, {"command": command, "tokens": length, "memories": list(memories), "rows": rows})


def _row(config: Config, memories: Sequence[int]) -> dict[str, Any]:
    """Number of trained weights, bytes at the peak at the configuration's length, and the longest that fits each."""
    check(config)
    plan = Plan(config, Assumptions(GPUS["A100"]))
    found = [longest_that_fits(Plan(config, replace(plan.on, available=size), plan.passes)) for size in memories]
    return {
        "weights": plan.passes.states.trained,
        "gpu": max(plan.peak, plan.starting),
        "cpu": sum(plan.memory.host.values()),
        "device": plan.memory.device,
        "host": plan.memory.host,
        "longest": [each and each.length for each in found],
    }
