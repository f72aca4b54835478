"""Imports go one way, floor by floor and inside each folder; read from the source, so that an import inside a function,
for a type checker, or by a module's name in a string counts too."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.cases import together

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "errors": set(),
    "system": set(),
    "files": {"errors", "system"},
    "ops": {"errors"},
    "optimizers": {"errors"},
    "config": {"errors", "files", "optimizers"},
    "data": {"errors", "system", "files"},
    "attention": {"errors", "ops", "config"},
    "settings": {"errors", "optimizers", "config", "attention"},
    "functional": {"errors", "ops", "config", "attention", "settings"},
    "layer": {"errors", "ops", "config", "attention", "settings", "functional"},
    "training": {"errors", "system", "files", "ops", "optimizers", "config", "data", "settings"},
    "model": {"errors", "files", "ops", "config", "attention"},
}
ALL_BELOW = set(MAY_IMPORT)
for floor in ("evaluation", "planning", "hub"):
    MAY_IMPORT[floor] = ALL_BELOW
MAY_IMPORT["tasks"] = ALL_BELOW | {"evaluation", "planning", "hub"}  # it starts from their models, and plans them
MAY_IMPORT["runs"] = ALL_BELOW | {"evaluation", "planning", "hub", "tasks"}
MAY_IMPORT["cli"] = {*MAY_IMPORT["runs"], "runs"}
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT["__init__"] = {"__main__", *MAY_IMPORT["cli"], "cli"}  # it imports a public name on first use


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> set[str]:
    """Dotted names that a file imports by a statement, by a string that is a module's name, alone or before a colon, or
    by an f-string: f"megasparse.hub.{name}" may import each module of the folder."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {node.value.partition(":")[0]} & MODULES.keys() - {"megasparse"}
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            folder = str(node.values[0].value)
            names |= {name for name in MODULES if folder.removesuffix(".") in MODULES and name.startswith(folder)}
    assert not {name.partition(".")[0] for name in names} & {"launch", "tools", "tests"}, path
    return {name for name in names if name.partition(".")[0] == "megasparse"} - {"megasparse.__version__"}


FILES = sorted((ROOT / "megasparse").rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


def module_of(name: str) -> Path:
    """File of a dotted name, of which the last part may be a name in the module."""
    return MODULES.get(name) or MODULES[name.rpartition(".")[0]]


def circles(folder: Path) -> list[set[str]]:
    """Files and folders inside `folder` that import each other, directly or through others."""

    def part(path: Path) -> str:
        """An operator and its kernels are one part of two files."""
        return path.relative_to(folder).parts[0].removesuffix(".py").removesuffix("_kernels")

    reached: dict[str, set[str]] = {}
    for path in FILES:
        if path.is_relative_to(folder):
            used = {part(other) for other in map(module_of, imported(path)) if other.is_relative_to(folder)}
            reached[part(path)] = reached.get(part(path), set()) | used - {part(path)}
    for middle in reached:  # paths through one part after another (Warshall)
        for ends in reached.values():
            if middle in ends:
                ends |= reached[middle]
    found = {frozenset(other for other in ends if start in reached[other]) for start, ends in reached.items()}
    return [set(circle) for circle in found if len(circle) > 1]


@together("folder", sorted({str(path.parent.relative_to(ROOT)) for path in FILES}))
def test_nothing_in_a_folder_imports_in_a_circle(folder):
    assert not circles(ROOT / folder)


def test_a_part_imports_only_lower_parts():
    offences = []
    for path in FILES:
        part = path.relative_to(ROOT / "megasparse").parts[0].removesuffix(".py")
        assert part in MAY_IMPORT, f"megasparse/{part} has no entry in MAY_IMPORT"
        allowed = MAY_IMPORT[part] | {part}
        offences += [
            f"{path.relative_to(ROOT)}: {name}" for name in sorted(imported(path)) if name.split(".")[1] not in allowed
        ]
    assert not offences, "\n".join(offences)


def test_only_the_engine_and_its_configuration_know_deepspeed():
    knowing = {
        str(path.relative_to(ROOT / "megasparse"))
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name.split(".")[0] == "deepspeed"
    }
    assert knowing <= {"training/engines/deepspeed.py", "config/deepspeed_section.py"}


PROTOCOLS = {"hub"}
"""Folders whose classes have methods that transformers calls."""


def test_every_method_is_called():
    """An unused method may be one that a rename has missed, for example in a subclass."""
    nodes = [(path, node) for path in FILES for node in ast.walk(parsed(path))]
    called = {node.attr for _, node in nodes if isinstance(node, ast.Attribute)}
    called |= {node.value for _, node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    alone = [
        f"{path.relative_to(ROOT)}: {node.name}.{method.name}"
        for path, node in nodes
        if isinstance(node, ast.ClassDef) and path.relative_to(ROOT).parts[1] not in PROTOCOLS
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name not in called and not method.name.startswith("_")
    ]
    assert not alone


def test_the_check_sees_every_kind_of_import(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("""import megasparse.data.index as a
from megasparse import ops, __version__
def f(name):
    from megasparse.model.block import Block
    import_module("megasparse.attention")
    load("megasparse.hub.export:to_hf")
    import_module(f"megasparse.cli.{name}")
""")
    names = {name.removeprefix("megasparse.") for name in imported(path)}
    assert names >= {"cli.main", "cli.hub"}
    others = {"data.index", "ops", "model.block.Block", "attention", "hub.export"}
    assert {name for name in names if not name.startswith("cli.")} == others


RUNS = ALL_BELOW | {"cli", "runs"}
REACHED = {
    "pretrain": ("runs.pretraining", RUNS | {"evaluation", "planning"}),
    "finetune": ("runs.finetuning", RUNS | {"evaluation", "planning", "tasks"}),
    "evaluate": ("runs.api", RUNS | {"evaluation"}),
    "generate": ("evaluation.texts", RUNS | {"evaluation"}),
    "predict": ("tasks.run", RUNS | {"evaluation", "tasks"}),
    "prepare-data": ("data.prepare", {"cli", "config", "errors", "system", "files", "data", "optimizers"}),
    "compare": ("runs.comparison", RUNS),
    "report": ("runs.report", RUNS),
    "plan": ("planning.plan", RUNS | {"planning"}),
    "replace-attention": ("hub.replace", RUNS | {"hub"}),
}
"""Command -> the module that does its work, and the folders that it may reach."""
ONLY = {"pretrain": {"planning": {"planning.flops"}}}
"""Command -> the modules of a folder that it reaches: planning's others are for the dry run."""


FAST = ("pretrain", "finetune", "prepare-data")
"""Commands that are checked by `make test`; each imports torch in a separate process."""


@pytest.mark.parametrize(
    "command", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in REACHED]
)
def test_a_command_imports_only_the_modules_that_it_needs(command):
    work, folders = REACHED[command]
    code = f"""
import importlib, sys
from megasparse.cli.main import parser_of
parser_of({command!r})
importlib.import_module("megasparse.{work}")
print(*(name.removeprefix("megasparse.") for name in sys.modules if name.startswith("megasparse.")))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    reached = set(ended.stdout.split())
    assert {name.split(".")[0] for name in reached} <= folders
    for folder, modules in ONLY.get(command, {}).items():
        assert {name for name in reached if name.startswith(f"{folder}.")} <= modules
