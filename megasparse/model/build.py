"""Build a model from its configuration, with initial weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megasparse.attention.initial_weights import initial_weight, initialise, initialise_buffers
from megasparse.config.schema import ModelConfig
from megasparse.model.decoder import Decoder, EncoderDecoder
from megasparse.model.encoder import Encoder

__all__ = ["Model", "build_model", "deferred_model", "empty_model", "initial_weight", "initialise"]

Model = Decoder | Encoder | EncoderDecoder


def empty_model(config: ModelConfig) -> Model:
    """Return the model of `config.kind` with uninitialised weights."""
    kinds: dict[str, type[Model]] = {"decoder": Decoder, "encoder": Encoder, "encoder_decoder": EncoderDecoder}
    return kinds[config.kind](config)


def build_model(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Model:
    """Build a model whose weights are pure functions of (seed, weight name).

    Embeddings are standard normal. Projections are normal with deviation 1/√fan-in, and those into a residual stream
    are divided by √(branches of the stack). Norms are 1, biases and n-gram tables 0. With `style` "bert" all other
    weights except the mechanisms' own use BERT's deviation. A mechanism may set the deviations of its weights, see
    `Attention.initial_deviations`.

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
    """Return the model of `build_model` with its matrices on the meta device, to fill from `initial_weight` or a
    checkpoint.
    """
    with _MatricesOnMeta():
        model = empty_model(config)
    initialise_buffers(model, seed)
    return model


class _MatricesOnMeta(TorchFunctionMode):
    """Mode in which torch.empty creates matrices on the meta device: all random weights are created by it, and
    constructors compute with no other matrices from it.
    """

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if function in (torch.empty, torch.empty_like):
            weight = function(*args, **{**kwargs, "device": "meta"})
            if isinstance(weight, Tensor) and weight.dim() >= 2:
                return weight
        return function(*args, **kwargs)
