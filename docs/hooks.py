"""Hooks of MkDocs: the laboratory's pages enter the navigation, and the page of the command line gets the help of every
subcommand."""

import os
from pathlib import Path
from typing import Any

from megasparse.cli.main import COMMANDS, parser_of

os.environ["COLUMNS"] = "100"  # the width of argparse's help


def on_config(config: Any) -> Any:
    """Add a section with every page of docs/lab/, its index first."""
    folder = Path(config.docs_dir)
    pages = sorted((folder / "lab").glob("*.md"), key=lambda path: (path.stem != "index", path.stem))
    config.nav.append({"Lab notebook": [path.relative_to(folder).as_posix() for path in pages]})
    return config


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """The page's text, that of `reference/command_line.md` with a section for each subcommand."""
    if page.file.src_uri != "reference/command_line.md":
        return markdown
    sections = [f"## {name}\n\n{does.capitalize()}.\n\n```text\n{_help(name)}```\n" for name, does in COMMANDS.items()]
    return "\n".join([markdown, *sections])


def _help(name: str) -> str:
    return parser_of(name).format_help()
