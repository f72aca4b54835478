"""A run's memory on its GPUs, asked of the planner before any weight is made."""

import sys

import torch

from megasparse.config.schema import Config
from megasparse.errors import UserError
from megasparse.planning.further import longest_that_fits, pretraining_hints
from megasparse.planning.hardware import GPUS, gigabytes
from megasparse.planning.plan import Assumptions, Plan
from megasparse.tasks.memory_check import ERROR, ranks_here
from megasparse.training.ranks import Ranks
from megasparse.training.reporting.memory import available_bytes


def require_fit(config: Config, ranks: Ranks) -> None:
    """Raise UserError on every rank where a step of some rank takes more of its GPU, or of its share of CPU memory,
    than is free, naming what to change; print a warning where it may just not fit. On a CPU nothing is asked.
    """
    if ranks.device.type != "cuda":
        return
    here = ranks_here(ranks.world_size)
    on = Assumptions(GPUS["A100"], gpus=ranks.world_size, per_node=here, available=available_bytes(ranks.device))
    found = shortage(Plan(config, on), available_bytes(torch.device("cpu")) // here)
    refused = ranks.any(found is not None and found[0])
    if refused:
        problem = "it does not fit on another rank, whose own message says why" if found is None else found[1]
        raise UserError(f"this run cannot fit: {problem}")
    if found is not None and ranks.rank == 0:
        print(f"this run may not fit: {found[1]}", file=sys.stderr)


def shortage(plan: Plan, host: int) -> tuple[bool, str] | None:
    """What does not fit of a plan with `available` bytes of a GPU and `host` bytes of CPU memory: whether even a
    prediction that is too high by `ERROR` would not, and what is short and helps. None where all fits.
    """
    assert plan.on.available is not None
    needed = max(plan.peak, plan.starting)
    on_cpu = max(sum(plan.memory.host.values()), plan.building()[1])
    pools = {"GPU memory": (needed, plan.on.available), "CPU memory": (on_cpu, host)}
    name, (peak, free) = max(pools.items(), key=lambda pool: pool[1][0] / max(1, pool[1][1]))
    if peak <= free:
        return None
    problem = f"it takes about {gigabytes(peak)} of {name}, {gigabytes(free)} are free"
    if name == "CPU memory":
        return peak * (1 - ERROR) > free, f'{problem}. Give adapters (lora), or model.activations="checkpoint"'
    helps = [f"{hint.change}: {gigabytes(hint.peak)}" for hint in pretraining_hints(plan)[:4]]
    if (longest := longest_that_fits(plan)) is not None:
        helps.insert(0, f"data.sequence_length={longest.length} fits")
    found = "; ".join(helps) or "a smaller model"
    return peak * (1 - ERROR) > free, f"{problem}. What helps, with the peak after it: {found}"
