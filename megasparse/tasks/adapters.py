"""Low-rank adapters (Hu et al. 2021) on linear layers, by peft: W·x + α/r·B·A·x, of which A and B are trained."""

import math
import warnings
from typing import Any

import torch
from torch import nn

from megasparse.attention.contract import Attention
from megasparse.config.finetuning import LoRAConfig
from megasparse.config.messages import show
from megasparse.errors import ConfigError, UserError, did_you_mean
from megasparse.model.embedding import Embedding
from megasparse.ops.random import derive
from megasparse.tasks.backbones import Backbone, HuggingFaceBody, MegasparseBody


def add_adapters(body: Backbone, config: LoRAConfig, seed: int) -> None:
    """Freeze the body's pretrained weights and give the linear layers that `lora.targets` names adapters, in place. B
    begins as 0, so the outputs stay what they were; A is uniform, a pure function of the seed and its name.

    Weights that are not pretrained are trained too: those of the mechanisms, which learn by losses of their own, and
    the norm over the states of one of our models. Raises ConfigError where a target names no linear layer, and
    UserError where peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        problem = "lora: peft is not installed"
        raise UserError(f'{problem}. Install it: pip install "megasparse[tasks]", or remove lora') from None
    if config.dropout and not isinstance(body, HuggingFaceBody):
        problem = f"{config.dropout}, and adapters of our own models have none: they draw by sample, peft's do not"
        raise ConfigError("lora.dropout", problem, "Set it to 0")
    targets = _targets(body, config.targets)
    alpha: Any = config.alpha  # peft's annotation says int, and it divides it by the rank
    settings = LoraConfig(
        r=config.rank, lora_alpha=alpha, lora_dropout=config.dropout, target_modules=targets, bias="none"
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # GPT-2's transposed layers: peft puts it right
        inject_adapter_in_model(settings, body)
    own = {id(weight) for module in body.modules() if isinstance(module, Attention) for weight in module.parameters()}
    if isinstance(body, MegasparseBody) and body.norm is not None:
        own |= {id(weight) for weight in body.norm.parameters()}
    for module in body.modules():
        if isinstance(module, Embedding):
            module.register_forward_hook(_want_gradient)
    for name, weight in body.named_parameters():
        adapter = ".lora_A." in name or ".lora_B." in name
        weight.requires_grad_(adapter or id(weight) in own)
        if adapter:
            _initialise(name, weight, seed)


def _want_gradient(embedding: nn.Module, given: Any, x: torch.Tensor) -> None:
    """Let the embedding's output require a gradient: a reversible or checkpointed stack over an input that needs none
    would compute no gradients for its own weights.
    """
    if torch.is_grad_enabled() and not x.requires_grad:
        x.requires_grad_()


@torch.no_grad()
def _initialise(name: str, weight: nn.Parameter, seed: int) -> None:
    """Initialise A as torch does linear layers, uniform within 1/√(width in), and B with zeros."""
    if ".lora_B." in name:
        weight.zero_()
        return
    generator = torch.Generator().manual_seed(derive(seed, "initial adapter", name) >> 1)
    limit = 1 / math.sqrt(weight.shape[1])
    weight.copy_(torch.rand(weight.shape, generator=generator) * 2 * limit - limit)


def _targets(body: Backbone, wanted: list[str]) -> list[str]:
    """The full names of the linear layers, outside of mechanisms, that end as wanted."""
    linear = _linear_layers(body)
    found: list[str] = []
    for target in wanted:
        matching = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not matching:
            known = {name.rpartition(".")[2] for name in linear}
            known |= {".".join(name.split(".")[-2:]) for name in linear if name.endswith(".dense")}
            raise ConfigError("lora.targets", f"no linear layer is named {show(target)}", did_you_mean(target, known))
        found += matching
    return sorted(set(found))


def _linear_layers(body: Backbone) -> list[str]:
    kinds: tuple[type[nn.Module], ...] = (nn.Linear,)
    if not isinstance(body, MegasparseBody):
        from transformers.pytorch_utils import Conv1D

        kinds = (nn.Linear, Conv1D)
    inside = {id(part) for module in body.modules() if isinstance(module, Attention) for part in module.modules()}
    return [name for name, part in body.named_modules() if isinstance(part, kinds) and id(part) not in inside]


def adapter_size(body: Backbone, config: LoRAConfig) -> int:
    """Number of weights that `add_adapters` would add. Raises ConfigError as it does."""
    shapes = [dict(body.named_parameters())[f"{name}.weight"].shape for name in _targets(body, config.targets)]
    return config.rank * sum(sum(shape) for shape in shapes)
