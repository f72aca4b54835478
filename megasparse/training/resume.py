"""Where a run starts: at its newest checkpoint, at one that is named, or at step 0 where there is none.

A run never starts at step 0 beside its own checkpoints, never passes over a damaged one in silence, and never goes on
with a configuration or data that would make it another run.
"""

import json
import sys
from pathlib import Path
from typing import Any

from megasparse.config.schema import Config
from megasparse.errors import CheckpointError, ConfigError
from megasparse.training.checkpoint import Checkpoint
from megasparse.training.ranks import Ranks
from megasparse.training.run_folder import find_newest, list_checkpoints
from megasparse.training.saving import Saver, remove_leftovers

FREE_TO_CHANGE = (
    "run.directory",
    "run.engine",
    "run.device",
    "data.path",  # what counts is the fingerprint of the data
    "data.prefetch",
    "training.steps",
    "training.micro_batch",
    "evaluation",
    "checkpoint",
    "logging",
    "deepspeed",
)
"""Keys, and sections, that a run may go on with changed: they do not change what it computes."""


def find_start(choice: str, saver: Saver, allow_changed_config: bool = False) -> Checkpoint | None:
    """The checkpoint to go on from, opened and verified by all ranks; None starts at step 0.

    choice: "auto" (the newest one, if there is any), "never", or the path of a checkpoint. saver: of the run to start.
    Raises CheckpointError, on every rank, where going on would lose or mix up something; ConfigError where the ranks
    were not given the same run.
    """
    directory, ranks = saver.directory, saver.ranks
    _check_same_on_all(saver)  # and nobody cleans up before everybody has come
    if ranks.rank == 0:
        remove_leftovers(directory)
    newest = find_newest(directory)
    if choice == "never" and newest is not None:
        mend = "Choose another run.directory, or leave --resume out to go on"
        raise CheckpointError(newest, "a new run here would overwrite this one", mend)
    path = newest if choice in ("auto", "never") else Path(choice)
    if path is None:
        return None
    if newest is not None and path.resolve().parent != directory.resolve():
        problem = f"this run has checkpoints of its own, such as {newest}, and was asked to go on from {path}"
        raise CheckpointError(directory, problem, "Choose another run.directory")
    checkpoint = _open(path, ranks, None if path != newest else directory)
    _check_data(checkpoint, saver)
    _check_config(checkpoint, saver.config, allow_changed_config, ranks)
    if ranks.rank == 0:
        _set_aside_later(directory, checkpoint)
    ranks.gather(None)
    return checkpoint


def _check_same_on_all(saver: Saver) -> None:
    own = {"config": json.loads(saver.config.model_dump_json()), "data": saver.data_fingerprint}
    for rank, other in enumerate(saver.ranks.gather(own)):
        if other != own:
            problem = f"rank {rank} and rank {saver.ranks.rank} were given different configurations or data"
            raise ConfigError("--config", problem, "Give all machines the same files")


def _open(path: Path, ranks: Ranks, directory: Path | None) -> Checkpoint:
    """Open on all ranks or on none. `directory`: where to look for an older complete one to recommend."""
    problem = checkpoint = None
    try:
        checkpoint = Checkpoint.open(path, ranks.rank, ranks.world_size)
    except CheckpointError as error:
        problem = str(error)
    problems = [problem for problem in ranks.gather(problem) if problem is not None]
    if problems:
        mend = "There is no older complete checkpoint"
        if directory is None:
            mend = "Choose another checkpoint"
        elif (older := _newest_complete(list_checkpoints(directory)[:-1])) is not None:
            mend = f"To go on from the newest complete one: --resume {older}"
        raise CheckpointError(path, f"this checkpoint is damaged: {problems[0]}", mend)
    assert checkpoint is not None
    return checkpoint


def _newest_complete(paths: list[Path]) -> Path | None:
    for path in reversed(paths):
        try:
            Checkpoint.open(path)
            return path
        except CheckpointError:
            continue
    return None


def _check_data(checkpoint: Checkpoint, saver: Saver) -> None:
    mend = "Point data.path at the data it was trained on, or choose another run.directory to start a new run"
    for what, then, now in (
        ("tokenizer", checkpoint.manifest["tokenizer"], saver.tokenizer),
        ("data", checkpoint.manifest["data_fingerprint"], saver.data_fingerprint),
    ):
        if then != now:
            raise CheckpointError(checkpoint.path, f"was trained on other data: {what} was {then}, is now {now}", mend)


def _check_config(checkpoint: Checkpoint, config: Config, allow_changed: bool, ranks: Ranks) -> None:
    then, now = _flatten(checkpoint.config), _flatten(config)
    changed = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
    kept = [key for key in changed if not any(key == free or key.startswith(f"{free}.") for free in FREE_TO_CHANGE)]
    listed = "; ".join(f"{key}: {json.dumps(then.get(key))} -> {json.dumps(now.get(key))}" for key in kept)
    if kept and not allow_changed:
        mend = (
            "Put them back, choose another run.directory to start a new run, "
            f"or go on all the same with --resume {checkpoint.path} --allow-changed-config"
        )
        raise CheckpointError(checkpoint.path, f"the configuration has changed since: {listed}", mend)
    if ranks.rank == 0 and kept:
        print(f"going on with a changed configuration, as asked: {listed}", file=sys.stderr)
    if ranks.rank == 0 and "training.steps" in changed:
        moved = "training.steps: {} -> {}; a cosine schedule now ends there, so the learning rate differs from here on"
        print(moved.format(then["training.steps"], now["training.steps"]), file=sys.stderr)


def _flatten(config: Config) -> dict[str, Any]:
    """Dotted key -> value."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, part in value.items():
                walk(f"{prefix}.{key}" if prefix else key, part)
        else:
            flat[prefix] = value

    walk("", json.loads(config.model_dump_json()))
    return flat


def _set_aside_later(directory: Path, checkpoint: Checkpoint) -> None:
    """Rename checkpoints later than the one to go on from, so that they are not taken for this run's newest."""
    for path in list_checkpoints(directory):
        if int(path.name) > checkpoint.step:
            aside = path.with_name(f"set-aside-{path.name}")
            number = 1
            while aside.exists():
                number += 1
                aside = path.with_name(f"set-aside-{path.name}-{number}")
            path.rename(aside)
            print(f"{path} is later than the checkpoint to go on from: renamed to {aside}", file=sys.stderr)
