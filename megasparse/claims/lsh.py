"""Reformer's claims on LSH attention, whose queries are its keys. L length, D head dim."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.heads import build_mechanism
from megasparse.benchmarks.attention import model_of
from megasparse.benchmarks.launch_counts import total
from megasparse.benchmarks.launches import count_layer
from megasparse.claims.claim import Claim, Curve, Judgement, Numbers, Picture, Trial, mean_of
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention
from megasparse.ops.bucketed_attention.reference import visible
from megasparse.ops.hashing import angular_hash
from megasparse.ops.random import derive, rotations
from megasparse.runs.comparison import spread

PAPER = "Reformer"
INPUTS = {"random": 0, "clustered": 64}
"""Kinds of inputs, and how many tokens share a direction: trained heads are peaked, random ones hardly."""


def inputs(trial: Trial, together: int) -> tuple[Tensor, Tensor]:
    """Queries and values (1, 1, L, D) of normal numbers. together: tokens around each of L/together centres."""
    generator = torch.Generator().manual_seed(trial.seed)
    length, dim = trial.settings["length"], trial.settings["head_dim"]
    q, v = (torch.randn(1, 1, length, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    if together:
        centres = torch.randn(length // together, dim, generator=generator, dtype=torch.float64)
        own = torch.randint(len(centres), (length,), generator=generator)
        q = centres[own] + q / 3
    return q, v


def measure_rounds(trial: Trial) -> Numbers:
    """By kind of inputs: relative error of the output against full attention, and the mass of its weights on the keys
    that some round shows, for each number of rounds."""
    settings = trial.settings
    found: dict[str, list[float]] = {}
    most, buckets = max(settings["rounds"]), [2 * settings["length"] // settings["chunk"]]
    window = Window("band", settings["chunk"])
    spec = BucketedAttentionSpec(window, causal=True)
    for kind, together in INPUTS.items():
        trial.progress(kind)
        q, v = inputs(trial, together)
        k = F.normalize(q, dim=-1)
        drawn = rotations(derive(trial.seed, kind), range(1), most, q.shape[3], buckets, q.device)
        codes = angular_hash(q, drawn, buckets)
        length = q.shape[2]
        hidden = torch.ones(length, length, dtype=torch.bool).triu()  # itself too: only where it sees nothing else
        hidden[0, 0] = False
        weights = (q @ k.transpose(2, 3)).masked_fill(hidden, -torch.inf).softmax(-1)
        exact = weights @ v
        errors, masses = found[f"{kind} error"], found[f"{kind} mass"] = [], []
        for rounds in settings["rounds"]:
            out = bucketed_attention(q, k, v, codes[:, :, :rounds], spec)[0]
            errors.append(float((out - exact).norm() / exact.norm()))
            seen = visible(codes[:, :, :rounds], window, causal=True).any(2)
            masses.append(float((weights * seen).sum(-1).mean()))
    return {"rounds": settings["rounds"], **found}


def judge_rounds(runs: Sequence[Numbers]) -> Judgement:
    rounds = runs[0]["rounds"]
    table, monotone = [["rounds", *map(str, rounds)]], True
    for kind in INPUTS:
        errors, masses = (mean_of(runs, f"{kind} {key}") for key in ("error", "mass"))
        monotone &= errors == sorted(errors, reverse=True) and masses == sorted(masses)
        table.append([f"{kind}: error", *(f"{x:.3f}" for x in errors)])
        table.append([f"{kind}: mass found", *(f"{x:.3f}" for x in masses)])
    at_8 = [run["clustered mass"][rounds.index(8)] for run in runs]
    return Judgement(monotone, f"8 rounds find {spread(at_8)} of the clustered inputs' mass", table)


def draw_rounds(runs: Sequence[Numbers]) -> Picture:
    curves = [Curve(kind, runs[0]["rounds"], mean_of(runs, f"{kind} mass")) for kind in INPUTS]
    return Picture("full attention's mass that hashing finds", "rounds", "share", curves, "x")


ROUNDS = Claim(
    name="lsh_rounds",
    paper=f"{PAPER}, Figure 4",
    says="LSH attention approximates full attention, and the better the more rounds.",
    rule="For random and for clustered queries the output's error falls and the mass found grows with every doubling "
    "of the rounds, means over seeds. The mass at 8 rounds is reported.",
    budgets={"cpu": {"length": 1024, "head_dim": 64, "chunk": 64, "rounds": [1, 2, 4, 8, 16], "minutes": 1}},
    measure=measure_rounds,
    judge=judge_rounds,
    draw=draw_rounds,
)


def measure_cost(trial: Trial) -> Numbers:
    """Bytes that a layer moves (LSH) and FLOPs of a token, forward and backward, at a fixed number of tokens."""
    settings = trial.settings
    found: dict[str, list[float]] = {"LSH, bytes": [], "LSH, FLOPs": [], "full, FLOPs": []}
    for length in settings["lengths"]:
        trial.progress(f"{length} tokens")
        batch = settings["tokens"] // length
        models = {kind: model_of(kind, length, settings["heads"], 64, 2, 128) for kind in ("lsh", "full")}
        counts = total(count_layer("lsh", models["lsh"], batch, torch.bfloat16))
        found["LSH, bytes"].append(counts.moved / settings["tokens"])
        for kind, name in (("lsh", "LSH, FLOPs"), ("full", "full, FLOPs")):
            found[name].append(_flops(kind, models[kind], length))  # type: ignore[arg-type]
    return {"lengths": settings["lengths"], **found}


def _flops(kind: str, model: object, length: int) -> float:
    with torch.device("meta"):
        passes = build_mechanism(kind, model, model.heads).flops(length)  # type: ignore[attr-defined, arg-type]
    return float(passes.forward + passes.backward)


def judge_cost(runs: Sequence[Numbers]) -> Judgement:
    run = runs[0]
    flat = [max(run[key]) / min(run[key]) - 1 for key in ("LSH, bytes", "LSH, FLOPs")]
    grown = run["full, FLOPs"][-1] / run["full, FLOPs"][0]
    table = [["a token", *map(str, run["lengths"])]]
    table += [[key, *(f"{x:.3g}" for x in run[key])] for key in ("LSH, bytes", "LSH, FLOPs", "full, FLOPs")]
    sentence = (
        f"LSH's bytes change by {flat[0]:.1%}, its FLOPs by {flat[1]:.1%}; full attention's grow {grown:.0f} times"
    )
    return Judgement(max(flat) <= 0.15, sentence, table)


def draw_cost(runs: Sequence[Numbers]) -> Picture:
    curves = [Curve(key, runs[0]["lengths"], runs[0][key]) for key in ("LSH, FLOPs", "full, FLOPs")]
    return Picture("FLOPs of a token and layer", "tokens", "FLOPs", curves, "both")


COST = Claim(
    name="lsh_cost",
    paper=f"{PAPER}, Figure 5 right",
    says="At a fixed number of tokens LSH attention takes as long for long sequences as for short ones; full attention "
    "takes longer.",
    rule="Counted, not timed: bytes moved by the GPU path and FLOPs a token change by at most 15 % from 1,024 to "
    "65,536 tokens.",
    budgets={"cpu": {"lengths": [1024, 4096, 16384, 65536], "tokens": 65536, "heads": 8, "minutes": 1}},
    measure=measure_cost,
    judge=judge_cost,
    draw=draw_cost,
    seeds=(0,),
)
