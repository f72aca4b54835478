"""Low-rank adapters (Hu et al. 2021) on linear layers, with peft: W·x + α/r·B·A·x, where A and B are trained. W may be
quantised (QLoRA, Dettmers et al. 2023)."""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megasparse.attention.contract import Attention
from megasparse.attention.heads import MultiHeadAttention
from megasparse.config.messages import show
from megasparse.config.schema import LoRAConfig
from megasparse.errors import ConfigError, FileError, did_you_mean
from megasparse.ops.quantised import is_quantised, quantise
from megasparse.ops.random import derive

Kinds = tuple[type[nn.Module], ...]
LINEAR: Kinds = (nn.Linear,)
PARTS = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.")
"""Parts of the names of an adapter's weights."""


def add_adapters(
    model: nn.Module, config: LoRAConfig, seed: int, *, kinds: Kinds = LINEAR, new: Iterable[nn.Parameter] = (),
    draws: bool = False,
) -> None:  # fmt: skip
    """Freeze the model's pretrained weights and add adapters to the linear layers named in `lora.targets`, in place. B
    is initially 0, so the outputs do not change; A is uniform, a pure function of the seed and its name. They are
    fp32.

    kinds: classes of linear layers. Weights of mechanisms and `new` weights stay trainable. draws: True if the model's
    dropout uses torch's generators, as peft's does.
    Raises ConfigError if a target matches no linear layer, and FileError if peft is not installed.
    """
    hint = 'Install it: pip install -e ".[tasks]", or remove lora'
    with FileError.instead_of(ImportError, "lora", "peft is not installed", hint):
        from peft import LoraConfig, inject_adapter_in_model
    if config.dropout and not draws:
        problem = f"{config.dropout} is not supported: this model draws dropout per sample, peft does not"
        raise ConfigError("lora.dropout", problem, "Set it to 0")
    targets = _targets(model, config.targets, kinds)
    alpha: Any = config.alpha  # annotated as int in peft, which divides it by the rank
    if any(isinstance(module, MultiHeadAttention) and module.groups > 1 for module in model.modules()):
        problem = "attention in groups reads slices of its weights, which adapters do not support"
        raise ConfigError("model.attention.head_groups", problem, "Set it to 1, or remove lora")
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        bias="none",
        use_rslora=config.rslora,
        use_dora=config.dora,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # peft corrects it for GPT-2's transposed layers
        inject_adapter_in_model(settings, model)
    mechanisms = [module for module in model.modules() if isinstance(module, Attention)]
    trained = {id(weight) for weight in (*new, *(weight for part in mechanisms for weight in part.parameters()))}
    for name, weight in model.named_parameters():
        adapter = any(part in name for part in PARTS)
        weight.requires_grad_(adapter or id(weight) in trained)
        if adapter:
            weight.data = weight.data.float()  # peft uses the dtype of W
            _initialise(model, name, weight, seed)


def quantise_layers(model: nn.Module, config: LoRAConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Quantise the frozen matrices of a model with adapters in place, on `device`, if `config` requires it."""
    for name, weight in model.named_parameters():
        if config.quantized is not None and is_quantised(name, weight.shape):
            module, _, part = name.rpartition(".")
            quantised = nn.Parameter(quantise(weight.to(device), config.quantized, dtype), requires_grad=False)
            setattr(model.get_submodule(module), part, quantised)


@torch.no_grad()
def _initialise(model: nn.Module, name: str, weight: nn.Parameter, seed: int) -> None:
    """Initialise A uniformly within 1/√(width in), as torch linear layers, B with zeros, DoRA's norms with W's."""
    if ".lora_B." in name:
        weight.zero_()
        return
    if ".lora_magnitude_vector." in name:
        layer: Any = model.get_submodule(name.partition(".lora_")[0])
        weight.copy_(layer.get_base_layer().weight.float().norm(dim=0 if layer.fan_in_fan_out else 1))
        return
    generator = torch.Generator().manual_seed(derive(seed, "initial adapter", name) >> 1)
    limit = 1 / math.sqrt(weight.shape[1])
    weight.copy_(torch.rand(weight.shape, generator=generator) * 2 * limit - limit)


def _targets(model: nn.Module, names: list[str], kinds: Kinds) -> list[str]:
    inside = {id(part) for module in model.modules() if isinstance(module, Attention) for part in module.modules()}
    linear = [name for name, part in model.named_modules() if isinstance(part, kinds) and id(part) not in inside]
    targets: list[str] = []
    for target in names:
        matching = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not matching:
            choices = {name.rpartition(".")[2] for name in linear}
            choices |= {".".join(name.split(".")[-2:]) for name in linear if name.endswith(".dense")}
            raise ConfigError("lora.targets", f"no linear layer is named {show(target)}", did_you_mean(target, choices))
        targets += matching
    return sorted(set(targets))
