"""Files and functions stay short enough to read at once; kernels, one pass over memory each, are excepted."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [path for part in ("megasparse", "launch", "tools", "tests") for path in sorted((ROOT / part).rglob("*.py"))]
KERNELS = [path for path in FILES if path.name.endswith("kernels.py") and path.is_relative_to(ROOT / "megasparse/ops")]
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 600, 100


def long_parts(source: str) -> list[str]:
    """Return the parts of a file that are too long, with their lines."""
    lines = source.count("\n")
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    sizes = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    found = [f"{name} has {size} lines" for name, size in sizes.items() if size > LINES_OF_A_FUNCTION]
    return found + ([f"{lines} lines"] if lines > LINES_OF_A_FILE else [])


def test_no_file_and_no_function_is_too_long():
    assert KERNELS
    found = {path: long_parts(path.read_text(encoding="utf-8")) for path in FILES if path not in KERNELS}
    assert not {str(path.relative_to(ROOT)): parts for path, parts in found.items() if parts}


def test_long_parts_are_seen():
    long = "def f():\n" + "    pass\n" * 100
    assert long_parts(long) == ["f has 101 lines"] and not long_parts(long.replace("    pass\n", "", 1))
    assert long_parts("\n" * 601) == ["601 lines"] and not long_parts("\n" * 600)
