"""Study the attention of trained models on held-out text, and how much of it hashes, windows and n-grams cover.

    python tools/study_attention.py hashes --checkpoint runs/full --data data/enwik8 --json hashes.json
    python tools/study_attention.py coverage --checkpoint runs/full_by_turns --data data/pays/client
    python tools/study_attention.py sampling --checkpoint runs/full --length 4096
    python tools/study_attention.py scores --checkpoint runs/smart_bird
    python tools/study_attention.py maps --checkpoint runs/wide --other runs/narrow
    python tools/study_attention.py repetitions --data data/pays/client --length 8192

hashes: assign the queries and keys of every layer to --buckets equal buckets at random, by position, by LSH, by SMYRF
and by LHA's hash functions, which are trained here while the model is frozen. Report the attention utility of each
method (LHA Eq. 5) with upper bound and floor, recall of the largest weights, imbalance of the buckets of unbalanced
hashes, and the error of the output by hash rounds.
coverage: for a decoder, the fraction of full attention on windows, the best keys, LSH and n-grams, by distance.
sampling: YOSO's error when it samples a model's queries, keys and values, by length (its Figure 5): |sampled -
expected|, both of length 1, without a mask, over all tokens of the first window's start.
scores: for Smart Bird, the distribution of its sketches' weights and of sampling scores (its Figure 6).
maps: Pearson's r of two models' full attention, averaged over heads, by layer (Smart Bird's Figure 1).
repetitions: for a corpus, the fraction of tokens whose last n tokens also occur earlier in the sequence, by distance.

B windows, H heads, R rounds, L length, D head dim, N buckets, T queries of a tile.
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megasparse.cli.arguments import require_checkpoint
from megasparse.errors import ConfigError, report_user_errors


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["hashes", "coverage", "sampling", "scores", "maps", "repetitions"])
    parser.add_argument("--checkpoint", help="a checkpoint, or a run (newest checkpoint)")
    parser.add_argument("--other", metavar="CHECKPOINT", help="maps: the second model, of as many layers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key")
    parser.add_argument("--data", help="folder of shards; by default the training data")
    parser.add_argument("--split", default="validation")
    parser.add_argument("--windows", type=int, default=10, help="windows of text, spread over the split")
    parser.add_argument("--length", type=int, help="tokens per window")
    parser.add_argument("--buckets", type=int, default=4, help="hashes: an even number")
    parser.add_argument("--top", type=int, default=16, help="hashes: number of largest weights per query in the recall")
    parser.add_argument("--hash-steps", type=int, default=300, help="hashes: training steps of LHA's hash functions")
    parser.add_argument("--psi", choices=["best", "argmax"], default="best", help="hashes: model.attention.lha.psi")
    parser.add_argument("--queries", type=int, default=256, help="coverage: positions per window")
    parser.add_argument("--ngrams", type=int, nargs="+", default=[4, 12], help="repetitions: n of each table")
    parser.add_argument("--near", type=int, default=128, help="repetitions: distance that any window covers")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results and their settings to this file")
    args = parser.parse_args(words)
    if args.study != "repetitions" and args.checkpoint is None:
        raise ConfigError("--checkpoint", "is missing", "Give a run's folder")
    if args.checkpoint is not None:
        require_checkpoint(args.checkpoint, args.set)
    if args.study == "maps":
        if args.other is None:
            raise ConfigError("--other", "is missing", "Give a second run's folder")
        require_checkpoint(args.other, args.set)
    return args


if __name__ == "__main__":  # help and mistakes end before the slow imports
    report_user_errors(arguments)()

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from megasparse.attention.baselines.smyrf import asymmetric
from megasparse.attention.contract import Attention, RecomputeCache
from megasparse.attention.lha import LHAAttention, LHAAttentionConfig
from megasparse.attention.lha_hash import scores_of
from megasparse.attention.lsh import LSHAttention
from megasparse.attention.ngram import ngram_codes
from megasparse.attention.observation import Call
from megasparse.attention.smart_bird import SmartBirdAttention
from megasparse.attention.yoso import YOSOAttention, YOSOAttentionConfig
from megasparse.config.attention import AttentionConfig
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.data.tokenizers import build_tokenizer
from megasparse.evaluation.attention_quality import (
    attention_utility,
    imbalance,
    recall_of_top,
    record_calls,
    relative_error,
    upper_bound,
    weights_of,
)
from megasparse.evaluation.outputs import write_json
from megasparse.evaluation.results import restore
from megasparse.model.decoder import Decoder
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.random import RngContext, derive, normal, random_bits, rotations
from megasparse.runs.data import open_folder
from tools.bench.visible_keys import Bands

METHODS = ("chunks", "random", "smyrf", "lsh", "lha")
ROUNDS: dict[str, Sequence[int | None]] = {"lsh": (1, 2, 4, 8, 16), "smyrf": (1, 2, 4, 8, 16), "yoso": (8, 32, 128)}
"""Hash rounds, or hashes of YOSO, for which the error of the output is measured."""
WINDOWS, BEST, LSH_ROUNDS, NGRAM = (64, 128, 256), (64, 128), (1, 2, 4, 8), 4
"""Patterns of `coverage`: window widths; number of keys of largest weight beyond the first window (an oracle); rounds
of LSH; n of n-grams (tokens that followed earlier occurrences of the last n tokens)."""
TILE = 64
HASHES, CODE_BITS, DRAWS = (32, 128), (None, 8), 2
"""`sampling`: hashes, bits of a code (None: log2 of the length), and draws of the hashes."""
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)

# Balanced assignments of queries and keys, (B, H, L) codes


def cut(values: Tensor, buckets: int) -> Tensor:
    """Sort values (..., L) and divide them into equal buckets. Return the codes."""
    return values.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True) * buckets // values.shape[-1]


def balanced(scores: Tensor, sweeps: int = 60) -> Tensor:
    """Return codes of scores (..., L, N) for buckets of equal size ("adaptively set hash boundaries", LHA section 3.3):
    Sinkhorn sweeps balance the scores, then tokens go to their best bucket. A full bucket keeps the tokens with the
    highest scores; the others go to their next best bucket.
    """
    scores = scores.double().log_softmax(-1)
    offset = torch.zeros_like(scores[..., :1, :])
    for _ in range(sweeps):
        share = (scores + offset).log_softmax(-1).logsumexp(-2, keepdim=True)
        offset = offset - share + share.mean(-1, keepdim=True)
    scores = (scores + offset).softmax(-1)
    length, buckets = scores.shape[-2:]
    capacity = ((torch.arange(buckets, device=scores.device) + 1) * length // buckets).diff(
        prepend=torch.zeros(1, dtype=torch.long, device=scores.device)
    )
    rejected = torch.zeros_like(scores, dtype=torch.bool)
    while True:
        codes = scores.masked_fill(rejected, -1.0).argmax(-1, keepdim=True)
        requests = torch.zeros_like(rejected).scatter_(-1, codes, True)
        rank = torch.where(requests, scores, -1.0).argsort(dim=-2, descending=True, stable=True).argsort(dim=-2)
        over = requests & (rank >= capacity)
        if not over.any():
            return codes.squeeze(-1)
        rejected |= over


def assignments(call: Call, lha: LHAAttention, buckets: int, key: int, window: int) -> dict[str, dict[str, Any]]:
    """Return method -> "balanced" codes of queries and keys, and for LSH and LHA also "plain" codes without balancing.
    Hashes are drawn again for every window.
    """
    q, k = call.inputs.q, call.inputs.k
    (_, heads, length, width), device = q.shape, q.device
    rows, window_key = torch.arange(heads, device=device), derive(key, window)
    bits = [random_bits(derive(window_key, side), rows, length).expand(q.shape[:3]) for side in ("queries", "keys")]
    matrices = rotations(key, range(heads), window + 1, width, [buckets], device)[:, window:]
    rotated = [torch.einsum("bhld,hbdn->bhln", x.float(), matrices) for x in (q, k)]
    lsh = [torch.cat([x, -x], dim=-1) for x in rotated]  # argmax [xR; -xR], Eq. 9
    line = normal(key, (window * (1 << 16) + rows)[None], width + 2).unsqueeze(-1)
    learned = hash_scores(lha, call)
    positions = torch.arange(length, device=device).expand(q.shape[:3])
    return {
        "chunks": {"balanced": [cut(positions, buckets)] * 2},
        "random": {"balanced": [cut(x, buckets) for x in bits]},
        "smyrf": {"balanced": [cut((x @ line).squeeze(-1), buckets) for x in asymmetric(q.float(), k.float())]},
        "lsh": {"balanced": [balanced(x) for x in lsh], "plain": [x.argmax(-1) for x in lsh]},
        "lha": {"balanced": [balanced(x) for x in learned], "plain": [x.argmax(-1) for x in learned]},
    }


# LHA's hash functions, trained on the queries and keys of a frozen model (LHA section 4.2)


def unmasked(call: Call) -> Any:
    """Return inputs without a causal mask, as in the paper, scaled so that q·k/√D are the logits of the call."""
    q = call.inputs.q * (call.scale * call.inputs.q.shape[-1] ** 0.5)
    return call.inputs._replace(q=q, causal=False)


def hash_scores(lha: LHAAttention, call: Call) -> tuple[Tensor, Tensor]:
    """Return H_Q(q) and H_K(k), both (B, H, L, N)."""
    q, k = (unmasked(call)[i] for i in range(2))
    query, key = lha.hash(q, call.context)
    return scores_of((q,), (query,)), scores_of((k,), (key,))


def train_hashes(
    steps: Iterator[list[Call]], buckets: int, seed: int, psi: Literal["best", "argmax"] = "best"
) -> tuple[list[LHAAttention], list[float]]:
    """Train LHA's hash functions with N buckets for every attention of a model, with one step of Adam per item of
    `steps`. Return them in the order of the calls, and the divergence KL_Q + KL_K per step.
    """
    first = next(steps)
    mechanisms = []
    for number, call in enumerate(first):
        chunk = -(-call.inputs.q.shape[2] // buckets)
        spec = dataclasses.replace(call.spec, causal=False, max_length=chunk * buckets)
        mechanism = LHAAttention(LHAAttentionConfig(chunk=chunk, psi=psi), spec)
        generator = torch.Generator().manual_seed(derive(seed, "hash functions", number) >> 1)
        with torch.no_grad():
            for weight in mechanism.parameters():
                if weight.dim() > 1:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
        mechanisms.append(mechanism.to(call.inputs.q.device))
    optimizer = torch.optim.Adam([weight for module in mechanisms for weight in module.parameters()], lr=3e-3)
    history = []
    for step, calls in enumerate(itertools.chain([first], steps)):
        losses = []
        for call, mechanism in zip(calls, mechanisms, strict=True):
            rng = RngContext(seed, step, torch.arange(len(call.x)), training=True)
            context = dataclasses.replace(call.context, rng=rng, recompute=RecomputeCache())
            loss = mechanism.learn(call.x, unmasked(call), context)[0]
            losses.append(loss * (mechanism.spec.layers / mechanism.auxiliary_weight))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        history.append(float(torch.stack(losses).detach().mean()))
    return mechanisms, history


@torch.no_grad()
def measure_hashes(
    call: Call, lha: LHAAttention, attention: AttentionConfig, args: argparse.Namespace, key: int, window: int
) -> dict[str, float]:
    """Return name -> mean over heads: utility, recall and imbalance of each method, errors of the output by rounds."""
    weights, codes = full_weights(call), assignments(call, lha, args.buckets, key, window)
    values = {"utility/bound": upper_bound(weights, -(-weights.shape[-1] // args.buckets))}
    values["utility/floor"] = torch.tensor(1 / args.buckets)
    for method, sides in codes.items():
        visible = same_bucket(*sides["balanced"])
        values[f"utility/{method}"] = attention_utility(weights, visible)
        values[f"recall/{method}"] = recall_of_top(weights, weights * visible, args.top)
        if "plain" in sides:
            queries, keys = sides["plain"]
            shares = imbalance(queries, keys, args.buckets)._asdict()
            values |= {f"imbalance/{method}/{share}": value for share, value in shares.items()}
    changes = {"shared_qk": call.mechanism.shared_qk, "shifted_keys": False}
    lsh = attention.lsh.model_copy(update={**changes, "buckets": None})
    yoso = attention.yoso.model_copy(update={"convolution": None})
    kinds: dict[str, Attention] = {"lsh": LSHAttention(lsh, call.spec), "yoso": YOSOAttention(yoso, call.spec)}
    if call.kind != "full":
        kinds[call.kind] = call.mechanism.without_additions()
    for kind, mechanism in kinds.items():
        other = dataclasses.replace(call, mechanism=mechanism)
        exact = other.run(other.exact())
        for rounds in ROUNDS.get(kind, (None,)):
            out, name = other.run(mechanism, rounds=rounds), f"{kind}/{rounds or 'as configured'}"
            values[f"output_error/{name}"] = relative_error(out, exact)
            values[f"largest_error/{name}"] = largest_error(out, exact)
    return {name: float(value.double().mean()) for name, value in values.items()}


def full_weights(call: Call) -> Tensor:
    """Return full attention (B, H, L, L) without a mask, as in the paper."""
    q, k = (at_least_fp32(x) for x in call.inputs[:2])
    return torch.softmax(q @ k.transpose(-1, -2) * call.scale, dim=-1)


def largest_error(out: Tensor, exact: Tensor) -> Tensor:
    """Return ‖out − exact‖∞ / ‖exact‖∞ over the tokens of each head (YOSO's Figure 5): (B, H) from (B, H, L, D)."""
    difference, size = ((x.double()).abs().amax((-1, -2)) for x in (out - exact, exact))
    return difference / size.clamp_min(torch.finfo(torch.float64).tiny)


def same_bucket(queries: Tensor, keys: Tensor) -> Tensor:
    return queries.unsqueeze(-1) == keys.unsqueeze(-2)


def study_hashes(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every layer. Numbers are {"mean", "half" (of the 95 % interval over windows), "windows"}."""
    model, config, checkpoint, ranks = restore(args.checkpoint, args.set)
    index = open_folder(args.data or config.data.path, config, build_tokenizer(config.data.tokenizer))
    length, seed = args.length or min(1024, config.data.sequence_length), config.run.seed
    if args.buckets < 2 or args.buckets % 2 or args.buckets > length:
        raise ConfigError("--buckets", f"{args.buckets} is not an even number up to --length", "LSH needs an even one")

    def calls(split: str, number: int, windows: int) -> list[Call]:
        tokens = window(EvaluationStream(index, split), number, windows, length, index.record or 1)
        return record_calls(model, tokens.to(ranks.device), seed + number)

    order = torch.randperm(args.hash_steps, generator=torch.Generator().manual_seed(seed)).tolist()
    steps = (calls("train", n, args.hash_steps) for n in tqdm(order, desc="hashes", disable=None))
    hashes, divergence = train_hashes(steps, args.buckets, seed, args.psi)
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in tqdm(range(args.windows), desc="windows", disable=None):
        for call, lha in zip(calls(args.split, number, args.windows), hashes, strict=True):
            key = derive(seed, "attention study", call.context.layer, call.context.head_offset)
            for name, value in measure_hashes(call, lha, config.model.attention, args, key, number).items():
                values[f"layer {call.context.layer} {call.kind}"][name].append(value)
    everywhere: dict[str, list[list[float]]] = defaultdict(list)
    for layer in values.values():
        for name, numbers in layer.items():
            everywhere[name].append(numbers)
    values["all layers"] = {
        name: [sum(x) / len(x) for x in zip(*rows, strict=True)] for name, rows in everywhere.items()
    }
    layers = [{"name": name, **nested(numbers)} for name, numbers in values.items()]
    protocol = {**vars(args), "step": checkpoint.step, "data": index.fingerprint, "length": length, "seed": seed}
    for row in layers:
        shares = ", ".join(f"{m} {x['mean']:.3f} ± {x['half']:.3f}" for m, x in row["utility"].items())
        print(f"{row['name']}: utility {shares}")
    return {"layers": layers[:-1], "all": layers[-1], "hash_divergence": divergence, "protocol": protocol}


def nested(values: dict[str, list[float]]) -> dict[str, Any]:
    """Return names with slashes as nested dictionaries, with the mean and half the 95 % interval (t) of each list."""
    from scipy import stats

    report: dict[str, Any] = {}
    for name, numbers in values.items():
        *path, last = name.split("/")
        section = report
        for part in path:
            section = section.setdefault(part, {})
        count, mean = len(numbers), sum(numbers) / len(numbers)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in numbers) / max(1, count - 1) / count)
        half = float(stats.t.ppf(0.975, count - 1)) * deviation if count > 1 else math.inf
        section[last] = {"mean": mean, "half": half, "windows": numbers}
    return report


def window(stream: EvaluationStream, number: int, windows: int, length: int, record: int) -> Tensor:
    """Return a window (1, length), one of `windows` that are spread evenly over a split and start at a record."""
    if stream.tokens < length:
        raise ConfigError("--length", f"{length} is more than the split's {stream.tokens} tokens", "Lower it")
    start = number * (stream.tokens - length) // max(1, windows - 1) // record * record
    return stream.read(start, start + length).unsqueeze(0)


# Coverage of full attention by patterns


@torch.no_grad()
def coverage_sums(
    call: Call, tokens: Tensor, attention: AttentionConfig, bounds: list[int], queries: int
) -> dict[str, Tensor]:
    """Return sums over heads and `queries` evenly spread positions of full attention on strictly earlier keys: by
    distance, and on the keys of each pattern. bounds: distances; a key at distance d belongs to the first bound >= d.
    """
    (q, k), length = (at_least_fp32(x[0]) for x in call.inputs[:2]), tokens.shape[1]
    previous = F.pad(tokens[:, :-1], (1, 0), value=-1)
    changes = {"shared_qk": call.mechanism.shared_qk, "shifted_keys": False}
    lsh = LSHAttention(attention.lsh.model_copy(update=changes), call.spec)
    rng = dataclasses.replace(call.context.rng, rounds=max(LSH_ROUNDS))
    lsh_context = dataclasses.replace(call.context, rng=rng, recompute=RecomputeCache())
    of_queries, of_keys = lsh.assign(call.inputs, lsh_context)[:2]
    of_queries, of_keys = of_queries[0].long(), (of_queries if of_keys is None else of_keys)[0].long()
    grams = ngram_codes(previous, [NGRAM], 1 << max(1, length - 1).bit_length()).long()
    bands = {
        "lsh": Bands(of_queries, of_keys, attention.lsh.chunk),
        f"n-gram {NGRAM}": Bands(grams, F.pad(grams[..., :-1], (1, 0), value=-1), attention.ngram.chunk - 1),
    }
    edges = torch.tensor(bounds, device=tokens.device)
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    count = min(queries, length - 1)
    for rows in (1 + torch.arange(count, device=tokens.device) * (length - 1) // count).split(TILE):
        keys = torch.arange(int(rows[-1]) + 1, device=rows.device)
        back = rows[:, None] - keys
        past = (q[:, rows] @ k[:, : len(keys)].transpose(-1, -2) * call.scale).masked_fill(back <= 0, -torch.inf)
        weights = past.softmax(-1)
        band = F.one_hot(torch.bucketize(back.clamp_min(1), edges), len(bounds)).to(weights.dtype)
        patterns = {f"window {width}": (back > 0) & (back <= width) for width in WINDOWS}
        far = past.masked_fill(back <= WINDOWS[0], -torch.inf)
        for best in BEST:
            value, index = far.topk(min(best, len(keys)), dim=-1)
            patterns[f"best {best}"] = torch.zeros_like(far, dtype=torch.bool).scatter_(-1, index, value > -torch.inf)
        for name, hashed in bands.items():
            masks = hashed.shown(rows)[0] & (back > 0)
            by_rounds = {f"{name}, {r} rounds": masks[:, :r].any(1) for r in LSH_ROUNDS} if name == "lsh" else {}
            patterns |= by_rounds or {name: masks.any(1)}
        totals = {"queries": torch.tensor(len(rows) * len(q)), "mass": torch.einsum("htl,tlb->b", weights, band)}
        for name, visible in patterns.items():
            visible = visible.expand_as(weights)
            totals[f"keys/{name}"] = visible.sum()
            totals[f"held/{name}"] = torch.einsum("htl,tlb->b", weights * visible, band)
        for name, total in totals.items():
            sums[name] = sums[name] + total.double().cpu()
    return dict(sums)


def study_coverage(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every layer of a decoder, as means over heads and queries by distance."""
    model, config, checkpoint, ranks = restore(args.checkpoint, args.set)
    if not isinstance(model, Decoder):
        raise ConfigError("--checkpoint", f"{args.checkpoint} is not a decoder", "Give a causal language model")
    index = open_folder(args.data or config.data.path, config, build_tokenizer(config.data.tokenizer))
    length, layers = args.length or config.model.max_length, dict[str, dict[str, Any]]()
    bounds = [*(bound for bound in (64, 512, 2048) if bound < length), length]
    stream = EvaluationStream(index, args.split)
    for number in tqdm(range(args.windows), desc="windows", disable=None):
        tokens = window(stream, number, args.windows, length, index.record or 1).to(ranks.device)
        for call in record_calls(model, tokens, config.run.seed):
            layer = layers.setdefault(f"layer {call.context.layer} {call.kind}", defaultdict(int))
            sums = coverage_sums(call, tokens, config.model.attention, bounds, args.queries)
            for name, value in sums.items():
                layer[name] += value
    report = {}
    for layer_name, total in layers.items():
        means = {name: (value / total["queries"]).tolist() for name, value in total.items()}
        report[layer_name] = means
        print(f"{layer_name}, up to {bounds} tokens back: mass {[round(x, 3) for x in means['mass']]}")
        for name in (name.removeprefix("keys/") for name in means if name.startswith("keys/")):
            shares = [round(x, 3) for x in means[f"held/{name}"]]
            print(f"  {name}: {means[f'keys/{name}']:.0f} keys, holds {shares}")
    protocol = {**vars(args), "step": checkpoint.step, "data": index.fingerprint, "length": length, "bounds": bounds}
    return {"layers": report, "protocol": protocol}


# YOSO's samples, and Smart Bird's scores


@torch.no_grad()
def sampling_error(call: Call, length: int, hashes: int, bits: int | None) -> float:
    """Return YOSO's |sampled - expected| for the first tokens of a call, mean over draws, heads, tokens."""
    q, k, v = (at_least_fp32(x[:, :, :length]) for x in call.inputs[:3])
    inputs = call.inputs._replace(q=q, k=k, v=v, key_mask=None, segments=None, causal=False)
    spec = dataclasses.replace(call.spec, max_length=length, causal=False)
    config = YOSOAttentionConfig(hashes=hashes, code_bits=bits, projection="gaussian")
    exact = config.model_copy(update={"expectation": True})
    errors = []
    for draw in range(DRAWS):
        rng = dataclasses.replace(call.context.rng, seed=derive(call.context.rng.seed, "draw", draw))
        of_draw = dataclasses.replace(call, inputs=inputs, context=dataclasses.replace(call.context, rng=rng))
        outputs = [of_draw.run(YOSOAttention(kind, spec)).double() for kind in (config, exact)]
        errors.append((outputs[0] - outputs[1]).norm(dim=-1).mean())
    return float(torch.stack(errors).mean())


def study_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the first tokens of a split, in lengths from 128 that double up to --length."""
    recorded, protocol = record_window(args)
    length = protocol["length"]
    lengths = [128 << n for n in range(max(0, (length // 128).bit_length()))]
    cases = list(itertools.product(lengths, CODE_BITS, HASHES))
    rows: list[dict[str, Any]] = [
        {"layer": call.context.layer, "tokens": tokens, "code_bits": bits, "hashes": hashes}
        | {"error": sampling_error(call, tokens, hashes, bits)}
        for call in tqdm(recorded, desc="layers", disable=None)
        for tokens, bits, hashes in cases
    ]
    for tokens, bits, hashes in cases:
        key = {"tokens": tokens, "code_bits": bits, "hashes": hashes}
        errors = [row["error"] for row in rows if key.items() <= row.items()]
        print(f"{tokens:,} tokens, {bits or 'log2'} code bits, {hashes} hashes: {sum(errors) / len(errors):.3f}")
    return {"rows": rows, "protocol": protocol}


@torch.no_grad()
def study_scores(args: argparse.Namespace) -> dict[str, Any]:
    """Count the weights and scores of all visible pairs of a window in 20 equal intervals, and list quantiles."""
    recorded, protocol = record_window(args)
    layers = {}
    for call in recorded:
        if not isinstance(call.mechanism, SmartBirdAttention):
            continue
        mechanism, inputs = call.mechanism, call.inputs
        x = mechanism._read(call.x, inputs, call.context)
        q, k = (at_least_fp32(part[:, 0]) for part in mechanism.sketches(x, inputs, call.context, exactly=False))
        logits = q @ k.mT / q.shape[-1] ** 0.5  # of one whole window: no padding, no documents
        visible = torch.ones_like(logits, dtype=torch.bool).tril(0 if inputs.causal else logits.shape[-1])
        alpha = logits.masked_fill(~visible, -torch.inf).softmax(-1)[visible]
        inverse = -1 / alpha.log()
        report = {}
        for name, values in (("raw", alpha), ("inverse_log", inverse), ("inverse_log_squared", inverse**2)):
            values = values.double()[values.isfinite()].numpy(force=True)
            counts, edges = np.histogram(values, bins=20)
            quantiles = np.quantile(values, QUANTILES).tolist()
            report[name] = {"counts": counts.tolist(), "edges": edges.tolist(), "quantiles": quantiles}
            shown = ", ".join(f"{value:.3g}" for value in quantiles)
            print(f"layer {call.context.layer} {name}, quantiles {QUANTILES}: {shown}")
        layers[f"layer {call.context.layer}"] = report
    if not layers:
        raise ConfigError("--checkpoint", f"{args.checkpoint} lacks Smart Bird attention", "Give a run with it")
    return {"layers": layers, "quantiles": QUANTILES, "protocol": protocol}


@torch.no_grad()
def study_maps(args: argparse.Namespace) -> dict[str, Any]:
    """Correlate the weights of both models, layer by layer, on the first tokens of a split."""
    first, protocol = record_window(args)
    second, _ = record_window(argparse.Namespace(**vars(args) | {"checkpoint": args.other}))
    correlations = []
    for one, other in zip(first, second, strict=True):
        maps = [weights_of(call, call.exact()).double().mean(1).flatten() for call in (one, other)]
        correlations.append(float(torch.corrcoef(torch.stack(maps))[0, 1]))
    print(f"Pearson's r by layer: {', '.join(f'{value:.3f}' for value in correlations)}")
    return {"correlations": correlations, "protocol": protocol}


def record_window(args: argparse.Namespace) -> tuple[list[Call], dict[str, Any]]:
    """Return the calls of a model on the first tokens of a split, and the protocol."""
    model, config, checkpoint, ranks = restore(args.checkpoint, args.set)
    index = open_folder(args.data or config.data.path, config, build_tokenizer(config.data.tokenizer))
    length = args.length or config.data.sequence_length
    tokens = window(EvaluationStream(index, args.split), 0, 1, length, index.record or 1).to(ranks.device)
    protocol = {**vars(args), "step": checkpoint.step, "data": index.fingerprint, "length": length}
    return record_calls(model, tokens, config.run.seed), protocol


# How far back texts repeat themselves


def repetitions(sequence: Tensor, n: int, bounds: list[int]) -> Tensor:
    """Count tokens whose previous n tokens occurred before, by distance to the latest occurrence, low < d <= high.

    sequence: (L,) int64. Returns (bounds − 1, 2): all such tokens, and the tokens that followed there as well.
    """
    counts = torch.zeros(len(bounds) - 1, 2, dtype=torch.long)
    if len(sequence) <= n:
        return counts
    _, codes = sequence.unfold(0, n, 1)[:-1].unique(dim=0, return_inverse=True)
    order = codes.argsort(stable=True)
    same = codes[order[1:]] == codes[order[:-1]]
    current, before = order[1:][same], order[:-1][same]
    right = sequence[current + n] == sequence[before + n]
    interval = torch.bucketize(current - before, torch.tensor(bounds[1:]))
    for selected, column in ((torch.ones_like(right), 0), (right, 1)):
        counts[:, column] += torch.bincount(interval[selected & (interval < len(counts))], minlength=len(counts))
    return counts


def study_repetitions(args: argparse.Namespace) -> dict[str, Any]:
    """Count repetitions in the first --windows sequences of a split, up to --near tokens and then in factors of 4."""
    stream = EvaluationStream(Index.load(args.data), args.split)
    length = args.length or 8192
    bounds = [0, args.near]
    while bounds[-1] * 4 < length:
        bounds.append(bounds[-1] * 4)
    bounds.append(length)
    starts = range(0, min(args.windows, max(1, stream.tokens // length)) * length, length)
    tokens = min(len(starts) * length, stream.tokens)
    tables = {}
    for n in args.ngrams:
        counts = sum(repetitions(stream.read(s, min(s + length, stream.tokens)), n, bounds) for s in starts)
        rows = zip(itertools.pairwise(bounds), torch.as_tensor(counts).tolist(), strict=True)
        tables[n] = [(low, high, all_of / tokens, same / max(1, all_of)) for (low, high), (all_of, same) in rows]
        for low, high, share, right in tables[n]:
            print(f"last {n} tokens repeat at distance {low:,} to {high:,}: {share:.1%}; same next token: {right:.0%}")
    return {"repetitions": tables, "protocol": vars(args)}


@report_user_errors
def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    studies = {"hashes": study_hashes, "coverage": study_coverage, "repetitions": study_repetitions}
    studies |= {"sampling": study_sampling, "scores": study_scores, "maps": study_maps}
    result = studies[args.study](args)
    if args.json:
        write_json(args.json, json.loads(json.dumps(result, default=str)))


if __name__ == "__main__":
    main()
