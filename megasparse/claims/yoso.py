"""YOSO's claims on its operators. L length, D head dim, m hashes, τ code bits; B_ij the share of m hashes in which q_i
and k_j collide, W_ij = E[B_ij] = (1 − acos(q_i·k_j)/π)^τ.
"""

import math
import statistics
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.benchmarks.attention import Case, Pass, build, kept_bytes, model_of
from megasparse.claims.claim import Claim, Curve, Judgement, Numbers, Picture, Trial, mean_of
from megasparse.evaluation.attention_quality import largest_error
from megasparse.ops.hash_table_attention import HashTableAttentionSpec, expected_attention, hash_table_attention
from megasparse.ops.hashing import sign_codes
from megasparse.ops.random import derive
from megasparse.runs.comparison import spread

PAPER = "YOSO"


def unit(generator: torch.Generator, *shape: int) -> Tensor:
    """Random vectors of length 1, (*shape), fp64."""
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def pair(trial: Trial, length: int) -> tuple[Tensor, Tensor]:
    """Queries and keys (1, 1, L, D) of length 1."""
    generator = torch.Generator().manual_seed(trial.seed)
    return tuple(unit(generator, 1, 1, length, trial.settings["head_dim"]) for _ in range(2))  # type: ignore[return-value]


def codes(trial: Trial, x: Tensor, hashes: int, draw: int) -> Tensor:
    """Sign codes (1, 1, m, L) by Gaussian hyperplanes, another set of them for each draw."""
    return sign_codes(x, derive(trial.seed, draw), range(1), hashes, trial.settings["code_bits"], "gaussian")


def collisions(trial: Trial, q: Tensor, k: Tensor, hashes: int, draw: int) -> Tensor:
    """B (L, L), pair by pair from the codes."""
    own, others = (codes(trial, x, hashes, draw)[0, 0] for x in (q, k))
    return torch.stack([(a[:, None] == b[None, :]).double() for a, b in zip(own, others, strict=True)]).mean(0)


def measure_estimator(trial: Trial) -> Numbers:
    settings, (q, k) = trial.settings, pair(trial, trial.settings["length"])
    expected = (1 - (q @ k.transpose(2, 3))[0, 0].clamp(-1, 1).acos() / math.pi) ** settings["code_bits"]
    hashes = [1 << power for power in range(settings["most_hashes"].bit_length())]
    errors = []
    for m in hashes:
        trial.progress(f"{m} hashes")
        errors.append(float((collisions(trial, q, k, m, m) - expected).square().mean().sqrt()))
    draws = (collisions(trial, q, k, settings["hashes"], 10_000 + draw) for draw in range(settings["draws"]))
    biases = [float((found - expected).mean()) for found in draws]
    return {"hashes": hashes, "error": errors, "biases": biases, "mean_weight": float(expected.mean())}


def judge_estimator(runs: Sequence[Numbers]) -> Judgement:
    biases = [bias for run in runs for bias in run["biases"]]
    error = statistics.stdev(biases) / len(biases) ** 0.5
    bias = statistics.mean(biases)
    slopes = [statistics.linear_regression(*_logs(run["hashes"], run["error"])).slope for run in runs]
    sentence = (
        f"bias {bias:+.1e}, {abs(bias) / error:.1f} standard errors of {len(biases)} draws (mean weight "
        f"{statistics.mean(run['mean_weight'] for run in runs):.4f}); slope {spread(slopes)}"
    )
    return Judgement(abs(bias) < 2 * error and all(abs(slope + 0.5) <= 0.05 for slope in slopes), sentence)


def _logs(*columns: Sequence[float]) -> list[list[float]]:
    return [[math.log(x) for x in column] for column in columns]


def draw_estimator(runs: Sequence[Numbers]) -> Picture:
    curves = [Curve(f"seed {number}", run["hashes"], run["error"]) for number, run in enumerate(runs)]
    return Picture("error of the sampled weights", "hashes", "root mean square error", curves, "both")


ESTIMATOR = Claim(
    name="yoso_estimator",
    paper=PAPER,
    says="Bernoulli sampling by hash collisions estimates its expectation without bias, and its error falls as 1/√m.",
    rule="The bias, pooled over all draws of all seeds, is below 2 of its standard errors; the slope of log error by "
    "log m (m = 1 … 512) is −0.5 ± 0.05 for every seed. (First trials of 192 and 384 draws of 8 hashes missed it, "
    "with +2.2e-4 and +1.4e-4, 2.7 and 2.4 standard errors; this one, written after them, has 8 times as many hashes.)",
    budgets={
        "cpu": {
            "length": 256,
            "head_dim": 8,
            "code_bits": 8,
            "most_hashes": 512,
            "hashes": 64,
            "draws": 128,
            "minutes": 3,
        }
    },
    measure=measure_estimator,
    judge=judge_estimator,
    draw=draw_estimator,
)


def measure_lengths(trial: Trial) -> Numbers:
    settings, spec = trial.settings, HashTableAttentionSpec(trial.settings["code_bits"], causal=False)
    errors, largest = [], []
    for length in settings["lengths"]:
        trial.progress(f"{length} tokens")
        q, k = pair(trial, length)
        v = torch.randn(q.shape, generator=torch.Generator().manual_seed(trial.seed + 1), dtype=q.dtype)
        exact = expected_attention(q, k, v, spec)[0]
        squares, most = [], []
        for draw in range(settings["draws"]):
            own, others = (codes(trial, x, settings["hashes"], draw) for x in (q, k))
            sampled = hash_table_attention(q, k, v, own, others, spec)[0]
            squares.append((sampled - exact).square().sum())
            most.append(largest_error(sampled, exact).mean())
        errors.append(float((torch.stack(squares).mean() / exact.square().sum()).sqrt()))
        largest.append(float(torch.stack(most).mean()))
    return {"lengths": settings["lengths"], "error": errors, "largest_error": largest}


def judge_lengths(runs: Sequence[Numbers]) -> Judgement:
    means = mean_of(runs, "error")
    change = max(means) / min(means) - 1
    largest = mean_of(runs, "largest_error")
    table = [
        ["tokens", *map(str, runs[0]["lengths"])],
        ["error", *(f"{error:.3f}" for error in means)],
        ["error in ℓ∞", *(f"{error:.3f}" for error in largest)],
    ]
    return Judgement(change < 0.2, f"the error changes by {change:.1%} over these lengths", table)


def draw_lengths(runs: Sequence[Numbers]) -> Picture:
    curves = [Curve(f"seed {number}", run["lengths"], run["error"]) for number, run in enumerate(runs)]
    return Picture("error of the output at a fixed number of hashes", "tokens", "relative error", curves, "x")


LENGTHS = Claim(
    name="yoso_lengths",
    paper=PAPER,
    says="At a fixed number of hashes the estimate is as good for long sequences as for short ones.",
    rule="The relative error of Σ_j B_ij·v_j at 32 hashes, mean over seeds, changes by less than 20 % from 128 to "
    "4,096 tokens. Beside it, not judged: the largest error over the largest number, as in the paper's Figure 5.",
    budgets={
        "cpu": {
            "lengths": [128, 256, 512, 1024, 2048, 4096],
            "head_dim": 64,
            "code_bits": 8,
            "hashes": 32,
            "draws": 4,
            "minutes": 1,
        }
    },
    measure=measure_lengths,
    judge=judge_lengths,
    draw=draw_lengths,
)


def measure_gradient(trial: Trial) -> Numbers:
    """shares: of each draw, ⟨sampled gradient of q, expected one⟩/|expected one|². The bound is τ/2·W, of cosines."""
    settings, bits = trial.settings, trial.settings["code_bits"]
    spec, (q, k) = HashTableAttentionSpec(bits, causal=False), pair(trial, trial.settings["length"])
    generator = torch.Generator().manual_seed(trial.seed + 1)
    v, g = (torch.randn(q.shape, generator=generator, dtype=q.dtype) for _ in range(2))
    q.requires_grad_()
    (wanted,) = torch.autograd.grad(expected_attention(q, k, v, spec)[0], q, g)
    shares = []
    for draw in range(settings["draws"]):
        own, others = (codes(trial, x, settings["hashes"], draw) for x in (q, k))
        (found,) = torch.autograd.grad(hash_table_attention(q, k, v, own, others, spec)[0], q, g)
        shares.append(float((found * wanted).sum() / wanted.square().sum()))
    same = unit(torch.Generator().manual_seed(trial.seed), 1, 1, 4, settings["head_dim"]).requires_grad_()
    (bounded,) = torch.autograd.grad(expected_attention(same, same, same, spec)[0].sum(), same)
    cosines = torch.linspace(-1, 1, 2001, dtype=torch.float64).requires_grad_()
    weight = (1 - cosines.acos() / math.pi) ** bits
    (true,) = torch.autograd.grad(weight.sum(), cosines)
    bound = bits / 2 * weight.detach()
    return {
        "shares": shares,
        "finite": bool(bounded.isfinite().all()),
        "true_at_1": str(float(true[-1])),
        "bound_below": bool((bound <= true + 1e-12)[1:-1].all()),
        "cosines": cosines.detach()[1:-1:20].tolist(),
        "true": true[1:-1:20].tolist(),
        "bound": bound[1:-1:20].tolist(),
    }


def judge_gradient(runs: Sequence[Numbers]) -> Judgement:
    shares = [share for run in runs for share in run["shares"]]
    error = statistics.stdev(shares) / len(shares) ** 0.5
    off = abs(statistics.mean(shares) - 1) / error
    finite = all(run["finite"] and not math.isfinite(float(run["true_at_1"])) for run in runs)
    sentence = (
        f"the sampled gradient is {statistics.mean(shares):.4f} of the expected one, {off:.1f} standard errors from 1; "
        f"at q = k the true derivative is {runs[0]['true_at_1']}, ours finite"
    )
    return Judgement(off < 2 and finite and all(run["bound_below"] for run in runs), sentence)


def draw_gradient(runs: Sequence[Numbers]) -> Picture:
    curves = [Curve(label, runs[0]["cosines"], runs[0][key]) for label, key in (("true", "true"), ("bound", "bound"))]
    return Picture("derivative of a weight by the cosine", "cosine", "derivative", curves)


GRADIENT = Claim(
    name="yoso_gradient",
    paper=PAPER,
    says="The backward estimates τ/2·W_ij, a lower bound of the weight's derivative that stays finite where the "
    "derivative does not, at q = k (Eq. 11, 12 and 19).",
    rule="The sampled gradient's share of the expected one is 1 within 2 standard errors of all draws; the bound is at "
    "or below the derivative over cosines in (−1, 1); at q = k autograd's derivative is infinite, ours finite.",
    budgets={"cpu": {"length": 64, "head_dim": 16, "code_bits": 8, "hashes": 32, "draws": 256, "minutes": 1}},
    measure=measure_gradient,
    judge=judge_gradient,
    draw=draw_gradient,
)


def measure_memory(trial: Trial) -> Numbers:
    settings = trial.settings
    found: dict[str, list[int]] = {"YOSO": [], "softmax, whole matrix": [], "torch's flash": []}
    for length in settings["lengths"]:
        trial.progress(f"{length} tokens")
        model = model_of("yoso", length, settings["heads"], 64, 2, 128, settings["hashes"], causal=False)
        case = Case("yoso", model, 1, "fp32", "cpu", 1, trial.seed)
        device = torch.device("cpu")
        runs: list[Pass] = [build(case, device)[0], _softmax(settings["heads"], length, trial.seed)]
        flash = Case("sdpa", model, 1, "fp32", "cpu", 1, trial.seed)
        for name, run in zip(found, [*runs, build(flash, device)[0]], strict=True):
            found[name].append(kept_bytes(run))
    return {"lengths": settings["lengths"], "kept": found}


def _softmax(heads: int, length: int, seed: int) -> Pass:
    """Softmax attention that forms the L × L probabilities, as the paper's baseline."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, length, 64, generator=generator, requires_grad=True) for _ in range(3))

    def forward() -> Pass:
        out = (q @ k.transpose(2, 3) / 8).softmax(-1) @ v
        return cast(Pass, lambda: out.sum().backward())

    return cast(Pass, forward)


def judge_memory(runs: Sequence[Numbers]) -> Judgement:
    lengths, kept = runs[0]["lengths"], runs[0]["kept"]
    a_token = [count / length for count, length in zip(kept["YOSO"], lengths, strict=True)]
    flat = max(a_token) / min(a_token) - 1
    ratio = kept["softmax, whole matrix"][-1] / kept["YOSO"][-1]
    table = [["MB kept", *map(str, lengths)]]
    table += [[name, *(f"{count / 1e6:.1f}" for count in counts)] for name, counts in kept.items()]
    sentence = f"bytes a token change by {flat:.1%}; {ratio:.0f} times less than softmax at {lengths[-1]} tokens"
    return Judgement(flat < 0.05 and ratio >= 10, sentence, table)


def draw_memory(runs: Sequence[Numbers]) -> Picture:
    curves = [
        Curve(name, runs[0]["lengths"], [count / 1e6 for count in kept]) for name, kept in runs[0]["kept"].items()
    ]
    return Picture("kept for the backward", "tokens", "MB", curves, "both")


MEMORY = Claim(
    name="yoso_memory",
    paper=PAPER,
    says="What is kept for the backward grows linearly with length, an order of magnitude below softmax (Table 4).",
    rule="Bytes that autograd keeps a token change by less than 5 % from 512 to 4,096 tokens, and at 4,096 are a tenth "
    "of those of softmax attention or less; flash attention beside them.",
    budgets={"cpu": {"lengths": [512, 1024, 2048, 4096], "heads": 12, "hashes": 16, "minutes": 1}},
    measure=measure_memory,
    judge=judge_memory,
    draw=draw_memory,
    seeds=(0,),
)
