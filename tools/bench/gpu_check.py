r"""Check a GPU in minutes: kernels against their definitions, attention and training steps against torch's attention.

    python tools/bench/gpu_check.py --output results --seconds 330        # an H100 or H200
    python tools/bench/gpu_check.py --output more --skip results/results.jsonl   # remaining jobs, on another machine
    python tools/bench/gpu_check.py --only attention train                # jobs by prefixes of their names
    python tools/bench/gpu_check.py --list --seconds 900                  # the plan: what runs when, and what does not
    python tools/bench/gpu_check.py --small                               # on a CPU: tiny sizes, Triton's interpreter

Every job runs in a separate process with a time limit; a crash is reported as a row, and the other jobs run. Jobs are
sorted by value, and a job only starts if it can end within --seconds. Run the same command again to resume: finished
jobs are skipped unless --only selects them. OUTPUT contains results.jsonl (one row per result), table.md and log.txt. A
wrong result ends the command with exit code 2. Kernel launches of the jobs are recorded on torch's meta device and
compiled ahead in parallel; "compiled late" counts the missed ones. The tests of the kernels run on a GPU with
`pytest -m "kernels or not soak" tests/ops`.

B batch, H heads, L length, D head dim, R rounds, M window.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if "--small" in sys.argv:  # before any kernel is defined
    os.environ["TRITON_INTERPRET"] = "1"

from megasparse.errors import ConfigError, UserError, did_you_mean, report_user_errors


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-check"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=600, metavar="N", help="limit of all jobs (%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run jobs with these prefixes, also finished ones")
    parser.add_argument("--skip", type=Path, metavar="FILE", help="results.jsonl with jobs to skip")
    parser.add_argument("--list", action="store_true", help="print when each job would start, and its expected seconds")
    parser.add_argument("--small", action="store_true", help="on a CPU, in Triton's interpreter, at tiny sizes")
    parser.add_argument("--kernels-once", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(words)


if __name__ == "__main__":  # help and mistakes end before the slow imports
    report_user_errors(arguments)()

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megasparse.config.schema import Config
from megasparse.data.batches import Batch
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention, gpu
from megasparse.ops.kernels import Launch, observed
from megasparse.ops.random import RngContext
from megasparse.planning.dry_run import trial_engine
from megasparse.planning.hardware import GPUS
from megasparse.planning.passes import META, ConfiguredPass, LiveBytes, as_on_a_gpu, dummy_records
from megasparse.planning.plan import RESERVE, Plan
from megasparse.settings.load import load_config
from megasparse.training.engines import build_engine
from megasparse.training.ranks import start_ranks
from megasparse.training.reporting.memory import available_bytes
from tools.bench.attention import MECHANISMS, Case, Inputs, build, model_of, sdpa
from tools.bench.jobs import RESULTS, Job, Report, compile_all, end_with_parent, gpu_facts, listing, rows_of, run_jobs
from tools.bench.measuring import machine, mark, peak, reset_peak, seconds_between
from tools.bench.operators import (
    EXACT,
    SMOOTH,
    Problem,
    check_exact,
    check_smooth,
    implementation,
    with_gradients,
)
from tools.bench.order import causal, causal_rows, order, order_rows, powers
from tools.bench.training import graph, graph_launches, step_seconds, train_config


def about(report: Report, small: bool) -> None:
    """Report the machine, and measure its bandwidth with a copy and its peak with a bf16 product."""
    device = device_of(small)
    report.add("machine", note="; ".join(f"{key} {value}" for key, value in machine(device).items()))
    if not small:
        facts = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu")
        report.add("nvidia-smi", note=", ".join(map(" ".join, zip(facts, gpu_facts(*facts), strict=True))))
    numbers, width = (1 << 20, 256) if small else (1 << 29, 8192)
    x, y = (torch.ones(numbers, dtype=torch.bfloat16, device=device) for _ in range(2))
    a, b = (torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    report.add("copy", {"GB/s": 4e-9 * numbers / seconds_a_call(lambda: y.copy_(x), device)})
    report.add("bf16 product", {"TFLOP/s": 2e-12 * width**3 / seconds_a_call(lambda: a @ b, device)})


ASSEMBLER = ("TRITON_PTXAS_PATH", "PTXAS_OPTIONS")


def assembler(report: Report) -> None:
    """Run a kernel compiled with TRITON_PTXAS_PATH, because drivers reject binaries of a much newer assembler."""
    x = torch.arange(-64, 64, device="cuda").float()
    right = torch.allclose(powers(x), torch.ldexp(torch.ones_like(x), x.int()))
    ptxas = triton.knobs.nvidia.ptxas
    report.add("ptxas", right=right, note=f"{ptxas.version} {ptxas.path}")


def device_of(small: bool) -> torch.device:
    return torch.device("cpu" if small else "cuda")


def seconds_a_call(call: Callable[[], object], device: torch.device, least: float = 0.1, repeats: int = 3) -> float:
    """Return the median seconds per call of asynchronous calls that take at least `least` seconds together."""
    for _ in range(2):
        start = mark(device)
        call()
        seconds = seconds_between(start, mark(device), device)
    calls, times = max(1, min(50, int(least / seconds))), []
    for _ in range(repeats if calls > 1 or least > 0 else 1):
        start = mark(device)
        for _ in range(calls):
            call()
        times.append(seconds_between(start, mark(device), device) / calls)
    return statistics.median(times)


BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Sizes = tuple[int, int, int, int]
"""Heads, head dim, rounds and window."""
LSH, HF, TINY = (8, 64, 2, 128), (8, 64, 4, 64), (2, 16, 2, 32)


def attention_pass(
    name: str, length: int, rows: int, small: bool, sizes: Sizes, device: torch.device | None = None
) -> Callable[[], Callable[[], None]]:
    """Return a forward pass that returns its backward. name: one of BACKENDS, MECHANISMS, "sdpa", "hf". rows: B·H."""
    model = model_of(MECHANISMS.get(name, "full"), length, *(TINY if small else sizes))
    kind = device_of(small) if device is None else device
    case = Case(name, model, max(1, rows // model.heads), "fp32" if small else "bf16", kind.type, 1, 0)
    if name not in BACKENDS:
        return build(case, kind)[0]
    run = sdpa(case, Inputs(case, kind))

    def forward() -> Callable[[], None]:
        with nullcontext() if kind.type != "cuda" else sdpa_kernel(BACKENDS[name]):
            return run()

    return forward


def attention_launches(names: Sequence[str], lengths: Sequence[int], rows: int, sizes: Sizes) -> None:
    for name in names:
        for length in lengths if name in MECHANISMS else ():
            attention_pass(name, length, rows, False, sizes, META)()()


def attention(
    report: Report, small: bool, names: Sequence[str], lengths: Sequence[int], rows: int, graphs: bool = False,
    sizes: Sizes = LSH, least: float = 0.1,
) -> None:  # fmt: skip
    """Measure attention forward and backward: milliseconds, measured and counted peak memory, and launches. graphs:
    also in a CUDA graph, whose replays use the same rotations.
    """
    device, lengths = device_of(small), [128] if small else lengths
    for name in names:
        if name == "hf" and importlib.util.find_spec("transformers") is None:
            report.add(name, note="transformers is not installed")
            continue
        for length in lengths:
            run = attention_pass(name, length, rows, small, sizes)
            launches = launches_of(run)
            run()  # releases the gradients of the previous pass
            before = reset_peak(device)
            run()()
            memory = (peak(device) - before) / 1e9
            figures = {
                "forward ms": 1e3 * seconds_a_call(run, device, least),
                "both ms": 1e3 * seconds_a_call(both(run), device, least),
            }
            figures |= {"GB": memory, "launches": launches}
            if name != "hf":
                figures["GB counted"] = counted_bytes(name, length, rows, small, sizes) / 1e9
            report.add(title(name, length, rows), figures)
            del run
    for name in names if graphs and not small else ():
        for length in lengths:
            try:
                replay = captured(attention_pass(name, length, rows, small, sizes))
            except Exception as error:
                note = f"{type(error).__name__}: {error}"[:300]
                report.add(f"{title(name, length, rows)}, graph", right=False, note=note)
                continue
            milliseconds = 1e3 * seconds_a_call(replay, device, least)
            report.add(f"{title(name, length, rows)}, graph", {"both ms": milliseconds})
            del replay


def launches_of(run: Callable[[], Callable[[], None]]) -> int:
    """Count the Triton kernels that a pass launches."""
    launches: list[Launch] = []

    def see(launch: Launch) -> None:
        launches.append(launch)
        launch.start()

    with observed(see):
        run()()
    return len(launches)


def both(run: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Return a call that runs a pass forward and backward."""
    return lambda: run()()


def title(name: str, length: int, rows: int) -> str:
    return f"{name}, {length:,} tokens, batch × heads {rows}"


def counted_bytes(name: str, length: int, rows: int, small: bool, sizes: Sizes) -> int:
    """Count the peak bytes of a pass on the meta device, without inputs."""
    run = attention_pass(name, length, rows, small, sizes, META)
    with observed(lambda launch: None), as_on_a_gpu(), LiveBytes() as counter:
        run()()
    return counter.peak


def captured(run: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of a forward and backward pass."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()()
    return graph.replay


def profile(report: Report, small: bool, name: str, length: int) -> None:
    """Report the microseconds of each kernel in a pass of attention."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    passes, device = 3, device_of(small)
    run = attention_pass(name, 128 if small else length, 8, small, LSH)
    seconds_a_call(both(run), device, 0.01, 1)
    with profiler(activities=[ProfilerActivity.CPU if small else ProfilerActivity.CUDA]) as profile:
        for _ in range(passes):
            run()()
        if not small:
            torch.cuda.synchronize()
    events = [
        (event.self_cpu_time_total if small else event.self_device_time_total, event)
        for event in profile.key_averages()
    ]
    for time_total, event in sorted(events, key=lambda pair: -pair[0])[:20]:
        figures = {"µs a pass": time_total / passes, "launches": event.count / passes}
        report.add(f"{name}, {event.key[:60]}", figures)


def train(report: Report, small: bool, name: str, steps: int) -> None:
    """Measure steps of configs/reformer_64k, or of a variant of it, after a first step."""
    config = train_config(name, small)
    ranks = start_ranks(config.run.model_copy(update={"device": device_of(small).type}))
    before = reset_peak(ranks.device)
    engine, batch = trial_engine(config, ranks)
    seconds = [step_seconds(engine, batch, step, config.optimizer.learning_rate) for step in range(1 + steps)]
    middle, memory = statistics.median(seconds[1:]), (peak(ranks.device) - before) / 1e9
    tokens = config.training.micro_batch * config.data.sequence_length
    figures = {"s": middle, "tokens/s": tokens / middle, "GB": memory, "first s": seconds[0]}
    report.add(f"step, {name}", figures)


def plan(report: Report, small: bool, name: str) -> None:
    """Report the prediction of `megasparse plan` for the step."""
    planned = Plan(train_config(name, small), GPUS["H100"])
    figures = {"s": planned.step_seconds, "GB": (planned.peak - RESERVE) / 1e9}
    report.add(f"planned, {name}", figures, note="GB without the CUDA context")


def decoder_config(length: int, layers: int, small: bool) -> Config:
    """Return configs/decoder_64k with the sizes of Llama 3.1 8B, and adapters."""
    model = {
        "layers": layers, "d_model": 4096, "d_ff": 14336, "heads": 32, "key_heads": 8, "vocabulary": 128256,
        "norm": "rms", "norm_eps": 1e-5, "feed_forward": "swiglu", "feed_forward_biases": False,
        "positions": {"kind": "rotary", "base": 500000.0}, "attention.pattern": ["full"], "max_length": length,
        "feed_forward_tiles": -(-length // 4096), "loss_tiles": -(-length // 512),
    }  # fmt: skip
    model |= {"d_model": 64, "heads": 4, "key_heads": 2, "vocabulary": 260, "feed_forward_tiles": 4} if small else {}
    changes = {"run.engine": "torch", "data.sequence_length": length, "training.global_batch": 1}
    changes |= {f"model.{key}": json.dumps(value) for key, value in model.items()}
    return load_config("decoder_64k", [f"{key}={value}" for key, value in changes.items()])


def decoder(report: Report, small: bool, length: int, layers: int, steps: int = 1) -> None:
    """Measure steps of a decoder of random weights, recomputed tile by tile, next to their plan."""
    plan = Plan(decoder_config(length, layers, small), GPUS["H100"])
    if not small:
        plan = plan.fitted(available_bytes(torch.device("cpu")))
    planned = {"planned s": plan.step_seconds, "planned GB": (plan.peak - RESERVE) / 1e9}
    report.add("step", decoder_steps(plan.config, device_of(small), steps) | planned, note=str(plan.settings))


def decoder_steps(config: Config, device: torch.device, steps: int) -> dict[str, float]:
    """Return the seconds of the last step, and the peak in GB with the weights, which are created on the device."""
    ranks, model = start_ranks(config.run.model_copy(update={"device": device.type})), ConfiguredPass(config).model
    for weight in model.parameters():
        weight.data = weight.data.float() if weight.requires_grad else weight.data
    before = reset_peak(device)

    def initial(name: str, shape: Sequence[int], start: int, numel: int) -> Tensor:
        return torch.empty(numel, dtype=torch.bfloat16, device=device).normal_(std=0.02)

    engine = build_engine(model, config, partial(RngContext, 0, training=True), ranks, initial=initial)
    batch = Batch(dummy_records(config.model, 1, config.data.sequence_length, 0), torch.arange(1))
    reset_peak(device)
    seconds = [step_seconds(engine, batch, step, 1e-4) for step in range(steps)]
    return {"s": seconds[-1], "GB": (peak(device) - before) / 1e9}


def kernels_once(device: torch.device) -> None:
    """Run LSH forward and backward, hash, sort, unit keys and local attention at L = 256, D = 64."""
    problem = Problem(256, 64, device)
    with implementation("triton"):
        for name in ("bucketed_attention", "unit_keys", "windows_of_positions"):
            inputs, call = SMOOTH[name](problem)
            with_gradients(call, [x.bfloat16() for x in inputs])
        for name in ("angular_hash", "counting_sort"):
            EXACT[name][0](problem)()


def memcheck(report: Report) -> None:
    """Run kernels under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__, "--kernels-once"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=end_with_parent)
    print(ended.stdout, ended.stderr)
    lines = [line for line in ended.stdout.splitlines() if "=====" in line]
    note = f"exit code {ended.returncode}: {' / '.join(lines[:1] + lines[-1:])}"[:300]
    report.add("memcheck", right=ended.returncode == 0, note=note)


def other_assembler() -> None:
    for name in ASSEMBLER:
        os.environ.pop(name, None)


def other_tiles(part: str, **changes: int) -> Callable[[], None]:
    """Return a function that changes a kernel's tiles in this process. part: a field of `TileShapes`."""

    def change() -> None:
        original = gpu.tiles

        def tiles(*arguments: Any) -> Any:
            tiles = original(*arguments)
            return tiles._replace(**{part: getattr(tiles, part)._replace(**changes)})

        gpu.tiles = tiles  # type: ignore[assignment]

    return change


def unaligned() -> None:
    """Let tiles of keys start at positions that depend on later tokens."""
    gpu.Intervals.slots = lambda *_: (None, None)  # type: ignore[method-assign,assignment]


VARIANTS: dict[str, Callable[[], None]] = {
    "as it is": lambda: None,
    "unaligned": unaligned,
    "Triton's own ptxas": other_assembler,
    "forward: 32 keys": other_tiles("forward", keys=32),
    "dq: 64 keys": other_tiles("queries", keys=64),
    "dk, dv: 64 queries": other_tiles("keys", queries=64),
    "dk, dv: 64 queries, 8 warps": other_tiles("keys", queries=64, warps=8),
}


def variant(report: Report, small: bool, name: str) -> None:
    VARIANTS[name]()
    length = 128 if small else 65536
    if not small:
        compile_all(report, "compiled", [partial(attention_launches, ["lsh"], [length], 8, LSH)])
        triton.runtime.driver.reset_active()
    device, run = device_of(small), attention_pass("lsh", length, 8, small, LSH)
    figures = {
        "forward ms": 1e3 * seconds_a_call(run, device),
        "both ms": 1e3 * seconds_a_call(both(run), device),
    }
    report.add(f"lsh, {length:,} tokens, {name}", figures)


@dataclass(frozen=True)
class Check:
    """An operator at one size: the arguments of a job."""

    name: str
    length: int
    dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = f"{str(self.dtype).removeprefix('torch.')}, " if self.name in SMOOTH else ""
        return f"{self.name}, {kind}L = {self.length:,}, D = {self.dim}"

    def run(self, report: Report, small: bool) -> None:
        problem = Problem(self.length, self.dim, device_of(small))
        if self.name in SMOOTH:
            right, error, note = check_smooth(self.name, problem, self.dtype)
        else:
            right, error, note = check_exact(self.name, problem)
        report.add("definition", {"error": error}, right, note)

    def launches(self) -> None:
        problem = Problem(self.length, self.dim, META)
        if self.name in SMOOTH:
            inputs, call = SMOOTH[self.name](problem)
            with_gradients(call, [x.to(self.dtype) for x in inputs])
        else:
            EXACT[self.name][0](problem)()

    def job(self, small: bool) -> Job:
        return Job(f"correct {self}", partial(self.run, small=small), 6, self.launches, together=True)


FIRST = (
    *("bucketed_attention", "bucketed_attention_of_separate_codes", "bucketed_attention_of_small_buckets"),
    *("windows_of_positions", "unit_keys", "cross_entropy", "layer_norm"),
    *("angular_hash", "counting_sort", "dropout"),
)
"""Operators used by the attention and training jobs."""
LENGTHS = (4096, 8192, 16384, 65536)
STEPS = {"as configured": 3, "all layers full": 1, "hashed layers full": 1}
DECODERS = {"64K": (1 << 16, 32, 2, 120), "256K, 8 layers": (1 << 18, 8, 1, 90), "1M, 2 layers": (1 << 20, 2, 1, 230)}
DECODERS |= {"256K": (1 << 18, 32, 1, 320), "1M": (1 << 20, 32, 1, 3300)}
"""Tokens, layers, steps and the expected seconds of the jobs of a decoder of 8 billion weights."""


def phases(small: bool) -> tuple[list[Job], list[Job]]:
    """Return the main jobs and the other jobs, both in order of value."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    operators = [*SMOOTH, *EXACT]
    later = [name for name in operators if name not in FIRST]

    def attend(
        job: str, seconds: float, names: Sequence[str], lengths: Sequence[int], rows: int = 8, **settings: Any
    ) -> Job:
        run = partial(attention, small=small, names=names, lengths=lengths, rows=rows, **settings)
        used = settings.get("sizes", LSH)
        return Job(f"attention {job}", run, seconds, partial(attention_launches, names, lengths, rows, used))

    if small:
        first = [Check(name, 37, 16, fp32) for name in FIRST]
        rest = [Check(name, 37, 16, fp32) for name in later]
    else:
        first = [Check(name, 8192, 64, bf16) for name in FIRST] + [Check("bucketed_attention", 4099, 64, bf16)]
        sizes = (128, bf16), (64, fp16), (64, fp32)
        rest = [Check(name, 4099, 64, bf16) for name in later]
        rest += [Check(name, 4099, dim, dtype) for dim, dtype in sizes for name in SMOOTH]
    middle = [16384, 65536]
    lsh = partial(attention_launches, ["lsh"], [65536], 8, LSH)
    decoders = {"256": (256, 2, 1, 60)} if small else DECODERS
    plans, variants = (list(STEPS)[:1], list(VARIANTS)[:1]) if small else (list(STEPS), list(VARIANTS))
    summed = partial(order, device=device_of(small), rows=128 if small else 4096)
    late = (48, 16, [29]) if small else (4096, 64, [1, 65, 819, 2053, 4093])
    main = [
        Job("about", partial(about, small=small), 8),
        *(check.job(small) for check in first),
        attend("lsh", 8, ["lsh"], LENGTHS, graphs=True),
        attend("flash", 8, ["flash"], LENGTHS, graphs=True),
        Job("graph", partial(graph, device_of(small), 3 if small else 50), 20, graph_launches),
        Job("profile lsh", partial(profile, small=small, name="lsh", length=65536), 5, lsh),
        *(
            Job(f"train {name}", partial(train, small=small, name=name, steps=steps), 12, partial(train_launches, name))
            for name, steps in STEPS.items()
        ),
        attend("cudnn", 8, ["cudnn"], LENGTHS, graphs=True),
        Job("order", summed, 8, lambda: [*order_rows(META, 128)]),
        Job("causal", lambda report: causal(report, device_of(small), *late), 8, lambda: [*causal_rows(META, *late)]),
    ]
    others = [
        *(
            Job(f"profile {name}", partial(profile, small=small, name=name, length=16384), 6)
            for name in ("yoso", "lha", "smart_bird")
        ),
        *(check.job(small) for check in rest),
        *(Job(f"plan {name}", partial(plan, small=small, name=name), 20, together=True) for name in plans),
        Job("correct beyond 2^31 numbers", partial(beyond_32_bits, small=small), 12, partial(many_heads, META, False)),
        *(attend(name, 8, [name], middle, graphs=True) for name in ("local", "yoso", "lha")),
        attend("smart_bird", 8, ["smart_bird"], middle),
        attend("of 64 heads", 10, ["lsh", "flash"], middle, rows=64),
        attend("of head dim 128", 12, ["lsh", "flash"], middle, graphs=True, sizes=(8, 128, 2, 128)),
        attend("lsh of 512K tokens", 8, ["lsh"], [1 << 19], least=0.0),
        attend("flash of 512K tokens", 20, ["flash"], [1 << 19], least=0.0),
        attend("hf", 10, ["hf", "lsh"], [16384], sizes=HF),
        *(
            Job(f"decoder {name}", partial(decoder, small=small, length=length, layers=layers, steps=steps), seconds)
            for name, (length, layers, steps, seconds) in decoders.items()
        ),
        *(Job(f"variant {name}", partial(variant, small=small, name=name), 12) for name in variants),
    ]
    if small:
        return [replace(job, seconds=60) for job in main], [replace(job, seconds=60) for job in others]
    others.insert(-len(VARIANTS), Job("memcheck", memcheck, 40))
    return main, others


def train_launches(name: str) -> None:
    config = train_config(name, False)
    ConfiguredPass(config).count(config.data.sequence_length)


def beyond_32_bits(report: Report, small: bool) -> None:
    """Check local attention with more than 2^31 numbers in all heads: the last head must equal a call with only it."""
    all_heads, last = many_heads(device_of(small), small)
    right = all(torch.equal(a, b) for a, b in zip(all_heads, last, strict=True))
    report.add("the last of many heads", right=right, note="" if right else "it differs from a call with only it")


def many_heads(device: torch.device, small: bool) -> list[list[Tensor]]:
    """Return the last head's output and gradients, from a call with all heads and from a call with only this head."""
    heads, length, dim = (2, 37, 16) if small else (33, 1 << 19, 128)
    spec = BucketedAttentionSpec(Window("chunk", 128), True, dim**-0.5, exclude_self=False)
    q, k, v, g = (torch.randn(1, heads, length, dim, dtype=torch.bfloat16, device=device) for _ in range(4))
    results = []
    for part in (slice(None), slice(heads - 1, None)):
        leaves = [x[:, part].detach().requires_grad_() for x in (q, k, v)]
        out, _ = bucketed_attention(leaves[0], leaves[1], leaves[2], None, spec)
        results.append([x[:, -1:].clone() for x in (out.detach(), *torch.autograd.grad(out, leaves, g[:, part]))])
        del out, leaves
    return results


@report_user_errors
def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    deadline = time.monotonic() + args.seconds
    if args.kernels_once:
        kernels_once(device_of(False))
        torch.cuda.synchronize()
        return
    main_jobs, others = phases(args.small)
    names = [job.name for job in main_jobs + others]
    for word in args.only or ():
        if not any(name.startswith(word) for name in names):
            raise ConfigError("--only", f'no job starts with "{word}"', did_you_mean(word, names))
    if args.skip is not None and not args.skip.is_file():
        raise ConfigError("--skip", f"{args.skip} is not a file", "Give a results.jsonl of an earlier check")
    if args.list:
        print(listing(main_jobs + others, args.seconds))
        return
    if not args.small and not gpu_facts("compute_cap"):
        raise ConfigError(
            "--small", "is not given, and nvidia-smi does not find a GPU", "Add it to run tiny sizes on a CPU"
        )
    args.output.mkdir(parents=True, exist_ok=True)
    results = args.output / RESULTS
    earlier = rows_of(results) + ([] if args.skip is None else rows_of(args.skip))
    ran = {row["job"] for row in earlier if row["name"] in ("done", "failed")}
    torch.set_num_threads(1 if not args.small else torch.get_num_threads())
    jobs: list[Job] = []
    for phase, part in (("A", main_jobs), ("B", others)):
        part = [
            job for job in part if (job.name not in ran if args.only is None else job.name.startswith(tuple(args.only)))
        ]
        launches = [job.launches for job in part if job.launches is not None]
        if launches and not args.small:
            position = part[:1] != [] and part[0].name == "about"
            part.insert(position, Job(f"warm {phase}", partial(compile_all, name="compiled", functions=launches), 30))
        jobs += part
    if not args.small:
        run_jobs([Job("assembler", assembler, 5)], args.output, deadline)
        if any(row["job"] == "assembler" and row["right"] is False for row in rows_of(results)):
            other_assembler()
            run_jobs([Job("assembler of Triton", assembler, 5)], args.output, deadline)
    run_jobs(jobs, args.output, deadline)
    wrong = [row["job"] for row in rows_of(results) if row["right"] is False]
    if wrong:
        raise UserError(f"{results}: {len(wrong)} results are wrong, the first of {wrong[0]}")


if __name__ == "__main__":
    main()
