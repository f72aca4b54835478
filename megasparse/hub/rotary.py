"""Rotary positions of HuggingFace's configurations, `rope_parameters`, and ours."""

import math
from pathlib import Path
from typing import Any

from megasparse.config.schema import PositionsConfig
from megasparse.hub.bert import not_ours

KEYS = {
    "original_length": "original_max_position_embeddings",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "fast": "beta_fast",
    "slow": "beta_slow",
    "attention_factor": "attention_factor",
}
"""Our key of model.positions.scaling -> HuggingFace's."""
OF_KIND = {
    "linear": (),
    "llama3": ("original_length", "low_frequency", "high_frequency"),
    "yarn": ("original_length", "fast", "slow", "attention_factor"),
}
"""Kinds of scaling that both have, and their keys beside the factor."""


def rotary_of(rope: dict[str, Any], path: Path) -> dict[str, Any]:
    """Our `model.positions`. Raises HubError naming `path` for a scaling that ours has not."""
    kind, found = rope["rope_type"], {"kind": "rotary", "base": float(rope["rope_theta"])}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise not_ours(path, "partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
    if kind == "default":
        return found
    if kind not in OF_KIND:
        raise not_ours(path, "rope_type", kind, ", ".join(map(repr, ("default", *OF_KIND))))
    if not rope.get("truncate", True):
        raise not_ours(path, "truncate", False, "true")
    scaling = {"kind": kind, "factor": float(rope["factor"])}
    scaling |= {key: rope[KEYS[key]] for key in OF_KIND[kind] if rope.get(KEYS[key]) is not None}
    both = [float(rope.get(key) or 0.0) for key in ("mscale", "mscale_all_dim")]
    if kind == "yarn" and all(both) and "attention_factor" not in scaling:
        above, below = (0.1 * scale * math.log(rope["factor"]) + 1.0 for scale in both)
        scaling["attention_factor"] = above / below
    return {**found, "scaling": scaling}


def rope_of(positions: PositionsConfig, head_dim: int) -> dict[str, Any]:
    """Keys of config.json, which every version of transformers reads. NTK scaling is another base there."""
    scaling = positions.scaling
    if scaling is None:
        return {"rope_theta": positions.base}
    if scaling.kind == "ntk":
        return {"rope_theta": positions.base * scaling.factor ** (head_dim / (head_dim - 2))}
    values = {KEYS[key]: getattr(scaling, key) for key in OF_KIND[scaling.kind]}
    given = {key: value for key, value in values.items() if value is not None}
    return {
        "rope_theta": positions.base,
        "rope_scaling": {"rope_type": scaling.kind, "factor": scaling.factor, **given},
    }
