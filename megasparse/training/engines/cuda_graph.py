"""Forward and backward pass of a micro-batch in one CUDA graph, which a host launches at once."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megasparse.ops.random import KeyTable, RngContext


class GraphedModel:
    """Model whose forward in training runs the backward too, from a CUDA graph of the first micro-batch's pass.

    Tokens, sample numbers and random keys are copied into the memory that the graph reads, and gradients are added in
    place to memory that it keeps. A CPU runs the same pass without a graph.
    """

    def __init__(self, model: nn.Module, backward: Callable[[Tensor], None], masters: Iterable[Tensor]):
        """Wrap `model`. backward: adds the gradient of an objective to the gradients of `masters`."""
        self._model, self._backward, self._masters = model, backward, list(masters)
        self._replay: Callable[[], None] | None = None

    def __call__(self, tokens: Tensor, rng: RngContext, *padding: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the objective and statistics of `model`, in training in memory that the next call overwrites."""
        if not torch.is_grad_enabled():
            result: tuple[Tensor, dict[str, Tensor]] = self._model(tokens, rng, *padding)
            return result
        if self._replay is None:
            self._start(tokens, rng)
        assert self._replay is not None
        assert tokens.shape == self._tokens.shape, "a CUDA graph has one shape"
        self._keys.fill(rng.step)
        self._tokens.copy_(tokens)
        self._rng.samples.copy_(rng.samples)
        self._replay()
        return self._result

    def _start(self, tokens: Tensor, rng: RngContext) -> None:
        """Run the pass once, which compiles kernels and finds its random keys; allocate gradients; and capture it."""
        self._tokens = tokens.clone()
        self._keys = KeyTable(tokens.device)
        self._keys.fill(rng.step)
        self._rng = replace(rng, samples=rng.samples.clone(), table=self._keys)
        if tokens.is_cuda:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            self._run()
        self._keys.complete = True
        for master in self._masters:
            master.grad = None if master.grad is None else torch.zeros_like(master)
        self._replay = self._captured()

    def _run(self) -> None:
        rng = replace(self._rng)  # without the row numbers of the last pass
        objective, statistics = self._model(self._tokens, rng)
        self._backward(objective)
        self._result = objective.detach(), {name: value.detach() for name, value in statistics.items()}

    def _captured(self) -> Callable[[], None]:
        if not self._tokens.is_cuda:
            return self._run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads read data and write files
            self._run()
        return graph.replay
