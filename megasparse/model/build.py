"""Build a model from its configuration, with initial weights."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megasparse.config.schema import ModelConfig, encoder_part
from megasparse.model.decoder import Decoder, EncoderDecoder
from megasparse.model.encoder import Encoder
from megasparse.ops.random import derive

Model = Decoder | Encoder | EncoderDecoder


def empty_model(config: ModelConfig) -> Model:
    """Return the model of `config.kind` with uninitialised weights."""
    kinds: dict[str, type[Model]] = {"decoder": Decoder, "encoder": Encoder, "encoder_decoder": EncoderDecoder}
    return kinds[config.kind](config)


def build_model(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Model:
    """Build a model whose weights are pure functions of (seed, weight name).

    Embeddings are standard normal. Projections are normal with deviation 1/√fan-in, and those into a residual stream
    are divided by √(branches of the stack). Norms are 1, biases and n-gram tables 0. Scores of `ranked` buckets have
    deviation 0.02. With `style` "bert" all other weights except the mechanisms' own use BERT's deviation.

    Args:
        config: The section `model` of a configuration.
        seed: Seed of the weights.
        dtype: Dtype of the weights.

    Returns:
        A Decoder, Encoder or EncoderDecoder, as selected by `config.kind`.

    Examples:
        >>> model = megasparse.build_model(megasparse.load_config("quickstart").model, seed=0)
        >>> sum(parameter.numel() for parameter in model.parameters()) > 0
        True
    """
    model = empty_model(config)
    initialise(model, config, seed)
    return model.to(dtype)


def deferred_model(config: ModelConfig, seed: int) -> Model:
    """Return the model of `build_model` with its matrices on the meta device. Fill them with `initial_weight` or a
    checkpoint. Vectors and buffers are initialised.
    """
    with _MatricesOnMeta():
        model = empty_model(config)
    _initialise_buffers(model, seed)
    return model


def initialise(module: nn.Module, config: ModelConfig, seed: int) -> None:
    """Initialise a model, or a part of one, with the weights that `build_model` describes."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(initial_weight(config, seed, name, parameter.shape).view(parameter.shape))
    _initialise_buffers(module, seed)


def initial_weight(
    config: ModelConfig, seed: int, name: str, shape: Sequence[int], start: int = 0, numel: int | None = None
) -> Tensor:
    """Return elements [start, start + numel) of the flattened initial matrix `name`, by default all; fp32, on the CPU.

    Memory use is these elements plus one block of others.
    """
    total = math.prod(shape)
    generator = torch.Generator().manual_seed(derive(seed, "initial weights", name) >> 1)
    numel = total - start if numel is None else numel
    deviation = _deviation(name, shape, config)
    return _normal(generator, total, start, numel).mul_(deviation) if deviation else torch.zeros(numel)


BLOCK = 1 << 20
"""Numbers drawn at a time (4 MB)."""


def _normal(generator: torch.Generator, total: int, start: int, numel: int) -> Tensor:
    """Return elements [start, start + numel) of torch.randn(total).

    On the CPU, torch draws normal numbers in groups of 16 and draws the last 16 again if the groups do not fill the
    tensor (normal_fill, 2.13). Blocks of whole groups, the last one of at least 16, therefore give the same numbers.
    """
    drawn, end, first = torch.empty(numel), start + numel, 0
    while first < end:
        size = BLOCK if total - first >= BLOCK + 16 else total - first
        block = torch.randn(size, generator=generator)
        low, high = max(first, start), min(first + size, end)
        if low < high:
            drawn[low - start : high - start] = block[low - first : high - first]
        first += size
    return drawn


def _initialise_buffers(module: nn.Module, seed: int) -> None:
    for name, part in module.named_modules():
        if (buffers := getattr(part, "initialise", None)) is not None:
            buffers(seed, name)


class _MatricesOnMeta(TorchFunctionMode):
    """Mode in which torch.empty creates matrices on the meta device, but not vectors. All random weights are created
    so, and constructors compute with no other matrices from torch.empty.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.empty, torch.empty_like):
            weight = function(*args, **{**kwargs, "device": "meta"})
            if weight.dim() >= 2:
                return weight
        return function(*args, **kwargs)


BERT_DEVIATION = 0.02
BUCKET_DEVIATION = 0.02
"""For buckets of ranked attention: larger weights give one bucket almost all probability, so gradients vanish."""


def _deviation(name: str, shape: Sequence[int], config: ModelConfig) -> float:
    if config.source is not None and name.startswith("encoder."):
        return _deviation(name.removeprefix("encoder."), shape, encoder_part(config))
    if name.startswith("embedding.ngrams.tables."):
        return 0.0
    if config.style == "bert" and "mechanisms." not in name:
        return BERT_DEVIATION
    if name.startswith("embedding.") and not name.startswith("embedding.ngrams."):
        return 1.0
    if name.endswith("_buckets.weight"):
        return BUCKET_DEVIATION
    scale = shape[1] ** -0.5
    branches = config.layers * (3 if config.source else 2)
    return scale * branches**-0.5 if name.endswith((".output.weight", ".down")) else scale
