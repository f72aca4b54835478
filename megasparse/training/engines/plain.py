"""Training with plain PyTorch, in one process."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megasparse.config.schema import RunSettings
from megasparse.optimizers import build_optimizer
from megasparse.optimizers.muon import Muon
from megasparse.training.checkpoints.checkpoint import Fragment
from megasparse.training.engines.contract import Engine, MakeRng, Weights, whole_fragments
from megasparse.training.engines.cuda_graph import GraphedModel
from megasparse.training.ranks import Ranks


class TorchEngine(Engine):
    """Plain PyTorch in one process. In bf16 the model is a rounded copy of fp32 weights, as under DeepSpeed."""

    totals_before_backward = False

    def __init__(self, model: nn.Module, config: RunSettings, make_rng: MakeRng, ranks: Ranks, weights: Weights):
        super().__init__(model, config, make_rng, ranks)
        weights.fill(ranks.device)
        self._masters: dict[str, Tensor] = dict(self._trained)
        self._rounded = config.training.precision == "bf16"
        if self._rounded:
            self._masters = {name: p.detach().clone() for name, p in self._masters.items()}
            for p in model.parameters():
                if p.dtype == torch.float32:
                    p.data = p.data.bfloat16()
        self.optimizer = build_optimizer(self._masters, config.optimizer)
        modules: Iterator[Any] = model.modules()
        for module in modules:
            if hasattr(module, "sparse_gradients"):
                module.sparse_gradients = isinstance(self.optimizer, Muon)
        self._has_graph = config.run.cuda_graph
        if self._has_graph:
            training = config.training
            backward = partial(self._accumulate, micro_batches=training.global_batch // training.micro_batch)
            self._forward = GraphedModel(model, backward, self._masters.values())

    def _accumulate(self, objective: Tensor, micro_batches: int) -> None:
        (objective / micro_batches).backward()
        if self._rounded:  # accumulate in fp32
            for name, p in self._trained.items():
                if p.grad is not None:
                    master, grad = self._masters[name], p.grad.float()
                    if master.grad is None:
                        master.grad = grad
                    else:
                        master.grad += grad
                    p.grad = None

    def _backward(self, objective: Tensor, micro_batches: int, last: bool, poison_gradient: bool) -> None:
        if not self._has_graph:  # else the forward has accumulated the gradient
            self._accumulate(objective, micro_batches)
        for master in self._masters.values() if last else ():
            if master.grad is None:  # as under DeepSpeed: each keeps a state and the same number of updates
                master.grad = torch.zeros_like(master)
            elif master.grad.is_sparse:
                master.grad = master.grad.coalesce()

    def _gradient_norm(self) -> dict[str, Tensor]:
        self._norm = torch.nn.utils.get_total_norm(self.gradients())
        return {"grad_norm": self._norm.double()}

    def _update(self, apply_update: bool, norm: float | None) -> tuple[float, bool]:
        assert norm is not None
        applied = apply_update and math.isfinite(norm)
        if applied:
            if self._clipping > 0:
                factor = (self._clipping / (self._norm + 1e-6)).clamp(max=1.0)  # as clip_grads_with_norm_ computes it
                torch._foreach_mul_(self.gradients(), factor)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self._has_graph)
        if self._rounded:
            for name, p in self._trained.items():
                p.data.copy_(self._masters[name])
        return norm, applied

    def gradients(self) -> list[Tensor]:
        gradients = (p.grad for p in self._masters.values() if p.grad is not None)
        return [gradient.values() if gradient.is_sparse else gradient for gradient in gradients]

    def _state(self) -> Iterator[Fragment]:
        return whole_fragments(self._masters, self.optimizer)

    def _state_owners(self) -> Iterator[Tensor]:
        yield from self._masters.values()
