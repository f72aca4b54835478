"""A pretrained decoder under several attentions: nats a token, keys a query, the attention they capture, seconds.

An arm is full attention, settings of a replacement, a replaced folder (such as a taught one), or an oracle. H heads, S
queries, L length, D head dim.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from megasparse.attention.contract import Attention, AttentionOutput
from megasparse.attention.observation import Call, each_call
from megasparse.benchmarks.visible_keys import best_pairs, seen_pairs, weights
from megasparse.hub.replace import load_plain, load_replaced, mechanisms, replace_attention, replacement_of

QUERIES = 128
"""Queries of a text whose keys are counted, spread evenly."""
_TILE = 128
_TOKENS = 512  # whose logits exist at a time


@dataclass(frozen=True)
class Best:
    """The oracle: `count` best keys of each head beside a window and sinks."""

    count: int
    window: int
    sinks: int

    def pairs(self, weight: Tensor, queries: Tensor) -> Tensor:
        return best_pairs(weight, queries, self.count, self.window, self.sinks)

    def attend(self, call: Call) -> Tensor:
        """Softmax attention to the oracle's keys, some queries at a time: (1, H, L, D)."""
        out = []
        for queries in torch.arange(call.inputs.q.shape[2]).split(_TILE):
            k, v = (x[:, :, : int(queries[-1]) + 1] for x in (call.inputs.k, call.inputs.v))
            weight = weights(replace(call, inputs=call.inputs._replace(k=k, v=v)), queries)
            weight *= self.pairs(weight, queries)
            out.append((weight / weight.sum(-1, keepdim=True)).to(v.dtype) @ v[0])
        return torch.cat(out, dim=1)[None]


@dataclass(frozen=True)
class Arm:
    """An arm by its name. attention: settings of `replace_attention`, or {"best", "window", "sinks"}, or a folder."""

    name: str
    attention: dict[str, Any] | Path

    @property
    def oracle(self) -> Best | None:
        own = self.attention
        return Best(own["best"], own["window"], own["sinks"]) if isinstance(own, dict) and "best" in own else None

    def seeds(self, count: int) -> list[int]:
        """Of the models to measure: a folder's own, the first `count` of settings that draw, else 0."""
        if isinstance(self.attention, Path):
            return [replacement_of(self.attention)["seed"]]
        return list(range(1 if self.attention.get("kind") in ("full", "local", None) else count))

    def model(self, plain: Path, length: int, seed: int) -> PreTrainedModel:
        if isinstance(self.attention, Path):
            return load_replaced(self.attention).eval()
        settings = {"kind": "full"} if self.oracle else self.attention
        return replace_attention(load_plain(plain), settings, max_length=length, seed=seed).eval()


@torch.no_grad()
def measure(model: PreTrainedModel, tokens: Tensor, oracle: Best | None) -> dict[str, Any]:
    """One text (1, L). nats: mean over the tokens after the first. keys: mean number that a query sees, and captured:
    the share of the layer's own full attention on them, of QUERIES queries, mean over heads and layers. seconds: of the
    process, all threads, for the pass without the counting. layers: captured in each.
    """
    length, parts = tokens.shape[1], dict[int, list[tuple[float, float]]]()
    queries = 1 + torch.arange(min(QUERIES, length - 1)) * (length - 1) // min(QUERIES, length - 1)
    counting = 0.0

    def listen(call: Call) -> None:
        nonlocal counting
        start = time.process_time()
        weight = weights(call, queries)
        seen = (oracle.pairs(weight, queries) if oracle else seen_pairs(call, queries)).expand_as(weight)
        for head, mask in zip(weight, seen, strict=True):
            found = (float(mask.sum(-1).float().mean()), float((head * mask).sum(-1).mean()))
            parts.setdefault(call.context.layer, []).append(found)
        counting += time.process_time() - start

    base: Any = model.base_model
    start = time.process_time()
    with ExitStack() as stack:
        stack.enter_context(each_call(model, listen))
        stack.enter_context(attending(model, oracle))
        hidden = base(input_ids=tokens, use_cache=False).last_hidden_state[0]
    seconds = time.process_time() - start - counting
    layers = [torch.tensor(parts[layer]).mean(0).tolist() for layer in sorted(parts)]
    return {
        "nats": nats(model, hidden, tokens[0]),
        "keys": sum(keys for keys, _ in layers) / len(layers),
        "captured": sum(share for _, share in layers) / len(layers),
        "seconds": round(seconds, 1),
        "layers": [round(share, 4) for _, share in layers],
    }


def nats(model: PreTrainedModel, hidden: Tensor, tokens: Tensor) -> float:
    """Mean nats of tokens 1… (L,) of what the last layer gives, hidden (L, E)."""
    head: Any = model.get_output_embeddings()
    pairs = zip(hidden[:-1].split(_TOKENS), tokens[1:].split(_TOKENS), strict=True)
    return float(sum(F.cross_entropy(head(x).float(), y, reduction="sum") for x, y in pairs)) / (len(tokens) - 1)


@contextmanager
def attending(model: PreTrainedModel, oracle: Best | None) -> Iterator[None]:
    """Inside the `with`, layers of full attention see the oracle's keys alone, where there is one."""

    def restrict(mechanism: nn.Module, given: Any, output: AttentionOutput) -> AttentionOutput:
        assert isinstance(mechanism, Attention) and oracle is not None
        return output._replace(out=oracle.attend(Call(mechanism, *given)))

    handles = [mechanism.register_forward_hook(restrict) for mechanism in mechanisms(model) if oracle]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
