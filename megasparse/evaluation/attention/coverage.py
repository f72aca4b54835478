"""Coverage: the share of full attention's mass that sparse patterns hold, and what else decides whether they can.

Full attention here is the softmax over the strictly earlier tokens of a trained layer's own queries and keys, fp32,
some queries at a time. H heads, R rounds, T queries of a tile, L length, D head dim, M chunk.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasparse.attention.contract import Attention, AttentionOutput, RecomputeCache
from megasparse.attention.full import FullAttention
from megasparse.attention.lsh import LSHAttention
from megasparse.attention.ngram import ngram_codes
from megasparse.attention.observation import Call
from megasparse.config.attention import AttentionConfig
from megasparse.model.decoder import Causal
from megasparse.ops.dtype import at_least_fp32
from megasparse.ops.random import RngContext

TILE = 64
CONTEXT_BUCKETS = 1 << 30


@dataclass(frozen=True)
class Patterns:
    """The patterns that are measured, each by a name.

    "window W": the W tokens before. "best K": the K keys of largest weight beyond the first window, an oracle. "lsh, R
    rounds": queries and keys hashed alike (of shared queries and keys only the queries). "lsh of queries, ...": keys
    have the buckets of their own queries, as with shared QK. "lsh shifted, ...": of the query before theirs. "n-gram
    N": what followed earlier occurrences of the last N tokens. LSH and n-grams have the chunk and buckets of the
    configuration, without a window beside them.
    """

    windows: tuple[int, ...] = (64, 128, 256)
    best: tuple[int, ...] = (64, 128)
    hashes: tuple[str, ...] = ("lsh", "lsh of queries", "lsh shifted")
    rounds: tuple[int, ...] = (1, 2, 4, 8)
    ngrams: tuple[int, ...] = (4,)


class Bands:
    """The last M keys of a query's bucket, at or before it, in each round."""

    def __init__(self, queries: Tensor, keys: Tensor, width: int):
        """Rank the keys inside their buckets. queries, keys: buckets, (H, R, L) int64. width: M."""
        self.queries, self.keys, self.width = queries, keys, width
        ordered, order = keys.sort(dim=-1, stable=True)
        rank = torch.arange(keys.shape[-1], device=keys.device) - torch.searchsorted(ordered, ordered)
        self.rank = torch.empty_like(keys).scatter_(-1, order, rank)

    def shown(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Which keys up to the last of the queries `rows` each round shows, (H, R, T, keys) bool, and how many keys the
        bucket has at or before the query, (H, R, T).
        """
        stop = int(rows[-1]) + 1
        place = torch.arange(stop, device=rows.device)
        same = self.queries[..., rows, None] == self.keys[..., None, :stop]
        same &= place <= rows[:, None]
        size = same.sum(-1)
        return same & (self.rank[..., None, :stop] >= size.unsqueeze(-1) - self.width), size


class Reach:
    """One layer's attention on one sequence: its exact logits, and the keys that patterns show."""

    def __init__(self, call: Call, tokens: Tensor, attention: AttentionConfig, patterns: Patterns):
        """Hash the call's queries and keys. tokens: (1, L), the sequence. attention: settings of LSH and n-grams."""
        self.call, self.patterns = call, patterns
        self.q, self.k = (at_least_fp32(x[0]) for x in call.inputs[:2])
        known = F.pad(tokens[:, :-1], (1, 0), value=-1)
        self.bands: dict[str, Bands] = {}
        if patterns.rounds:
            queries, keys = lsh_codes(call, attention, max(patterns.rounds))
            by_name = {"lsh": keys, "lsh of queries": queries, "lsh shifted": _following(queries)}
            self.bands = {name: Bands(queries, by_name[name], attention.lsh.chunk) for name in patterns.hashes}
        for n in patterns.ngrams:
            codes = ngram_codes(known, n, 1 << max(1, call.mechanism.spec.max_length - 1).bit_length()).long()[None]
            self.bands[f"n-gram {n}"] = Bands(codes, _following(codes), attention.ngram.chunk - 1)

    def logits(self, rows: Tensor, keys: Tensor | None = None, scale: float | None = None) -> Tensor:
        """The logits of some queries, (H, T, keys up to the last query), −∞ for later keys. keys: (H, L, D) in place of
        the layer's own, with their scale.
        """
        stop = int(rows[-1]) + 1
        k = self.k if keys is None else keys
        score = (self.q[:, rows] @ k[:, :stop].transpose(-1, -2)) * (self.call.scale if scale is None else scale)
        return score.masked_fill(torch.arange(stop, device=rows.device) > rows[:, None], -torch.inf)

    def visible(self, rows: Tensor, past: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each pattern's name and the strictly earlier keys that it shows, bool, broadcast to (H, T, keys).

        past: the exact logits of these keys, −∞ for others.
        """
        back = rows[:, None] - torch.arange(past.shape[-1], device=rows.device)  # (T, keys)
        for width in self.patterns.windows:
            yield f"window {width}", (back > 0) & (back <= width)
        far = past.masked_fill(back <= self.patterns.windows[0], -torch.inf)
        for count in self.patterns.best:
            value, index = far.topk(min(count, far.shape[-1]), dim=-1)
            yield f"best {count}", torch.zeros_like(far, dtype=torch.bool).scatter_(-1, index, value > -torch.inf)
        for name, bands in self.bands.items():
            shown = bands.shown(rows)[0] & (back > 0)
            if name not in self.patterns.hashes:
                yield name, shown.any(1)
                continue
            for rounds in self.patterns.rounds:
                yield f"{name}, {rounds} rounds", shown[:, :rounds].any(1)

    def restricted(self) -> Tensor:
        """The layer's output (1, H, L, D) where a query sees itself and the union of the patterns' keys; with shared QK
        itself only where it sees nothing else.
        """
        out = []
        for rows in torch.arange(self.q.shape[1], device=self.q.device).split(TILE):
            logits = self.logits(rows)
            own = torch.arange(logits.shape[-1], device=rows.device) == rows[:, None]
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for _, shown in self.visible(rows, logits.masked_fill(own, -torch.inf)):
                seen |= shown
            seen |= own & ~seen.any(-1, keepdim=True) if self.call.mechanism.shared_qk else own
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            out.append(weights @ self.call.inputs.v[0, :, : logits.shape[-1]].to(weights.dtype))
        return torch.cat(out, dim=1).unsqueeze(0).to(self.call.inputs.v.dtype)


def lsh_codes(call: Call, attention: AttentionConfig, rounds: int) -> tuple[Tensor, Tensor]:
    """LSH's buckets of a call's queries and keys, (H, R, L) int64; with shared QK both those of the queries."""
    lsh = LSHAttention(attention.lsh.model_copy(update={"shared_qk": call.mechanism.shared_qk}), call.mechanism.spec)
    context = replace(call.context, rng=replace(call.context.rng, rounds=rounds), recompute=RecomputeCache())
    queries, keys = lsh.assign(call.inputs, context)
    return queries[0].long(), (queries if keys is None else keys)[0].long()


def _following(codes: Tensor) -> Tensor:
    """The codes (..., L) of the positions before; −1, no query's, for the first."""
    return F.pad(codes[..., :-1], (1, 0), value=-1)


def sources(tokens: Tensor, context: int) -> Tensor:
    """The key that follows the latest earlier occurrence of the last `context` tokens that each position of a decoder
    knows: (L,) int64, −1 where there is none before the position itself. tokens: (1, L).

    The key that holds a token is the one after it, as a decoder reads its input shifted by one.
    """
    codes = ngram_codes(F.pad(tokens[:, :-1], (1, 0), value=-1), context, CONTEXT_BUCKETS)[0]
    ordered, order = codes.sort(stable=True)
    same = ordered[1:] == ordered[:-1]
    found = torch.full_like(order, -1)
    here, after = order[1:][same], order[:-1][same] + 1
    found[here] = torch.where(after < here, after, -1)
    return found


@torch.no_grad()
def sums(
    call: Call,
    tokens: Tensor,
    attention: AttentionConfig,
    patterns: Patterns,
    bounds: list[int],
    queries: int,
    context: int,
) -> dict[str, Tensor]:
    """Sums over the heads and `queries` positions of one sequence, spread evenly, of what `report` divides.

    bounds: distances, the last one the sequence's length; a key at distance d belongs to the first bound >= d.
    """
    found: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
    reach, length = Reach(call, tokens, attention, patterns), tokens.shape[1]
    source, edges = sources(tokens, context), torch.tensor(bounds, device=tokens.device)
    rows = 1 + torch.arange(min(queries, length - 1), device=tokens.device) * (length - 1) // min(queries, length - 1)

    def add(name: str, value: Tensor) -> None:
        found[name] = found[name] + value.double().cpu()

    for tile in rows.split(TILE):
        logits = reach.logits(tile)
        place = torch.arange(logits.shape[-1], device=tile.device)
        past = logits.masked_fill(place == tile[:, None], -torch.inf)
        weights = past.softmax(-1)
        band = F.one_hot(torch.bucketize(tile[:, None] - place, edges), len(bounds)).to(weights.dtype)
        heads, at = len(weights), torch.arange(len(tile), device=tile.device)
        repeated = source[tile] >= 0
        key = source[tile].clamp_min(0)
        there = band[at, key] * repeated[:, None]  # (T, bounds): where the induction key is
        add("queries", torch.tensor(len(tile) * heads))
        add("self", torch.exp(logits[:, at, tile] - logits.logsumexp(-1)).sum())
        add("mass", torch.einsum("htl,tlb->b", weights, band))
        add("sources", there.sum(0) * heads)
        add("source_weight", torch.einsum("ht,tb->b", weights[:, at, key], there))
        unit = reach.logits(tile, F.normalize(reach.k, dim=-1), 1.0).masked_fill(place == tile[:, None], -torch.inf)
        for name, values in (("as trained", past), ("keys of norm 1", unit)):
            for measure, value in temperature(values, tile).items():
                add(f"{measure}/{name}", value.sum())
        for name, shown in reach.visible(tile, past):
            shown = shown.expand_as(weights)
            add(f"keys/{name}", shown.sum())
            add(f"held/{name}", torch.einsum("htl,tlb->b", weights * shown, band))
            add(f"reached/{name}", torch.einsum("ht,tb->b", shown[:, at, key].to(weights.dtype), there))
        for name, bands in reach.bands.items():
            shown, size = bands.shown(tile)
            earlier = (shown & (place < tile[:, None])).any(-1)
            add(f"empty/{name}", (~earlier).double().mean(1).sum())
            add(f"overfull/{name}", (size > bands.width).double().mean(1).sum())
    return dict(found)


def temperature(past: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """The deviation of the logits (H, T, keys) over the `rows` keys before each query, and the entropy of their softmax
    in bits: (H, T) each.
    """
    weights, real = past.softmax(-1), past > -torch.inf
    mean = past.masked_fill(~real, 0.0).sum(-1, keepdim=True) / rows[:, None]
    spread = (past - mean).masked_fill(~real, 0.0).square().sum(-1) / rows
    return {"deviation": spread.sqrt(), "entropy": -torch.special.xlogy(weights, weights).sum(-1) / math.log(2)}


def report(found: dict[str, Tensor]) -> dict[str, Any]:
    """Means over queries and heads of the sums of one layer.

    mass: full attention's, by distance. self: the weight of a query's own key, were it visible beside the earlier ones.
    sources: share of queries whose context occurred before, by the distance to the key that followed; source_weight:
    full attention's weight on that key. logits: deviation and entropy (bits), as trained and with keys of norm 1.
    patterns: keys a query; held, the part of the mass, by distance; reached, the share of those keys that are shown.
    buckets, means over the rounds: empty, queries whose bucket has no earlier key; overfull, whose bucket has more keys
    than M, of which the oldest are not seen.
    """

    def mean(name: str, divisor: str = "queries") -> Any:
        return torch.where(found[divisor] > 0, found[name] / found[divisor], 0.0).tolist()

    def named(prefix: str) -> list[str]:
        return [name.partition("/")[2] for name in found if name.startswith(f"{prefix}/")]

    return {
        "mass": mean("mass"),
        "self": mean("self"),
        "sources": mean("sources"),
        "source_weight": mean("source_weight", "sources"),
        "logits": {name: {m: mean(f"{m}/{name}") for m in ("deviation", "entropy")} for name in named("deviation")},
        "patterns": {
            name: {
                "keys": mean(f"keys/{name}"),
                "held": mean(f"held/{name}"),
                "reached": mean(f"reached/{name}", "sources"),
            }
            for name in named("keys")
        },
        "buckets": {name: {m: mean(f"{m}/{name}") for m in ("empty", "overfull")} for name in named("empty")},
    }


def gradient_norms(model: Causal, tokens: Tensor, seed: int) -> list[dict[str, float]]:
    """The norm of the loss's gradient in each layer's projections to queries, keys and values and from the heads."""
    model.zero_grad()
    model(tokens, RngContext.evaluation(seed, len(tokens)))[0].backward()
    norms = []
    for block in model.layers:
        parts = block.attention.attention.named_children()
        linear = {name: part.weight.grad for name, part in parts if isinstance(part, nn.Linear)}
        norms.append({name: 0.0 if grad is None else float(grad.norm()) for name, grad in linear.items()})
    model.zero_grad()
    return norms


@torch.no_grad()
def restricted_nats(
    model: Causal, tokens: Tensor, seed: int, attention: AttentionConfig, patterns: Patterns | None
) -> float:
    """Nats a token of (1, L) where the layers of full attention see the patterns' keys alone; None: all of them."""

    def restrict(mechanism: Attention, given: Any, output: AttentionOutput) -> AttentionOutput:
        assert patterns is not None
        return output._replace(out=Reach(Call(mechanism, *given), tokens, attention, patterns).restricted())

    full = [each for _, each in model.mechanisms() if isinstance(each, FullAttention) and patterns is not None]
    handles = [mechanism.register_forward_hook(restrict) for mechanism in full]
    try:
        found = model(tokens, RngContext.evaluation(seed, len(tokens)))[1]
    finally:
        for handle in handles:
            handle.remove()
    return float(found["nats"] / found["tokens"])
