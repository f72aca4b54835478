"""Layer normalisation."""

import torch
from torch import Tensor, nn

from megasparse.config.schema import ModelConfig
from megasparse.ops.layer_norm import layer_norm


class Norm(nn.Module):
    """Layer normalisation over d_model, in the dtype of its input: fp32 for streams."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.d_model))

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Normalise x (B, L, E). dtype: of the result, by default that of x."""
        return layer_norm(x, self.weight, self.bias, self.eps, dtype)
