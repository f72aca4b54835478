"""Settings of the choice of keys that are not tensors."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KeyChoiceSpec:
    """Settings of the choice of keys.

    count: K, keys that a query chooses. causal: only keys at or before the query are visible. sampling: how a key's
    weight α becomes its rank p: "inverse_log_squared" (1/log α)², "inverse_log" −1/log α, "raw" and "top_k" α,
    "random" 1.
    """

    count: int
    causal: bool
    sampling: Literal["inverse_log_squared", "inverse_log", "raw", "top_k", "random"]
