"""The manifest for Kubernetes: valid by the published models of JobSet, and its script as a pod runs it."""

import copy
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models

from megasparse.cli.main import parser_of

MANIFEST = Path(__file__).parents[2] / "launch" / "kubernetes" / "pretrain.yaml"

FAKE = """#!/bin/bash
printf '%s\\n' "$@" > "$NOTES/arguments"
trap 'echo > "$NOTES/asked"; exit 0' TERM
touch "$NOTES/ready"
[ -z "$CODE" ] || exit "$CODE"
while :; do sleep 0.05; done
"""
"""What stands for `megasparse` in a pod: it runs until SIGTERM, then saves and ends with 0; or ends with $CODE."""


def manifest() -> dict[str, Any]:
    return dict(yaml.safe_load(MANIFEST.read_text()))


def as_known(values: dict[str, Any]) -> dict[str, Any]:
    """What the models keep of an object: unknown fields are dropped, wrong types and missing fields refused."""
    return dict(models.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(values)).to_dict())


def job(values: dict[str, Any]) -> dict[str, Any]:
    (only,) = values["spec"]["replicatedJobs"]
    return dict(only["template"]["spec"])


def container(values: dict[str, Any]) -> dict[str, Any]:
    (only,) = job(values)["template"]["spec"]["containers"]
    return dict(only)


def test_every_field_is_one_of_the_published_models():
    assert as_known(manifest()) == manifest()


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        (lambda m: m["spec"]["failurePolicy"], "maxRestart", 3),
        (lambda m: m["spec"]["failurePolicy"], "maxRestarts", "many"),
        (lambda m: m["spec"]["coordinator"], "replicatedJob", None),
        (lambda m: m["spec"]["replicatedJobs"][0]["template"]["spec"], "backoff", 0),
        (lambda m: m["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"], "containers", None),
    ],
)
def test_the_models_find_misspelt_missing_and_mistyped_fields(place, key, value):
    wrong = manifest()
    place(wrong)[key] = value
    with pytest.raises((ValueError, AssertionError)):
        assert as_known(wrong) == wrong


def test_its_numbers_agree_and_its_job_is_the_one_that_the_policies_name():
    values, pod = manifest(), container(manifest())
    environment = {each["name"]: each.get("value") for each in pod["env"]}
    assert job(values)["completions"] == job(values)["parallelism"] == int(environment["NODES"])
    assert pod["resources"]["limits"]["nvidia.com/gpu"] == int(environment["RANKS"])
    (rule,) = job(values)["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == pod["name"] and rule["onExitCodes"]["values"] == [2, 4, 7]
    names = [each["name"] for each in values["spec"]["replicatedJobs"]]
    assert values["spec"]["coordinator"]["replicatedJob"] in names
    volumes = {each["name"] for each in job(values)["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in pod["volumeMounts"]} == volumes


def pod_process(folder: Path, code: str = "") -> subprocess.Popen[bytes]:
    """The container's command with its arguments, as node 1, where `megasparse` is FAKE."""
    program = folder / "bin" / "megasparse"
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(0o755)
    pod = container(manifest())
    environment = {each["name"]: each["value"] for each in pod["env"] if "value" in each}
    environment |= {"JOB_COMPLETION_INDEX": "1", "COORDINATOR": "first.pod", "NOTES": str(folder), "CODE": code}
    environment["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    return subprocess.Popen([*pod["command"], *pod["args"]], env=environment)


@pytest.mark.parametrize("code", [0, 2, 5])
def test_a_run_that_ends_by_itself_keeps_its_exit_code_and_its_arguments_are_valid(tmp_path, code):
    assert pod_process(tmp_path, str(code)).wait(30) == code
    words = (tmp_path / "arguments").read_text().splitlines()
    assert words[0] == "supervise"
    args = parser_of("supervise").parse_args(words[1:])
    assert (args.ranks, args.nodes, args.node_rank, args.address) == (8, 2, 1, ("first.pod", 29500))
    assert args.script == "pretrain"
    given = parser_of("pretrain").parse_args(args.arguments)
    assert given.name == "reformer_64k" and "run.directory=/mnt/megasparse/runs/reformer_64k" in given.set


def test_a_pod_that_is_asked_to_stop_waits_for_the_save_and_does_not_look_complete(tmp_path):
    process = pod_process(tmp_path)
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert (tmp_path / "asked").exists()
