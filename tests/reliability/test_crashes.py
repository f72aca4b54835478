"""Ranks die at every point of a save, and jobs at any moment: what comes after is what would have come anyway."""

import os
import random
import re
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from megasparse.training.checkpoints.run_folder import list_checkpoints
from megasparse.training.checkpoints.run_lock import LOCK
from tests.helpers.faults import Ended, Run, fault, is_alive, is_complete, patience, running

KILLS = int(os.environ.get("MEGASPARSE_SOAK_KILLS", "20"))
DELAY = 6.0

CRASHES = [  # where it happens, in the order of a save; the newest checkpoint then
    (fault(r"write \S*tmp-00000004\S*/rank-00001", f"sleep {DELAY}", "kill", rank=1), 2),  # rank 0 has written its part
    (fault(r"write \S*tmp-00000008\S*/manifest", "kill", rank=0), 6),
    (fault(r"rename \S*tmp-00000010\S* \S*/00000010$", "kill", rank=0), 8),  # the manifest is on the disk
    (fault(r"write \S*latest", "kill", rank=0), 10),  # right after the rename
    (fault(r"remove (rank|manifest)", "kill", rank=0), 12),  # an old one is being deleted
    (fault(r"forward 15$", "kill", rank=1), 14),
]


@dataclass(eq=False)
class Watcher(threading.Thread):
    """Looks at a run every 10 ms: is there a complete checkpoint, and who lives on after a rank has died?"""

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
        while not self.ending.wait(0.01):
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


@dataclass(frozen=True)
class Story:
    run: Run
    watcher: Watcher
    ended: Ended
    leftovers: list[str]
    shared_memory: set[str]


@pytest.fixture(scope="module")
def story(tmp_path_factory, data):
    """One supervised job on two ranks that crashes at every point in turn, and goes on by itself."""
    run = Run(tmp_path_factory.mktemp("crashes"), data)
    with running(run), Watcher(run, len(CRASHES)) as watcher:
        run.start(supervise=["--restarts", "3"], faults=[crash for crash, _ in CRASHES])
        ended = run.wait(limit=300)
        return Story(run, watcher, ended, run.leftovers(), run.new_shared_memory())


def test_C2_a_crash_at_any_point_of_a_save_changes_nothing(story, clean):
    assert story.ended.code == 0, story.ended.said
    assert story.run.losses() == clean.losses()
    assert story.run.samples() == clean.samples()
    assert [story.watcher.deaths[n]["newest"] for n in range(len(CRASHES))] == [newest for _, newest in CRASHES]
    assert story.run.first_steps() == [1, *(newest + 1 for _, newest in CRASHES)]
    left = sorted(path.name for path in (story.run.directory / "checkpoints").iterdir())
    assert left == ["00000018", "00000020", "latest"]


def test_C12_every_restart_locks_the_folder_again(story):
    assert f"pid {story.run.rank(0)}, since " in (story.run.directory / LOCK).read_text()
    assert "is in use" not in story.ended.said and "cannot be locked" not in story.ended.said


def test_C3_a_rank_that_is_late_and_dies_leaves_the_older_checkpoint_the_newest(story):
    death = story.watcher.deaths[0]
    assert death["died"] - death["time"] > DELAY - 0.5
    assert death["newest"] == 2


def test_C9_a_complete_checkpoint_is_there_at_every_moment(story):
    assert story.watcher.polls > 500 and story.watcher.polls_without == 0


def test_S2_the_others_of_a_killed_rank_end_at_once_and_nothing_is_left(story):
    assert max(death["seconds"] for death in story.watcher.deaths.values()) < 5 * patience()
    assert story.leftovers == [] and story.shared_memory == set()
    for crash, _ in CRASHES:
        assert re.search(rf"rank {crash['rank']}\b.*SIGKILL", story.ended.said)
    assert len(re.findall(r"rank \d\b.*SIGKILL", story.ended.said)) == len(CRASHES)
    assert "Traceback" not in story.ended.said


@pytest.mark.soak
@pytest.mark.parametrize("asynchronous", [False, True])
def test_C1_C9_a_job_killed_at_any_moment_loses_no_more_than_an_interval(data, tmp_path, asynchronous, figures):
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
