"""Ranks agree on a save: the same step, completely or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest

from megasparse.errors import CheckpointError, ConfigError, StorageError, TrainingError
from megasparse.training.checkpoints import manifest, saving
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import RunIdentity
from megasparse.training.checkpoints.resume import find_start
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.ranks import Ranks
from tests.helpers.cases import together
from tests.helpers.ranks_in_threads import ThreadRanks, run_in_threads
from tests.helpers.tiny import identity_of, tiny_config, tiny_engine
from tests.training.checkpoints.test_saving import fail_in_rank_1, names

SAME: dict[str, Any] = {"step": 2, "sequences": 16, "state": {"losses": [0.1, 0.2], "skipped": 0}}


def save_twice(folder: Path, world_size: int = 2, unlike: dict[int, dict[str, Any]] | None = None, **checkpoint: Any):
    """Save checkpoint 1, then each rank's arguments. Returns the outcome of each rank."""
    config = tiny_config(folder, checkpoint=checkpoint)

    def work(ranks: Ranks) -> Any:
        engine = tiny_engine(config, ranks)
        saver = Saver(identity_of(config), ranks)
        for what in ({"step": 1, "sequences": 8, "state": {}}, {**SAME, **(unlike or {}).get(ranks.rank, {})}):
            saver.save(engine, **what)
            saver.finish()

    return run_in_threads(work, world_size)


@together("asynchronous", [False, True])
@together(
    ("unlike", "message"),
    [
        ({1: {"step": 3}}, "step: 2 on ranks 0, 2, 3 on rank 1"),
        ({2: {"sequences": 17}}, "sequences: 16 on ranks 0, 1, 17 on rank 2"),
        ({0: {"state": {"losses": [0.1, 0.2], "skipped": 1}}}, "state.skipped: 1 on rank 0, 0 on ranks 1, 2"),
        ({1: {"state": {"skipped": 0}}}, "state.losses: [0.1, 0.2] on ranks 0, 2, nothing on rank 1"),
        ({1: {"state": {"losses": [0.1, 0.2 + 3e-17], "skipped": 0}}}, "state.losses: [0.1, 0.2] on ranks 0, 2, "),
    ],
)
def test_ranks_that_disagree_on_a_save_are_rejected(tmp_path, unlike, message, asynchronous):
    errors = save_twice(tmp_path, 3, unlike, asynchronous=asynchronous)
    assert {type(error) for error in errors} == {CheckpointError} and len({str(error) for error in errors}) == 1
    assert message in str(errors[0]) and "disagree on the checkpoint" in str(errors[0])
    assert names(tmp_path / "checkpoints") == ["00000001", "latest"]


def test_the_same_on_all_is_saved_once(tmp_path):
    assert save_twice(tmp_path, 5) == [None] * 5
    opened = Checkpoint.open(tmp_path / "checkpoints" / "00000002")
    assert (opened.step, opened.sequences, opened.state) == tuple(SAME.values())
    assert len(opened.manifest["files"]) == 5


def test_only_rank_0_receives_the_manifests_of_the_ranks(tmp_path, monkeypatch):
    received: dict[int, list[str]] = {0: [], 1: [], 2: []}

    gather = ThreadRanks.gather

    def noting(ranks: ThreadRanks, value: Any, first_only: bool = False) -> list[Any]:
        values = gather(ranks, value, first_only)
        received[ranks.rank] += map(json.dumps, values)
        return values

    monkeypatch.setattr(ThreadRanks, "gather", noting)
    assert save_twice(tmp_path, 3) == [None] * 3
    of_pieces = {rank: sum('"numel"' in text for text in texts) for rank, texts in received.items()}
    assert of_pieces == {0: 2 * 3, 1: 0, 2: 0}


class Bug(Exception):
    pass


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("raised", "expected", "exit_code"),
    [
        (OSError(28, "No space left on device"), StorageError, 3),
        (TrainingError("weight of x contains a number that is not finite"), TrainingError, 4),
        (Bug("of ours"), CheckpointError, 2),
    ],
)
def test_one_ranks_failure_is_everybodys(tmp_path, monkeypatch, capsys, raised, expected, exit_code, asynchronous):
    fail_in_rank_1(monkeypatch, raised)
    errors = save_twice(tmp_path, asynchronous=asynchronous)
    assert [type(error) for error in errors] == [expected] * 2 and str(errors[0]) == str(errors[1])
    assert errors[0].exit_code == exit_code
    message = str(errors[0])
    assert "the checkpoint of step 2 was not saved. Rank 1: " in message and str(raised.args[-1]) in message
    assert names(tmp_path / "checkpoints") == ["00000001", "latest"]
    assert ("raise raised" in capsys.readouterr().err) == isinstance(raised, Bug), "a bug's traceback is shown"


def test_the_room_is_for_all_ranks_together(tmp_path, monkeypatch):
    assert save_twice(tmp_path / "first") == [None, None]
    files = (tmp_path / "first" / "checkpoints" / "00000002").glob("rank*")
    sizes = [file.stat().st_size for file in files]
    monkeypatch.setattr(saving, "free_bytes", lambda _: sum(sizes) - 1)
    errors = save_twice(tmp_path / "second")
    assert {type(error) for error in errors} == {StorageError} and max(sizes) < sum(sizes) - 1
    assert f"{sum(sizes):,} bytes needed, {sum(sizes) - 1:,} bytes free" in str(errors[0])
    assert not (tmp_path / "second").exists()


def start(folder: Path, **unlike: Any) -> list[Any]:
    """Start three ranks, of which rank 1 is given something else."""

    def work(ranks: Ranks) -> Any:
        own = {"config": {}, "data": "data", "tokenizer": {"name": "bytes"}, "resume": "auto"}
        own |= unlike if ranks.rank == 1 else {}
        config = tiny_config(folder, **own["config"])
        return find_start(RunIdentity(config, own["data"], own["tokenizer"]), ranks, resume=own["resume"])

    return run_in_threads(work, 3)


@pytest.mark.parametrize(
    ("unlike", "message"),
    [
        ({}, ""),
        ({"config": {"run": {"seed": 7}}}, "config.run.seed: 0 on ranks 0, 2, 7 on rank 1. Use"),
        ({"config": {"training": {"steps": 9}}}, "config.training.steps: 20 on ranks 0, 2, 9 on rank 1. Use"),
        ({"data": "other"}, 'data: "data" on ranks 0, 2, "other" on rank 1. Use'),
        ({"tokenizer": {"name": "words"}}, 'tokenizer.name: "bytes" on ranks 0, 2, "words" on rank 1. Use'),
        ({"resume": "never"}, 'command.resume: "auto" on ranks 0, 2, "never" on rank 1. Use'),
    ],
)
def test_ranks_that_were_given_different_runs_do_not_start(tmp_path, unlike, message):
    result = start(tmp_path, **unlike)
    assert [type(one) for one in result] == [ConfigError if message else type(None)] * 3
    assert all(message in str(one) for one in result)


def test_ranks_that_run_different_code_do_not_start(tmp_path, monkeypatch):
    def other(ranks: Ranks, value: Any) -> list[Any]:
        values = [value, {**value, "code": {**value["code"], "torch": "1.0", "source": "0" * 64}}]
        return values if "code" in value else [value] * 2

    monkeypatch.setattr(Ranks, "gather", other)
    with pytest.raises(ConfigError) as caught:
        find_start(identity_of(tiny_config(tmp_path)), Ranks())
    versions = manifest.versions()
    assert f'code.torch: "{versions["torch"]}" on rank 0, "1.0" on rank 1' in str(caught.value)
    assert f'code.source: "{versions["source"]}" on rank 0, "{"0" * 64}" on rank 1' in str(caught.value)
    assert "code.python" not in str(caught.value)


def test_the_code_is_the_bytes_and_the_names_of_its_files(tmp_path):
    digests = set()
    for files in ({"a.py": "1", "b/c.py": "2"}, {"a.py": "1", "b/c.py": "3"}, {"a.py": "1", "c.py": "2"}):
        folder = tmp_path / str(len(digests))
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        digests.add(manifest._source_digest(folder))
        (folder / "notes.txt").write_text("no code")
        digests.add(manifest._source_digest(folder))
    assert len(digests) == 3
    assert {"python", "torch", "source"} <= manifest.versions().keys()


def test_ranks_that_see_different_folders_do_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(Ranks, "gather", lambda _, value: [value, None if value == "00000001" else value])
    (tmp_path / "checkpoints" / "00000001").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r'newest: "00000001" on rank 0, null on rank 1'):
        find_start(identity_of(tiny_config(tmp_path)), Ranks())
