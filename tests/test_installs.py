"""The ranges of pyproject.toml admit what users have: CUDA builds of torch, and the versions of constraints.txt."""

import re
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRITON = {"2.7.0": "3.3.0", "2.11.0": "3.6.0", "2.13.0": "3.7.1", "2.15.0": "3.9.0"}
"""The triton that PyPI's torch, its CUDA build, requires, by its version: Requires-Dist of the wheel. Its CPU build
requires none.
"""
CORE = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = [Requirement(line) for lines in PROJECT["optional-dependencies"].values() for line in lines]


@pytest.mark.parametrize("version", TRITON)
def test_the_triton_of_a_cuda_build_of_torch_is_allowed(version):
    torch, triton = (next(found for found in CORE if found.name == name) for name in ("torch", "triton"))
    assert torch.specifier.contains(version) and triton.specifier.contains(TRITON[version])


def test_only_linux_requires_deepspeed_fairscale_and_triton():
    limited = {found.name for found in CORE if found.marker and not found.marker.evaluate({"sys_platform": "darwin"})}
    assert limited == {"deepspeed", "fairscale", "triton"}
    assert all(found.marker is None or found.marker.evaluate({"sys_platform": "linux"}) for found in CORE)


def test_no_requirement_pins_a_library_of_users():
    """Installing megasparse replaces no library of its users within a major version."""
    pinned = {found.name for found in [*CORE, *EXTRAS] if re.search(r"==", str(found.specifier))}
    assert pinned == {"kubeflow-trainer-api", "reformer-pytorch"}  # of development and comparisons only


def test_the_constraints_are_within_the_ranges():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = dict(line.split(" ;")[0].split("==") for line in lines if not line.startswith("#"))
    for found in (*CORE, *EXTRAS):
        if found.name in versions:
            assert found.specifier.contains(versions[found.name], prereleases=True), found
