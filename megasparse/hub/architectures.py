"""The Hugging Face architectures: the format of each, and its classes."""

import importlib
from typing import Any, cast

from megasparse.errors import ConfigError, did_you_mean
from megasparse.hub.formats import DECODERS, Format

FORMATS = {
    **dict.fromkeys(("bert", "roberta", "yoso"), "megasparse.hub.bert"),
    **dict.fromkeys(DECODERS, "megasparse.hub.decoders"),
    "megasparse": "megasparse.hub.megasparse_format",
    "reformer": "megasparse.hub.reformer",
}
"""Module of each format; imported lazily, because some need transformers."""


def format_named(name: str) -> Format:
    if name not in FORMATS:
        raise ConfigError("format", f'unknown format "{name}"', did_you_mean(name, FORMATS))
    module = importlib.import_module(FORMATS[name]).FORMAT
    return cast(Format, module[name] if isinstance(module, dict) else module)


def hf_class(name: str) -> Any:
    """Return a class of transformers, or megasparse's class with the same interface."""
    if name.startswith("Megasparse"):
        from megasparse.hub import modelling as classes
    else:
        import transformers as classes  # type: ignore[no-redef]
    return getattr(classes, name)
