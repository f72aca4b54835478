"""Killed ranks and jobs and changed numbers of ranks do not change the later steps."""

import os
import random
import signal
import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megasparse.data.index import Index
from megasparse.data.reader import ShardReader
from megasparse.files import LOCK_FILE
from megasparse.training.checkpoints.manifest import list_checkpoints
from tests.helpers.faults import Ended, Run, fault, is_alive, is_complete, patience, running

KILLS = int(os.environ.get("MEGASPARSE_SOAK_KILLS", "20"))
DELAY = 3.0

CRASHES = [  # where it happens; the newest checkpoint then. Every point of a save: tests/training/checkpoints
    (fault(r"write \S*tmp-00000004\S*/rank-00001", f"sleep {DELAY}", "kill", rank=1), 2),  # rank 0 has written its part
    (fault(r"rename \S*tmp-00000008\S* \S*/00000008$", "kill", rank=0), 6),  # the manifest is on the disk
    (fault(r"forward 9$", "kill", rank=1), 8),
    (fault(r"remove (rank|manifest)", "kill", rank=0), 10),  # an old one is being deleted
]


@dataclass(eq=False)
class Watcher(threading.Thread):
    """Looks at a run every 20 ms: is there a complete checkpoint, and who lives on after a rank has died?"""

    run_: Run
    crashes: int = 0
    polls: int = 0
    polls_without: int = 0
    """Polls without a complete checkpoint, after the first one."""
    deaths: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Crash -> when its rank had died, the newest checkpoint then, and how many seconds later all ranks were gone."""

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.ending = threading.Event()

    def run(self) -> None:
        found = False
        while not self.ending.wait(0.02):
            complete = any(
                is_complete(path) for path in reversed(list_checkpoints(self.run_.directory / "checkpoints"))
            )
            found = found or complete
            self.polls += found
            self.polls_without += found and not complete
            for number in range(self.crashes):
                self._look_at(number)

    def _look_at(self, number: int) -> None:
        death = self.deaths.get(number, {})
        if "seconds" in death or (note := self.run_.note(number)) is None:
            return
        if not death and not is_alive(note["pids"][f"rank-{note['rank']}"]):
            death = {"died": time.time(), "newest": self.run_.checkpoints()[-1], **note}
            self.deaths[number] = death
        if death and not any(is_alive(pid) for pid in note["pids"].values()):
            death["seconds"] = time.time() - death["died"]

    def __enter__(self) -> "Watcher":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ending.set()
        self.join()


@pytest.mark.slow
def test_a_run_killed_anywhere_in_a_save_or_step_resumes_under_torchrun(clean, data, tmp_path):
    """One job of two ranks: each crash kills a rank, torchrun's agent ends the other and starts both again."""
    run = Run(tmp_path, data)
    with running(run), Watcher(run, len(CRASHES)) as watcher:
        run.start(restarts=len(CRASHES), faults=[crash for crash, _ in CRASHES])
        ended = run.wait(limit=300)
        assert run.leftovers() == [] and run.new_shared_memory() == set()
    assert ended.code == 0, ended.said
    assert run.losses() == clean.losses() and run.samples() == clean.samples()
    assert run.first_steps() == [1, *(newest + 1 for _, newest in CRASHES)]
    assert sorted(path.name for path in (run.directory / "checkpoints").iterdir()) == ["00000018", "00000020", "latest"]

    deaths = [watcher.deaths[number] for number in range(len(CRASHES))]
    assert [death["newest"] for death in deaths] == [newest for _, newest in CRASHES]
    assert deaths[0]["died"] - deaths[0]["time"] > DELAY - 0.5, "rank 1 was late, and the older checkpoint the newest"
    assert max(death["seconds"] for death in deaths) < 5 * patience()
    assert watcher.polls > 200 and watcher.polls_without == 0, "a complete checkpoint at every moment"
    assert "Traceback" not in ended.said

    assert f"pid {run.rank(0)}, since " in (run.directory / LOCK_FILE).read_text(), "every start locks the folder again"
    assert "is in use" not in ended.said and "cannot be locked" not in ended.said


@pytest.mark.soak
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_job_killed_at_any_moment_loses_no_more_than_an_interval(data, tmp_path, asynchronous, figures):
    """SIGKILL of launcher and ranks; a rank's writing takes 0 to 2 s more, and half of the kills fall between saves."""
    every, draw = 5, random.Random(int(asynchronous))
    sections = {"training": {"steps": 100_000}, "checkpoint": {"every": every, "asynchronous": asynchronous}}
    run, straight = Run(tmp_path / "killed", data, **sections), Run(tmp_path / "straight", data, **sections)
    slow = [fault("forward", "sleep 0.1", every=True), fault(r"write \S*/rank-", "sleep 0 to 2", every=True)]
    expected, lost = [1], []
    began = time.monotonic()
    with running(run, straight), Watcher(run) as watcher:
        for _ in range(KILLS):
            run.start(faults=slow)
            run.wait_until(lambda: len(run.first_steps()) == len(expected))
            time.sleep(draw.uniform(0, 5))
            run.kill_all()
            newest = max(run.checkpoints(), default=0)
            lost.append(max(run.losses(), default=0) - newest)
            expected.append(newest + 1)
        run.start("--stop-at", str(newest + 10))
        assert run.wait().code == 0, run.said()
        seconds = (time.monotonic() - began) / KILLS
        straight.start("--stop-at", str(newest + 10))
        assert straight.wait(limit=1800).code == 0, straight.said()
    killed, undisturbed = run.losses(), straight.losses()
    differences = sum(killed.get(step) != loss for step, loss in undisturbed.items())
    resumes = sum(one == other for one, other in zip(run.first_steps()[1:], expected[1:], strict=True))
    late = sum(steps > (2 if asynchronous else 1) * every for steps in lost)
    figures(kills=KILLS, resumes=resumes, bit_differences=differences, lost_steps_over_interval=late)
    figures(longest_trial_of_a_kill_seconds=seconds, checkpoint_polls=watcher.polls)
    assert killed.keys() == undisturbed.keys() and differences == 0
    assert run.samples() == straight.samples()
    assert (resumes, late, watcher.polls_without) == (KILLS, 0, 0)


@dataclass
class Change:
    run: Run
    ends: list[Ended] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    """The newest checkpoint after each end."""


@pytest.fixture(scope="module")
def change(tmp_path_factory, data):
    """Two ranks whose launcher gets SIGTERM in step 4, one rank that gets SIGUSR1 in step 7, two to the end."""
    run = Run(tmp_path_factory.mktemp("ranks"), data)
    change = Change(run)
    with running(run):
        for ranks, step in ((2, 4), (1, 7), (2, None)):
            run.start(ranks=ranks, faults=[fault(f"forward {step}$", "sleep 1", rank=ranks - 1)] if step else [])
            if step is not None:
                run.wait_for_fault(0)
                pid, name = (run.launcher, signal.SIGTERM) if ranks == 2 else (run.rank(0), signal.SIGUSR1)
                os.kill(pid, name)
            change.ends.append(run.wait())
            change.saved.append(max(run.checkpoints()))
            assert run.leftovers() == []
    return change


@pytest.mark.slow
def test_a_signal_to_launcher_or_rank_saves_after_the_step(change):
    """torchrun ends with 1 when it was signalled itself."""
    assert [end.code for end in change.ends] == [1, 0, 0], [end.said for end in change.ends]
    assert change.saved == [4, 7, 20]
    assert "SIGTERM: saving and stopping" in change.ends[0].said
    assert "SIGUSR1: saving and stopping" in change.ends[1].said


def sequences_of(data: Path) -> list[bytes]:
    """The tokens of every sequence of an epoch."""
    reader = ShardReader(Index.load(data), "train")
    sequences = [
        reader.read(number, start, start + 64).numpy().tobytes()
        for number, shard in enumerate(reader.shards)
        for start in range(0, shard.tokens - 63, 64)
    ]
    reader.close()
    return sequences


@pytest.mark.slow
def test_every_sequence_of_the_epoch_comes_once(change, clean, data):
    assert change.run.samples() == clean.samples()
    sequences = sequences_of(data)
    assert 7 * 4 < len(sequences) < 20 * 4, "the epoch ends after the changes, and within the run"
    trained = {sample: crc for step in change.run.samples().values() for sample, crc in step.items()}
    assert sorted(trained) == list(range(20 * 4))
    assert Counter(trained[n] for n in range(len(sequences))) == Counter(map(zlib.crc32, sequences))


@pytest.mark.slow
def test_losses_equal_the_same_number_of_ranks_throughout(change, clean):
    found = {step: float.fromhex(loss) for step, loss in change.run.losses().items()}
    expected = {step: float.fromhex(loss) for step, loss in clean.losses().items()}
    assert list(found) == list(range(1, 21))
    assert [found[step] for step in range(1, 5)] == [expected[step] for step in range(1, 5)]
    for step in range(5, 18):
        assert found[step] == pytest.approx(expected[step], rel=1e-6), step


BATCH = 12


@pytest.mark.soak
def test_two_four_three_one_two_ranks_of_the_same_global_batch(tmp_path, data):
    """Through nearly five epochs, with every number of ranks that was not there before: nothing lost or repeated."""
    batch = {"steps": 20, "global_batch": BATCH, "micro_batch": 1}
    clean, run = (Run(tmp_path / name, data, training=batch) for name in ("clean", "run"))
    with running(clean, run):
        clean.start()
        assert clean.wait().code == 0, clean.said()
        for ranks, stop in ((2, 4), (4, 8), (3, 12), (1, 16), (2, 20)):
            run.start("--stop-at", str(stop), ranks=ranks)
            assert run.wait().code == 0, run.said()
            assert max(run.checkpoints()) == stop and max(run.losses()) == stop
    samples = run.samples(ranks=4)
    assert {step: sorted(numbers) for step, numbers in samples.items()} == {
        step: list(range((step - 1) * BATCH, step * BATCH)) for step in range(1, 21)
    }
    assert samples == clean.samples()
    sequences = Counter(map(zlib.crc32, sequences_of(data)))
    trained = {number: crc for numbers in samples.values() for number, crc in numbers.items()}
    size = sequences.total()
    assert len(trained) > 4 * size
    for epoch in range(4):
        assert Counter(trained[number] for number in range(epoch * size, (epoch + 1) * size)) == sequences
    losses = {step: (float.fromhex(loss), float.fromhex(run.losses()[step])) for step, loss in clean.losses().items()}
    moved = {step: abs(theirs / ours - 1) for step, (ours, theirs) in losses.items() if abs(theirs / ours - 1) > 1e-6}
    assert len(moved) <= 1 and all(size < 1e-4 for size in moved.values()), moved  # rounding flips a hash code
