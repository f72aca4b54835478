"""A pass in a CUDA graph, without a GPU: recorded operations and launches of kernels, run again with their arguments
and their memory, and passes on the meta device, in which the host would wait for the GPU."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from megasparse.data.batches import Batch
from megasparse.model.build import build_model, empty_model
from megasparse.ops.operator import VARIABLE
from megasparse.ops.random import RngContext
from megasparse.planning.passes import META
from megasparse.settings.checks import IN_A_GRAPH
from megasparse.training.engines import build_engine
from megasparse.training.engines.cuda_graph import GraphedModel
from megasparse.training.ranks import Ranks
from tests.helpers.launches import OperationsAndKernels
from tests.helpers.models import VARIANTS, attention, kind_of, named, random_tokens, small
from tests.helpers.tiny import tiny_config

READ_BY_THE_HOST = (
    "_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "repeat_interleave", "unique_consecutive",
    "unique_dim", "_unique2",
)  # fmt: skip
"""Operations whose result, or its shape, the host waits for."""


class Recording(OperationsAndKernels):
    """Operations and launches inside the `with`. `replay` runs them again. One that a graph cannot contain fails."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []

    def _see(self, launch: Any) -> None:
        self.steps.append(launch.start)
        with _disable_current_modes():
            launch.start()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        assert name not in READ_BY_THE_HOST, f"the host waits for {name}"
        result = function(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        assert len({x.device for x in tensors if x.dim() > 0 or name == "_to_copy"}) < 2, f"{name} copies from the host"
        constant = name == "lift_fresh" and result.is_meta  # torch.tensor(numbers, device=...)
        assert not constant, "a constant of the host"
        self.steps.append(partial(_again, function, args, kwargs, result))
        return result

    def replay(self) -> None:
        for step in self.steps:
            step()


@torch.no_grad()
def _again(function: Any, args: Any, kwargs: Any, result: Any) -> None:
    for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
        if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            old.copy_(new)


def record(graphed: GraphedModel) -> Any:
    """Capture as a GPU does: what Python decides once stays."""
    with Recording() as recording:
        graphed._run()
    for master in graphed._masters:  # a GPU runs nothing while it captures
        if master.grad is not None:
            master.grad.zero_()
    return recording.replay


@pytest.mark.parametrize(
    "kind,precision,blocks",
    [
        ("lsh", "fp32", "ordinary"),
        pytest.param("lsh", "bf16", "reversible", marks=pytest.mark.slow),
        pytest.param("lha", "fp32", "ordinary", marks=pytest.mark.slow),
    ],
)
def test_replays_draw_what_steps_draw(kind, precision, blocks, tmp_path, monkeypatch):
    """Rotations, samples of keys and every dropout; two micro-batches a step. Gradients stay where they are."""
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(GraphedModel, "_captured", record)
    layers: Any = {"blocks": blocks, "activations": "reversible" if blocks == "reversible" else "stored"}
    model = small(layers=1, attention=attention(kind, lsh={"rounds": 1}), dropout=0.2, **layers)

    def steps(cuda_graph: bool) -> tuple[list[Any], list[int]]:
        training = {"global_batch": 2, "micro_batch": 1, "precision": precision}
        run = {"cuda_graph": cuda_graph}
        config = tiny_config(tmp_path, training=training, run=run)
        engine: Any = build_engine(build_model(model, 0), config, partial(RngContext, 0, training=True), Ranks())
        results, places = [], []
        for step in range(2):
            batches = [Batch(random_tokens(1, 12, seed=2 * step + i), torch.tensor([7 * step + i])) for i in range(2)]
            results.append(engine.train_step(batches, step, 0.01))
            places.append([master.grad.data_ptr() for master in engine._masters.values() if master.grad is not None])
        return [(x.loss, x.grad_norm, x.statistics) for x in results], places

    eager, graphed = steps(False), steps(True)
    assert graphed[0] == eager[0]
    assert graphed[1][0] and graphed[1] == graphed[1][:1] * 2


OTHERS = [name for name in VARIANTS if kind_of(name) in IN_A_GRAPH and name not in ("lha top_k", "lha separate")]


@pytest.mark.parametrize("names", [IN_A_GRAPH, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["kinds", "variants"])
def test_the_host_takes_no_part(names):
    """In any mechanism that a graph may contain, with the code for GPUs."""
    for name in names:
        for activations in ("stored", "checkpoint"):
            assert_recorded(named(name), activations)


def assert_recorded(mechanism, activations):
    parts: Any = {"blocks": "ordinary", "activations": activations, "ngrams": {"lengths": [2], "rows": 50}}
    config = small(attention=mechanism, layers=2, dropout=0.1, **parts)
    with META:
        model = empty_model(config)
    graphed = GraphedModel(model, torch.Tensor.backward, model.parameters())
    graphed._captured = partial(record, graphed)
    objective, _ = graphed(random_tokens(2, 128).to(META), RngContext(0, 1, torch.arange(2).to(META), training=True))
    assert objective.is_meta
