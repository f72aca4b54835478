"""The start of a run: at its newest checkpoint, at one that is named, or at step 0 where there is none.

A run never starts at step 0 beside its own checkpoints, never passes over a damaged one in silence, and never goes on
with a configuration or data that would make it another run.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from megasparse.config.schema import Config, RunSettings
from megasparse.errors import CheckpointError, ConfigError
from megasparse.files import Progress, open_file, read_file
from megasparse.training.checkpoints.bucket import fetch_newest, on_first_rank
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
    "run.directory",
    "run.engine",
    "run.device",
    "run.hang_timeout",
    "run.deterministic",
    "data.path",  # of this and the next two the content counts: the fingerprint of the data, the tokenizer's sha256
    "data.mixture",
    "data.cache",
    "data.cache_gb",
    "data.tokenizer",
    "start.checkpoint",  # its sha256 counts, as that of the next one
    "start.huggingface",
    "start.activations",
    "task.source",  # the fingerprint of the examples counts
    "task.validation",
    "training.epochs",
    "training.steps",
    "training.micro_batch",
    "parallel.sequence",
    "evaluation",
    "checkpoint",
    "logging",
    "deepspeed",
)
"""Keys, and sections, that a run may go on with changed: they do not change what it computes, or say what becomes of
steps and samples that are bad."""


def find_start(
    run: RunIdentity,
    ranks: Ranks,
    hooks: RunHooks = RunHooks(),  # noqa: B008  (frozen)
    *,
    resume: str = "auto",
    allow_changed_config: bool = False,
) -> Checkpoint | None:
    """Open the checkpoint to go on from, verified by all ranks together; None starts at step 0.

    resume: "auto" (the newest one, if there is any), "never", or the path of a checkpoint.
    Raises CheckpointError, on every rank, where going on would lose or mix up something; ConfigError where the ranks
    were not given the same run or do not run the same code.
    """
    inputs = {
        "config": json.loads(run.config.model_dump_json()),
        "data": run.data_fingerprint,
        "tokenizer": run.tokenizer,
        "code": versions(),
        "command": {"resume": resume, "allow_changed_config": allow_changed_config},
    }
    if unlike := differences(ranks.gather(inputs)):  # and nobody cleans up before everybody has come
        problem = f"the ranks were given different configurations, data or code: {unlike}"
        raise ConfigError("--config", problem, "Give all machines the same files and the same versions")
    directory = run.checkpoints
    if ranks.rank == 0:
        remove_leftovers(directory)
    fetch_newest(run.config, directory, ranks, hooks, resume)
    newest = find_newest(directory)
    if unlike := differences([{"newest": name} for name in ranks.gather(newest and newest.name)]):
        hint = "Put run.directory where all machines see the same files"
        raise CheckpointError(directory, f"the ranks find different checkpoints: {unlike}", hint)
    if resume == "never" and newest is not None:
        hint = "Choose another run.directory, or leave --resume out to go on"
        raise CheckpointError(newest, "a new run here would overwrite this one", hint)
    path = newest if resume in ("auto", "never") else Path(resume)
    if path is None:
        on_first_rank(ranks, lambda: check_records(directory.parent, None, resume))
        return None
    if newest is not None and path.resolve().parent != directory.resolve():
        problem = f"this run has checkpoints of its own, such as {newest}, and was asked to go on from {path}"
        raise CheckpointError(directory, problem, "Choose another run.directory")
    checkpoint = _open(path, ranks, hooks, None if path != newest else directory)
    _check_data(checkpoint, run)
    _check_config(checkpoint, run.config, allow_changed_config, ranks)
    on_first_rank(ranks, lambda: check_records(directory.parent, checkpoint, resume))
    on_first_rank(ranks, lambda: _set_aside_later(directory, checkpoint))
    return checkpoint


def _open(path: Path, ranks: Ranks, hooks: RunHooks, directory: Path | None) -> Checkpoint:
    """Open on all ranks or on none. `directory`: where to look for an older complete one to recommend."""
    problem = checkpoint = None
    try:
        checkpoint = Checkpoint.open(path, ranks.rank, ranks.world_size, hooks.alive)
    except CheckpointError as error:
        problem = str(error)
    hooks.progress("checkpoint verified, waiting for the other ranks")
    if problems := [problem for problem in ranks.gather(problem) if problem is not None]:
        hint = "There is no older complete checkpoint"
        if directory is None:
            hint = "Choose another checkpoint"
        elif (older := _newest_complete(list_checkpoints(directory)[:-1], hooks.alive)) is not None:
            hint = f"To go on from the newest complete one: --resume {older}"
        raise CheckpointError(path, f"this checkpoint is damaged: {problems[0]}", hint)
    assert checkpoint is not None
    return checkpoint


def _newest_complete(paths: list[Path], progress: Progress) -> Path | None:
    for path in reversed(paths):
        with suppress(CheckpointError):
            return Checkpoint.open(path, progress=progress).path
    return None


def _check_data(checkpoint: Checkpoint, run: RunIdentity) -> None:
    manifest = checkpoint.manifest
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
    # What follows from other keys is compared by these: the warm-up is a part of the steps, which are free to change.
    derived = ("optimizer.warmup_steps",) * bool(now.get("optimizer.warmup_fraction"))
    free_keys = (*FREE_TO_CHANGE, *derived)
    conflicts = [key for key in changed if not any(key == free or key.startswith(f"{free}.") for free in free_keys)]
    if checkpoint.manifest["data_fingerprint"] == NO_DATA:  # nothing has been computed yet
        conflicts = [key for key in conflicts if key.startswith("model.")]
    listed = _listed(then, now, conflicts)
    if conflicts and not allow_changed:
        anew = "another run.directory" + " and checkpoint.bucket" * (config.checkpoint.bucket is not None)
        hint = (
            f"Put them back, choose {anew} to start a new run, "
            f"or go on all the same with --resume {checkpoint.path} --allow-changed-config"
        )
        raise CheckpointError(checkpoint.path, f"the configuration has changed since: {listed}", hint)
    if ranks.rank == 0 and conflicts:
        print(f"going on with a changed configuration, as asked: {listed}", file=sys.stderr)
    schedule = now["optimizer.schedule"]
    moved = [key for key in changed if key in derived or (key == "training.steps" and schedule in ("linear", "cosine"))]
    if ranks.rank == 0 and moved and checkpoint.step:
        line = f"the {schedule} schedule changes with it, so the learning rate differs from here on"
        print(f"{_listed(then, now, moved)}; {line}", file=sys.stderr)


def _changed(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]


def _listed(then: dict[str, Any], now: dict[str, Any], keys: list[str]) -> str:
    return "; ".join(f"{key}: {json.dumps(then.get(key))} -> {json.dumps(now.get(key))}" for key in keys)


def _set_aside_later(directory: Path, checkpoint: Checkpoint) -> None:
    """Rename checkpoints later than the one to go on from: they are not this run's newest. Raises CheckpointError."""
    for path in list_checkpoints(directory):
        if int(path.name) > checkpoint.step:
            aside = path.with_name(f"set-aside-{path.name}")
            number = 1
            while aside.exists():
                number += 1
                aside = path.with_name(f"set-aside-{path.name}-{number}")
            try:
                path.rename(aside)
            except OSError as error:
                problem = f"{path}, later than the checkpoint to go on from, cannot be renamed: {error.strerror}"
                hint = "Let this run write there, or choose another run.directory"
                raise CheckpointError(directory, problem, hint) from None
            print(f"{path} is later than the checkpoint to go on from: renamed to {aside}", file=sys.stderr)


LONGEST_LINE = 1 << 24
"""Bytes of a line that are read at once."""


def check_records(directory: Path, start: Checkpoint | None, resume: str) -> None:
    """Raise CheckpointError where `directory`/metrics.jsonl contradicts the checkpoint that its run goes on from: its
    loss is not that of the step's line, or there is no checkpoint although one must have been saved. resume: see
    `find_start`.

    Steps after the checkpoint are done again, and their lines cut. Where they are more than the end of a run can cost,
    and where steps before it have no line, that is reported.
    """
    path = directory / "metrics.jsonl"
    last, line = _lines(path, start.step if start else 0)
    saved = _saved_for_certain(directory, last) if resume == "auto" else 0
    gone = f"{path} has come to step {last}, and the checkpoint of step {saved} is not there"
    if start is None:
        if saved:
            hint = "Put it back, or begin anew: --resume never, or another run.directory"
            raise CheckpointError(directory / "checkpoints", f"{gone}, nor any other", hint)
        return
    if saved > start.step:
        print(f"{gone}: going on from step {start.step}", file=sys.stderr)
    if last < start.step and path.exists():
        missing = f"steps {last + 1} to {start.step} have no line"
        print(f"{path} ends at step {last}, before the checkpoint: {missing}", file=sys.stderr)
    loss, recorded = _last_loss(start), line.get("train/loss")
    if loss is not None and recorded is not None and loss != recorded:
        problem = f"the loss of step {start.step} is {loss} here and {recorded} in {path}: they are not of one run"
        raise CheckpointError(start.path, problem, f"Move {path.name} away, or choose another run.directory")


def _last_loss(checkpoint: Checkpoint) -> float | None:
    """The loss of the checkpoint's step; None where that step was left out, as then its loss is not kept."""
    guard = checkpoint.state.get("loss_guard", {})
    losses = guard.get("losses")
    return losses[-1] if losses and not guard.get("skipped_in_a_row") else None


def _lines(path: Path, step: int) -> tuple[int, dict[str, Any]]:
    """The last step that has a whole line, 0 where none has, and the line of `step`, {} where it has none."""
    last, match = b"", b""
    with suppress(FileNotFoundError), open_file(path) as file:
        while line := file.readline(LONGEST_LINE):
            if line.endswith(b"\n"):
                last = line
                if line.startswith(b'{"step": %d,' % step):
                    match = line
    last_step = _read(last).get("step") if last else 0
    if type(last_step) is not int or not 0 <= last_step < 1 << 63:
        problem = f"its last line states no step: {last.strip()[:40].decode(errors='replace')}"
        raise CheckpointError(path, problem, "Remove that line, or move the file away")
    return last_step, _read(match)


def _read(line: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        value = json.loads(line)
        return value if isinstance(value, dict) else {}
    return {}


def _saved_for_certain(directory: Path, last: int) -> int:
    """The newest step that the run before, which came to step `last`, must have saved; 0 where none must have been."""
    try:
        settings = json.loads(read_file(directory / "config.json"))["checkpoint"]
        every, waits = int(settings["every"]), bool(settings["asynchronous"])
        if settings["on_failure"] != "stop":
            return 0
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0
    newest = (last - 1) // every * every if every > 0 else 0  # a step has its line before it is saved
    return max(0, newest - every * waits)  # and what is written beside training must be there by the next save
