"""Documents name existing files, modules, links and commands; their lines fit an editor."""

import math
import re
import shlex
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

import megasparse
from megasparse.cli.main import parser_of, split
from megasparse.config.schema import Config
from megasparse.planning.dry_run import dry_run
from tests.helpers.documents import commands, runs
from tests.planning.test_configs import reduced
from tests.test_imports import MAY_IMPORT

ROOT = Path(__file__).parents[1]
NAMED = ("README.md", "CONTRIBUTING.md", "tokenizers/README.md")
DOCUMENTS = [*(ROOT / name for name in NAMED), *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("megasparse", "launch", "tools", "configs", "tests", "docs", "tokenizers")
MADE = ("tokenizers/books.model", "tokenizers/bert.json", "tokenizers/multi30k.model", "tokenizers/small.model")
"""Files that a reader makes or brings."""
PLACEHOLDERS = {"NAME", "test_NAME", "my", "test_my", "mine"}
"""Stems of placeholders for a reader's files."""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_links_that_a_document_names_exist(path):
    text = path.read_text(encoding="utf-8")
    named = re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w\.(?:py|json|md|sbatch|svg|yaml))\b", text)
    missing = {name for name in named if not (ROOT / name).exists() and name not in MADE}
    missing = {name for name in missing if Path(name).stem not in PLACEHOLDERS}
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    missing |= {link for link in links if not (path.parent / link).exists()}
    assert not missing, f"{path.name} names {sorted(missing)}"


@pytest.mark.parametrize("name", NAMED)
def test_links_to_headings_from_outside_the_site_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
        target = (ROOT / name).parent / link if link else ROOT / name
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {slugify(heading, "-") for heading in headings}, f"{name} names {link}#{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_an_option_on_a_separate_line_continues_a_command(path):
    assert not re.findall(r"^ {4,}[^#\n]*[^\\\n]\n {4,}--\w", path.read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_of_a_document_are_commands(path):
    for words in commands(path.read_text(encoding="utf-8")):
        name, rest = split(words)
        assert name is not None, f"{path.name}: {shlex.join(words)}"
        if "--help" in rest:
            continue
        try:
            parser_of(name).parse_args(rest)
        except SystemExit:
            pytest.fail(f"{path.name}: {shlex.join(words)}")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_pretrainings_of_a_document_dry_run_scaled_down(path):
    trained = [words for words in commands(path.read_text(encoding="utf-8")) if "--help" not in words]
    small = [reduced(run) for words in trained for run in runs(words) if isinstance(run, Config)]
    for config in {config.model.model_dump_json(): config for config in small}.values():
        assert math.isfinite(dry_run(config).loss)


def test_commands_are_found_in_documents():
    text = "Text.\n\n    megasparse plan quickstart \\\n      --gpus 8    # a comment\n\n    python x.py\n"
    assert commands(text) == [["plan", "quickstart", "--gpus", "8"]]
    assert commands("```bash\nmegasparse plan quickstart\n```\n") == [["plan", "quickstart"]]
    assert sum(len(commands(path.read_text(encoding="utf-8"))) for path in DOCUMENTS) > 30


def test_lines_fit_an_editor_and_the_readme_a_sitting():
    long = [
        f"{path.name}:{number}"
        for path in [*DOCUMENTS, ROOT / "CHANGELOG.md"]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > 120 and not line.startswith("|")
    ]
    assert not long
    assert len((ROOT / "README.md").read_text(encoding="utf-8")) <= 7000
    guides = [path for path in DOCUMENTS if path.parent.name not in ("lab", "reference")]
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in guides}
    assert sum(words.values()) <= 18_000 and max(words.values()) <= 1_200, words


def test_the_drawn_layers_equal_the_imports():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = [re.findall(r"(\w+)(?:/|\.py)", line[:39]) for line in text.split("```")[1].splitlines()]
    floor = {part: -number for number, row in enumerate(rows) for part in row}
    parts = {*MAY_IMPORT} - {"__main__"}
    assert {*floor} == parts | {"launch", "tools"}
    wrong = [(part, below) for part in parts for below in MAY_IMPORT[part] if floor[below] >= floor[part]]
    assert not wrong


def test_the_site_has_every_page_and_every_public_name():
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in {*docs.rglob("*.md")} - {*docs.glob("lab/*")}}
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(pages)
    names = re.findall(r"^::: megasparse\.([\w.]+)$", (ROOT / "docs/reference/python.md").read_text(), re.MULTILINE)
    assert names == [f"{module}.{name}" for name, module in megasparse._MODULES.items()]
