"""A rank's planned memory by the kinds that a run counts, for the report of a run that memory did not suffice for."""

from megasparse.config.schema import Config
from megasparse.planning.further import pretraining_changes
from megasparse.planning.hardware import GPUS
from megasparse.planning.plan import RESERVE, Assumptions, Plan
from megasparse.training.ranks import Ranks
from megasparse.training.reporting.memory_shortage import PlannedMemory

KIND_OF = {"weights": "weights", "gradients": "gradients", "fp32 weights": "optimizer", "optimizer": "optimizer"}
"""Part of a plan -> kind. What of these is offloaded to the memory of a CPU that computes is there all the same."""


def by_kind(parts: dict[str, int], peak: int) -> dict[str, int]:
    """The parts of a plan by kind; what is none of these is "other", up to the peak."""
    held = {"weights": 0, "gradients": 0, "optimizer": 0}
    for name, size in parts.items():
        if (kind := KIND_OF.get(name.removeprefix("offloaded "))) is not None:
            held[kind] += size
    return held | {"other": peak - sum(held.values())}


def planned_memory(config: Config, ranks: Ranks) -> PlannedMemory:
    """Plan a rank of a pretraining run: counted on a GPU, without what is not torch's there; from short passes on a
    CPU, all of the process.
    """
    on_gpu, size = ranks.device.type == "cuda", ranks.world_size
    aside = RESERVE if on_gpu else 0
    on = Assumptions(GPUS["A100"], gpus=size, per_node=size, path="counted" if on_gpu else "measured")
    plan = Plan(config, on)
    parts = plan.memory.device | ({} if on_gpu else plan.memory.host)
    changes = ((change, lambda predict=predict: predict() - aside) for change, predict in pretraining_changes(plan))
    return PlannedMemory(by_kind(parts, plan.peak - aside), changes)
