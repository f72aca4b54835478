"""The choice of keys of a replaced decoder, taught by the attention that the model has, its own weights frozen.

Every layer attends fully while its mechanisms learn, one layer after another as the pass goes on, so that no more than
one layer's queries and keys exist at a time. B batch, L length.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from megasparse.attention.contract import RecomputeCache
from megasparse.attention.heads import Padding
from megasparse.attention.lha import LHAAttention
from megasparse.attention.observation import Call, each_call
from megasparse.attention.smart_bird import SmartBirdAttention
from megasparse.errors import HubError
from megasparse.hub.hash_training import full_attention
from megasparse.hub.replace import mechanisms
from megasparse.hub.replaced_layer import Mechanisms
from megasparse.ops.random import RngContext

HASH_RATE, SKETCH_RATE = 1e-2, 3e-3
"""Learning rates of Adam."""
UPDATES = 8
"""Steps of Adam of each layer in one pass of the model, each on queries of its own."""
_HELD_OUT = 1 << 30  # step of the draws of measurements


class Teacher:
    """Adam over the mechanisms of a replaced decoder that learn from its attention which keys to choose."""

    def __init__(self, model: PreTrainedModel, seed: int = 0):
        """Begin the teaching. seed: of the draws of queries. Raises HubError where nothing can be taught."""
        self.model, self.seed, self.passes = model, seed, 0
        self.layers = [module for module in model.modules() if isinstance(module, Mechanisms)]
        if not any(_teachable(mechanism) for mechanism in mechanisms(model)):
            hint = (
                'Replace its attention by {"kind": "smart_bird", "sketch": "heads", "objective": "attention"} or '
                '{"kind": "lha", "joint": false, "utility": "collisions"}'
            )
            raise HubError(type(model).__name__, "no part of its attention can be taught", hint)
        self.optimizers = {
            (number, kind): _adam(mechanism)
            for number, layer in enumerate(self.layers)
            for kind, mechanism in layer.items()
            if _teachable(mechanism)
        }

    def learn(self, tokens: Tensor) -> float:
        """Learn from texts (B, L) int64 without padding. Returns the mean loss of mechanisms, before each update."""
        losses = self._run(tokens, self.passes * UPDATES, UPDATES)
        self.passes += 1
        return losses

    def measure(self, tokens: Tensor) -> float:
        """The mean loss of mechanisms on texts (B, L), from which nothing is learned."""
        return self._run(tokens, _HELD_OUT, 0)

    def _run(self, tokens: Tensor, step: int, updates: int) -> float:
        losses: list[Tensor] = []
        with torch.no_grad(), full_attention(self.model):

            def listen(call: Call) -> None:
                losses.extend(self._learn_layer(call, step, updates))

            with each_call(self.model, listen):
                cast(Any, self.model.base_model)(input_ids=tokens, use_cache=False)
        return float(torch.stack(losses).mean())

    @torch.enable_grad()
    def _learn_layer(self, call: Call, step: int, updates: int) -> list[Tensor]:
        number, inputs, losses = call.context.layer, call.inputs, []
        layer = self.layers[number]
        parts = layer.split_heads_by_mechanism(inputs.q, inputs.k, inputs.v, Padding(), call.context)
        for kind, (mechanism, heads, context) in zip(layer.split, parts, strict=True):
            if (optimizer := self.optimizers.get((number, kind))) is None:
                continue
            own: Any = mechanism
            for update in range(max(1, updates)):
                rng = RngContext(self.seed, step + update, torch.arange(len(call.x)), training=True)
                drawn = replace(context, rng=rng, recompute=RecomputeCache())
                loss = own.learn(call.x, heads, drawn)[0] * (mechanism.spec.layers / own.config.weight)
                if updates:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                losses.append(loss.detach())
        return losses

    def save(self, path: Path) -> None:
        """Write what is learned, and Adam's state, to a safetensors file."""
        save_file({name: tensor.contiguous() for name, tensor in self._state()}, path)

    @torch.no_grad()
    def load(self, path: Path, passes: int) -> None:
        """Go on from what `save` wrote after so many passes. Raises HubError for another file."""
        own = dict(self._state())
        try:
            found = load_file(path)
        except (SafetensorError, OSError) as error:
            raise HubError(path, f"cannot be read ({error})", "Remove it to begin again") from None
        if {name: x.shape for name, x in found.items()} != {name: x.shape for name, x in own.items()}:
            raise HubError(path, "is not what this model's mechanisms learned", "Remove it to begin again")
        for name, tensor in own.items():
            tensor.copy_(found[name])
        self.passes = passes

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for (number, kind), optimizer in self.optimizers.items():
            for place, weight in enumerate(optimizer.param_groups[0]["params"]):
                state = optimizer.state[weight]
                if not state:  # as Adam itself begins
                    state["step"] = torch.zeros(())
                    state |= {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
                name = f"{number}.{kind}.{place}"
                yield f"{name}.weight", weight.detach()
                yield from ((f"{name}.{key}", state[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def _teachable(mechanism: nn.Module) -> bool:
    """Whether a mechanism learns its choice from attention beyond its window and sinks."""
    if isinstance(mechanism, SmartBirdAttention):
        return mechanism.config.objective == "attention"
    return isinstance(mechanism, LHAAttention) and mechanism.config.utility == "collisions"


def _adam(mechanism: nn.Module) -> torch.optim.Adam:
    rate = HASH_RATE if isinstance(mechanism, LHAAttention) else SKETCH_RATE
    return torch.optim.Adam(mechanism.parameters(), lr=rate)
