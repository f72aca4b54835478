"""The curves of a run that a report shows, in their order. Scalars are those of docs/monitoring.md."""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

LAYER = re.compile(r"(.*)/layer_(\d+)")


class Plan(NamedTuple):
    """A chart: its scalars with their labels."""

    title: str
    unit: str
    names: dict[str, str]
    linear: bool = False
    """Whether the axis is never logarithmic."""


PLANNED = {
    "Loss": [
        Plan("Loss", "nats/token", {"train/loss": "training", "evaluation/loss": "held-out"}),
        Plan("Bits per dim", "bits/token", {"train/bits_per_dim": "training", "evaluation/bits_per_dim": "held-out"}),
        Plan("Accuracy", "share", {"model/accuracy": "training", "evaluation/accuracy": "held-out"}),
        Plan("Objective", "nats/token", {"model/objective": "with auxiliary losses", "train/loss": "loss alone"}),
    ],
    "Optimizer": [
        Plan("Learning rate", "", {"optimizer/learning_rate": "learning rate"}, linear=True),
        Plan("Gradient norm", "L2, before clipping", {"optimizer/gradient_norm": "gradient norm"}),
        Plan("Steps", "so far", {"train/skipped_steps": "skipped", "train/loss_spikes": "loss spikes"}),
    ],
    "Speed": [
        Plan("Tokens a second", "tokens/s", {"speed/tokens_per_second": "all devices"}),
        Plan(
            "Where a step's time goes",
            "s",
            {
                "speed/step_seconds": "whole step",
                "speed/exposed_communication_seconds": "exposed communication",
                "speed/data_wait_seconds": "waiting for data",
                "checkpoint/stall_seconds": "saving",
            },
        ),
        Plan(
            "Utilisation of the devices' peak",
            "share",
            {"speed/model_flops_utilisation": "model FLOPs", "speed/hardware_flops_utilisation": "hardware FLOPs"},
        ),
        Plan("Slowest rank against the median", "ratio", {"speed/straggler_ratio": "slowest rank"}),
    ],
    "Memory of rank 0": [
        Plan(
            "By kind",
            "bytes",
            {f"memory/{kind}_bytes": kind for kind in ("weights", "gradients", "optimizer", "other", "offloaded")},
        ),
        Plan(
            "In all",
            "bytes",
            {
                "memory/peak_bytes": "peak",
                "memory/reserved_bytes": "reserved",
                "memory/resident_bytes": "resident",
                "memory/swapped_bytes": "swapped out",
            },
        ),
        Plan("Fragmentation", "share of what is reserved", {"memory/fragmentation": "never allocated"}),
    ],
}
LEFT_OUT = {"speed/tokens_per_second_per_device"}
"""Scalars that another one shows already."""
EXAMPLES = {"Loss": "mean of an example", "Objective": "mean of an example"}
"""Units of charts in fine-tuning."""

UNITS = {
    "kl_queries": "nats/token",
    "kl_keys": "nats/token",
    "collisions": "keys a query and hash",
    "sketch_loss": "the sketch's own",
    "output_error": "relative",
    "recall_top": "share of the 16 largest weights",
    "utility": "share of full attention's weight",
    "utility_bound": "share, the most that so many keys can have",
    "utility_floor": "share, of so many random keys",
    "bucket_largest": "share of all tokens",
    "bucket_ratio": "share of buckets",
    "bucket_size": "share of buckets",
}
"""Units of what mechanisms report, and of the quality of attention."""


def plan(names: Iterable[str], finetuning: bool) -> dict[str, list[Plan]]:
    """Charts of all scalars by section; layers share a chart, and so do the mechanisms of one measure of quality."""
    names = set(names) - LEFT_OUT
    sections: defaultdict[str, list[Plan]] = defaultdict(list)
    used: set[str] = set()
    for section, charts in PLANNED.items():
        for each in charts:
            own = {name: label for name, label in each.names.items() if name in names}
            if not own or (each.title == "Objective" and "model/objective" not in own):
                continue
            used |= set(own)
            unit = EXAMPLES.get(each.title, each.unit) if finetuning else each.unit
            sections[section].append(Plan(each.title, unit, own, each.linear))
    for name in sorted(names - used, key=_by_layer):
        section, title, label = _place(name)
        same = next((each for each in sections[section] if each.title == title), None)
        if same is None:
            sections[section].append(same := Plan(title, UNITS.get(title.rpartition("/")[2], ""), {}))
        same.names[name] = label
    return dict(sections)


def _place(name: str) -> tuple[str, str, str]:
    """Section, chart and label of a scalar that is not planned."""
    layer = LAYER.fullmatch(name)
    base, label = (layer[1], f"layer {layer[2]}") if layer else (name, "mean")
    group, _, rest = base.partition("/")
    if "attention/" in base:
        return "Attention", rest.replace("attention/", ""), label
    if group == "quality" and "/" in rest:
        kind, _, measure = rest.partition("/")
        return "Quality of attention", measure, kind
    if group == "evaluation":
        return "Evaluation", rest, "held-out"
    return "Others", base, label if layer else rest


def _by_layer(name: str) -> tuple[str, int]:
    layer = LAYER.fullmatch(name)
    return (layer[1], int(layer[2])) if layer else (name, -1)
