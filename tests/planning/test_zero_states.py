"""Predicted bytes of weights, gradients and optimizer state under ZeRO against the tensors that DeepSpeed's ranks hold.

One launch of two ranks on the CPU. Compiles DeepSpeed's Adam for the CPU where that has not been done: soak tier.
"""

from typing import Any

import pytest
import torch

from megasparse.config.load import build_config
from megasparse.config.schema import Config
from megasparse.data.batches import Batch
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.planning.passes import dummy_records
from megasparse.planning.plan import GPUS, Plan
from megasparse.training.engines import build_engine
from megasparse.training.ranks import start_ranks
from tests.helpers.run_ranks import run_ranks

pytestmark = pytest.mark.soak

RANKS, LENGTH = 2, 128
CPU = {"device": "cpu"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{precision}, ZeRO {stage}": (precision, {"stage": stage}) for precision in ("fp32", "bf16") for stage in range(4)
}
CASES["bf16, ZeRO 2, optimizer on the CPU"] = ("bf16", {"stage": 2, "offload_optimizer": CPU})
CASES["fp32, ZeRO 1, Adafactor"] = ("fp32", {"stage": 1})
CASES["bf16, ZeRO 3, Adafactor"] = ("bf16", {"stage": 3})
CASES["bf16, ZeRO 3, both on the CPU"] = ("bf16", {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU})


def config_of(case: str) -> Config:
    precision, zero = CASES[case]
    return build_config(
        {
            "run": {"device": "cpu", "engine": "deepspeed"},
            "model": {
                "max_length": LENGTH, "layers": 2, "d_model": 128, "d_ff": 512, "heads": 4,
                "attention": {"pattern": ["lsh"], "lsh": {"chunk": 32, "rounds": 1}},
            },
            "data": {"sequence_length": LENGTH},
            "training": {"global_batch": RANKS, "precision": precision},
            "optimizer": {"name": "adafactor" if "Adafactor" in case else "adamw"},
            "deepspeed": {"zero_optimization": zero},
        }
    )  # fmt: skip


def held() -> dict[str, dict[str, int]]:
    """Bytes that this rank holds after two steps, on its device or elsewhere."""
    torch.set_num_threads(1)
    found = {}
    for case in CASES:
        config = config_of(case)
        ranks = start_ranks(config.run)
        engine = build_engine(build_model(config.model, 0), config, lambda step, x: RngContext(0, step, x, True), ranks)
        batch = Batch(dummy_records(config.model, 1, LENGTH, ranks.rank), torch.tensor([ranks.rank]), 1)
        for step in range(2):
            result = engine.train_step([batch], step, 1e-3)
        found[case] = {kind: sum(sizes) for kind, sizes in result.held.items()}
        engine.close()
    return found


def predicted(case: str) -> dict[str, int]:
    plan = Plan(config_of(case), GPUS["A100"], RANKS)
    every = plan.memory.device | plan.memory.host
    names = {"weights": ["weights"], "optimizer": ["fp32 weights", "optimizer"]}
    return {
        kind: sum(every.get(key, 0) for name in parts for key in (name, f"offloaded {name}"))
        for kind, parts in names.items()
    }


def test_ranks_hold_what_is_predicted():
    found = run_ranks(held, RANKS, timeout=600)
    for case in CASES:
        for kind, size in predicted(case).items():
            for rank in range(RANKS):
                own = found[rank][case][kind]
                print(f"{case:36} rank {rank} {kind:10} predicted {size:>11,} held {own:>11,}")
                assert size == pytest.approx(own, rel=0.001), (case, kind)  # counts of steps, padding
