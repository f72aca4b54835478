"""The pins of pyproject.toml go together: with CUDA builds of torch, and with the Python versions that are named."""

import re
from importlib.metadata import requires
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.version import Version

from tests.helpers.cases import together

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRITON = {"2.11.0": "3.6.0", "2.13.0": "3.7.1"}
"""What PyPI's torch, its CUDA build, requires, by its version: Requires-Dist of the wheel. Its CPU build requires none.
"""
CORE = [Requirement(line) for line in PROJECT["dependencies"]]


def pin(requirement):
    """The version that a requirement pins, or None."""
    match = re.fullmatch(r"==([^*]+)", str(requirement.specifier))
    return match and match[1]


def required(extra):
    """The requirements of an extra, including the extras that it names."""
    for line in PROJECT["optional-dependencies"][extra]:
        found = Requirement(line)
        if found.name == PROJECT["name"]:
            for other in sorted(found.extras):
                yield from required(other)
        else:
            yield found


@together("torch", TRITON)
def test_the_triton_of_a_cuda_build_of_torch_is_allowed(torch):
    """2.13.0: a fresh installation. 2.11.0: a machine on which `tools/bench/gpu_check.py` runs."""
    (own,) = (found for found in CORE if found.name == "triton")
    assert own.specifier.contains(TRITON[torch])
    assert own.marker.evaluate({"sys_platform": "linux"})


def test_the_pinned_torch_has_a_known_triton():
    (torch,) = (found for found in CORE if found.name == "torch")
    assert pin(torch) in TRITON
    installed = [Requirement(line) for line in requires("torch") or ()]
    for found in installed:
        if found.name == "triton" and (found.marker is None or found.marker.evaluate()):
            assert found.specifier.contains(TRITON[pin(torch)])  # of a CUDA build; a CPU build has none


@together("extra", sorted(PROJECT["optional-dependencies"]))
def test_no_extra_pins_another_version_than_the_rest(extra):
    """Each pinned name has one pin, so that the resolver accepts every extra with the requirements."""
    pins = {}
    for found in [*CORE, *required(extra)]:
        if pin(found):
            assert pins.setdefault(found.name, pin(found)) == pin(found), found.name
    for found in [*CORE, *required(extra)]:
        if found.name in pins:
            assert found.specifier.contains(Version(pins[found.name])), found
