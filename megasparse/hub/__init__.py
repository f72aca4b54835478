"""Hugging Face: export, import, and replacement of a pretrained model's attention.

to_hf("runs/quickstart", "export/quickstart") exports a checkpoint as a Hugging Face model;
from_pretrained("google/reformer-enwik8") loads a Hugging Face model as a megasparse model;
replace_attention(bert, {"kind": "lha"}) changes a Hugging Face model in place, and Teacher trains its hashes;
save_replaced saves it, and load_replaced loads it. transformers itself is not changed.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megasparse.hub.versions import require_transformers

if TYPE_CHECKING:
    from megasparse.model.build import Model

_PLACES = {
    "to_hf": "export",
    "Teacher": "teaching",
    **dict.fromkeys(
        ("replace_attention", "auxiliary_loss", "extend_positions", "load_replaced", "save_replaced"), "replace"
    ),
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, because only these need transformers."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"megasparse.hub.{_PLACES[name]}"), name)


def from_pretrained(name: str | Path) -> "Model":
    """Load a Hugging Face Reformer or YOSO, or an exported megasparse model, as a megasparse model in evaluation mode.

    Args:
        name: The model's folder, or its name in transformers' local cache. Nothing is downloaded, and code that comes
            with the model is not run.

    Raises:
        HubError: A file is missing or damaged, or megasparse cannot express the architecture.

    Examples:
        >>> folder = megasparse.to_hf("runs/quickstart", "export/again")
        >>> megasparse.from_pretrained(folder).training
        False
    """
    from megasparse.hub.importing import HFModel

    return HFModel.open(name).build()


if importlib.util.find_spec("transformers") is not None:
    require_transformers()
