"""The values of a model's weights, read a piece at a time: a rank never holds what it does not keep."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megasparse.training.checkpoints.checkpoint import Checkpoint

Initial = Callable[[str, Sequence[int], int, int], Tensor]
"""Maps (name, shape, start, numel) to elements [start, start + numel) of a flattened initial weight, fp32."""


class Weights:
    """Where a model's weights come from: trained ones from a checkpoint, if there is one; else those on the meta device
    from `initial`, and all others from the model itself.
    """

    def __init__(self, model: nn.Module, initial: Initial | None = None, checkpoint: Checkpoint | None = None):
        self.model, self._initial, self._checkpoint = model, initial, checkpoint

    def read(self, name: str, weight: Tensor, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of a flattened weight of the model."""
        if self._checkpoint is not None and weight.requires_grad:
            return self._checkpoint.read("weight", name, start, numel)
        if not weight.is_meta:
            return weight.detach().reshape(-1)[start : start + numel]
        assert self._initial is not None, f"{name} has no memory, and no initial value"
        return self._initial(name, weight.shape, start, numel)

    def fill(self, device: torch.device) -> None:
        """Give the model all of every weight, one after another, on `device`, and move its buffers there."""
        for name, weight in self.model.named_parameters():
            put(weight, self.read(name, weight, 0, weight.numel()).view(weight.shape).to(device, weight.dtype))
        move_buffers(self.model, device)


def put(weight: Tensor, values: Tensor) -> None:
    """Let a weight, which may be on the meta device, have these values, without a copy. It stays the same object."""
    if weight.is_meta:
        torch.utils.swap_tensors(weight, nn.Parameter(values, requires_grad=weight.requires_grad))
    else:
        weight.data = values


def move_buffers(model: nn.Module, device: torch.device) -> None:
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
