"""Functions of mechanisms, operators and models have typed results and few parameters; read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megasparse"
FILES = [path for folder in ("attention", "model", "ops") for path in sorted((PACKAGE / folder).rglob("*.py"))]
FILES += sorted((PACKAGE / "hub").glob("replace*.py"))
MOST_PARAMETERS = 8


def functions(node: ast.AST, private: bool = False) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Yield the functions in a node, and True for private ones: by name, of a private class, or inside a function."""
    for child in ast.iter_child_nodes(node):
        inside = private
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inside = private or (child.name.startswith("_") and child.name != "__init__")
        if isinstance(child, ast.FunctionDef):
            yield child, inside
            inside = True
        yield from functions(child, inside)


def is_any(annotation: ast.AST | None) -> bool:
    """True if an annotation contains Any, except as the type of a dict's values: JSON or keyword arguments."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "dict":
        return False
    return annotation is not None and (
        ast.unparse(annotation) == "Any" or any(is_any(child) for child in ast.iter_child_nodes(annotation))
    )


def offences(tree: ast.AST, kernels: bool = False) -> list[str]:
    found = []
    for function, private in functions(tree):
        a = function.args
        names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs) if x.arg not in ("self", "cls", "ctx")]
        if is_any(function.returns):
            found.append(f"{function.name} returns {ast.unparse(function.returns)}")
        if len(names) > MOST_PARAMETERS and not (private or kernels):
            found.append(f"{function.name} has {len(names)} parameters")
    return found


def test_functions_are_typed_and_have_few_parameters():
    found = []
    for path in FILES:
        kernels = path.stem.endswith("kernels")
        found += [f"{path.relative_to(PACKAGE)}: {x}" for x in offences(ast.parse(path.read_text("utf-8")), kernels)]
    assert not found, "\n".join(found)


def test_the_check_sees_both_offences():
    many = ", ".join(f"x{number}" for number in range(MOST_PARAMETERS + 1))
    source = f"""
class Public:
    def wide(self, {many}) -> dict[str, Any]: ...
    def loose(self) -> tuple[int, Any] | None: ...
class _Private:
    def wide(self, {many}): ...
"""
    assert offences(ast.parse(source)) == ["wide has 9 parameters", "loose returns tuple[int, Any] | None"]
