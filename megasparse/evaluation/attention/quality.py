"""How near each attention of a model comes to full attention, measured on one held-out window inside training."""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

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
    .../bucket_largest (see `measure`), and of its first layer .../maps, a picture.
    """
    stream = EvaluationStream(index, config.evaluation.split)
    longest = WINDOW if config.model.source is None else config.data.sequence_length
    length = min(longest, config.data.sequence_length, stream.tokens)
    tokens = stream.read(0, length).unsqueeze(0).to(engine.ranks.device)

    @torch.no_grad()
    def quality() -> dict[str, float | str | Tensor]:
        found: dict[str, list[float]] = defaultdict(list)
        pictures: dict[str, float | str | Tensor] = {}
        for call in record_calls(engine.module, tokens, config.run.seed):
            if call.kind == "full":
                continue
            exact, own = weights_of(call, call.exact()), weights_of(call, call.mechanism.without_additions())
            for name, value in measure(call, exact, own).items():
                found[f"quality/{call.kind}/{name}"].append(value)
            pictures.setdefault(f"quality/{call.kind}/maps", _picture(call, exact, own))
        return pictures | {name: sum(values) / len(values) for name, values in found.items()}

    return quality


@torch.no_grad()
def record_calls(model: nn.Module, tokens: Tensor, seed: int) -> list[Call]:
    """The call of each of a model's mechanisms on tokens (B, L), in evaluation mode."""
    training = model.training
    model.eval()
    with calls(model) as found:
        model(tokens, RngContext.evaluation(seed, len(tokens)))
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
    heads = range(min(HEADS_SHOWN, exact.shape[1]))
    rows = [
        [attention_map(w[0, head], w[0, head] != 0, causal=call.inputs.causal).cpu().numpy() for w in (exact, own)]
        for head in heads
    ]
    labels = [f"head {call.context.head_offset + head}" for head in heads]
    return torch.tensor(sheet(rows, ["full attention", call.kind], labels, [f"layer {call.context.layer}", *LINES]))
