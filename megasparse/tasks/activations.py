"""Activation checkpointing of transformers' layers: their inputs are kept, on the device or in CPU memory, and the rest
is recomputed in the backward pass.

fairscale's checkpoint runs a layer without gradients the first time. The auxiliary losses of a replaced layer's
mechanisms are therefore an output of the layer here, and reach the model's list from outside.
"""

from collections.abc import Iterator
from typing import Any

import torch
from fairscale.nn import checkpoint_wrapper
from torch import Tensor, nn

from megasparse.errors import ConfigError
from megasparse.model.block import Block
from megasparse.tasks.backbones import HuggingFaceBody

PASS = "megasparse_pass"
"""Argument of a replaced model's layers that holds `losses`, a list that its mechanisms append to."""


def checkpoint_layers(model: nn.Module, offload_to_cpu: bool) -> None:
    """Checkpoint every transformer layer of a model of transformers, in place. Gradients, random draws and the names of
    parameters stay what they are, and so does a pass without gradients.

    offload_to_cpu: keep the layers' inputs in CPU memory. Raises ConfigError where the model has no layers that can be
    recomputed.
    """
    found = list(_layers(model))
    if not found:
        problem = f"{type(model).__name__} has no layers that can be recomputed"
        raise ConfigError("start.activations", problem, 'Set it to "stored"')
    for layer in found:
        layer.forward = _Layer(layer, offload_to_cpu).run


def store_layers(model: nn.Module) -> None:
    """Undo `checkpoint_layers`."""
    for layer in _layers(model):
        vars(layer).pop("forward", None)


def _layers(model: nn.Module) -> Iterator[Any]:
    """The outermost layers that transformers itself would checkpoint."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if isinstance(model, GradientCheckpointingLayer):
        yield model
    else:
        for child in model.children():
            yield from _layers(child)


class _Layer(nn.Module):
    """The module that is checkpointed in place of a layer: its forward, with the mechanisms' losses as an output.

    The model does not know this module, so no parameter has another name.
    """

    def __init__(self, layer: nn.Module, offload_to_cpu: bool):
        super().__init__()
        self.layer = layer
        checkpoint_wrapper(self, offload_to_cpu=offload_to_cpu)

    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's outputs; its losses are appended to the list of the pass."""
        if not torch.is_grad_enabled():
            return type(self.layer).forward(self.layer, x, *args, **kwargs)
        args, kwargs = tuple(map(_uncached, args)), {name: _uncached(value) for name, value in kwargs.items()}
        if not x.requires_grad:
            if not any(weight.requires_grad for weight in self.layer.parameters()):
                return type(self.layer).forward(self.layer, x, *args, **kwargs)
            x = x.detach().requires_grad_()  # frozen embeddings: torch warns of a checkpoint without such an input
        losses, single, *outputs = self(x, *args, **kwargs)
        if losses is not None:
            kwargs[PASS].losses.append(losses)
        return outputs[0] if single else tuple(outputs)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The sum of the losses or None, whether there is a single output, and the outputs."""
        known = kwargs[PASS].losses if kwargs.get(PASS) is not None else []
        before = len(known)
        outputs = type(self.layer).forward(self.layer, *args, **kwargs)
        own = known[before:]
        del known[before:]
        single = isinstance(outputs, Tensor)
        return torch.stack(own).sum() if own else None, single, *((outputs,) if single else outputs)


def _uncached(value: Any) -> Any:
    """None in place of a decoding cache: training reads none, and the second pass would write into it again."""
    from transformers import Cache

    return None if isinstance(value, Cache) else value


def set_activations(body: nn.Module, kind: str) -> None:
    """Let a body store or checkpoint its layers' activations, as `activations` says. A reversible one stays so."""
    for block in _own_blocks(body):
        vars(block).pop("forward", None)
        if kind in ("checkpoint", "checkpoint_cpu"):
            checkpoint_wrapper(block, offload_to_cpu=kind == "checkpoint_cpu")
    if not isinstance(body, HuggingFaceBody):
        return
    store_layers(body)
    if kind != "stored":
        checkpoint_layers(body, offload_to_cpu=kind == "checkpoint_cpu")


def count_layers(body: nn.Module) -> int:
    """Layers that can be checkpointed."""
    return len(_own_blocks(body)) or len(list(_layers(body)))


def _own_blocks(body: nn.Module) -> list[Block]:
    """The blocks of one of our models, of both sides where it has two."""
    return [module for module in body.modules() if isinstance(module, Block)]
