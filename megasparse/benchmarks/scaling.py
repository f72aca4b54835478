"""Plans of configurations on several numbers of GPUs, beside published steps: a table, and where it stops scaling.

Nothing is measured. Memory, FLOPs and bytes are counted without a device, seconds follow from them.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megasparse.config.load import load_config
from megasparse.config.schema import Config
from megasparse.evaluation.outputs import write_json
from megasparse.planning.goodput import goodput
from megasparse.planning.hardware import GPUS, Hardware, gigabytes
from megasparse.planning.plan import Assumptions, Plan
from megasparse.planning.planner import with_changes
from megasparse.planning.published import published
from megasparse.planning.step_time import STREAMED

NODE = 8


def bench_scaling(
    names: Sequence[str], gpus: Sequence[int], prices: Mapping[str, float], command: str, output: Path | None = None
) -> Iterator[str]:
    """Yield lines of Markdown, and write the rows to `output` as JSON.

    names: of configurations. gpus: numbers of GPUs, each planned with as many ranks a sequence as a node has, as there
    are heads, and twice as many, one sequence for each such group. prices: of a GPU and hour, by the GPU's name.
    """
    yield "| configuration | GPUs | ranks a sequence | memory | step | exposed | tokens/s a GPU | goodput | cost |"
    yield "|---|---|---|---|---|---|---|---|---|"
    rows: list[dict[str, Any]] = []
    for name in names:
        known: dict[int, Plan] = {}
        for gpu in prices:
            for number, sequence in _shapes(load_config(name), gpus):
                plan = known[sequence] = _plan(load_config(name), GPUS[gpu], number, sequence, known.get(sequence))
                rows.append({"configuration": name, **_row(plan, prices[gpu])})
                yield _line(rows[-1])
    steps = [_published(each) for each in published()]
    for step in steps:
        error = step["predicted_seconds"] / step["seconds"] - 1
        yield f"{step['name']}: {step['predicted_seconds']:.3g} s, published {step['seconds']:.3g} s ({error:+.1%})"
    if output is not None:
        hardware = {name: vars(GPUS[name]) | {"streamed": STREAMED} for name in prices}
        write_json(output, {"command": command, "hardware": hardware, "rows": rows, "published": steps})


def _shapes(config: Config, gpus: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers of GPUs, each with those of ranks that share a sequence."""
    heads = config.model.heads
    return [(n, ranks) for n in gpus for ranks in sorted({min(n, NODE, heads), min(n, heads), min(n, 2 * heads)})]


def _plan(config: Config, gpu: Hardware, gpus: int, sequence: int, known: Plan | None) -> Plan:
    """The plan, with tiles as large as configured. known: one of as many ranks a sequence, whose counts hold."""
    model, before = config.model, config.parallel.sequence
    tiles = {key: max(1, getattr(model, key) * before // sequence) for key in ("feed_forward_tiles", "loss_tiles")}
    groups = max(1, model.attention.head_groups * before // sequence)  # a rank attends to as many heads at a time
    attention = model.attention.model_copy(update={"head_groups": groups})
    config = with_changes(with_changes(config, "model", attention=attention, **tiles), "parallel", sequence=sequence)
    config = with_changes(config, "training", global_batch=config.training.micro_batch * gpus // sequence)
    plan = Plan(config, Assumptions(gpu, gpus, NODE, gpu.memory), None if known is None else known.passes)
    if known is not None:
        plan.moved = known.moved
    return plan


def _row(plan: Plan, price: float) -> dict[str, Any]:
    """A row of the table. Memory of a GPU, and of the CPUs of a node, in bytes; seconds, bytes and FLOPs of a step."""
    found, kept, swap = plan.communication, goodput(plan), plan.offload
    gpu_hours = plan.on.gpus * plan.counted_seconds / 3600 / kept.share
    return {
        "gpu": plan.on.gpu.name,
        "gpus": plan.on.gpus,
        "sequence": plan.cluster.sequence,
        "parameters": plan.passes.states.trained,
        "length": plan.config.data.sequence_length,
        "tokens": plan.tokens,
        "memory": plan.memory.device,
        "activations": plan.activations,
        "peak": max(plan.peak, plan.starting),
        "fits": plan.fits,
        "host": {name: size * plan.cluster.local for name, size in plan.memory.host.items()},
        "seconds": vars(plan.time),
        "step_seconds": plan.counted_seconds,
        "exposed": plan.exposed,
        "traffic": {
            "nvlink": found.zero + found.sequence,
            "all_to_all": found.sequence,
            "node_to_network": found.network,
            "pcie": swap.weights + swap.gradients + swap.optimizer,
        },
        "traffic_seconds": {"zero": found.zero_seconds, "all_to_all": found.sequence_seconds, "swap": swap.seconds},
        "tokens_a_second_and_gpu": plan.tokens / plan.counted_seconds / plan.on.gpus,
        "goodput": vars(kept),
        "price": price,
        "cost_of_a_billion_tokens": price * gpu_hours * 1e9 / plan.tokens,
    }


def _line(row: dict[str, Any]) -> str:
    shape = f"{row['gpus']} {row['gpu']} | {row['sequence']} | {gigabytes(row['peak'])}{'' if row['fits'] else ' (no)'}"
    time = f"{row['step_seconds']:.3g} s | {row['exposed']:.1%} | {row['tokens_a_second_and_gpu']:,.0f}"
    kept = f"{row['goodput']['share']:.1%} | {row['cost_of_a_billion_tokens']:,.0f}"
    return f"| {row['configuration']} | {shape} | {time} | {kept} |"


def _published(each: Any) -> dict[str, Any]:
    plan = Plan(each.config, Assumptions(each.gpu, each.gpus, NODE, each.gpu.memory))
    return {
        "name": each.name,
        "source": each.source,
        "about": each.about,
        "gpus": each.gpus,
        "tokens": each.tokens,
        "seconds": each.seconds,
        "predicted_seconds": plan.counted_seconds,
        "at_30_percent_mfu": plan.step_seconds,
        "parts": vars(plan.time),
    }
