"""A plan in words, and as JSON."""

from collections.abc import Iterator
from typing import Any

from megasparse.config.schema import Config
from megasparse.errors import ConfigError
from megasparse.planning.dry_run import dry_run
from megasparse.planning.further import Longest
from megasparse.planning.hardware import GPUS, gigabytes
from megasparse.planning.plan import Assumptions, Plan
from megasparse.planning.planner import Hint
from megasparse.planning.step_time import STREAMED


def dry_run_report(config: Config) -> Iterator[str]:
    """The parts of --dry-run's report: the plan for as few A100s as the configuration takes, which needs no step, and
    then the trial step, which may take minutes here.
    """
    training, ranks = config.training, config.parallel.sequence
    step = f"{training.global_batch} × {config.data.sequence_length:,} tokens"
    yield f"planning {training.steps:,} steps of {step}; of long sequences that takes minutes"
    plan = Plan(config, Assumptions(GPUS["A100"], gpus=ranks, per_node=max(8, ranks)))
    yield "\n".join(["", "planned, see megasparse plan:", *lines(plan), *assumption_lines(plan), ""])
    yield "one step of synthetic data, on this machine:"
    yield dry_run(config).lines(config)


def as_json(plan: Plan, longest: Longest | None, changes: list[Hint]) -> dict[str, Any]:
    """Sizes in bytes, times in seconds, bandwidths in bytes/s."""
    found, gpu = plan.communication, plan.on.gpu
    return {
        "gpus": plan.on.gpus,
        "parameters": plan.passes.states.trained,
        "memory": {**vars(plan.memory), "path": plan.on.path, "trial_lengths": plan.passes.lengths},
        "building": dict(zip(("device", "host"), plan.building(), strict=True)),
        "activations": plan.activations,
        "peak": plan.peak,
        "available": plan.on.available,
        "fits": plan.fits,
        "micro_batches": plan.micro_batches,
        "tokens_per_step": plan.tokens,
        "model_flops_per_step": plan.model_flops,
        "hardware_flops_per_step": plan.hardware_flops,
        "compute_seconds": plan.compute_seconds,
        "communication": {**vars(found), "seconds": found.seconds},
        "offload": vars(plan.offload),
        "step_seconds": plan.step_seconds,
        "counted": _counted(plan),
        "run_seconds": plan.run_seconds,
        "cost": plan.cost,
        "zero_hides_from_length": plan.hides_from(found.zero_seconds),
        "offload_hides_from_length": plan.hides_from(plan.offload.seconds),
        "longest": None if longest is None else vars(longest),
        "changes": [vars(change) for change in changes],
        "assumptions": {"mfu": plan.on.mfu, "gpus_per_node": plan.on.per_node, **vars(gpu)},
    }


def lines(plan: Plan) -> list[str]:
    """The lines about one rank's memory, and about a step."""
    on, states, found, swap = plan.on, plan.passes.states, plan.communication, plan.offload
    config = plan.config
    reported = [
        f"{on.gpus} × {on.gpu.name}, ZeRO {plan.zero.stage}, parallel.sequence {config.parallel.sequence}, "
        f"{plan.micro_batches} micro-batches of {config.training.micro_batch} × {config.data.sequence_length:,} tokens "
        f"in {config.training.precision}",
        "",
        f"{'parameters':36} {states.trained:,}{f' trained, {states.frozen:,} frozen' if states.frozen else ''}",
    ]
    for pool, parts in (("", plan.memory.device), ("CPU: ", plan.memory.host), ("NVMe: ", plan.memory.nvme)):
        reported += [f"{pool + name:36} {gigabytes(size)}" for name, size in parts.items() if size]
        if pool == "":
            reported += [f"  {'while in ' + part:34} {gigabytes(size)}" for part, size in plan.activations.items()]
    limit = "" if on.available is None else f" of {gigabytes(on.available)}: {'fits' if plan.fits else 'DOES NOT FIT'}"
    if plan.starting > plan.peak:
        reported.append(f"{'while the model is built':36} {gigabytes(plan.starting)}")
    if on.path == "counted":
        reported.append(f"{'CPU: while the model is built':36} {gigabytes(plan.building()[1])}")
    reported += [f"{'peak of a GPU' if on.path == 'counted' else 'peak':36} {gigabytes(plan.peak)}{limit}", ""]
    reported += [
        f"{'model FLOPs a step':36} {plan.model_flops:.3g}",
        f"{'hardware FLOPs, with recomputation':36} {plan.hardware_flops:.3g}",
        f"{'computing a step':36} {_seconds(plan.compute_seconds)} at {on.mfu:.0%} MFU",
        f"{'ZeRO sends, a GPU and step':36} {gigabytes(found.zero)}, {_seconds(found.zero_seconds)}",
    ]
    if found.sequence:
        line = f"{gigabytes(found.sequence)}, {_seconds(found.sequence_seconds)}, not hidden"
        reported.append(f"{'all-to-alls send':36} {line}")
    if swap.seconds:
        moved = swap.weights + swap.gradients + swap.optimizer
        reported.append(f"{'swap to the CPU, a GPU and step':36} {gigabytes(moved)}, {_seconds(swap.pcie_seconds)}")
        if swap.nvme:
            reported.append(
                f"{'swap to NVMe, a GPU and step':36} {gigabytes(swap.nvme)}, {_seconds(swap.nvme_seconds)}"
            )
    for name, seconds in (("ZeRO's communication", found.zero_seconds), ("the swap", swap.seconds)):
        if seconds:
            reported.append(f"{name + ' behind computing':36} {_hidden(plan, seconds)}")
    cost = "" if plan.cost is None else f", {plan.cost:,.0f} at {on.price:g} a GPU and hour"
    reported += [
        f"{'a step':36} {_seconds(plan.step_seconds)}, {plan.tokens / plan.step_seconds:,.0f} tokens/s",
        f"{f'{config.training.steps:,} steps':36} {plan.run_seconds / 3600:,.1f} h{cost}",
    ]
    return [*reported, *_counted_lines(plan)]


def _counted(plan: Plan) -> dict[str, Any] | None:
    try:
        return {"parts": vars(plan.time), "step_seconds": plan.counted_seconds, "exposed": plan.exposed}
    except ConfigError:
        return None


def _counted_lines(plan: Plan) -> list[str]:
    """The step by counted work; none for what is not counted."""
    try:
        time = plan.time
    except ConfigError:
        return []
    mfu = plan.model_flops / (plan.counted_seconds * plan.on.gpu.peak * plan.on.gpus)
    parts = [f"{'  ' + name.replace('_', '-'):36} {_seconds(value)}" for name, value in vars(time).items() if value]
    step = f"{_seconds(plan.counted_seconds)}, {mfu:.0%} MFU, {plan.exposed:.1%} of it waiting"
    return ["", f"{'a step, by counted work':36} {step}", *parts]


def further_lines(plan: Plan, longest: Longest | None, changes: list[Hint]) -> list[str]:
    reported = [""]
    if longest is None:
        reported.append("no length fits")
    else:
        keys = ", ".join(f"{key}={value}" for key, value in longest.changed.items())
        reported.append(f"longest sequence that fits: {longest.length:,} tokens, with {keys}")
    reported += ["to go further, each alone, and what it saves of a GPU:"] if changes else []
    return reported + [f"  {gigabytes(plan.peak - change.peak):>12}  {change.change}" for change in changes]


def assumption_lines(plan: Plan) -> list[str]:
    gpu, tokens = plan.on.gpu, ", ".join(f"{length:,}" for length in plan.passes.lengths)
    reported = {
        "measured": f"memory: from passes of {tokens} tokens on this CPU; a GPU's kernels take other workspaces",
        "counted": f"memory: counted from the GPU kernels' allocations in passes of {tokens} tokens without a device, "
        "not measured on a GPU",
    }[plan.on.path]
    return [
        "",
        reported,
        f"assumed: {plan.on.mfu:.0%} MFU of {gpu.peak / 1e12:g} TFLOP/s while computing, bandwidths one way in GB/s: "
        f"between GPUs {gpu.link / 1e9:g}, a node's network {gpu.network / 1e9:g}, PCIe {gpu.pcie / 1e9:g}, "
        f"NVMe a node {gpu.nvme / 1e9:g}; ZeRO's communication and the swap overlap computing, all-to-alls do not",
        f"counted work: arithmetic at {gpu.reach:.0%} of the peak, codes of {gpu.single / 1e12:g} TFLOP/s in fp32, "
        f"memory at {STREAMED:.0%} of {gpu.bandwidth / 1e12:g} TB/s, the CPUs' of {gpu.host / 1e9:g} GB/s a node",
    ]


def _hidden(plan: Plan, seconds: float) -> str:
    length = plan.hides_from(seconds)
    ratio = f"computing takes {plan.compute_seconds / seconds:.3g} times as long"
    return f"{ratio}; {'at no length of this model' if length is None else f'hidden at {length:,} tokens or more'}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
