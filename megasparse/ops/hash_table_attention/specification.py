"""Settings of YOSO attention that are not tensors."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class HashTableAttentionSpec:
    """Settings of YOSO attention.

    code_bits: τ, codes are below 2^τ. causal: only keys at or before the query are visible. chunk: positions of a
    causal sequence whose collisions are found pair by pair. backward: the procedure for ∇q and ∇k; `auto` takes the one
    with less to do. Neither of the last two changes the result: they steer the blockwise implementation alone.
    """

    code_bits: int
    causal: bool
    chunk: int = 128
    backward: Literal["auto", "tables", "pairs"] = "auto"

    @property
    def causal_chunk(self) -> int | None:
        """The chunk of causal attention; None where attention is bidirectional."""
        return self.chunk if self.causal else None
