"""Compare outputs and gradients of two implementations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.helpers.models import Single, training_draws


def gradients(model: Any, tokens: Tensor, step: int = 0, call: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective of a training step and its gradients by name. call: replaces the model."""
    model.zero_grad()
    objective, _ = (model if call is None else call)(tokens, training_draws(len(tokens), step))
    objective.backward()
    return objective.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error(ours: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    difference = sum(((ours[n].double() - exact[n].double()) ** 2).sum() for n in exact)
    return float((difference / sum((exact[n].double() ** 2).sum() for n in exact)) ** 0.5)


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], bar: float) -> None:
    """Every gradient, given by names, within a relative bar."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= bar * gradient.norm(), name


def decoded_nats(model: Any, tokens: Tensor, prompt: int, cache: Any) -> Tensor:
    """Nats of the tokens after the first `prompt`, which an empty cache reads at once; the others one by one."""
    logits = [model.prefill(tokens[:, :prompt], cache)]
    logits += [model.decode(tokens[:, t], cache) for t in range(prompt, tokens.shape[1] - 1)]
    return -torch.log_softmax(torch.stack(logits, 1), -1).gather(-1, tokens[:, prompt:, None]).squeeze(-1)


def objective_of(output: Any) -> Tensor:
    """A sum that all outputs of a mechanism or layer move, and its auxiliary loss."""
    out = output.out.float()
    objective = (out * out.detach().cos()).sum()
    return objective if output.auxiliary_loss is None else objective + output.auxiliary_loss


def gradients_of(single: Single, output: Any, inputs: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """The gradients of x, q, k and v, and of the mechanism's own weights, by name."""
    weights = dict(single.mechanism.named_parameters())
    found = torch.autograd.grad(objective_of(output), [*inputs, *weights.values()], allow_unused=True)
    return dict(zip(["x", "q", "k", "v", *weights], found, strict=True))


def softmax_over(score: Tensor, seen: Tensor, v: Tensor) -> Tensor:
    """Values (..., L, D) weighted by the softmax of scores (..., L, L) over the keys that are seen; 0 where none is."""
    blind = ~seen.any(-1, keepdim=True)
    score = score.masked_fill(~seen, -torch.inf).masked_fill(blind, 0.0)
    return (torch.softmax(score, -1) @ v).masked_fill(blind, 0.0)


def assert_same_with_gradients(
    ours: Callable[..., Tensor],
    definition: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    weights: Iterable[Tensor] = (),
    unread: Sequence[int] = (),
) -> None:
    """Both functions of the inputs have the same output, and the same gradients of inputs and weights, in float64.

    unread: numbers of the inputs that have no gradient."""
    found = []
    for function in (ours, definition):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        read = [leaf for number, leaf in enumerate(leaves) if number not in unread]
        found.append((out, *torch.autograd.grad((out * out.detach().cos()).sum(), [*read, *weights])))
    for own, defined in zip(*found, strict=True):
        torch.testing.assert_close(own, defined, rtol=1e-9, atol=1e-9)
