"""Initial weights of a model or of a part of it, pure functions of (seed, weight name)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megasparse.config.attention import MECHANISMS
from megasparse.config.schema import ModelConfig, encoder_part
from megasparse.ops.random import derive


def initialise(module: nn.Module, config: ModelConfig, seed: int) -> None:
    """Initialise a model, or a part of one, with the weights that `model.build.build_model` describes."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(initial_weight(config, seed, name, parameter.shape).view(parameter.shape))
    initialise_buffers(module, seed)


def initial_weight(
    config: ModelConfig, seed: int, name: str, shape: Sequence[int], start: int = 0, numel: int | None = None
) -> Tensor:
    """Return elements [start, start + numel) of the flattened initial matrix `name`, by default all; fp32, on a CPU."""
    total = math.prod(shape)
    generator = torch.Generator().manual_seed(derive(seed, "initial weights", name) >> 1)
    numel = total - start if numel is None else numel
    deviation = _deviation(name, shape, config)
    return _normal(generator, total, start, numel).mul_(deviation) if deviation else torch.zeros(numel)


BLOCK = 1 << 20
"""Numbers drawn at a time (4 MB)."""


def _normal(generator: torch.Generator, total: int, start: int, numel: int) -> Tensor:
    """Return elements [start, start + numel) of torch.randn(total).

    On the CPU, torch draws normal numbers in groups of 16 and the last 16 again if the groups do not fill the tensor
    (normal_fill, 2.13). Blocks of whole groups, the last one of at least 16, therefore give the same numbers.
    """
    drawn = torch.empty(numel)
    end = start + numel
    first = 0
    while first < end:
        size = BLOCK if total - first >= BLOCK + 16 else total - first
        block = torch.randn(size, generator=generator)
        low = max(first, start)
        high = min(first + size, end)
        if low < high:
            drawn[low - start : high - start] = block[low - first : high - first]
        first += size
    return drawn


def initialise_buffers(module: nn.Module, seed: int) -> None:
    """Set the buffers and other values of parts that draw them themselves."""
    for name, part in module.named_modules():
        if (buffers := getattr(part, "initialise", None)) is not None:
            buffers(seed, name)


def _deviation(name: str, shape: Sequence[int], config: ModelConfig) -> float:
    if config.source is not None and name.startswith("encoder."):
        return _deviation(name.removeprefix("encoder."), shape, encoder_part(config))
    if name.startswith("embedding.ngrams.tables."):
        return 0.0
    if config.style == "bert" and "mechanisms." not in name:
        return 0.02
    if name.startswith("embedding.") and not name.startswith("embedding.ngrams."):
        return 1.0
    for kind, mechanism in MECHANISMS.items():
        for parameter, deviation in mechanism.initial_deviations.items():
            if f".{name}".endswith(f".{kind}.{parameter}"):
                return float(deviation)
    scale = shape[1] ** -0.5
    branches = config.layers * (3 if config.source else 2)
    return scale * branches**-0.5 if name.endswith((".output.weight", ".down")) else scale
