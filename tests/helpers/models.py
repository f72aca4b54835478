"""Small decoders for tests."""

from typing import Any

import torch
from torch import Tensor

from megasparse.config.schema import (
    AttentionConfig,
    FullAttentionConfig,
    LocalAttentionConfig,
    LSHAttentionConfig,
    ModelConfig,
    PositionsConfig,
)
from megasparse.ops.random import Draws

AXIAL = PositionsConfig(kind="axial", axial_shape=[8, 16], axial_dims=[12, 20])


def attention(*pattern: str, lsh: dict[str, Any] | None = None, shared_qk: bool = False) -> AttentionConfig:
    return AttentionConfig(
        pattern=list(pattern),
        full=FullAttentionConfig(shared_qk=shared_qk),
        local=LocalAttentionConfig(chunk=8),
        lsh=LSHAttentionConfig(**{"chunk": 8, "rounds": 2, **(lsh or {})}),
    )


def small(pattern: tuple[str, ...] = ("local", "lsh", "full"), **changes: Any) -> ModelConfig:
    """128 positions, 32 wide, 2 heads, 3 layers; any field can be changed."""
    settings: dict[str, Any] = dict(
        max_length=128, layers=3, d_model=32, d_ff=64, heads=2, positions=AXIAL, attention=attention(*pattern)
    )
    return ModelConfig(**{**settings, **changes})


def random_tokens(batch: int, length: int, vocabulary: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def training_draws(batch: int, step: int = 0) -> Draws:
    return Draws(0, step, torch.arange(batch), training=True)
