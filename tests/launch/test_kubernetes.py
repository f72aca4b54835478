"""The manifest for Kubernetes: valid by the published models of JobSet, and its command as torchrun parses it."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models
from torch.distributed.run import get_args_parser

from megasparse.cli.main import parser_of
from megasparse.config.schema import Config
from megasparse.settings.load import load_settings
from tests.helpers.cases import together

MANIFEST = Path(__file__).parents[2] / "launch" / "kubernetes" / "pretrain.yaml"


def manifest() -> dict[str, Any]:
    return dict(yaml.safe_load(MANIFEST.read_text()))


def as_known(values: dict[str, Any]) -> dict[str, Any]:
    """An object as the models read it: unknown fields are dropped, wrong types and missing fields are errors."""
    return dict(models.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(values)).to_dict())


def job(values: dict[str, Any]) -> dict[str, Any]:
    (only,) = values["spec"]["replicatedJobs"]
    return dict(only["template"]["spec"])


def container(values: dict[str, Any]) -> dict[str, Any]:
    (only,) = job(values)["template"]["spec"]["containers"]
    return dict(only)


def test_every_field_is_one_of_the_published_models():
    assert as_known(manifest()) == manifest()


@together(
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
    names = [each["name"] for each in values["spec"]["replicatedJobs"]]
    assert values["spec"]["coordinator"]["replicatedJob"] in names
    volumes = {each["name"] for each in job(values)["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in pod["volumeMounts"]} == volumes


def test_torchrun_and_the_run_accept_the_command():
    """Every option of the container's command, and the configuration and keys that its arguments name."""
    pod = container(manifest())
    values = {item["name"]: item["value"] for item in pod["env"] if "value" in item} | {"COORDINATOR": "first.pod"}
    words = [re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], word) for word in [*pod["command"], *pod["args"]]]
    assert words[0] == "torchrun"
    options = get_args_parser().parse_args(words[1:])
    assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == ("2", "8", "first.pod:29500")
    assert options.module and options.training_script == "megasparse"
    command, *arguments = options.training_script_args
    args = parser_of(command).parse_args(arguments)
    assert command == "pretrain" and load_settings(args.name, args.set, Config).parallel.sequence == 8
