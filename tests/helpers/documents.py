"""The commands of documents, and the runs that they would train."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

from megasparse.cli.main import parser_of, split
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import Config
from megasparse.runs import comparison
from megasparse.settings.load import load_settings

LAUNCHED = re.compile(r"(?:deepspeed|torchrun) .*?(?:launch/(?=\w+\.py )|-m megasparse )([\w-]+)(?:\.py)?(.*)")


def commands(text: str) -> list[list[str]]:
    """Return the words of every command in an indented block or a bash fence, as `megasparse` takes them: continued
    lines joined, loops of the shell written out. Commands with `...`, which show a form, are left out."""
    found = []
    for line in shell_lines(text):
        if launched := LAUNCHED.match(line):
            line = "".join(("megasparse ", *launched.groups()))
        if line.startswith("megasparse ") and "..." not in line:
            found.append(shlex.split(line, comments=True)[1:])
    return found


def shell_lines(text: str) -> Iterator[str]:
    """The lines of every indented block and bash fence: continued lines joined, loops written out."""
    text = re.sub(r"^```bash\n(.*?)^```", lambda fence: textwrap.indent(fence[1], "    "), text, flags=re.M | re.S)
    block = re.sub(r"\\\n\s*", " ", "\n".join(re.findall(r"^ {4,}(.*)$", text, re.M)))
    return _unrolled(block.splitlines())


def _unrolled(lines: list[str]) -> Iterator[str]:
    """The lines with each loop `for NAME in WORDS; do ... done` written out."""
    while lines:
        line, lines = lines[0].strip(), lines[1:]
        if not (loop := re.match(r"for (\w+) in (.+); do$", line)):
            yield line
            continue
        depth, end = 1, 0
        while depth:
            depth += {"for": 1, "done": -1}.get(lines[end].split()[0], 0)
            end += 1
        for value in loop[2].split():
            name = rf"\$({loop[1]}\b|{{{loop[1]}}})"
            yield from _unrolled([re.sub(name, value, inner) for inner in lines[: end - 1]])
        lines = lines[end:]


def runs(words: list[str]) -> list[Config | FinetuneConfig]:
    """Every run that a command trains or plans, its configuration checked. None of one that does neither, or takes its
    configuration from a file of the reader's."""
    name, rest = split(words)
    assert name is not None, shlex.join(words)
    args = parser_of(name).parse_args(rest)
    if name in ("pretrain", "plan", "finetune"):
        kind = FinetuneConfig if name == "finetune" else Config
        config = args.config or args.name
        return [] if _is_own(config) else [load_settings(config, args.set, kind)]
    if name == "compare" and not _is_own(args.comparison):
        parts = comparison.load(args.comparison, args.corpora).values()
        options = Path("runs"), args.arms, args.seeds, args.set
        planned = [run for part in parts for run in comparison.runs_of(part, *options)]
        return [config for run in planned for config in runs(run.training)]
    return []


def _is_own(config: str) -> bool:
    """True for a placeholder of a reader's file or of a file that a run wrote."""
    return config in ("C", "mine.json") or config.startswith("runs/")
