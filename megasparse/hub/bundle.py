"""The code of an exported folder: megasparse's own modules as a flat set of files that import nothing but torch and
transformers, for `trust_remote_code`.

Only import lines differ from our source: `from megasparse.ops.random import Draws` becomes
`from .megasparse_ops_random import Draws`, as transformers copies such files into one folder.
"""

import ast
from pathlib import Path

from megasparse import __version__

PACKAGE = Path(__file__).parents[1]
_MODELLING = "megasparse.hub.modelling"
_OPERATORS = [path.parent.name for path in sorted((PACKAGE / "ops").glob("*/operator.py"))]
_STAND_INS = {
    "megasparse.config.section": f"{_MODELLING}.stand_ins.section",
    "pydantic": f"{_MODELLING}.stand_ins.section",
    "fairscale.nn": f"{_MODELLING}.stand_ins.checkpointing",
    "megasparse.ops.backend": f"{_MODELLING}.stand_ins.backend",
    "megasparse.ops.random_kernels": f"{_MODELLING}.stand_ins.backend",
    "megasparse.ops.hashing.gpu": f"{_MODELLING}.stand_ins.backend",
    **{f"megasparse.ops.{name}.operator": f"megasparse.ops.{name}.blockwise" for name in _OPERATORS},
}
"""Modules that an exported folder has another one for. It has operators in blockwise torch alone: transformers refuses
folders whose files import a package that is not there, such as Triton.
"""
_NOTICE = """\
# Part of megasparse {version} (Apache License 2.0), written by megasparse convert to-hf from {source}.
# Change it there.

"""

AUTO_MAP = {
    "AutoConfig": "configuration_megasparse.MegasparseConfig",
    "AutoModel": "modeling_megasparse.MegasparseModel",
    "AutoModelForCausalLM": "modeling_megasparse.MegasparseForCausalLM",
    "AutoModelForMaskedLM": "modeling_megasparse.MegasparseForMaskedLM",
    "AutoModelForSeq2SeqLM": "modeling_megasparse.MegasparseForSeq2SeqLM",
    "AutoModelForSequenceClassification": "modeling_megasparse.MegasparseForSequenceClassification",
}
"""Map of transformers' class -> the file and class of ours."""


def bundle() -> dict[str, str]:
    """File name -> text of all that `modeling_megasparse.py` needs."""
    files: dict[str, str] = {}
    wanted = [f"{_MODELLING}.modeling_megasparse", f"{_MODELLING}.configuration_megasparse"]
    while wanted:
        module = wanted.pop()
        if _file_name(module) not in files:
            text, needed = _flattened(module)
            files[_file_name(module)] = text
            wanted += needed
    return files


def _flattened(module: str) -> tuple[str, list[str]]:
    """A module's source with its imports made flat, and the modules of ours that it imports."""
    path = _source(module)
    source = path.read_text(encoding="utf-8")
    lines, needed = source.splitlines(keepends=True), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] != "megasparse" for alias in node.names), (
                f"{path}: write from ... import"
            )
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        target = _STAND_INS.get(node.module, node.module)
        if target.split(".")[0] == "megasparse":
            assert not any(_exists(f"{target}.{alias.name}") for alias in node.names), f"{path}: imports a whole module"
            first = lines[node.lineno - 1]
            flat = first.replace(f"from {node.module} import", f"from .{_file_name(target)[:-3]} import", 1)
            assert flat != first, f"{path}, line {node.lineno}: an import that is not written plainly"
            lines[node.lineno - 1] = flat
            needed.append(target)
    where = path.relative_to(PACKAGE.parent).as_posix()
    return _NOTICE.format(version=__version__, source=where) + "".join(lines), needed


def _source(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _exists(module: str) -> bool:
    return _source(module).exists()


def _file_name(module: str) -> str:
    """`megasparse_ops_random.py`; HuggingFace's own files keep the names that its users expect."""
    last = module.split(".")[-1]
    if module in (f"{_MODELLING}.modeling_megasparse", f"{_MODELLING}.configuration_megasparse"):
        return f"{last}.py"
    return module.replace(".", "_") + ".py"
