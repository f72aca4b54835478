"""Layer normalisation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.config.schema import ModelConfig


class Norm(nn.Module):
    """Layer normalisation over d_model, in the dtype of its input: fp32 for streams."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.d_model))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
