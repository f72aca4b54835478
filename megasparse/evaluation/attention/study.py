"""The attention of a trained model against hashes that approximate it: LHA's Figures 1, 2 and 6 in small.

B windows, H heads, L length, D head dim, N buckets.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megasparse.attention.contract import Attention
from megasparse.attention.hash_training import hash_scores
from megasparse.attention.lha import LHAAttention
from megasparse.attention.lsh import LSHAttention
from megasparse.attention.observation import Call
from megasparse.attention.smart_bird import SmartBirdAttention
from megasparse.attention.yoso import YOSOAttention
from megasparse.config.attention import AttentionConfig
from megasparse.evaluation.attention.assignment import balanced, cut, lsh_scores, random_codes, smyrf_values
from megasparse.evaluation.attention.metrics import (
    attention_utility,
    attention_weights,
    imbalance,
    largest_error,
    recall_of_top,
    relative_error,
    same_bucket,
    upper_bound,
)
from megasparse.evaluation.attention.weights import LEGEND, attention_map, weights_of
from megasparse.evaluation.pictures import sheet
from megasparse.ops.random import derive
from megasparse.ops.sketch.reference import sketched_weights

PAPER_IMBALANCE = {"ratio": 0.613, "size": 0.359}
"""The paper's shares for LSH in all layers of a 16-layer model, 4 buckets, 1,024 tokens (LHA section 3.2)."""
METHODS = ("chunks", "random", "smyrf", "lsh", "lha")
"""Methods that are compared; chunks: pieces of the window, as a local attention has them: what position alone gives."""
ROUNDS: dict[str, Sequence[int | None]] = {
    "lsh": (1, 2, 4, 8, 16),
    "smyrf": (1, 2, 4, 8, 16),
    "yoso": (8, 16, 32, 64, 128),
}
"""Hash rounds, or YOSO's hashes, at which the error of the output is measured."""
YOSO_SHOWN = (8, 32, 128)
"""Hashes of the maps."""


@dataclass(frozen=True)
class Protocol:
    """The settings under which the numbers were measured."""

    checkpoint: str
    checkpoint_step: int
    data_fingerprint: str
    split: str
    windows: int
    length: int
    buckets: int
    top: int
    """Largest weights of a query that its recall counts."""
    hash_split: str
    hash_steps: int
    hash_utility: str
    seed: int
    mask: str = "no causal mask on the weights of utility, bound and recall, as in the paper; output errors with it"
    balance: str = (
        "buckets of equal size: random, a permutation; chunks, by position; LSH and LHA, boundaries moved by a number "
        "a bucket; SMYRF, cut from the sorted order"
    )
    interval: str = "mean over heads (and layers) of a window; 95 % interval of its mean over the windows, Student's t"


@dataclass(frozen=True)
class Interval:
    """A mean over windows with the half width of its 95 % confidence interval."""

    mean: float
    half: float

    @staticmethod
    def of(values: list[float]) -> "Interval":
        """Student's t, its quantile by the Cornish–Fisher expansion (4 digits from 9 degrees of freedom on)."""
        count, mean = len(values), math.fsum(values) / len(values)
        if count < 2:
            return Interval(mean, math.inf)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
        z, n = 1.959964, count - 1
        terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
        return Interval(mean, (z + sum(term / n**i for i, term in enumerate(terms, 1))) * deviation / math.sqrt(count))


def study(
    record: Callable[[int], list[Call]], hashes: list[LHAAttention], protocol: Protocol, attention: AttentionConfig
) -> dict[str, Any]:
    """Measure every attention of a model on `protocol.windows` windows.

    record: number of a window -> the calls of the model's mechanisms on it. hashes: LHA's of every call, trained.
    attention: settings of the mechanisms whose output errors are measured. Returns {"layers": [{"name", "utility",
    "recall", "imbalance", "output_error", "largest_error", and of Smart Bird "sketch"}], "all": the same over all
    layers, "paper_imbalance", "protocol"}; every number is {"mean", "half", "windows": [a number each]}.
    """
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for window in tqdm(range(protocol.windows), desc="windows", unit="window", disable=None):
        for i, (call, mechanism) in enumerate(zip(record(window), hashes, strict=True)):
            found = _quality(call, mechanism, protocol, window) | _output_errors(call, attention) | _sketch(call)
            for name, value in found.items():
                values[f"{i:03d} layer {call.context.layer} {call.kind}"][name].append(value)
    layers = [{"name": name[4:], **_report(found)} for name, found in sorted(values.items())]
    return {
        "layers": layers,
        "all": {"name": "all layers", **_report(_mean_over(values.values()))},
        "paper_imbalance": PAPER_IMBALANCE,
        "protocol": asdict(protocol),
    }


@torch.no_grad()
def assignments(call: Call, mechanism: LHAAttention, buckets: int, key: int, window: int) -> dict[str, dict[str, Any]]:
    """Each method's codes of queries and keys, (B, H, L) each: "balanced" ones, and of a hash with buckets of its own
    "plain" ones. Hashes are drawn anew for every window.
    """
    q, k = call.inputs.q, call.inputs.k
    lsh = lsh_scores(q, buckets, key, window), lsh_scores(k, buckets, key, window)
    lha = hash_scores(mechanism, call)
    place = torch.arange(q.shape[2], device=q.device).expand(q.shape[:3])
    return {
        "chunks": {"balanced": [cut(place, buckets)] * 2},
        "random": {"balanced": random_codes(q, buckets, derive(key, window))},
        "smyrf": {"balanced": [cut(x, buckets) for x in smyrf_values(q, k, key, window)]},
        "lsh": {"balanced": [balanced(x) for x in lsh], "plain": [x.argmax(-1) for x in lsh]},
        "lha": {"balanced": [balanced(x) for x in lha], "plain": [x.argmax(-1) for x in lha]},
    }


@torch.no_grad()
def _quality(call: Call, mechanism: LHAAttention, protocol: Protocol, window: int) -> dict[str, float]:
    """Name -> mean over heads: utility/METHOD, recall/METHOD, imbalance/METHOD/SHARE."""
    weights = attention_weights(call.inputs.q, call.inputs.k, call.scale)
    keys = -(-protocol.length // protocol.buckets)
    found = {"utility/bound": upper_bound(weights, keys), "utility/floor": torch.tensor(1 / protocol.buckets)}
    for method, codes in assignments(call, mechanism, protocol.buckets, _key(call, protocol), window).items():
        visible = same_bucket(*codes["balanced"])
        found[f"utility/{method}"] = attention_utility(weights, visible)
        found[f"recall/{method}"] = recall_of_top(weights, weights * visible, protocol.top)
        if "plain" in codes:
            queries, of_keys = codes["plain"]
            for share, value in imbalance(queries, of_keys, protocol.buckets)._asdict().items():
                found[f"imbalance/{method}/{share}"] = value
    return {name: float(value.double().mean()) for name, value in found.items()}


def _key(call: Call, protocol: Protocol) -> int:
    return derive(protocol.seed, "attention study", call.context.layer, call.context.head_offset)


@torch.no_grad()
def _output_errors(call: Call, attention: AttentionConfig) -> dict[str, float]:
    """Return output_error/KIND/ROUNDS -> error of the output against what the kind approximates, mean over heads, and
    largest_error/KIND/ROUNDS, in the largest number.

    The kinds are LSH (on the model's own queries and keys), YOSO, and the layer's own attention, unless it is exact.
    """
    lsh = attention.lsh.model_copy(update={"shared_qk": call.mechanism.shared_qk, "buckets": None})
    yoso = attention.yoso.model_copy(update={"convolution": None})
    kinds: dict[str, Attention] = {"lsh": LSHAttention(lsh, call.spec), "yoso": YOSOAttention(yoso, call.spec)}
    if call.kind != "full":
        kinds[call.kind] = call.mechanism.without_additions()
    found = {}
    for kind, mechanism in kinds.items():
        placed = call.replaced(mechanism)
        exact = placed.run(placed.exact())
        for rounds in ROUNDS.get(kind, (None,)):
            out, name = placed.run(mechanism, rounds=rounds), f"{kind}/{rounds or 'as configured'}"
            found[f"output_error/{name}"] = float(relative_error(out, exact).mean())
            found[f"largest_error/{name}"] = float(largest_error(out, exact).mean())
    return found


@torch.no_grad()
def _sketch(call: Call) -> dict[str, float]:
    """Return sketch/SCORE/TENTH -> the part of the visible pairs whose weight α, 1/|log α| or (1/log α)² is in this
    tenth of [0, 1], what is above 1 in the last: Smart Bird's Figure 6.
    """
    if not isinstance(call.mechanism, SmartBirdAttention):
        return {}
    inputs = call.inputs
    q, k = call.mechanism.sketched(call.x, inputs, call.context)
    alpha, seen = sketched_weights(q, k, inputs.causal, inputs.key_mask, inputs.segments)
    inverse = 1.0 / alpha[seen].log().abs()
    scores = {"weight": alpha[seen], "inverse_log": inverse, "inverse_log_squared": inverse.square()}
    found: dict[str, float] = {}
    for name, score in scores.items():
        parts = torch.histc(score.clamp(0.0, 1.0), bins=10, min=0.0, max=1.0) / score.numel()
        found |= {f"sketch/{name}/{tenth / 10}": part for tenth, part in enumerate(parts.tolist())}
    return found


@torch.no_grad()
def maps(call: Call, mechanism: LHAAttention, protocol: Protocol, attention: AttentionConfig, heads: int = 4) -> Tensor:
    """Attention maps of a call's first window, with headings: a head a row; full attention, what each method of METHODS
    sees of it, and YOSO's weights of few and many hashes (YOSO's Figure 4). (S, S′, 3) uint8. Of a decoder the causal
    half is drawn, of scores that know no mask.
    """
    causal = call.inputs.causal
    weights = attention_weights(call.inputs.q, call.inputs.k, call.scale)[0, :heads]
    codes = assignments(call, mechanism, protocol.buckets, _key(call, protocol), 0)
    seen = [torch.ones_like(weights, dtype=torch.bool)]
    seen += [same_bucket(*codes[method]["balanced"])[0, :heads] for method in METHODS]
    columns = [attention_map(weights, visible, causal=causal) for visible in seen]
    for hashes in YOSO_SHOWN:
        settings = attention.yoso.model_copy(update={"convolution": None, "evaluation_hashes": hashes})
        sampled = weights_of(call, YOSOAttention(settings, call.spec))[0, :heads]
        columns.append(attention_map(sampled, sampled > 0, causal=causal))
    labels = [f"head {call.context.head_offset + head}" for head in range(len(weights))]
    headings = ["full", *METHODS, *(f"yoso, {hashes} hashes" for hashes in YOSO_SHOWN)]
    rows = zip(*(column.cpu().numpy() for column in columns), strict=True)
    of = f"layer {call.context.layer} of {protocol.checkpoint}, whose own attention is {call.kind}"
    return torch.tensor(sheet(list(rows), headings, labels, [of, LEGEND]))


def summary(result: dict[str, Any]) -> str:
    """The tables that are printed."""
    rows = [*result["layers"], result["all"]]
    protocol, paper = result["protocol"], result["paper_imbalance"]
    columns = [*METHODS, "bound", "floor"]
    lines = [
        f"attention utility, {protocol['buckets']} equal buckets, mean ± 95 % interval over {protocol['windows']} "
        f"windows of {protocol['length']} tokens of {protocol['split']}",
        f"{'':16}" + "".join(f"{name:>16}" for name in columns),
    ]
    for row in rows:
        lines.append(f"{row['name']:16}" + "".join(f"{_shown(row['utility'][name]):>16}" for name in columns))
    recall = ", ".join(f"{method} {_shown(rows[-1]['recall'][method])}" for method in METHODS)
    lines += ["", f"recall of a query's {protocol['top']} largest weights: {recall}"]
    for share, text in (("ratio", "query:key ratio outside 1:2 … 2:1"), ("size", "size off by more than 2×")):
        found = ", ".join(f"{kind} {100 * each[share]['mean']:.1f} %" for kind, each in rows[-1]["imbalance"].items())
        lines.append(f"buckets of the plain hash, {text}: {found} (the paper's LSH: {100 * paper[share]:.1f} %)")
    for name, norm in (("output_error", "Frobenius"), ("largest_error", "largest number")):
        for kind, errors in rows[-1][name].items():
            found = ", ".join(f"{rounds}: {_shown(error)}" for rounds, error in errors.items())
            lines.append(f"relative output error of {kind} by rounds, {norm}: {found}")
    return "\n".join(lines)


def _shown(number: dict[str, Any]) -> str:
    return f"{number['mean']:.3f} ± {number['half']:.3f}"


def _mean_over(layers: Iterable[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Window by window, the mean over the layers that have a number."""
    gathered: dict[str, list[list[float]]] = defaultdict(list)
    for layer in layers:
        for name, values in layer.items():
            gathered[name].append(values)
    return {name: [math.fsum(v) / len(v) for v in zip(*each, strict=True)] for name, each in gathered.items()}


def _report(found: dict[str, list[float]]) -> dict[str, Any]:
    """Names with slashes as nested dictionaries."""
    report: dict[str, Any] = {}
    for name, values in found.items():
        *path, last = name.split("/")
        place = report
        for part in path:
            place = place.setdefault(part, {})
        place[last] = {**asdict(Interval.of(values)), "windows": values}
    return report
