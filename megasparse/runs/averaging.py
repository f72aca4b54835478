"""The mean of the weights of a run's last checkpoints, as a run of its own (Vaswani et al. 2017, section 6.1)."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megasparse.errors import CheckpointError
from megasparse.hub.importing import write_file, write_weights
from megasparse.hub.output_folder import appearing, refuse_existing
from megasparse.tasks.start import FOLDER
from megasparse.training.checkpoints.checkpoint import Checkpoint, Fragment
from megasparse.training.checkpoints.merged import whole
from megasparse.training.checkpoints.run_folder import list_checkpoints


def average(run: Path, last: int, output: Path) -> tuple[Path, list[int]]:
    """Write OUTPUT/checkpoints/STEP and OUTPUT/config.json, and OUTPUT/start for a fine-tuning run. Returns the
    checkpoint's path, and the steps that were averaged. The adapters of a pretraining run are averaged merged: a mean
    of products is no product of means.

    Raises CheckpointError where the run has fewer checkpoints, or one is damaged or of another model; HubError where
    `output` exists or cannot be written.
    """
    refuse_existing(output)
    checkpoints = [whole(Checkpoint.open(path)) for path in last_of(run, last)]
    *older, newest = checkpoints
    for checkpoint in older:
        if (unlike := unlike_parts(checkpoint, newest)) is not None:
            problem = f"differs from {newest.path} in {unlike}: it belongs to another model"
            raise CheckpointError(checkpoint.path, problem, "Average checkpoints of one run, or a smaller --last")
    steps = [checkpoint.step for checkpoint in checkpoints]
    names = newest.manifest["tensors"]["weight"]
    fragments = [_fragment(name, mean(checkpoints, name)) for name in names]
    path = Path("checkpoints", newest.path.name)
    config = newest.manifest["config"]
    config = {**config, "run": {**config["run"], "directory": str(output)}}
    manifest = {
        **{key: newest.manifest[key] for key in ("step", "sequences", "tokenizer")},
        "state": {"averaged": {"run": str(run), "steps": steps}},
        "config": config,
    }
    with appearing(output) as temporary:
        write_weights(temporary / path, fragments, manifest)
        write_file(temporary / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        if config.get("start") and (run / FOLDER).is_dir():
            shutil.copytree(run / FOLDER, temporary / FOLDER)
    return output / path, steps


def last_of(run: Path, number: int) -> list[Path]:
    """The run's last checkpoints, oldest first. Raises CheckpointError where it has fewer."""
    found = list_checkpoints(run / "checkpoints")
    if not found:
        raise CheckpointError(run, "holds no checkpoint", "Give a run's folder")
    if len(found) < number:
        keep = Checkpoint.open(found[-1]).settings.checkpoint.keep
        problem = f"has {len(found)} checkpoints, and {number} are to be averaged"
        hint = f"Give --last {len(found)}, or train again and keep more than checkpoint.keep = {keep}"
        raise CheckpointError(run, problem, hint)
    return found[-number:]


def unlike_parts(one: Checkpoint, other: Checkpoint) -> str | None:
    """The first difference that shows that two checkpoints belong to different models; None where there is none."""
    a, b = one.manifest, other.manifest
    shapes = [{name: x["shape"] for name, x in each["tensors"]["weight"].items()} for each in (a, b)]
    if shapes[0] != shapes[1]:
        names = [name for name in sorted({*shapes[0], *shapes[1]}) if shapes[0].get(name) != shapes[1].get(name)]
        return f"the weight {names[0]}"
    configs = [each["config"] for each in (a, b)]
    starts = [{key: (config.get("start") or {}).get(key) for key in ("sha256", "attention")} for config in configs]
    parts = {"tokenizer": [a["tokenizer"], b["tokenizer"]], "start": starts}
    parts |= {key: [config.get(key) for config in configs] for key in ("model", "lora", "head")}
    return next((key for key, (x, y) in parts.items() if x != y), None)


def mean(checkpoints: Sequence[Checkpoint], name: str) -> Tensor:
    """The mean of one weight over the checkpoints, in fp32."""
    total = torch.zeros((), dtype=torch.float64)
    for checkpoint in checkpoints:
        total = total + checkpoint.tensor("weight", name).double()
    return (total / len(checkpoints)).float()


def _fragment(name: str, value: Tensor) -> Fragment:
    return Fragment.of("weight", name, tuple(value.shape), 0, value.contiguous().view(-1))
