"""Hooks of MkDocs: pages of the lab notebook enter the navigation, reference pages get the help of every subcommand
and every configuration key, and the page of docs/notebook.ipynb its cells with their outputs."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter

import megasparse.attention  # noqa: F401  (registers the mechanisms, whose keys are listed too)
from megasparse.cli.main import COMMANDS, parser_of
from megasparse.config.attention import AttentionConfig
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.messages import _models_in, show
from megasparse.config.schema import Config
from megasparse.config.section import LARGEST, Section

os.environ["COLUMNS"] = "90"  # width of the help of a command

PAPER_VALUES = {
    "model.layers": "Reformer 12 on enwik8 (3 in ablations), LHA 16 on WikiText-103, YOSO 12, Smart Bird 2",
    "model.d_model": "Reformer 1024, LHA 410, YOSO 768, Smart Bird 256",
    "model.d_ff": "Reformer 4096, LHA 2100, YOSO 3072",
    "model.heads": "Reformer 8, LHA 10, YOSO 12",
    "model.dropout": "Reformer 0.1, LHA 0.2, YOSO 0.1",
    "data.sequence_length": "Reformer 65536, YOSO 512 and 4096, Smart Bird up to 4096",
    "training.steps": "Reformer 20000, LHA 20000, YOSO 500000",
    "training.global_batch": "Reformer 8, LHA 32, YOSO 256 of 512 tokens",
    "optimizer.name": "Reformer adafactor, LHA adamw",
    "optimizer.learning_rate": "LHA 3.5e-4, Smart Bird 1e-4, YOSO 1e-4 (BERT's)",
    "optimizer.betas": "LHA [0.9, 0.999]",
    "optimizer.schedule": "LHA cosine",
    "optimizer.warmup_steps": "LHA 2000, YOSO 10000 (BERT's)",
    "model.attention.lsh.rounds": "Reformer 1 to 16; 8 nearly match full attention",
    "model.attention.lha.hash": "LHA mlp",
    "model.attention.yoso.hashes": "YOSO 16, 32 and 64",
    "model.attention.yoso.code_bits": "YOSO log2 of the length",
    "model.attention.smart_bird.keys": "Smart Bird 20",
    "model.attention.smart_bird.sketch_dim": "Smart Bird 4",
}
"""Values that the papers state for a configuration key."""


SHARED = ("run", "checkpoint", "logging", "deepspeed", "model", "lora")
"""Sections that fine-tuning shares with pretraining."""


def on_config(config: Any) -> Any:
    """Add a section with every page of docs/lab/, its index first."""
    folder = Path(config.docs_dir)
    pages = sorted((folder / "lab").glob("*.md"), key=lambda path: (path.stem != "index", path.stem))
    config.nav.append({"Lab notebook": [path.relative_to(folder).as_posix() for path in pages]})
    return config


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Append the generated part of a reference page."""
    return "\n".join([markdown, *GENERATED.get(page.file.src_uri, tuple)()])


def _commands() -> list[str]:
    helps = {name: parser_of(name).format_help() for name in COMMANDS}
    return [f"## {name}\n\n{COMMANDS[name][1].capitalize()}.\n\n```text\n{text}```\n" for name, text in helps.items()]


def keys(section: Any, prefix: str = "", skip: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a heading for each section and key below it, with the key's values, default and meaning."""
    sections = {name: next(_models_in(field.annotation), None) for name, field in section.model_fields.items()}
    for name, declared in section.model_fields.items():
        fields = [base.model_fields.get(name) for base in section.__mro__ if issubclass(base, Section)]
        meanings = [" ".join(field.description.split()) for field in fields if field and field.description]
        key, meaning = prefix + name, meanings[0] if meanings else ""
        paper = f"In the papers: {PAPER_VALUES[key]}." if key in PAPER_VALUES else ""
        if name == "attention":
            yield f"### `{key}`\n\n{meaning} [Its keys](attention.md).\n"
        elif name not in skip and not sections[name]:
            default = (
                "" if declared.is_required() else f"`{json.dumps(declared.get_default(call_default_factory=True))}`"
            )
            kind: Any = (
                Annotated[(declared.annotation, *declared.metadata)] if declared.metadata else declared.annotation
            )
            values = _describe(TypeAdapter(kind).json_schema())
            values = f"*{values}; {'default' if default else 'required'}* {default}"
            yield "\n\n".join([f"### `{key}`", values, *filter(None, [meaning, paper])]) + "\n"
    for name, part in sections.items():
        if part and name not in (*skip, "attention"):
            text = section.model_fields[name].description or part.__doc__ or ""
            yield f"## `{prefix}{name}`\n\n{' '.join(text.split())}\n"
            yield from keys(part, f"{prefix}{name}.")


def _describe(schema: dict[str, Any]) -> str:
    """Return a JSON schema in words: "a whole number >= 1", `"adamw" or "adafactor"`, "a list of texts"."""
    if "anyOf" in schema:
        return " or ".join(_describe(part) for part in schema["anyOf"])
    if "const" in schema:
        return show(schema["const"])
    if "enum" in schema:
        return " or ".join(show(value) for value in dict.fromkeys(schema["enum"]))
    kind = schema.get("type", "any value")
    if kind == "array":
        if items := schema.get("prefixItems"):
            return f"a list of {len(items)} values, each {_describe(items[0])}"
        least, most = schema.get("minItems"), schema.get("maxItems")
        length = "" if not least else f", at least {least} long" if not most else f", {least} to {most} of them"
        return f"a list whose values are {_describe(schema.get('items', {}))}{length}"
    names = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "a text in double quotes" + ", not empty" * ("minLength" in schema),
        "object": "an object {...}",
        "null": "null",
    }
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[limit]:g}" for limit, sign in limits.items() if schema.get(limit, LARGEST) != LARGEST]
    return " ".join([names.get(kind, kind), " and ".join(bounds)]).strip()


def _cells() -> Iterator[str]:
    for cell in json.loads((Path(__file__).parent / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]:
        source = re.sub(r"^# .*\n", "", "".join(cell["source"]))  # the page shows the title
        yield f"\n{source}\n" if cell["cell_type"] == "markdown" else f"```python\n{source}\n```\n"
        for output in cell.get("outputs", ()):
            if image := output.get("data", {}).get("image/png"):
                yield f'<img alt="plot of the cell above" src="data:image/png;base64,{"".join(image.split())}">\n'
            elif output["output_type"] == "stream":
                yield f"```text\n{''.join(output['text'])}```\n"


GENERATED: dict[str, Callable[[], Iterable[str]]] = {
    "notebook.md": _cells,
    "reference/command_line.md": _commands,
    "reference/configuration.md": lambda: keys(Config),
    "reference/attention.md": lambda: keys(AttentionConfig, "model.attention."),
    "reference/finetuning.md": lambda: keys(FinetuneConfig, skip=SHARED),
}
"""Page -> the sections that follow its text."""
