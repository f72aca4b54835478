"""How near each attention of a model comes to full attention, measured on one held-out window inside training."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megasparse.attention.observation import Call, calls
from megasparse.config.schema import Config
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.evaluation.attention.metrics import (
    attention_utility,
    imbalance,
    recall_of_top,
    relative_error,
    upper_bound,
)
from megasparse.evaluation.attention.weights import LEGEND, attention_map, weights_of
from megasparse.evaluation.pictures import sheet
from megasparse.model.padding import cut
from megasparse.ops.random import RngContext
from megasparse.training.engines.contract import Engine

WINDOW = 1024
"""Tokens at most: the L² weights of each head are held."""
TOP = 16
"""Largest exact weights of a query that its recall counts."""
HEADS_SHOWN = 2
LINES = LEGEND.split("; ")  # below maps that may be narrow


def attention_quality(engine: Engine, index: Index, config: Config) -> Callable[[], dict[str, float | str | Tensor]]:
    """Build a function that measures the attention on the first tokens of `evaluation.split`, an encoder–decoder's
    first sequence, whose encoder and decoder are taken together; every rank calls it and has the same result.

    For each kind of attention but full, mean over its layers and heads: quality/KIND/output_error, .../recall_top,
    .../utility, .../utility_bound and .../utility_floor, of LSH and LHA also .../bucket_ratio, .../bucket_size and
    .../bucket_largest (see `measure`), and of its first layer .../maps, a picture. Ranks that share sequences measure
    each its own heads, where their number divides the window; the whole of it otherwise.
    """
    stream = EvaluationStream(index, config.evaluation.split)
    longest = WINDOW if config.model.source is None else config.data.sequence_length
    length = min(longest, config.data.sequence_length, stream.tokens)
    ranks = engine.ranks
    tokens = stream.read(0, length).unsqueeze(0).to(ranks.device)
    sequence = ranks.sequence if length % ranks.sequence_size == 0 else None

    @torch.no_grad()
    def quality() -> dict[str, float | str | Tensor]:
        found: dict[str, list[float]] = defaultdict(list)
        pictures: dict[str, float | str | Tensor] = {}
        for call in record_calls(engine.module, tokens, config.run.seed, sequence):
            if call.kind == "full":
                continue
            exact, own = weights_of(call, call.exact()), weights_of(call, call.mechanism.without_additions())
            for name, value in measure(call, exact, own).items():
                found[f"quality/{call.kind}/{name}"].append(value)
            if (name := f"quality/{call.kind}/maps") not in pictures:
                pictures[name] = _picture(call, exact, own)
        means = torch.tensor([sum(values) / len(values) for values in found.values()], dtype=torch.float64)
        if sequence is not None:  # each rank has equally many heads
            means = ranks.sum(means.to(ranks.device)) / ranks.world_size
        return pictures | dict(zip(found, means.tolist(), strict=True))

    return quality


@torch.no_grad()
def record_calls(model: Any, tokens: Tensor, seed: int, sequence: ProcessGroup | None = None) -> list[Call]:
    """The call of each of a model's mechanisms on tokens (B, L), in evaluation mode. sequence: ranks that share the
    tokens, each of which has the calls of its heads.
    """
    training = model.training
    own, padding = cut(tokens, model.config, sequence)
    model.eval()
    with calls(model) as found:
        model(own, RngContext.evaluation(seed, len(tokens)), padding)
    model.train(training)
    return found


def measure(call: Call, exact: Tensor, own: Tensor) -> dict[str, float]:
    """One layer's attention against full attention of the same queries and keys; means over heads and queries.

    exact, own: the two attention matrices (B, H, L, L).
    output_error: ‖output − exact output‖ / ‖exact output‖. recall_top: share of the TOP largest exact weights that are
    among the TOP largest of its own. utility: exact attention on the pairs that it sees (LHA Eq. 5); utility_bound: the
    most that so many keys a query can have; utility_floor: what so many keys taken at random have. Where tokens have
    buckets also bucket_ratio, bucket_size and bucket_largest, see `Imbalance`.
    """
    visible = own != 0
    keys = visible.sum(-1)
    seen, allowed = keys.double(), (exact != 0).sum(-1).clamp_min(1)
    values = {
        "output_error": relative_error(call.run(call.mechanism.without_additions()), call.run(call.exact())),
        "recall_top": recall_of_top(exact, own, TOP),
        "utility": attention_utility(exact, visible),
        "utility_bound": upper_bound(exact, keys),
        "utility_floor": (seen / allowed).clamp_max(1.0),
    }
    if (buckets := call.mechanism.buckets_of(call.inputs, call.context)) is not None:
        values |= {f"bucket_{name}": value for name, value in imbalance(*buckets)._asdict().items()}
    return {name: float(value.double().mean()) for name, value in values.items()}


def _picture(call: Call, exact: Tensor, own: Tensor) -> Tensor:
    """The exact map beside its own, of the first heads of the first sequence, one below the other: (S, S', 3) uint8."""
    part, here = call.context.part, exact.shape[1]
    exact, own = (part.gather_heads(w[:1, :HEADS_SHOWN])[0, :HEADS_SHOWN] for w in (exact, own))
    rows = [
        [attention_map(w, w != 0, causal=call.inputs.causal).cpu().numpy() for w in pair]
        for pair in zip(exact, own, strict=True)
    ]
    first = call.context.head_offset - part.way * here
    labels = [f"head {first + head}" for head in range(len(rows))]
    return torch.tensor(sheet(rows, ["full attention", call.kind], labels, [f"layer {call.context.layer}", *LINES]))
