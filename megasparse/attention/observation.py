"""Record the calls of a model's mechanisms with hooks."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from megasparse.attention.contract import (
    Attention,
    AttentionContext,
    AttentionInputs,
    AttentionOutput,
    MechanismSpec,
    RecomputeCache,
)
from megasparse.attention.full import FullAttention, FullAttentionConfig
from megasparse.config.attention import MECHANISMS


@dataclass(frozen=True)
class Call:
    """Arguments of one call of a mechanism in a model's forward."""

    mechanism: Attention
    x: Tensor
    inputs: AttentionInputs
    context: AttentionContext

    @property
    def kind(self) -> str:
        return next(kind for kind, registered in MECHANISMS.items() if type(self.mechanism) is registered)

    @property
    def scale(self) -> float:
        """Factor of q·k before the softmax."""
        return 1.0 if self.mechanism.shared_qk else self.inputs.q.shape[-1] ** -0.5

    @property
    def spec(self) -> MechanismSpec:
        heads, length, width = self.inputs.q.shape[1:]
        return MechanismSpec(heads, width, self.x.shape[-1], length, self.inputs.causal)

    def exact(self) -> Attention:
        """Return the mechanism that this one approximates: `Attention.exact`, by default full attention."""
        full = FullAttentionConfig(shared_qk=self.mechanism.shared_qk)
        return self.mechanism.exact() or FullAttention(full, self.spec)

    def run(self, mechanism: Attention, v: Tensor | None = None, rounds: int | None = None) -> Tensor:
        """Return the output (B, H, L, D) of a mechanism on this input, with the same draws, optionally with other
        values or hash rounds.
        """
        inputs = self.inputs if v is None else self.inputs._replace(v=v)
        rng = dataclasses.replace(self.context.rng, rounds=rounds)
        undivided = dataclasses.replace(self.context.part, divides_pairs=False)
        context = dataclasses.replace(self.context, rng=rng, recompute=RecomputeCache(), part=undivided)
        return cast(AttentionOutput, mechanism(self.x, inputs, context)).out


@contextmanager
def calls(model: nn.Module) -> Iterator[list[Call]]:
    """Context manager that yields a list of the calls of the model's mechanisms, in order."""
    recorded: list[Call] = []
    with each_call(model, recorded.append):
        yield recorded


@contextmanager
def each_call(model: nn.Module, listen: Callable[[Call], None]) -> Iterator[None]:
    """Context manager that passes every call of the model's mechanisms to `listen` before it is computed."""

    def before(mechanism: nn.Module, arguments: tuple[Any, ...]) -> None:
        listen(Call(cast(Attention, mechanism), *arguments))

    handles = [module.register_forward_pre_hook(before) for module in model.modules() if isinstance(module, Attention)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
