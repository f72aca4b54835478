r"""Check a GPU: every kernel against its definition, attention and training steps beside torch's flash attention.

    python tools/bench/gpu_check.py                                # all stages: ten minutes on an H100 or H200
    python tools/bench/gpu_check.py --stages ceilings,correct      # some of them
    python tools/bench/gpu_check.py --small                        # a CPU: tiny sizes in Triton's interpreter

Stages: ceilings (copy, product), correct (each operator against its definition in float64, twice, in memory that holds
NaN; more than 2^31 numbers), attention (forward and backward), training (reformer_64k, and the same with full
attention). Each result is a line, and in OUTPUT/STAGE.json; a wrong one ends the command with exit code 2. The tests of
the kernels run on a GPU by `pytest -m "kernels or not soak" tests/ops`.

B batch, H heads, L length, D head dim, R rounds, M window.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if "--small" in sys.argv:  # before any kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from megasparse.config.load import build_config, load_config
from megasparse.errors import ConfigError, UserError, did_you_mean, report_user_errors
from megasparse.ops.operator import VARIABLE, Implementation
from megasparse.planning.dry_run import trial_engine
from megasparse.training.ranks import start_ranks
from tools.bench.attention import MECHANISMS, Case, build, model_of
from tools.bench.measuring import machine, peak, reset_peak, time_passes
from tools.bench.training import models, step_seconds

Outputs = Sequence[Tensor]
BARS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 3e-2), torch.float16: (1e-2, 3e-2)}
"""Relative errors that outputs and gradients may have, by norms."""
AGREEMENT = 0.998
"""Least part of equal codes and choices: two scores that are equal up to rounding may go either way."""


@dataclass(frozen=True)
class Problem:
    """Random inputs of an operator. heads: of B = 1, H = 2."""

    length: int
    head_dim: int
    device: torch.device

    def normal(self, *shape: int) -> Tensor:
        """Float64 numbers that depend on the shape alone."""
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.device)

    def integers(self, below: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(below)
        return torch.randint(below, shape, generator=generator).to(self.device)

    def heads(self, count: int = 3) -> list[Tensor]:
        """Different vectors (1, 2, L, D)."""
        return list(self.normal(count, 1, 2, self.length, self.head_dim))

    def padding(self) -> Tensor:
        """(1, L) bool: the last eighth is padding."""
        return (torch.arange(self.length, device=self.device) < self.length - self.length // 8)[None]

    def documents(self) -> Tensor:
        """(1, L): three documents."""
        return (torch.arange(self.length, device=self.device) * 3 // self.length)[None]


Make = Callable[[Problem], tuple[list[Tensor], Callable[..., Outputs]]]
SMOOTH: dict[str, Make] = {}
"""Operators with gradients: inputs in float64, and a function of them that gives the outputs."""
EXACT: dict[str, tuple[Callable[[Problem], Callable[[], Tensor]], float]] = {}
"""Operators of integers and draws: a function that gives them, and the least part of them that must be equal."""


def smooth(make: Make) -> Make:
    SMOOTH[make.__name__] = make
    return make


def exact(least: float = 1.0) -> Callable[[Any], Any]:
    def add(make: Callable[[Problem], Callable[[], Tensor]]) -> Any:
        EXACT[make.__name__] = make, least
        return make

    return add


@smooth
def bucketed_attention(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    """LSH in a decoder: two rounds, a band of 128."""
    from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention

    codes = p.integers(max(2, p.length // 64), 1, 2, 2, p.length).to(torch.int16)
    spec = BucketedAttentionSpec(Window("band", 128), causal=True, scale=p.head_dim**-0.5)
    return p.heads(), lambda q, k, v: bucketed_attention(q, k, v, codes, spec)


@smooth
def bucketed_attention_of_separate_codes(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    """LHA in an encoder with padding and documents. Its definition takes a step a query: at most 1,027 tokens."""
    from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention

    p = Problem(min(p.length, 1027), p.head_dim, p.device)
    codes = p.integers(max(2, p.length // 64), 2, 1, 2, 1, p.length).to(torch.int16)
    spec = BucketedAttentionSpec(Window("band", 64), False, p.head_dim**-0.5, exclude_self=False)
    masks = p.padding(), p.documents()
    return p.heads(), lambda q, k, v: bucketed_attention(q, k, v, codes[0], spec, *masks, key_codes=codes[1])


@smooth
def windows_of_positions(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    """Local attention in a decoder, of documents."""
    from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention

    spec = BucketedAttentionSpec(Window("chunk", 128), True, p.head_dim**-0.5, exclude_self=False)
    return p.heads(), lambda q, k, v: bucketed_attention(q, k, v, None, spec, None, p.documents())


@smooth
def relative_local_attention(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    from megasparse.ops.local_attention import LocalAttentionSpec, distances, relative_local_attention

    spec = LocalAttentionSpec(64, True, p.head_dim**-0.5)
    r, u, w = p.normal(2, len(distances(64, True)), p.head_dim), p.normal(2, p.head_dim), p.normal(2, p.head_dim)
    return [*p.heads(), r, u, w], lambda q, k, v, r, u, w: [relative_local_attention(q, k, v, r, u, w, spec)]


@smooth
def gathered_attention(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    from megasparse.ops.gathered_attention import gathered_attention

    index = p.integers(p.length + 1, 1, 2, p.length, 20) - 1
    return p.heads(), lambda q, k, v: gathered_attention(q, k, v, index, scale=p.head_dim**-0.5)


@smooth
def hash_table_attention(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    """YOSO in a decoder: four hashes, buckets of 64 tokens."""
    from megasparse.ops.hash_table_attention import HashTableAttentionSpec, hash_table_attention

    bits = max(1, (p.length // 64).bit_length())
    codes = p.integers(1 << bits, 2, 1, 2, 4, p.length).to(torch.int16)
    spec = HashTableAttentionSpec(bits, True)
    q, k, v = p.heads()
    heads = [torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1), v]
    return heads, lambda q, k, v: hash_table_attention(q, k, v, codes[0], codes[1], spec)[:1]


@smooth
def sketched_attention(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    from megasparse.ops.sketch import sketched_attention

    return list(p.normal(3, 1, p.length, 4)), lambda q, k, v: sketched_attention(q, k, v, causal=True)


@smooth
def cross_entropy(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    from megasparse.ops.cross_entropy import token_scores

    words = min(30522, 8 * p.length)
    targets = p.integers(words, min(p.length, 1027))
    return [p.normal(len(targets), words)], lambda logits: [token_scores(logits, targets, 0.1)[:, [0, 2]]]


@smooth
def layer_norm(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    from megasparse.ops.normalize import layer_norm

    return [p.normal(1, p.length, 1024), p.normal(1024), p.normal(1024)], lambda x, weight, bias: [
        layer_norm(x, weight, bias, 1e-5)
    ]


@smooth
def unit_keys(p: Problem) -> tuple[list[Tensor], Callable[..., Outputs]]:
    from megasparse.ops.normalize import unit_keys

    return p.heads(1), lambda q: unit_keys(q)


@exact(AGREEMENT)
def angular_hash(p: Problem) -> Callable[[], Tensor]:
    from megasparse.ops.hashing import angular_hash

    x, rotations = p.heads(1)[0].float(), p.normal(2, 2, p.head_dim, 32).float()
    return lambda: angular_hash(x, rotations, [64])


@exact(AGREEMENT)
def sign_codes(p: Problem) -> Callable[[], Tensor]:
    from megasparse.ops.hashing import sign_codes

    return lambda: sign_codes(p.heads(1)[0].float(), 1234, range(2), 32, 9, "hadamard")


@exact(AGREEMENT)
def hash_learning(p: Problem) -> Callable[[], Tensor]:
    from megasparse.ops.hash_learning import ranks

    scores = p.normal(1, 2, p.length, 16).float()
    return lambda: ranks(scores, 0).argsort(-1)  # their order: the ranks themselves hold a logarithm's last bits


@exact(AGREEMENT)
def chosen_keys(p: Problem) -> Callable[[], Tensor]:
    from megasparse.ops.sketch import KeyChoiceSpec, chosen_keys

    q, k = p.normal(2, 1, p.length, 4).float()
    return lambda: chosen_keys(q, k, KeyChoiceSpec(20, True, "top_k"), None)


@exact()
def counting_sort(p: Problem) -> Callable[[], Tensor]:
    from megasparse.ops.counting_sort import counting_sort

    return lambda: counting_sort(p.integers(1 << 12, 4, p.length).to(torch.int16), 12)


@exact()
def random_bits(p: Problem) -> Callable[[], Tensor]:
    from megasparse.ops.random import random_bits

    return lambda: random_bits(1234, torch.arange(p.length, device=p.device) << 20, 192)


@exact()
def dropout(p: Problem) -> Callable[[], Tensor]:
    from megasparse.ops.random import dropout

    rows = torch.arange(p.length, device=p.device)[None]
    return lambda: dropout(p.normal(1, p.length, 192).float(), 0.1, 1234, rows)


def check_smooth(name: str, p: Problem, dtype: torch.dtype) -> tuple[bool, float, str]:
    """Compare an operator's outputs and gradients with its definition's: whether they are right, the largest relative
    error, and what is wrong.
    """
    inputs, call = SMOOTH[name](p)
    inputs = [x.to(dtype) for x in inputs]
    with implementation("reference"):
        expected = with_gradients(call, [x.double() for x in inputs])
    with implementation("triton"), poisoned_memory():
        ours, again = (with_gradients(call, inputs) for _ in range(2))
    if not all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)):
        return False, float("nan"), "two runs differ"
    bars, outputs, worst = BARS[dtype], len(ours) - len(inputs), 0.0
    for number, (a, b) in enumerate(zip(ours, expected, strict=True)):
        seen = b > -torch.inf
        if not torch.equal(a > -torch.inf, seen):
            return False, float("nan"), f"output {number} is −∞ elsewhere"
        error = ((a[seen].double() - b[seen]).norm() / b[seen].norm().clamp_min(1e-30)).item()
        worst = max(worst, error)
        if not error <= bars[number >= outputs]:
            what = f"output {number}" if number < outputs else f"the gradient of input {number - outputs}"
            return False, error, f"{what} is {error:.2g} off"
    return True, worst, ""


def check_exact(name: str, p: Problem) -> tuple[bool, float, str]:
    """Compare integers or draws with those of blockwise torch; the second result is the part of them that differs."""
    make, least = EXACT[name]
    with implementation("blockwise"):
        expected = make(p)()
    with implementation("triton"), poisoned_memory():
        ours, again = make(p)(), make(p)()
    if not torch.equal(ours, again):
        return False, float("nan"), "two runs differ"
    equal = (ours == expected).double().mean().item()
    return equal >= least, 1 - equal, "" if equal >= least else f"{1 - equal:.2g} of them differ"


def with_gradients(call: Callable[..., Outputs], inputs: list[Tensor]) -> list[Tensor]:
    """The outputs, and the inputs' gradients toward fixed random directions of the outputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outs = list(call(*leaves))
    generator = torch.Generator().manual_seed(7)
    directions = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outs]
    directions = [d.masked_fill(out == -torch.inf, 0.0) for d, out in zip(directions, outs, strict=True)]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, directions)]


@contextmanager
def implementation(name: Implementation) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that is allocated inside holds NaN, or the largest integer, until it is written."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operations that have no deterministic variant say so
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


@dataclass
class Report:
    """Results of a stage, written to a file after each: name, right (None where nothing can be wrong), figures."""

    path: Path
    about: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, right: bool | None, **figures: Any) -> None:
        self.rows.append({"name": name, "right": right, **figures})
        self.path.write_text(json.dumps({"about": self.about, "rows": self.rows}, indent=1) + "\n")
        word = {None: "", True: "right", False: "WRONG"}[right]
        shown = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in figures.items()
        )
        print(f"{name:70} {word:6} {shown}", flush=True)

    def check(self, name: str, check: Callable[..., tuple[bool, float, str]], *arguments: Any) -> None:
        """Add the result of check(*arguments), or the exception that it raised."""
        try:
            right, error, note = check(*arguments)
        except Exception as exception:
            lines = str(exception).strip().splitlines() or [""]
            self.add(name, False, note=f"{type(exception).__name__}: {lines[0][:160]}")
            if "CUDA error" in str(exception):  # no later call would succeed
                raise
            return
        self.add(name, right, error=error, note=note)


def ceilings(report: Report, small: bool, device: torch.device) -> None:
    """Copy and bf16 product: the bandwidth and peak that this device reaches."""
    numbers, width = (1 << 20, 256) if small else (1 << 29, 8192)
    x, y = (torch.ones(numbers, dtype=torch.bfloat16, device=device) for _ in range(2))
    a, b = (torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    for name, run, work in (
        ("copy, GB/s", lambda: y.copy_(x), 4e-9 * numbers),
        ("bf16 product, TFLOP/s", lambda: a @ b, 2e-12 * width**3),
    ):

        def forward(run: Callable[[], Any] = run) -> Callable[[], None]:
            run()
            return lambda: None

        report.add(name, None, rate=work / min(seconds for seconds, _ in time_passes(forward, device, 5, 2)))


def correct(report: Report, small: bool, device: torch.device) -> None:
    """Each operator against its definition in float64, twice, in memory that holds NaN; then beyond 2^31 numbers."""
    sizes = [(37, 16, torch.float32)]
    if not small:
        sizes = [(4099, 64, torch.float32), (8192, 64, torch.bfloat16), (4099, 64, torch.float16)]
        sizes.append((4099, 128, torch.bfloat16))
    for length, dim, dtype in sizes:
        problem = Problem(length, dim, device)
        for name in SMOOTH:
            report.check(f"{name}, {dtype}, L = {length:,}, D = {dim}", check_smooth, name, problem, dtype)
    for name in EXACT:
        report.check(f"{name}, L = {sizes[0][0]:,}", check_exact, name, Problem(*sizes[0][:2], device))
    if small or torch.cuda.mem_get_info(device)[0] > 64e9:
        report.check("the last head of more than 2^31 numbers", beyond_32_bits, device, small)


def beyond_32_bits(device: torch.device, small: bool) -> tuple[bool, float, str]:
    """Local attention of so many heads that their numbers are more than 2^31: the last head is as it is alone."""
    from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention

    heads, length, dim = (2, 37, 16) if small else (33, 1 << 19, 128)
    spec = BucketedAttentionSpec(Window("chunk", 128), True, dim**-0.5, exclude_self=False)
    q, k, v, g = (torch.randn(1, heads, length, dim, dtype=torch.bfloat16, device=device) for _ in range(4))
    results = []
    for part in (slice(None), slice(heads - 1, None)):
        leaves = [x[:, part].detach().requires_grad_() for x in (q, k, v)]
        out, _ = bucketed_attention(leaves[0], leaves[1], leaves[2], None, spec)
        results.append([x[:, -1:].clone() for x in (out.detach(), *torch.autograd.grad(out, leaves, g[:, part]))])
        del out, leaves
    right = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return right, 0.0, "" if right else "it differs from the head alone"


def attention(report: Report, small: bool, device: torch.device) -> None:
    """Attention forward and backward beside torch's: heads of 64, 8 a sequence, a window of 128, 2 rounds, bf16."""
    everything = ("sdpa", "lsh", "local", "yoso", "lha", "smart_bird")
    cases = [(length, heads, everything, 5) for heads in (8, 64) for length in (4096, 16384, 65536)]
    for length, heads, names, repeats in (
        [(128, 8, everything, 1)] if small else [*cases, (524288, 8, ("sdpa", "lsh"), 1)]
    ):
        flash = None
        for name in names:
            sizes = (2, 16, 2, 32) if small else (8, 64, 2, 128)
            model = model_of(MECHANISMS.get(name, "full"), length, *sizes)
            run, note = build(
                Case(name, model, heads // 8, "fp32" if small else "bf16", device.type, repeats, 0), device
            )
            before = reset_peak(device)
            seconds = statistics.median(both for _, both in time_passes(run, device, repeats, min(2, repeats)))
            flash = flash or seconds
            figures = {"milliseconds": 1e3 * seconds, "x flash": flash / seconds, "GB": (peak(device) - before) / 1e9}
            report.add(f"{name}, {length:,} tokens, batch × heads {heads}", None, **figures, note=note)
            del run
            if not small:
                torch.cuda.empty_cache()


def training(report: Report, small: bool, device: torch.device) -> None:
    """Steps of configs/reformer_64k, and of the same with full attention in place of hashes."""
    overrides = ["data.sequence_length=256", "model.max_length=256"] if small else []
    config = load_config("quickstart" if small else "reformer_64k", overrides)
    full = build_config(models(config)["hashed layers full"])
    for name, version, steps in (("as configured", config, 3), ("hashed layers full", full, 1)):
        ranks = start_ranks(version.run.model_copy(update={"engine": "torch", "device": device.type}))
        before = reset_peak(ranks.device)
        engine, batch = trial_engine(version, ranks)
        seconds = [step_seconds(engine, batch, step, version.optimizer.learning_rate) for step in range(1 + steps)]
        middle = statistics.median(seconds[1:])
        rate = version.training.micro_batch * version.data.sequence_length / middle
        memory = (peak(ranks.device) - before) / 1e9
        report.add(f"step, {name}", None, **{"seconds": middle, "tokens/s": rate, "GB": memory})
        engine.close()


STAGES = {"ceilings": ceilings, "correct": correct, "attention": attention, "training": training}


@report_user_errors
def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-check"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--stages", default=",".join(STAGES), metavar="A,B", help="default: all")
    parser.add_argument("--small", action="store_true", help="on a CPU, in Triton's interpreter, at tiny sizes")
    args = parser.parse_args(words)
    names = args.stages.split(",")
    for name in names:
        if name not in STAGES:
            raise ConfigError("--stages", f'there is no "{name}"', did_you_mean(name, STAGES))
    if not args.small and not torch.cuda.is_available():
        raise ConfigError("--small", "is not given, and torch sees no GPU here", "Give it, for tiny sizes on a CPU")
    device = torch.device("cpu" if args.small else "cuda")
    args.output.mkdir(parents=True, exist_ok=True)
    wrong = []
    for name in names:
        report, start = Report(args.output / f"{name}.json", machine(device)), time.perf_counter()
        STAGES[name](report, args.small, device)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        wrong += [row["name"] for row in report.rows if row["right"] is False]
    if wrong:
        raise UserError(f"{args.output}: {len(wrong)} results are wrong, the first: {wrong[0]}")


if __name__ == "__main__":
    main()
