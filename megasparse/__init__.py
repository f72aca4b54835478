"""Pretraining of transformers on very long sequences with hashed attention.

    import megasparse
    config = megasparse.load_config("quickstart", ["data.path=data/books"])
    megasparse.pretrain(config)
    print(megasparse.generate("runs/quickstart", "The history of "))

`dir(megasparse)` lists the public names, and `help(megasparse.generate)` shows examples of one. Names are imported on
first use, so `import megasparse` is fast.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "AttentionLayer": "layer",
    "build_model": "model.build",
    "evaluate": "runs.api",
    "finetune": "runs.finetuning",
    "from_pretrained": "hub",
    "generate": "runs.api",
    "load_checkpoint": "runs.api",
    "load_config": "settings.load",
    "load_finetune_config": "runs.api",
    "plan": "runs.api",
    "predict": "runs.api",
    "pretrain": "runs.pretraining",
    "replace_attention": "hub.replace",
    "to_hf": "tasks.exporting",
}
"""Public name -> module that defines it."""

__all__ = ["__version__", "functional", *_MODULES]


def __getattr__(name: str) -> Any:
    if name == "functional":
        return importlib.import_module("megasparse.functional")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"megasparse.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
