"""The position-wise feed-forward, in tiles, backward included. B batch, L length, E d_model, F d_ff."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.config.schema import GATED, ModelConfig
from megasparse.ops.random import RngContext, dropout, relu_dropout
from megasparse.ops.tiled import tiled

_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": _tanh, "swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": _tanh,
}  # fmt: skip


class FeedForward(nn.Module):
    """W2·dropout(f(W1·x + b1)) + b2, gated W2·dropout(f(W3·x + b3)·(W1·x + b1)) + b2, with the activation f that
    `model.feed_forward` names; with `style` bert without dropout. With T tiles the hidden layer (B, L/T, F) exists for
    one tile at a time (Reformer Eq. 10).
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.tiles = layer, config.feed_forward_tiles
        bert = config.style == "bert"
        kind = config.feed_forward or ("gelu" if bert else "relu")
        self.activation = ACTIVATIONS[kind]
        self.rate = 0.0 if bert else config.dropout
        # Parameters of this very module: under ZeRO 3 its call gathers them once for all tiles.
        self.up = nn.Parameter(torch.empty(config.d_ff, config.d_model))
        self.up_bias = nn.Parameter(torch.zeros(config.d_ff)) if config.feed_forward_biases else None
        self.down = nn.Parameter(torch.empty(config.d_model, config.d_ff))
        self.down_bias = nn.Parameter(torch.zeros(config.d_model)) if config.feed_forward_biases else None
        gated = kind in GATED
        self.gate = nn.Parameter(torch.empty(config.d_ff, config.d_model)) if gated else None
        self.gate_bias = nn.Parameter(torch.zeros(config.d_ff)) if gated and config.feed_forward_biases else None

    def forward(self, x: Tensor, rng: RngContext) -> Tensor:
        """Run the feed-forward. x: (B, L, E)."""
        weights = dict(self.named_parameters(recurse=False))

        def tile(x: Tensor, rows: Tensor, *given: Tensor) -> Tensor:
            return self.of_tile(x, rows, rng, dict(zip(weights, given, strict=True)))

        return tiled(tile, (x, rng.rows(x.shape[1], x.device)), list(weights.values()), self.tiles)

    def of_tile(self, x: Tensor, rows: Tensor, rng: RngContext, w: Mapping[str, Tensor]) -> Tensor:
        """The feed-forward of a tile (B, T, E) with weights w. rows: (B, T), see `RngContext.rows`."""
        rate = self.rate if rng.training else 0.0
        key = rng.key(self.layer, "feed-forward hidden dropout")
        hidden = F.linear(x, w["up"], w.get("up_bias"))
        if "gate" in w:
            hidden = dropout(self.activation(F.linear(x, w["gate"], w.get("gate_bias"))) * hidden, rate, key, rows)
        elif self.activation is F.relu:
            hidden = relu_dropout(hidden, rate, key, rows)
        else:
            hidden = dropout(self.activation(hidden), rate, key, rows)
        return F.linear(hidden, w["down"], w.get("down_bias"))
