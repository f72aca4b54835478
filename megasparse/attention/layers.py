"""Parts of layers: layer and RMS normalisation, rotary positions. B batch, H heads, L length, D head dim."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megasparse.config.schema import ModelConfig, PositionsConfig, RotaryScalingConfig
from megasparse.ops.normalize import layer_norm
from megasparse.ops.positions import rotate


class Norm(nn.Module):
    """The normalisation that `model.norm` names, in the dtype of its input: fp32 for streams."""

    def __init__(self, config: ModelConfig, width: int | None = None):
        """Make the parameters. width: of what is normalised; null takes d_model."""
        super().__init__()
        self.eps, width = config.norm_eps, width or config.d_model
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.norm == "layer" else None

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Normalise x (..., E). dtype: of the result, by default that of x."""
        return self.by(dict(self.named_parameters()), x, dtype)

    def by(self, weights: Mapping[str, Tensor], x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """`forward` with such weights, by their names."""
        return layer_norm(x, weights["weight"], weights.get("bias"), self.eps, dtype)


LLAMA3_TURNS = (1.0, 4.0)
"""Turns in the original length below which Llama 3 divides a frequency by the factor, and above which it stays."""
YARN_TURNS = (32.0, 1.0)
"""The paper's alpha and beta: turns above which YaRN leaves a frequency, and below which it divides it."""


class Rotary:
    """Rotation of queries and keys by f_i = base^(−2i/D), or by what `model.positions.scaling` makes of these:

    linear: f_i/factor (Chen et al. 2023). ntk: those of base·factor^(D/(D−2)). llama3: f_i of wavelengths up to
    original_length/4, f_i/factor from original_length on, between them in proportion to the number of turns. yarn
    (Peng et al. 2023, "NTK by parts"): likewise between 32 turns and 1 in original_length, in proportion to i, and
    queries and keys are multiplied by attention_factor.
    """

    def __init__(self, positions: PositionsConfig, head_dim: int):
        self.base, self.scaling, self.half = positions.base, positions.scaling, head_dim // 2
        scaling = self.scaling
        self.scale = 1.0
        if scaling is not None and scaling.kind == "yarn":
            self.scale = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0

    def __call__(self, x: Tensor, first_position: int) -> Tensor:
        """Rotate x (B, H, L, D), of the positions from `first_position` on."""
        return rotate(x, first_position, self.frequencies(x.device), self.scale)

    def frequencies(self, device: torch.device | str = "cpu") -> Tensor:
        """Angles that the pairs turn by from one position to the next, (D/2,) float64."""
        base, scaling = self.base, self.scaling
        if scaling is not None and scaling.kind == "ntk":
            base *= scaling.factor ** (self.half / (self.half - 1))
        number = torch.arange(self.half, dtype=torch.float64, device=device)
        frequency = base ** (-number / self.half)
        if scaling is None or scaling.kind == "ntk":
            return frequency
        if scaling.kind == "linear":
            return frequency / scaling.factor
        share = self._kept_by_number(number, scaling) if scaling.kind == "yarn" else _kept_by_turns(frequency, scaling)
        return frequency * (share + (1 - share) / scaling.factor)

    def _kept_by_number(self, number: Tensor, scaling: RotaryScalingConfig) -> Tensor:
        """Share of each frequency that YaRN leaves as it is."""
        length = scaling.original_length
        assert length is not None
        first, last = (  # of the pairs that make so many turns in the original length
            self.half * math.log(length / (turns * 2 * math.pi)) / math.log(self.base) for turns in YARN_TURNS
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * self.half - 1)
        return 1 - ((number - first) / max(last - first, 0.001)).clamp(0, 1)


def _kept_by_turns(frequency: Tensor, scaling: RotaryScalingConfig) -> Tensor:
    """Share of each frequency that Llama 3's scaling leaves as it is."""
    assert scaling.original_length is not None
    turns = scaling.original_length * frequency / (2 * math.pi)
    low, high = LLAMA3_TURNS
    return ((turns - low) / (high - low)).clamp(0, 1)
