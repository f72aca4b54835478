"""Layer normalisation, or RMS normalisation."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megasparse.config.schema import ModelConfig
from megasparse.ops.normalize import layer_norm


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
