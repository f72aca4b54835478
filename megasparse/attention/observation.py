"""What a model's attention sees, read from outside: inputs of every mechanism, and its weights as a matrix.

B batch, H heads, L length, D head dim.
"""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from megasparse.attention.contract import (
    Attention,
    AttentionContext,
    AttentionInputs,
    AttentionOutput,
    MechanismSpec,
    RecomputeCache,
)
from megasparse.attention.full import FullAttention
from megasparse.attention.lha import LHAAttention
from megasparse.attention.lsh import LSHAttention
from megasparse.attention.mechanisms import MECHANISMS
from megasparse.attention.yoso import YOSOAttention
from megasparse.config.attention import FullAttentionConfig


@dataclass(frozen=True)
class Call:
    """One call of a mechanism in a model's forward: all that it was given."""

    mechanism: Attention
    x: Tensor
    inputs: AttentionInputs
    context: AttentionContext

    @property
    def kind(self) -> str:
        return next(kind for kind, made in MECHANISMS.items() if type(self.mechanism) is made)

    @property
    def scale(self) -> float:
        """What q·k is multiplied by before the softmax."""
        return 1.0 if self.mechanism.shared_qk else self.inputs.q.shape[-1] ** -0.5

    @property
    def spec(self) -> MechanismSpec:
        heads, length, width = self.inputs.q.shape[1:]
        return MechanismSpec(heads, width, self.x.shape[-1], length, self.inputs.causal)

    def replaced(self, mechanism: Attention) -> "Call":
        """The same call of another mechanism."""
        return dataclasses.replace(self, mechanism=mechanism)

    def attention(self) -> Attention:
        """The mechanism, without what it adds to attention (YOSO's convolution of the values)."""
        if isinstance(self.mechanism, YOSOAttention):
            return _yoso(self.mechanism, expectation=self.mechanism.config.expectation)
        return self.mechanism

    def exact(self) -> Attention:
        """What the mechanism stands for: full attention of the same queries and keys, or YOSO's expectation."""
        if isinstance(self.mechanism, YOSOAttention):
            return _yoso(self.mechanism, expectation=True)
        return FullAttention(FullAttentionConfig(shared_qk=self.mechanism.shared_qk), self.spec)

    def codes(self) -> tuple[Tensor, Tensor, int] | None:
        """The buckets of queries and of keys, (B, H, L) each (of R rounds (B, R·H, L)), and how many buckets there are:
        of LSH and LHA, None of others.
        """
        mechanism = self.mechanism
        if isinstance(mechanism, LSHAttention):
            queries, keys = mechanism.assign(self.inputs, self.context)
            keys = queries if keys is None else keys
            return queries.flatten(1, 2), keys.flatten(1, 2), math.prod(mechanism.factors)
        if isinstance(mechanism, LHAAttention):
            assigned = mechanism.assign(self.inputs, self.context)
            return assigned.query_codes, assigned.key_codes, mechanism.buckets
        return None

    def run(self, mechanism: Attention, v: Tensor | None = None, rounds: int | None = None) -> Tensor:
        """The output (B, H, L, D) of a mechanism on this input, with other values or hash rounds where given.

        Everything is decided anew, from the same draws.
        """
        inputs = self.inputs if v is None else self.inputs._replace(v=v)
        rng = dataclasses.replace(self.context.rng, rounds=rounds)
        context = dataclasses.replace(self.context, rng=rng, recompute=RecomputeCache())
        return cast(AttentionOutput, mechanism(self.x, inputs, context)).out


def _yoso(mechanism: YOSOAttention, expectation: bool) -> YOSOAttention:
    bits = mechanism.code_bits
    changes = {"expectation": expectation, "convolution": None, "code_bits": bits}
    return YOSOAttention(mechanism.config.model_copy(update=changes), mechanism.spec)


@contextmanager
def calls(model: nn.Module) -> Iterator[list[Call]]:
    """Inside the `with`, the list of what the model's mechanisms were called with, in their order."""
    found: list[Call] = []
    handles = [
        module.register_forward_pre_hook(lambda mechanism, given: found.append(Call(mechanism, *given)))
        for module in model.modules()
        if isinstance(module, Attention)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def weights_of(call: Call, mechanism: Attention) -> Tensor:
    """The attention matrix (B, H, L, L) of a mechanism on a call's input, in the dtype of its output.

    These are its outputs of one-hot values, some columns at a time, so it holds for whatever is linear in the values.
    YOSO, which scales each output to length 1, gets one column more with the value 1 of every key, by which the others
    are divided: its rows, too, sum to 1.
    """
    length, width = call.inputs.v.shape[2:]
    normalises = isinstance(mechanism, YOSOAttention)
    step = width - normalises
    one_hot = torch.eye(length, dtype=call.inputs.v.dtype, device=call.inputs.v.device)
    columns = []
    for start in range(0, length, step):
        piece = one_hot[:, start : start + step]
        v = torch.zeros_like(call.inputs.v)
        v[..., : piece.shape[1]] = piece
        if normalises:
            v[..., -1] = 1.0
        out = call.run(mechanism, v)
        total = out[..., -1:]
        columns.append(torch.where(total > 0, out / total, 0.0) if normalises else out)
        columns[-1] = columns[-1][..., : piece.shape[1]]
    return torch.cat(columns, dim=-1)


def attention_map(weights: Tensor, visible: Tensor, size: int = 256) -> Tensor:
    """A picture of attention matrices (..., L, L): uint8 (..., S, S, 3), S = min(L, size).

    Queries downwards, keys to the right. White is not visible, blue visible; darker has more of its query's weight. Of
    the pairs that share a pixel the strongest shows.
    """
    strength = (weights / weights.amax(-1, keepdim=True).clamp_min(1e-30)).sqrt() * visible
    side = min(weights.shape[-1], size)
    shape = (*weights.shape[:-2], side, side)
    dark, seen = (
        torch.nn.functional.adaptive_max_pool2d(x.float().reshape(-1, *x.shape[-2:]), side).reshape(shape)
        for x in (strength, visible)
    )
    blue = torch.tensor([0.75, 0.87, 1.0], device=weights.device)
    paper = 1.0 - seen.unsqueeze(-1) * (1.0 - blue)
    return (255 * paper * (1.0 - dark.unsqueeze(-1))).round().to(torch.uint8)
