"""Runs of launch/slurm/pretrain.sbatch on a Slurm of two nodes: preempted, out of time, killed, wrong and requeued."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.conftest import ENVIRONMENT, STEPS, cluster_run
from tests.helpers.faults import Run
from tests.helpers.hosts import require
from tests.helpers.slurm import Slurm

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "launch/slurm/pretrain.sbatch"


@pytest.fixture
def run(tmp_path, data):
    return cluster_run(tmp_path / "run", data)


def submit(slurm: Slurm, run: Run, *arguments: str, options: tuple[str, ...] = (), **environment: str) -> str:
    """Queue it for two nodes of one rank; its number."""
    options = ("--nodes=2", f"--output={run.folder}/log", *options)
    script = [SCRIPT, "--config", str(run.folder / "config.json"), *arguments]
    return slurm.submit(*options, *script, folder=ROOT, environment=ENVIRONMENT | environment)


def said(run: Run) -> str:
    return (run.folder / "log").read_text()


def wait_for_step(slurm: Slurm, run: Run, step: int) -> None:
    slurm.wait_until(lambda: max(run.losses(), default=0) >= step)


def test_the_script_is_clean():
    require("shellcheck")
    found = subprocess.run(["shellcheck", ROOT / SCRIPT], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_a_job_finishes_after_requeue_preemption_and_time_limit(slurm, run, clean):
    job = submit(slurm, run)
    wait_for_step(slurm, run, 20)
    slurm.first.do("scontrol", "requeue", job)
    wait_for_step(slurm, run, 50)
    urgent = slurm.first.do(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=sleep 2"
    )
    slurm.wait_for(urgent.strip(), "COMPLETED")
    wait_for_step(slurm, run, 80)
    slurm.first.do("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1 sends before time is up
    state = slurm.wait_for(job, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "3"), said(run)
    assert said(run).count("saving and stopping after this step") >= 3
    assert said(run).count("time is up, and the run has saved; requeued") == 1
    assert run.losses() == clean.losses()


def test_a_killed_rank_is_restarted_without_the_queue(slurm, pair, run, clean):
    job = submit(slurm, run)
    wait_for_step(slurm, run, 20)
    (rank,) = pair[1].processes("launch/pretrain.py", "--config")
    os.kill(rank, signal.SIGKILL)
    state = slurm.wait_for(job, "COMPLETED", "FAILED")
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "0"), said(run)
    assert run.losses() == clean.losses()


def test_a_mistake_is_not_queued_again(slurm, run):
    job = submit(slurm, run, "--set", "model.heads=7")
    state = slurm.wait_for(job, "COMPLETED", "FAILED")
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0"), said(run)
    assert "model.heads" in said(run) and "requeued" not in said(run)


def test_a_cancelled_job_saves_and_is_not_queued_again(slurm, run):
    job = submit(slurm, run)
    wait_for_step(slurm, run, 5)
    slurm.first.do("scancel", job)
    slurm.wait_for(job, "CANCELLED")
    assert "requeued" not in said(run)
    assert max(run.checkpoints()) == max(run.losses()) < STEPS


def test_the_real_time_limit_and_the_limit_of_requeues(slurm, run, figures):
    """Two minutes, with a signal 20 s before: of a run that needs longer than that."""
    options = ("--time=2", "--signal=B:USR1@20")
    job = submit(slurm, run, "--set", "training.steps=100000", options=options, MEGASPARSE_REQUEUES="1")
    state = slurm.wait_for(job, "COMPLETED", "FAILED", "TIMEOUT", limit=480)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), said(run)
    assert said(run).count("time is up, and the run has saved; requeued") == 1
    assert "not requeued: 1 requeues are the limit" in said(run)
    assert max(run.checkpoints()) == max(run.losses())
    figures(steps_in_four_minutes_of_queue=max(run.losses()))
