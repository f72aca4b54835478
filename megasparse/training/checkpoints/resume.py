"""Selection of the checkpoint that a run starts from: the newest one, a named one, or none (step 0).

A run does not start at step 0 if its folder contains checkpoints, does not skip a damaged checkpoint silently, and does
not resume with a configuration or data that would fork it.
"""

import json
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from megasparse.config.attention import MECHANISMS
from megasparse.config.schema import Config, RunSettings
from megasparse.errors import CheckpointError, ConfigError
from megasparse.files import read_line
from megasparse.optimizers import decay_start
from megasparse.training.checkpoints.bucket import fetch_newest
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import (
    NO_DATA,
    RunIdentity,
    differences,
    find_newest,
    flatten,
    list_checkpoints,
    versions,
)
from megasparse.training.checkpoints.saving import remove_leftovers
from megasparse.training.ranks import Ranks, RunHooks

FREE_TO_CHANGE = (
    "run.directory", "run.engine", "run.device", "run.hang_timeout", "run.deterministic", "run.cuda_graph",
    # Their content is compared: the data's fingerprint, the tokenizer's sha256.
    "data.path", "data.mixture", "data.cache", "data.cache_gb", "data.tokenizer",
    # Their content is compared: the weights' sha256, the examples' fingerprint.
    "start.checkpoint", "start.huggingface", "start.activations", "task.source", "task.validation",
    "training.epochs", "training.steps", "training.micro_batch", "parallel.sequence",
    "evaluation", "checkpoint", "logging", "deepspeed",
)  # fmt: skip
"""Keys and sections that may change when a run resumes: they do not affect the results of steps, or only how bad steps
and samples are handled.
"""


def find_start(
    run: RunIdentity,
    ranks: Ranks,
    hooks: RunHooks = RunHooks(),  # noqa: B008  (frozen)
    *,
    resume: str = "auto",
    allow_changed_config: bool = False,
) -> Checkpoint | None:
    """Open the checkpoint to resume from; all ranks verify it together. None starts at step 0.

    resume: "auto" (the newest checkpoint, if there is one), "never", or the path of a checkpoint. Raises, on every
    rank, CheckpointError if resuming would lose data or mix up two runs, ConfigError if the ranks have different
    configurations, data or code.
    """
    inputs = {
        "config": json.loads(run.config.model_dump_json()),
        "data": run.data_fingerprint,
        "base": run.base,
        "tokenizer": run.tokenizer,
        "code": versions(),
        "command": {"resume": resume, "allow_changed_config": allow_changed_config},
    }
    if unlike := differences(ranks.gather(inputs)):  # the gather also delays the clean-up until all ranks are ready
        problem = f"the ranks have different configurations, data or code: {unlike}"
        raise ConfigError("--config", problem, "Use the same files and the same versions on all machines")
    directory = run.checkpoints
    if ranks.rank == 0:
        remove_leftovers(directory)
    fetch_newest(run.config, directory, ranks, hooks, resume)
    newest = find_newest(directory)
    if unlike := differences([{"newest": name} for name in ranks.gather(newest and newest.name)]):
        hint = "Put run.directory on a file system that all machines share"
        raise CheckpointError(directory, f"the ranks find different checkpoints: {unlike}", hint)
    if resume == "never" and newest is not None:
        raise CheckpointError(newest, "a new run here would overwrite this one", "Choose another run.directory")
    path = newest if resume in ("auto", "never") else Path(resume)
    if path is None:
        ranks.on_first_rank(lambda: check_records(run, None, resume))
        return None
    if newest is not None and path.resolve().parent != directory.resolve():
        problem = f"this run contains its own checkpoints, such as {newest}, so it cannot resume from {path}"
        raise CheckpointError(directory, problem, "Choose another run.directory")
    checkpoint = _open(path, ranks, hooks, None if path != newest else directory)
    _check_data(checkpoint, run)
    _check_config(checkpoint, run.config, allow_changed_config, ranks)
    written, current = checkpoint.manifest.get("versions", {}), versions()
    changed = [key for key in _changed(written, current) if key in written and key != "source"]
    if changed and checkpoint.step:
        listed = _listed(written, current, changed)
        ranks.say(f"resuming under other versions ({listed}): losses may differ in rounding")
    ranks.on_first_rank(lambda: check_records(run, checkpoint, resume))
    ranks.on_first_rank(lambda: _set_aside_later(directory, checkpoint))
    return checkpoint


def _open(path: Path, ranks: Ranks, hooks: RunHooks, directory: Path | None) -> Checkpoint:
    """Open a checkpoint on all ranks or on none. directory: searched for an older one to recommend."""
    problem = checkpoint = None
    try:
        checkpoint = Checkpoint.open(path, ranks.rank, ranks.world_size, hooks.alive)
    except CheckpointError as error:
        problem = str(error)
    hooks.progress("checkpoint verified, waiting for the other ranks")
    if problems := [problem for problem in ranks.gather(problem) if problem is not None]:
        hint = "No older checkpoint is complete" if directory else "Choose another checkpoint"
        for older in reversed(list_checkpoints(directory)[:-1] if directory else []):
            with suppress(CheckpointError):
                Checkpoint.open(older, progress=hooks.alive)
                hint = f"To resume from the newest complete one: --resume {older}"
                break
        raise CheckpointError(path, f"this checkpoint is damaged: {problems[0]}", hint)
    assert checkpoint is not None
    return checkpoint


def _check_data(checkpoint: Checkpoint, run: RunIdentity) -> None:
    manifest = checkpoint.manifest
    if run.base is not None:
        checkpoint.check_base(run.base)
    then = flatten({"data": manifest["data_fingerprint"], "tokenizer": manifest["tokenizer"]})
    now = flatten({"data": run.data_fingerprint, "tokenizer": run.tokenizer})
    if changed := [key for key in _changed(then, now) if key != "data" or then["data"] != NO_DATA]:
        problem = f"it was trained on other data: {_listed(then, now, changed)}"
        mixed_then, mixed_now = (
            {"data.mixture": settings.data.mixture if isinstance(settings, Config) else {}}
            for settings in (checkpoint.settings, run.config)
        )
        if mixed_then != mixed_now:
            problem += f"; {_listed(mixed_then, mixed_now, ['data.mixture'])}"
        keys = "data.path or data.mixture" if isinstance(run.config, Config) else "task.source"
        hint = f"Point {keys} at the data it was trained on, or choose another run.directory"
        raise CheckpointError(checkpoint.path, problem, hint)


def _check_config(checkpoint: Checkpoint, config: RunSettings, allow_changed: bool, ranks: Ranks) -> None:
    then, now = (flatten(json.loads(one.model_dump_json())) for one in (checkpoint.settings, config))
    changed = _changed(then, now)
    # Keys that follow from other keys are compared by these: the warm-up is a fraction of the steps, which may change.
    derived = ("optimizer.warmup_steps",) * bool(now.get("optimizer.warmup_fraction"))
    patterns = json.dumps([value for key, value in now.items() if key.endswith("attention.pattern")])
    averages = any(f'"{kind}"' in patterns for kind, cls in MECHANISMS.items() if cls.has_auxiliary_loss)
    free_keys = [key for key in (*FREE_TO_CHANGE, *derived) if key != "training.micro_batch" or not averages]
    conflicts = [key for key in changed if not any(key == free or key.startswith(f"{free}.") for free in free_keys)]
    if checkpoint.manifest["data_fingerprint"] == NO_DATA:  # nothing has been computed yet
        conflicts = [key for key in conflicts if key.startswith("model.")]
    listed = _listed(then, now, conflicts)
    if conflicts and not allow_changed:
        alternative = "another run.directory" + " and checkpoint.bucket" * (config.checkpoint.bucket is not None)
        hint = (
            f"Restore them, choose {alternative} to start a new run, "
            f"or resume with the changes: --resume {checkpoint.path} --allow-changed-config"
        )
        raise CheckpointError(checkpoint.path, f"the configuration has changed: {listed}", hint)
    if conflicts:
        ranks.say(f"resuming with a changed configuration, as requested: {listed}")
    schedule = now["optimizer.schedule"]
    # wsd depends on the number of steps only once it decays.
    stable = "training.steps" in changed and all(
        checkpoint.step <= decay_start(values["training.steps"], config.optimizer) for values in (then, now)
    )
    fixed = ("constant", "inverse_sqrt") + ("wsd",) * stable
    moved = [key for key in changed if key in derived or (key == "training.steps" and schedule not in fixed)]
    if moved and checkpoint.step:
        line = f"the {schedule} schedule changes with it, so the learning rate differs from this step on"
        ranks.say(f"{_listed(then, now, moved)}; {line}")


def _changed(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]


def _listed(then: dict[str, Any], now: dict[str, Any], keys: list[str]) -> str:
    return "; ".join(f"{key}: {json.dumps(then.get(key))} -> {json.dumps(now.get(key))}" for key in keys)


def _set_aside_later(directory: Path, checkpoint: Checkpoint) -> None:
    """Rename checkpoints later than the start of the run, so that they are not its newest."""
    for path in list_checkpoints(directory):
        if int(path.name) > checkpoint.step:
            names = (f"set-aside-{path.name}{f'-{number}' * (number > 1)}" for number in count(1))
            aside = next(other for other in map(path.with_name, names) if not other.exists())
            problem = f"{path}, later than the checkpoint to resume from, cannot be renamed: {{}}"
            hint = "Make it writable, or choose another run.directory"
            with CheckpointError.instead_of(OSError, directory, problem, hint):
                path.rename(aside)
            print(f"{path} is later than the checkpoint to resume from: renamed to {aside}", file=sys.stderr)


def check_records(run: RunIdentity, start: Checkpoint | None, resume: str) -> None:
    """Raise CheckpointError if metrics.jsonl and the checkpoint to resume from record different losses for its step, or
    if there is no checkpoint although metrics.jsonl contains twice the steps between two.
    """
    path, settings = run.checkpoints.parent / "metrics.jsonl", run.config.checkpoint
    last, line = read_line(path, start.step if start else 0)
    if start is None:
        if resume == "auto" and settings.on_failure == "stop" and 0 < 2 * settings.every < last:
            problem = f"{path} ends at step {last}, but all checkpoints are missing"
            hint = "Restore them, or start again: --resume never, or another run.directory"
            raise CheckpointError(run.checkpoints, problem, hint)
        return
    loss, recorded = start.state.get("loss"), line.get("train/loss")
    if loss is not None and recorded is not None and loss != recorded:
        problem = f"the loss of step {start.step} is {loss}, but {recorded} in {path}: they belong to different runs"
        raise CheckpointError(start.path, problem, f"Move {path.name} away, or choose another run.directory")
