"""Comparison of a model's attention with full attention, during training and in tools/study_attention.py: attention
utility (LHA section 3.3), imbalance of buckets (section 3.2), recall of the largest weights, output error.

All functions store L² weights per head: use windows of a few thousand tokens. B windows, H heads, L length, D head dim,
N buckets.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megasparse.attention.contract import Attention
from megasparse.attention.observation import Call, calls
from megasparse.config.schema import Config
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.evaluation.images import BACKGROUND, sheet
from megasparse.model.stack import cut
from megasparse.ops.random import RngContext
from megasparse.training.engines.contract import Engine

WINDOW = 1024
"""Most tokens of the window."""
TOP = 16
"""Number of largest exact weights per query in the recall."""
HEADS_SHOWN = 2
LEGEND = "rows are queries, columns are keys; white: masked; blue: visible; darker: larger attention weight"


def attention_quality(engine: Engine, index: Index, config: Config) -> Callable[[], dict[str, float | str | Tensor]]:
    """Return a function that measures attention on the first tokens of the validation split, or on the first sequence
    of an encoder–decoder. All ranks call it and return the same result: the means over layers and heads of `measure`,
    quality/KIND/output_error and so on, for each kind except full, and for the first layer quality/KIND/maps, a
    picture. With sequence parallelism each rank measures its heads if the ranks divide the window.
    """
    stream = EvaluationStream(index, "validation")
    longest = WINDOW if config.model.source is None else config.data.sequence_length
    length = min(longest, config.data.sequence_length, stream.tokens)
    ranks = engine.ranks
    tokens = stream.read(0, length).unsqueeze(0).to(ranks.device)
    sequence = ranks.sequence if length % ranks.sequence_size == 0 else None

    @torch.no_grad()
    def quality() -> dict[str, float | str | Tensor]:
        measurements: dict[str, list[float]] = defaultdict(list)
        pictures: dict[str, float | str | Tensor] = {}
        for call in record_calls(engine.module, tokens, config.run.seed, sequence):
            if call.kind == "full":
                continue
            exact, weights = weights_of(call, call.exact()), weights_of(call, call.mechanism.without_additions())
            for name, value in measure(call, exact, weights).items():
                measurements[f"quality/{call.kind}/{name}"].append(value)
            if (name := f"quality/{call.kind}/maps") not in pictures:
                pictures[name] = _picture(call, exact, weights)
        means = torch.tensor([sum(values) / len(values) for values in measurements.values()], dtype=torch.float64)
        if sequence is not None:  # all ranks measure the same number of heads
            means = ranks.sum(means.to(ranks.device)) / ranks.world_size
        return pictures | dict(zip(measurements, means.tolist(), strict=True))

    return quality


@torch.no_grad()
def record_calls(model: Any, tokens: Tensor, seed: int, sequence: ProcessGroup | None = None) -> list[Call]:
    """Return the calls of all mechanisms of a model on tokens (B, L); on ranks that split the
    tokens, of their heads.
    """
    training = model.training
    local_tokens, padding = cut(tokens, model.config, sequence)
    model.eval()
    with calls(model) as recorded:
        model(local_tokens, RngContext.evaluation(seed, len(tokens)), padding)
    model.train(training)
    return recorded


def measure(call: Call, exact: Tensor, weights: Tensor) -> dict[str, float]:
    """Compare a layer's attention with full attention of the same queries and keys, as means over heads and queries.

    exact, weights: matrices of full attention and of the layer's, (B, H, L, L). Returns output_error; recall_top:
    fraction of the TOP largest exact weights among the TOP largest of `weights`; utility: exact attention on visible
    pairs (LHA Eq. 5); utility_bound and utility_floor: of as many keys, the best and random ones; and for bucketed
    attention `Imbalance`.
    """
    visible = weights != 0
    keys = visible.sum(-1)
    counts, allowed = keys.double(), (exact != 0).sum(-1).clamp_min(1)
    values = {
        "output_error": relative_error(call.run(call.mechanism.without_additions()), call.run(call.exact())),
        "recall_top": recall_of_top(exact, weights, TOP),
        "utility": attention_utility(exact, visible),
        "utility_bound": upper_bound(exact, keys),
        "utility_floor": (counts / allowed).clamp_max(1.0),
    }
    if (buckets := call.mechanism.buckets_of(call.inputs, call.context)) is not None:
        values |= {f"bucket_{name}": value for name, value in imbalance(*buckets)._asdict().items()}
    return {name: float(value.double().mean()) for name, value in values.items()}


def _picture(call: Call, exact: Tensor, weights: Tensor) -> Tensor:
    """Return maps of both attentions for the first heads of the first sequence: (S, S', 3)."""
    part, local_heads = call.context.part, exact.shape[1]
    exact, weights = (part.gather_heads(w[:1, :HEADS_SHOWN])[0, :HEADS_SHOWN] for w in (exact, weights))
    rows = [
        [attention_map(w, w != 0, causal=call.inputs.causal).cpu().numpy() for w in pair]
        for pair in zip(exact, weights, strict=True)
    ]
    first = call.context.head_offset - part.head_rank * local_heads
    labels = [f"head {first + head}" for head in range(len(rows))]
    return torch.tensor(
        sheet(rows, ["full attention", call.kind], labels, [f"layer {call.context.layer}", *LEGEND.split("; ")])
    )


def attention_utility(weights: Tensor, visible: Tensor) -> Tensor:
    """Return the attention on visible keys, Σ_{visible j} A_ij, as mean over queries (LHA Eq. 5): (B, H). weights: (B,
    H, L, L). visible: broadcast to `weights`.
    """
    return weights.masked_fill(~visible, 0.0).sum(-1).mean(-1)


def upper_bound(weights: Tensor, keys: int | Tensor) -> Tensor:
    """Return the largest utility (B, H) with `keys` keys per query, a number or (B, H, L)."""
    total = weights.sort(dim=-1, descending=True).values.cumsum(-1)
    count = torch.as_tensor(keys, device=weights.device).expand(weights.shape[:-1])
    largest = total.gather(-1, (count.long() - 1).clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.where(count > 0, largest, 0.0).mean(-1)


def recall_of_top(exact: Tensor, sparse: Tensor, top: int) -> Tensor:
    """Return the fraction of the `top` largest exact weights per query among the `top` largest sparse weights, as mean
    over queries: (B, H). Weights of 0 are not counted.
    """
    exact_top, sparse_top = _largest(exact, top), _largest(sparse, top)
    count = exact_top.sum(-1)
    return torch.where(count > 0, (exact_top & sparse_top).sum(-1) / count.clamp_min(1), 1.0).mean(-1)


def _largest(weights: Tensor, top: int) -> Tensor:
    values, index = weights.topk(min(top, weights.shape[-1]), dim=-1)
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, index, values > 0)


def relative_error(out: Tensor, exact: Tensor) -> Tensor:
    """Return ‖out − exact‖ / ‖exact‖ over the tokens of each head, (B, H)."""
    difference = (out.double() - exact.double()).norm(dim=(-1, -2))
    return difference / exact.double().norm(dim=(-1, -2)).clamp_min(torch.finfo(torch.float64).tiny)


class Imbalance(NamedTuple):
    """Imbalance of buckets, tensors (B, H). ratio: fraction of non-empty buckets with more than twice as many queries
    as keys, or the reverse. size: fraction of buckets with more than twice or less than half the mean number of queries
    and keys. largest: fraction of all queries and keys in the largest bucket.
    """

    ratio: Tensor
    size: Tensor
    largest: Tensor


def imbalance(query_codes: Tensor, key_codes: Tensor, buckets: int) -> Imbalance:
    """Return the imbalance of hash codes (B, H, L) before any balancing (LHA section 3.2)."""
    queries, keys = (_sizes(codes, buckets) for codes in (query_codes, key_codes))  # (B, H, N)
    filled = queries + keys > 0
    off = filled & ((queries > 2 * keys) | (keys > 2 * queries))
    size, total = queries + keys, query_codes.shape[-1] + key_codes.shape[-1]
    off_size = (size > 2 * total / buckets) | (2 * size < total / buckets)
    return Imbalance(off.sum(-1) / filled.sum(-1), off_size.float().mean(-1), size.amax(-1) / total)


def _sizes(codes: Tensor, buckets: int) -> Tensor:
    sizes = torch.zeros(*codes.shape[:-1], buckets, dtype=torch.int64, device=codes.device)
    return sizes.scatter_add_(-1, codes.long(), torch.ones_like(codes, dtype=torch.int64))


@torch.no_grad()
def weights_of(call: Call, mechanism: Attention) -> Tensor:
    """Return the attention matrix (B, H, L, L) of a mechanism on a call's input, from outputs for one-hot values, a few
    columns at a time, for any mechanism that is linear in the values. If it scales outputs to length 1, a column of
    ones gives the divisor with which rows sum to 1.
    """
    length, width = call.inputs.v.shape[2:]
    normalises = mechanism.normalises
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


def attention_map(weights: Tensor, visible: Tensor, size: int = 256, causal: bool = False) -> Tensor:
    """Return a picture of attention matrices (..., L, L): uint8 (..., S, S, 3), S = min(L, size). Masked pairs are
    white, visible pairs blue, darker for larger weights; a pixel shows the largest of its pairs. causal: keys after
    their query are drawn as background.
    """
    if causal:
        weights, visible = weights.tril(), visible.tril()
    strength = (weights / weights.amax(-1, keepdim=True).clamp_min(1e-30)).sqrt() * visible
    side = min(weights.shape[-1], size)
    shape = (*weights.shape[:-2], side, side)
    dark, visibility = (
        torch.nn.functional.adaptive_max_pool2d(x.float().reshape(-1, *x.shape[-2:]), side).reshape(shape)
        for x in (strength, visible)
    )
    blue = torch.tensor([0.75, 0.87, 1.0], device=weights.device)
    paper = 1.0 - visibility.unsqueeze(-1) * (1.0 - blue)
    picture = (255 * paper * (1.0 - dark.unsqueeze(-1))).round().to(torch.uint8)
    if causal:
        later = torch.ones(side, side, dtype=torch.bool, device=weights.device).triu(1)
        picture[..., later, :] = torch.tensor(BACKGROUND, dtype=torch.uint8, device=weights.device)
    return picture
