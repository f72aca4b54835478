"""Nothing that a configuration, a file or a checkpoint holds is ever executed: the gate over our own source."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megasparse.errors import ConfigError
from megasparse.settings.load import build_config, load_config
from tests.helpers.cases import together

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("megasparse", "launch", "tools") for path in (ROOT / folder).rglob("*.py"))

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    *("os.system", "os.popen", "tempfile.mktemp", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "torch.hub.load"),
    *("torch.hub.load_state_dict_from_url", "shutil.unpack_archive", "runpy.run_path", "runpy.run_module"),
}
METHODS = {"extractall", "extract"}


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`t.hub.load` as `torch.hub.load` under `import torch as t`; "" if it is not a plain name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        before = dotted(node.value, names)
        return f"{before}.{node.attr}" if before else f"?.{node.attr}"
    return ""


def is_constant(call: ast.Call, name: str, value: object) -> bool:
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is value for k in call.keywords)


def is_given(call: ast.Call, name: str) -> bool:
    return any(k.arg == name for k in call.keywords)


def findings(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
            imported = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            imported = [f"{node.module}.{a.name}" for a in node.names]
        else:
            continue
        for name in imported:
            if name.split(".")[0] in MODULES or "torch.hub" in name or name in CALLS:
                yield f"line {node.lineno}: imports {name}"
    for node in ast.walk(tree):
        where = f"line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and dotted(node, names) in CALLS:
            yield f"{where}: {dotted(node, names)}"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func, names)
        if name in BUILTINS or name.removeprefix("builtins.") in BUILTINS:
            yield f"{where}: {name}"
        if name == "torch.load" and not is_constant(node, "weights_only", True):
            yield f"{where}: torch.load without weights_only=True"
        if name == "numpy.load" and is_given(node, "allow_pickle") and not is_constant(node, "allow_pickle", False):
            yield f"{where}: numpy.load with allow_pickle"
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            yield f"{where}: {node.func.attr}"
        if is_given(node, "shell") and not is_constant(node, "shell", False):
            yield f"{where}: shell="
        if is_given(node, "trust_remote_code") and not is_constant(node, "trust_remote_code", False):
            yield f"{where}: trust_remote_code="


def test_the_source_never_executes_file_content():
    offences = [f"{path.relative_to(ROOT)}: {text}" for path in SOURCES for text in findings(path.read_text("utf-8"))]
    assert not offences, "\n".join(offences)


WRITE = re.compile(r"\.write_(text|bytes)\(|\bopen\((?!.*opener=).*, \"[wax]")
FRESH_FOLDERS = {f"hub/{x}.py" for x in ("replace", "gguf_file", "tensor_file")}


def test_the_package_writes_through_no_link():
    """Files are written by megasparse.files, except /proc's and those in a folder that was just made."""
    folder = ROOT / "megasparse"
    writers = {str(p.relative_to(folder)) for p in folder.rglob("*.py") if WRITE.search(p.read_text("utf-8"))}
    assert writers == {*FRESH_FOLDERS, "planning/dry_run.py"}


@together(
    "source",
    [
        *(f"import {name}" for name in sorted(MODULES)),
        *("from pickle import loads", "import pickle as p", "def f():\n    import dill", "from joblib.x import y"),
        *("eval('1')", "exec('1')", "compile('1', '', 'eval')", "import builtins as b\nb.eval('1')", "__import__('x')"),
        *("import torch\ntorch.load('x')", "import torch as t\nt.load('x', weights_only=False)"),
        *("from torch import load\nload('x')", "import torch\ntorch.load('x', weights_only=flag)"),
        *("import yaml\nyaml.load(text, Loader=yaml.SafeLoader)", "from yaml import load", "import yaml\nf=yaml.load"),
        *("archive.extractall()", "tarfile.open(x).extract(member)", "import shutil\nshutil.unpack_archive('x')"),
        *("import subprocess as s\ns.run('x', shell=True)", "run('x', shell=wanted)"),
        *("import os\nos.system('x')", "from os import popen", "import os\nf = os.popen"),
        *("AutoModel.from_pretrained('x', trust_remote_code=True)", "load('x', trust_remote_code=wanted)"),
        *("import numpy as np\nnp.load('x', allow_pickle=True)", "from numpy import load\nload('x', allow_pickle=y)"),
        *("import torch\ntorch.hub.load('a', 'b')", "from torch.hub import load", "import torch.hub"),
        *("import tempfile\ntempfile.mktemp()", "from tempfile import mktemp", "import runpy\nrunpy.run_path('x')"),
    ],
)
def test_the_gate_sees_it(source):
    assert list(findings(source))


def test_the_gate_lets_the_safe_forms_pass():
    safe = """
import re, subprocess, numpy as np, torch
torch.load("x", weights_only=True)
np.load("x"); np.load("x", allow_pickle=False)
subprocess.run(["x"]); subprocess.run(["x"], shell=False)
re.compile("x"); model.eval(); torch.compile(model); table.load("x")
"""
    assert not list(findings(safe)) and len(SOURCES) > 100


@together(
    "value",
    [
        *("$HOME", "${HOME}", "$(touch MARKER)", "`touch MARKER`", "~/runs", "%(HOME)s", "runs{HOME}", "!ENV HOME"),
        *("!!python/object/apply:os.system ['touch MARKER']", "@MARKER", "@file:MARKER", "${oc.env:HOME}", "../runs"),
        *("__import__('os').system('touch MARKER')", "; touch MARKER", "| touch MARKER", "pipe:touch MARKER"),
    ],
)
def test_a_value_is_taken_literally(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    value = value.replace("MARKER", "marker")
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"run": {"directory": value}}))
    assert load_config(path).run.directory == value
    assert build_config({}, [f"run.directory={value}"]).run.directory == value
    with pytest.raises(ConfigError):
        build_config({}, [f"training.steps={value}"])
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@together(
    ("name", "text"),
    [
        ("run.yaml", "run:\n  directory: !!python/object/apply:os.system ['touch marker']\n"),
        ("run.yml", "--- !!python/object/apply:os.system ['touch marker']\n"),
        ("run.py", "import os\nos.system('touch marker')\n"),
        ("run.pkl", "cos\nsystem\n(S'touch marker'\ntR."),
        ("run.json", "!!python/object/apply:os.system ['touch marker']"),
        ("run.json", '{"run": !!python/object/apply:os.system ["touch marker"]}'),
        ("run.toml", "[run]\nseed = 1\n"),
        ("run.ini", "[run]\nseed = 1\n"),
        ("run.json", '@include "other.json"'),
    ],
)
def test_a_configuration_that_is_not_json_is_rejected_in_one_line_and_never_executed(tmp_path, monkeypatch, name, text):
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"{name}.*not JSON") as error:
        load_config(str(tmp_path / name))
    assert "\n" not in str(error.value) and [p.name for p in tmp_path.iterdir()] == [name]


@together("key", ["include", "extends", "$ref", "__class__", "_target_", "defaults", "<<"])
def test_no_key_brings_in_other_files_or_classes(key):
    for place in ({key: "os.system"}, {"run": {key: "os.system"}}, {"deepspeed": {key: "os.system"}}):
        with pytest.raises(ConfigError, match="unknown key"):
            build_config(place)
