"""The Python API: the names of `import megasparse`, and the example in the docstring of each."""

import doctest
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import megasparse
from tests.helpers.finetuning import ENCODER, launch, reviews
from tests.helpers.trained import prepared

ROOT = Path(__file__).parents[1]
GLOBALS = {"megasparse": megasparse, "torch": torch, "transformers": transformers}
NAMES = [name for name in dir(megasparse) if not name.startswith("_")]
TINY = {
    "run": {"directory": "runs/quickstart", "engine": "torch", "device": "cpu"},
    "model": {"max_length": 64, "layers": 1, "d_model": 32, "d_ff": 64, "heads": 4, "attention": {"pattern": ["lsh"]}},
    "data": {"path": "data", "sequence_length": 64},
    "training": {"steps": 2, "global_batch": 2, "micro_batch": 2},
}


def test_nothing_is_imported_before_it_is_used():
    code = "import sys, megasparse; print(sorted({'torch', 'pydantic', 'megasparse.runs'} & {*sys.modules}))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'pretrian'"):
        _ = megasparse.pretrian


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with small stand-ins for the files of the examples: data, a configuration, runs and a BERT."""
    folder = tmp_path_factory.mktemp("api")
    prepared(folder)
    tiny = TINY | {"model": {**TINY["model"], "attention": {"pattern": ["lsh"], "lsh": {"chunk": 8}}}}
    (folder / "quickstart").write_text(json.dumps(tiny))  # a file of that name wins over the shipped configuration
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        megasparse.pretrain(megasparse.load_config("quickstart"))
    launch(folder / "runs" / "reviews", reviews(folder / "reviews.csv", 24), model=ENCODER)
    shutil.copy(folder / "runs" / "reviews.json", folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_each_name_works(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    member = getattr(megasparse, name)
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(member, name, globs=GLOBALS)
    assert example.examples, f"{name} has no example in its docstring"
    report = []
    assert doctest.DocTestRunner().run(example, out=report.append).failed == 0, "".join(report)
