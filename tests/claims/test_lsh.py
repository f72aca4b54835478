"""Reformer's claims on LSH attention, whose queries are its keys. L length, D head dim."""

import torch
import torch.nn.functional as F

from megasparse.attention.heads import build_mechanism
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention
from megasparse.ops.hashing import angular_hash
from megasparse.ops.random import derive, rotations
from megasparse.runs.comparison import spread
from tests.claims.claim import claim, mean_of
from tests.helpers.definitions import visible
from tests.helpers.launches import count_layer, total
from tools.bench.attention import model_of

INPUTS = {"random": 0, "clustered": 64}
"""Kinds of inputs, and how many tokens share a direction: trained heads are peaked, random ones hardly."""


def inputs(trial, together):
    """Queries and values (1, 1, L, D) of normal numbers. together: tokens around each of L/together centres."""
    generator = torch.Generator().manual_seed(trial.seed)
    length, dim = trial.settings["length"], trial.settings["head_dim"]
    q, v = (torch.randn(1, 1, length, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    if together:
        centres = torch.randn(length // together, dim, generator=generator, dtype=torch.float64)
        nearest = torch.randint(len(centres), (length,), generator=generator)
        q = centres[nearest] + q / 3
    return q, v


def measure_rounds(trial):
    """By kind of inputs: relative error of the output against full attention, and the mass of its weights on the keys
    that some round shows, for each number of rounds."""
    settings = trial.settings
    numbers = {}
    most, buckets = max(settings["rounds"]), [2 * settings["length"] // settings["chunk"]]
    window = Window("band", settings["chunk"])
    spec = BucketedAttentionSpec(window, causal=True)
    for kind, together in INPUTS.items():
        q, v = inputs(trial, together)
        k = F.normalize(q, dim=-1)
        drawn = rotations(derive(trial.seed, kind), range(1), most, q.shape[3], buckets, q.device)
        codes = angular_hash(q, drawn, buckets)
        length = q.shape[2]
        hidden = torch.ones(length, length, dtype=torch.bool).triu()  # itself too: only where it sees nothing else
        hidden[0, 0] = False
        weights = (q @ k.transpose(2, 3)).masked_fill(hidden, -torch.inf).softmax(-1)
        exact = weights @ v
        errors, masses = numbers[f"{kind} error"], numbers[f"{kind} mass"] = [], []
        for rounds in settings["rounds"]:
            out = bucketed_attention(q, k, v, codes[:, :, :rounds], spec)[0]
            errors.append(float((out - exact).norm() / exact.norm()))
            reached = visible(codes[:, :, :rounds], window, causal=True).any(2)
            masses.append(float((weights * reached).sum(-1).mean()))
    return {"rounds": settings["rounds"], **numbers}


@claim(
    "Reformer, Figure 4",
    "LSH attention approximates full attention, and more rounds approximate it better.",
    "For random and for clustered queries the error of the output falls and the attention mass in the buckets grows "
    "with every doubling of the rounds, means over seeds. The mass at 8 rounds is reported.",
    cpu={"length": 1024, "head_dim": 64, "chunk": 64, "rounds": [1, 2, 4, 8, 16], "minutes": 1},
    small={"length": 256, "chunk": 16, "rounds": [1, 2, 8]},
)
def test_lsh_rounds(trials):
    runs = trials.run(measure_rounds)
    rounds = runs[0]["rounds"]
    errors, masses = ({kind: mean_of(runs, f"{kind} {key}") for kind in INPUTS} for key in ("error", "mass"))
    table = [["rounds", *map(str, rounds)]]
    for kind in INPUTS:
        table.append([f"{kind}: error", *(f"{x:.3f}" for x in errors[kind])])
        table.append([f"{kind}: mass found", *(f"{x:.3f}" for x in masses[kind])])
    at_8 = [run["clustered mass"][rounds.index(8)] for run in runs]
    parts = {
        "the error falls": all(values == sorted(values, reverse=True) for values in errors.values()),
        "the mass grows": all(values == sorted(values) for values in masses.values()),
    }
    trials.verdict(f"8 rounds find {spread(at_8)} of the mass of clustered inputs", parts, table)


def measure_cost(trial):
    """Bytes that a layer moves (LSH) and FLOPs of a token, forward and backward, at a fixed number of tokens."""
    settings = trial.settings
    numbers = {"LSH, bytes": [], "LSH, FLOPs": [], "full, FLOPs": []}
    for length in settings["lengths"]:
        batch = settings["tokens"] // length
        models = {kind: model_of(kind, length, settings["heads"], 64, 2, 128) for kind in ("lsh", "full")}
        counts = total(count_layer("lsh", models["lsh"], batch, torch.bfloat16))
        numbers["LSH, bytes"].append(counts.moved / settings["tokens"])
        for kind, name in (("lsh", "LSH, FLOPs"), ("full", "full, FLOPs")):
            with torch.device("meta"):
                passes = build_mechanism(kind, models[kind], models[kind].heads).flops(length)
            numbers[name].append(float(passes.forward + passes.backward))
    return {"lengths": settings["lengths"], **numbers}


@claim(
    "Reformer, Figure 5 right",
    "At a fixed number of tokens LSH attention costs as many bytes and FLOPs for long sequences as for short ones, "
    "full attention more. (The paper shows time, which this trial does not measure.)",
    "Bytes moved by the GPU path and FLOPs per token change by at most 15 % from 1,024 to 65,536 tokens; the FLOPs of "
    "full attention grow.",
    cpu={"lengths": [1024, 4096, 16384, 65536], "tokens": 65536, "heads": 8, "minutes": 1},
    small={"lengths": [1024, 2048], "tokens": 2048, "heads": 2},
    seeds=(0,),
)
def test_lsh_cost(trials):
    (run,) = trials.run(measure_cost)
    changes = [max(run[key]) / min(run[key]) - 1 for key in ("LSH, bytes", "LSH, FLOPs")]
    grown = run["full, FLOPs"][-1] / run["full, FLOPs"][0]
    table = [["a token", *map(str, run["lengths"])]]
    table += [[key, *(f"{x:.3g}" for x in run[key])] for key in ("LSH, bytes", "LSH, FLOPs", "full, FLOPs")]
    sentence = f"LSH's bytes change by {changes[0]:.1%}, FLOPs by {changes[1]:.1%}"
    parts = {"LSH costs the same": max(changes) <= 0.15, "full attention costs more": grown > 1}
    trials.verdict(f"{sentence}; full attention's grow {grown:.0f} times", parts, table)
