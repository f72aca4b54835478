"""A model out of its configuration, with its initial weights."""

import torch
from torch import Tensor, nn

from megasparse.config.parts import encoder_part
from megasparse.config.schema import ModelConfig
from megasparse.model.decoder import Decoder
from megasparse.model.encoder import Encoder
from megasparse.model.encoder_decoder import EncoderDecoder
from megasparse.ops.keys import derive

Model = Decoder | Encoder | EncoderDecoder


def empty_model(config: ModelConfig) -> Model:
    """The model that `config.kind` names, its weights not yet filled."""
    kinds: dict[str, type[Decoder | Encoder | EncoderDecoder]] = {
        "decoder": Decoder,
        "encoder": Encoder,
        "encoder_decoder": EncoderDecoder,
    }
    return kinds[config.kind](config)


def build_model(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Model:
    """A model whose every weight, and every buffer that training moves, is a pure function of (seed, its name).

    Embeddings are standard normal; projections normal with deviation 1/√fan-in, those into a stream divided by
    √(branches of its stack) so that the streams' scale does not grow with depth; norms 1, biases 0. With `style` bert
    all but the mechanisms' own have BERT's deviation.

    >>> model = megasparse.build_model(megasparse.load_config("quickstart").model, seed=0)
    >>> sum(parameter.numel() for parameter in model.parameters()) > 0
    True
    """
    model = empty_model(config)
    initialise(model, config, seed)
    return model.to(dtype)


def initialise(module: nn.Module, config: ModelConfig, seed: int) -> None:
    """Gives a model, or any part of one, the initial weights that `build_model` describes."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() < 2:
                continue
            generator = torch.Generator().manual_seed(derive(seed, "initial weights", name) >> 1)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * _deviation(name, parameter, config))
    for name, part in module.named_modules():
        if (buffers := getattr(part, "initialise", None)) is not None:
            buffers(seed, name)


BERT_DEVIATION = 0.02


def _deviation(name: str, parameter: Tensor, config: ModelConfig) -> float:
    if config.source is not None and name.startswith("encoder."):
        return _deviation(name.removeprefix("encoder."), parameter, encoder_part(config))
    if config.style == "bert" and "mechanisms." not in name:
        return BERT_DEVIATION
    if name.startswith("embedding."):
        return 1.0
    scale = parameter.shape[1] ** -0.5
    branches = config.layers * (3 if config.source else 2)
    return scale * branches**-0.5 if name.endswith((".output.weight", ".down")) else scale
