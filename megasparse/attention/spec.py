"""The shape of a mechanism's heads."""

from dataclasses import dataclass, replace

from megasparse.attention.flops import Workload
from megasparse.attention.sequence_part import SequencePart


@dataclass(frozen=True)
class MechanismSpec:
    """Shape of a mechanism's heads, and the model that contains them."""

    heads: int
    """Number of heads of this mechanism, possibly fewer than the layer's; before division among ranks."""
    head_dim: int
    d_model: int
    """Width of the layer's input x."""
    max_length: int
    causal: bool
    layers: int = 1
    """Number of layers that use this mechanism; auxiliary losses are averaged over them."""
    vocabulary: int = 256
    dropout: float = 0.0
    """Dropout rate of attention probabilities in training."""

    def on_rank(self, part: SequencePart) -> "MechanismSpec":
        return replace(self, heads=self.heads // part.head_shards)

    def workload(self, length: int) -> Workload:
        return Workload(self.heads, self.head_dim, self.causal, length)
