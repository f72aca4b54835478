"""Imports go one way, floor by floor; read from the source, so that a lazy import inside a function counts too."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "errors": set(),
    "files": {"errors"},
    "ops": {"errors"},
    "optimizers": {"errors"},
    "config": {"errors", "files", "optimizers"},
    "data": {"errors", "files"},
    "attention": {"errors", "ops", "config"},
    "training": {"errors", "files", "optimizers", "config", "data"},
    "model": {"errors", "files", "ops", "config", "attention"},
}
ALL_BELOW = {"errors", "files", "ops", "optimizers", "config", "data", "attention", "training", "model"}
for floor in ("evaluation", "planning", "hub"):
    MAY_IMPORT[floor] = ALL_BELOW
MAY_IMPORT["tasks"] = ALL_BELOW | {"evaluation", "planning", "hub"}  # it starts from their models, and plans them
MAY_IMPORT["runs"] = ALL_BELOW | {"evaluation", "planning", "hub", "tasks"}
MAY_IMPORT["cli"] = {*MAY_IMPORT["runs"], "runs"}
MAY_IMPORT["__main__"] = {"cli"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> set[str]:
    """Parts of megasparse that a file imports: the second name of megasparse.x.y."""
    parts = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "megasparse":
                parts.add(rest.split(".")[0])
            assert first not in ("launch", "tools", "tests"), f"{path} imports {name}"
    return parts


FILES = sorted((ROOT / "megasparse").rglob("*.py"))


def test_a_part_imports_only_lower_parts():
    offences = []
    for path in FILES:
        part = path.relative_to(ROOT / "megasparse").parts[0].removesuffix(".py")
        assert part == "__init__" or part in MAY_IMPORT, f"megasparse/{part} has no entry in MAY_IMPORT"
        allowed = set() if part == "__init__" else MAY_IMPORT[part] | {part, "__version__"}
        offences += [f"{path.relative_to(ROOT)}: megasparse.{name}" for name in sorted(imported(path) - allowed)]
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
    lazy = "def f():\n    from megasparse.model.x import y\n"
    path.write_text(f"import megasparse.data.index as a\nfrom megasparse import ops\n{lazy}")
    assert imported(path) == {"data", "ops", "model"}


RUNS = {"cli", "runs", "config", "errors", "files", "data", "ops", "attention", "model", "optimizers", "training"}
REACHED = {
    "pretrain": ("runs.pretraining", RUNS | {"evaluation", "planning"}),
    "finetune": ("runs.finetuning", RUNS | {"evaluation", "planning", "tasks"}),
    "evaluate": ("runs.api", RUNS | {"evaluation"}),
    "generate": ("evaluation.texts", RUNS | {"evaluation"}),
    "predict": ("tasks.run", RUNS | {"evaluation", "tasks"}),
    "prepare-data": ("data.prepare", {"cli", "config", "errors", "files", "data", "optimizers"}),
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
