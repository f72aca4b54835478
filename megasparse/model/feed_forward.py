"""The position-wise feed-forward, in tiles of the sequence whose backward is tiled too. B batch, L length, E d_model,
F d_ff.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.config.schema import ModelConfig
from megasparse.ops.random import RngContext, relu_dropout
from megasparse.ops.tiled import tiled


class FeedForward(nn.Module):
    """W2·dropout(relu(W1·x + b1)) + b2, or with `style` bert W2·gelu(W1·x + b1) + b2. With T tiles the hidden layer
    (B, L/T, F) exists for one tile at a time (Reformer Eq. 10).
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.tiles = layer, config.feed_forward_tiles
        bert = config.style == "bert"
        self.activation: Callable[[Tensor], Tensor] = F.gelu if bert else F.relu
        self.rate = 0.0 if bert else config.dropout
        # Parameters of this very module: under ZeRO 3 its call gathers them once for all tiles.
        self.up = nn.Parameter(torch.empty(config.d_ff, config.d_model))
        self.up_bias = nn.Parameter(torch.zeros(config.d_ff))
        self.down = nn.Parameter(torch.empty(config.d_model, config.d_ff))
        self.down_bias = nn.Parameter(torch.zeros(config.d_model))

    def forward(self, x: Tensor, rng: RngContext, gradient: Tensor | None = None) -> Tensor:
        """Run the feed-forward. x: (B, L, E). gradient: that of the result, where it is known before (`tiled`)."""
        rate = self.rate if rng.training else 0.0
        key = rng.key(self.layer, "feed-forward hidden dropout")

        def tile(x: Tensor, rows: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
            hidden = F.linear(x, up, up_bias)
            hidden = relu_dropout(hidden, rate, key, rows) if self.activation is F.relu else self.activation(hidden)
            return F.linear(hidden, down, down_bias)

        rows = rng.rows(x.shape[1], x.device)
        return tiled(tile, (x, rows), (self.up, self.up_bias, self.down, self.down_bias), self.tiles, gradient)
