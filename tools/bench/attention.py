r"""Measure time and memory of attention without projections, compared with torch and published Reformers.

    python tools/bench/attention.py                                         # one or two hours on a GPU
    python tools/bench/attention.py --mechanisms lsh --lengths 16384,65536  # minutes on a GPU
    python tools/bench/attention.py --device cpu --lengths 1024,4096        # a minute on a CPU
    python tools/bench/attention.py --device cpu --lengths 4096,16384,65536 --compare sdpa,hf,reformer-pytorch \
      --json bench.json

Each implementation and length is measured in a separate process, on the same random queries, keys and values. The
measurement includes normalisation of keys, hashing, sorting, attention, and the training of learned hashes. After a
warm-up, --repeat runs of forward and backward give the median and range of times (CUDA events on a GPU), the peak
memory beyond inputs and output gradient (resident memory on a CPU) in training and in a forward without gradients, and
the bytes saved for the backward, inputs included. If an implementation runs out of memory, its row reports this, and
greater lengths are skipped.

LSH uses shared queries and keys, --rounds rounds and chunks of --window tokens (two buckets per chunk), as do
HuggingFace's LSHSelfAttention (without projections) and reformer-pytorch's LSHAttention. LHA (window: a bucket) and
local attention use the same window, YOSO --hashes hashes, Smart Bird 20 keys, and SDPA the fastest backend of torch.
Attention is causal unless --bidirectional is given. The time of YOSO depends on collisions of queries and keys: in
yoso-clustered they are near L/64 random centres (cosine of about 0.9 in a cluster), as in trained models but unlike
random vectors.

B batch, H heads, L length, D head dim, E = H·D, M window, R rounds.
"""

import argparse
import importlib.util
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megasparse.errors import ConfigError, did_you_mean, report_user_errors

CLUSTERED = "yoso-clustered"
"""YOSO on clustered queries and keys, as in trained models, because its cost depends on collisions."""
MECHANISMS: dict[str, str] = {
    "lsh": "lsh",
    "lha": "lha",
    "yoso": "yoso",
    CLUSTERED: "yoso",
    "smart_bird": "smart_bird",
    "local": "local",
    "full": "full",
    "linformer": "linformer",  # the last two only on request
    "longformer": "longformer",
}
"""Name in the benchmark -> mechanism of megasparse."""
PEER_NAMES = ("sdpa", "hf", "reformer-pytorch")
NEEDS = {"hf": "transformers", "reformer-pytorch": "reformer_pytorch"}
"""Peer -> package that it needs besides torch."""


def names(text: str) -> list[str]:
    return list(dict.fromkeys(text.split(",")))


def numbers(text: str) -> list[int]:
    values = [int(word) for word in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a list of positive numbers, such as 4096,16384")
    return list(dict.fromkeys(values))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if available")
    parser.add_argument("--mechanisms", type=names, metavar="A,B", help=f"of {', '.join(MECHANISMS)} (CPU: lsh)")
    parser.add_argument("--lengths", type=numbers, metavar="N,N", help="tokens (CPU: 4096,16384; GPU: 1K to 1M)")
    parser.add_argument("--heads", type=numbers, metavar="N,N", help="batch × heads, 8 per sequence (GPU: 8,64)")
    parser.add_argument("--head-dim", type=numbers, metavar="N,N", help="(CPU: 64; GPU: 64,128)")
    parser.add_argument("--rounds", type=int, metavar="N", help="hash rounds of LSH and its peers (CPU: 4; GPU: 2)")
    parser.add_argument("--window", type=int, metavar="N", help="M, tokens per chunk (CPU: 64; GPU: 128)")
    parser.add_argument("--hashes", type=int, default=32, metavar="N", help="hashes of YOSO (%(default)s)")
    parser.add_argument("--bidirectional", action="store_true", help="as in an encoder; --compare sdpa or none")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="(CPU: fp32; GPU: bf16)")
    parser.add_argument(
        "--compare", type=names, metavar="A,B", help=f"of {', '.join(PEER_NAMES)}, or none (all installed)"
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="measured runs (CPU: 3; GPU: 10)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results and their settings to this file")
    return parser.parse_args(words)


if __name__ == "__main__":  # help and mistakes end before the slow imports
    report_user_errors(arguments)()

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from megasparse.attention.contract import Attention, AttentionContext, Targets
from megasparse.attention.heads import Padding, build_mechanism, head_dim, split_heads_by_mechanism
from megasparse.config.attention import AttentionConfig
from megasparse.config.schema import ModelConfig
from megasparse.evaluation.outputs import write_json
from megasparse.model.build import initialise
from megasparse.ops.random import RngContext
from tools.bench.measuring import MeasurementError, alone, machine, peak, reset_peak, time_passes

Pass = Callable[[], Callable[[], None]]
"""A forward pass that returns its backward pass."""
CLUSTER = 64
SPREAD = 1 / 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP = {"cpu": 1, "cuda": 3}


@dataclass(frozen=True)
class Case:
    """A measurement. implementation: one of MECHANISMS or PEERS, or a kind of attention. model: configuration of the
    layer; its `max_length` is the length of the measurement.
    """

    implementation: str
    model: ModelConfig
    batch: int
    dtype: str
    device: str
    repeats: int
    seed: int


@dataclass(frozen=True)
class Measurement:
    """Seconds of each repeat. extra_bytes: peak memory beyond inputs and output gradient. testing_bytes: the same for
    a forward without gradients. kept_bytes: bytes saved for the backward, inputs included. note: chosen backend.
    """

    forward: list[float]
    both: list[float]
    extra_bytes: int
    testing_bytes: int
    kept_bytes: int
    note: str


def model_of(
    kind: str, length: int, heads: int, dim: int, rounds: int, window: int, hashes: int = 32, causal: bool = True
) -> ModelConfig:
    """Return the configuration of a decoder or encoder with this mechanism; LSH uses the paper's 2·L/M buckets.

    hashes: number of hashes of YOSO.
    """
    attention = {
        "pattern": [kind],
        "lsh": {"rounds": rounds, "chunk": min(window, length)},
        "lha": {"chunk": min(window, length)},
        "yoso": {"hashes": hashes},
        "local": {"chunk": window},
        "longformer": {"chunk": window},
    }
    return ModelConfig(
        kind="decoder" if causal else "encoder",
        max_length=length,
        heads=heads,
        head_dim=dim,
        d_model=heads * dim,
        attention=AttentionConfig.model_validate(attention),
    )


def measure(case: Case) -> Measurement:
    """Measure a case. Call it once per process, because the peak of memory includes earlier use."""
    device = torch.device(case.device)
    warm_up = WARM_UP[device.type]
    short = min(max(256, 4 * case.model.attention.lsh.chunk), case.model.max_length)
    tiny = replace(case, model=case.model.model_copy(update={"max_length": short}))
    time_passes(build(tiny, device)[0], device, 1, 0)  # exclude memory that libraries allocate at their first use
    run, note = build(case, device)
    before = reset_peak(device)
    seconds = time_passes(run, device, case.repeats, warm_up)
    extra = peak(device) - before
    before = reset_peak(device)
    with torch.no_grad():
        run()
    testing = peak(device) - before
    times = [s[0] for s in seconds], [s[1] for s in seconds]
    return Measurement(*times, extra, testing, kept_bytes(run), note)


def kept_bytes(run: Pass) -> int:
    """Return the bytes of the tensors that a forward pass saves for the backward, without duplicates."""
    saved: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        backward = run()
    del backward
    return sum(x.untyped_storage().nbytes() for x in saved.values())


def build(case: Case, device: torch.device) -> tuple[Pass, str]:
    """Return the implementation's pass on random inputs, and the chosen backend."""
    heads = Inputs(case, device)
    peer = PEERS.get(case.implementation)
    return (_ours(case, heads), "") if peer is None else peer(case, heads)


class Inputs:
    """Tensors q, k, v (B, H, L, D) and the output gradient g: standard normal, the same for every implementation.

    For `CLUSTERED`, q and k are one of L/64 random centres plus noise with a third of its length: two vectors of a
    cluster have a cosine of about 0.9.
    """

    def __init__(self, case: Case, device: torch.device):
        model = case.model
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(case.seed)
        self._dtype, self._device = DTYPES[case.dtype], device
        shape = (case.batch, model.heads, model.max_length, head_dim(model))
        self.q, self.k, self.v, self.g = (self._normal(*shape) for _ in range(4))
        if case.implementation == CLUSTERED:
            centres = self._normal(*shape[:2], max(1, shape[2] // CLUSTER), shape[3])
            self.q, self.k = (self._near(centres, noise) for noise in (self.q, self.k))

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device, generator=self._generator)

    def _near(self, centres: Tensor, noise: Tensor) -> Tensor:
        nearest = torch.randint(centres.shape[2], noise.shape[:3], device=noise.device, generator=self._generator)
        return centres.gather(2, nearest.unsqueeze(-1).expand_as(noise)) + SPREAD * noise

    def layer_input(self, case: Case) -> Tensor:
        """Return the input of the layer, x (B, L, E), which only Smart Bird reads."""
        shape = (case.batch, case.model.max_length, case.model.d_model)
        if case.implementation == "smart_bird":
            return self._normal(*shape)
        return self.q.new_zeros(1).expand(shape)


def _ours(case: Case, heads: Inputs) -> Pass:
    """Return the pass of a megasparse mechanism as in `MultiHeadAttention` in training, with its auxiliary loss."""
    model, kind = case.model, MECHANISMS.get(case.implementation, case.implementation)
    mechanism = build_mechanism(kind, model, model.heads)
    initialise(mechanism, model, case.seed)
    mechanism.to(heads.q.device, heads.q.dtype)
    x, samples = heads.layer_input(case), torch.arange(case.batch, device=heads.q.device)
    targets = torch.randint(model.vocabulary, (case.batch, model.max_length)).to(heads.q.device)
    leaves = _leaves(heads.q, heads.v) if mechanism.shared_qk else _leaves(heads.q, heads.v, heads.k)

    def attend() -> list[Tensor]:
        mechanism.zero_grad(set_to_none=True)
        q, v, *k = leaves
        return outputs_of(kind, mechanism, model, (q, *k, v), x, samples, targets, case.seed)

    return _passes(attend, leaves, heads.g)


def outputs_of(
    kind: str, mechanism: Attention, model: ModelConfig, heads: Sequence[Tensor], x: Tensor, samples: Tensor,
    targets: Tensor, seed: int = 0,
) -> list[Tensor]:  # fmt: skip
    """Return the output of a mechanism over all heads of a layer in training, and its auxiliary loss, if any.

    heads: q, k and v (B, H, L, D), without k if queries and keys are shared.
    """
    q, v = heads[0], heads[-1]
    keys = q[:, :0] if mechanism.shared_qk else heads[1]
    context = AttentionContext(0, RngContext(seed, 0, samples, True), targets=Targets(targets, None))
    causal = model.kind != "encoder"
    [(_, inputs, context)] = split_heads_by_mechanism(
        {kind: mechanism}, {kind: model.heads}, (q, keys, v), Padding(), causal, context
    )
    out, auxiliary, *_ = mechanism(x, inputs, context)
    return [out] if auxiliary is None else [out, auxiliary]


def _leaves(*inputs: Tensor) -> list[Tensor]:
    return [x.requires_grad_() for x in inputs]


def _passes(attend: Callable[[], list[Tensor]], leaves: list[Tensor], g: Tensor) -> Pass:
    """Return a forward and backward pass. attend: returns the output, whose gradient is g, and any auxiliary loss."""

    def forward() -> Callable[[], None]:
        for leaf in leaves:
            leaf.grad = None
        outs = attend()
        gradients = [g, *(torch.ones_like(loss) for loss in outs[1:])]
        return lambda: torch.autograd.backward(outs, gradients)

    return forward


def sdpa(case: Case, heads: Inputs) -> Pass:
    """Return the pass of PyTorch's attention with the backend that torch selects."""
    leaves = _leaves(heads.q, heads.k, heads.v)
    causal = case.model.kind != "encoder"

    def attend() -> list[Tensor]:
        q, k, v = leaves
        return [F.scaled_dot_product_attention(q, k, v, is_causal=causal)]

    return _passes(attend, leaves, heads.g)


def _fastest_sdpa(case: Case, heads: Inputs) -> tuple[Pass, str]:
    """Return the pass of PyTorch's attention, on a GPU with its fastest fused backend."""
    run = sdpa(case, heads)
    if heads.q.device.type != "cuda":
        return run, ""

    def by(backend: SDPBackend) -> Pass:
        def forward() -> Callable[[], None]:
            with sdpa_kernel(backend):
                return run()

        return forward

    times = dict(_tried(by, heads.q.device))
    for leaf in (heads.q, heads.k, heads.v):  # measured passes allocate their gradients
        leaf.grad = None
    if not times:
        return run, ""
    best = min(times, key=lambda backend: times[backend])
    return by(best), best.name.removesuffix("_ATTENTION").lower()


def _tried(by: Callable[[SDPBackend], Pass], device: torch.device) -> Iterator[tuple[SDPBackend, float]]:
    """Yield each supported backend and its seconds."""
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            yield backend, min(both for _, both in time_passes(by(backend), device, 2, 1))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # unsupported dtype, head dim or GPU
            continue


class _Projected(nn.Module):
    """Stand-in for a projection that returns projected vectors."""

    def __init__(self, x: Tensor):
        super().__init__()
        self.x = x

    def forward(self, hidden: Tensor) -> Tensor:
        return self.x


def _hf(case: Case, heads: Inputs) -> tuple[Pass, str]:
    """Return the pass of HuggingFace's LSHSelfAttention without projections, on queries and values (B, L, E). The
    number of buckets is the power of two nearest to 2·L/M, above 128 in two factors.
    """
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    model = case.model
    lsh, dim = model.attention.lsh, head_dim(model)
    bits = max(1, round(math.log2(2 * model.max_length / lsh.chunk)))
    config = ReformerConfig(
        hidden_size=model.heads * dim,
        num_attention_heads=model.heads,
        attention_head_size=dim,
        num_hashes=lsh.rounds,
        lsh_attn_chunk_length=lsh.chunk,
        lsh_num_chunks_before=1,
        lsh_num_chunks_after=0,
        num_buckets=2**bits if bits <= 7 else [2 ** (bits // 2), 2 ** (bits - bits // 2)],
        is_decoder=True,
        lsh_attention_probs_dropout_prob=0.0,
        max_position_embeddings=model.max_length,
        hash_seed=None,
    )
    leaves = _leaves(*(x.transpose(1, 2).flatten(2).contiguous() for x in (heads.q, heads.v)))
    g = heads.g.transpose(1, 2).flatten(2).contiguous()
    del heads.q, heads.k, heads.v, heads.g
    attention: Any = LSHSelfAttention(config)
    attention.query_key, attention.value = (_Projected(leaf) for leaf in leaves)
    attention.to(g.device)
    return _passes(lambda: [attention(leaves[0]).hidden_states], leaves, g), ""


def _reformer_pytorch(case: Case, heads: Inputs) -> tuple[Pass, str]:
    """Return the pass of lucidrains' LSHAttention, which takes (B·H, L, D) and returns its output first."""
    from reformer_pytorch.reformer_pytorch import LSHAttention

    lsh = case.model.attention.lsh
    attention = LSHAttention(bucket_size=lsh.chunk, n_hashes=lsh.rounds, causal=True).to(heads.q.device)
    leaves = _leaves(*(x.flatten(0, 1) for x in (heads.q, heads.v)))
    return _passes(lambda: [attention(*leaves)[0]], leaves, heads.g.flatten(0, 1)), ""


PEERS: dict[str, Callable[[Case, Inputs], tuple[Pass, str]]] = {
    "sdpa": _fastest_sdpa,
    "hf": _hf,
    "reformer-pytorch": _reformer_pytorch,
}


def crossover(ours: dict[int, float], theirs: dict[int, float]) -> int | None:
    """Return the length above which the first of two implementations is faster, interpolated on logarithmic scales; the
    shortest length if it is always faster, and None if it is slower at the longest one. Arguments: length -> seconds,
    infinite if the measurement failed.
    """
    lengths = sorted(ours.keys() & theirs.keys())
    slower = [n for n in lengths if not ours[n] < theirs[n]]
    if not lengths or lengths[-1] in slower:
        return None
    if not slower:
        return lengths[0]
    low = slower[-1]
    high = lengths[lengths.index(low) + 1]
    if math.isinf(ours[low]) or math.isinf(theirs[high]):
        return high
    before, after = (math.log(ours[n] / theirs[n]) for n in (low, high))
    return math.ceil(low * (high / low) ** (before / (before - after)))


SEED = 0
CPU = {"mechanisms": ["lsh"], "lengths": [4096, 16384], "heads": [8], "head_dim": [64]}
CPU |= {"rounds": 4, "window": 64, "dtype": "fp32", "repeat": 3}
CUDA = {
    "mechanisms": [*MECHANISMS][:-2],
    "lengths": [1024 << i for i in range(11)],
    "heads": [8, 64],
    "head_dim": [64, 128],
}
CUDA |= {"rounds": 2, "window": 128, "dtype": "bf16", "repeat": 10}
DEFAULTS: dict[str, dict[str, Any]] = {"cpu": CPU, "cuda": CUDA}


def bench_attention(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure everything and return all figures, which are also written to `args.json` after each measurement."""
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    about = {"command": command, "machine": alone(machine, torch.device(args.device)), "seed": SEED}
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for row in measured(args):
        rows.append(row)
        result = {**about, "settings": settings, **compared(rows, args)}
        if args.json is not None:
            write_json(args.json, result)
    return result


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per implementation and length. Lengths above one that ran out of memory are skipped."""
    series = list(product(args.heads, args.head_dim, [*args.compare, *args.mechanisms]))
    with tqdm(total=len(series) * len(args.lengths), unit="measurement", disable=None) as progress:
        for heads, dim, name in series:
            failure = None
            for length in args.lengths:
                progress.set_description(f"{name}, {length:,} tokens")
                row = {"implementation": name, "heads": heads, "head_dim": dim, "length": length}
                figures = {"error": failure} if failure else measure_one(args, name, heads, dim, length)
                if "memory" in figures.get("error", "") and not failure:
                    failure = f"not tried, after {length:,} tokens"
                yield row | figures
                progress.update()


def measure_one(args: argparse.Namespace, name: str, heads: int, dim: int, length: int) -> dict[str, Any]:
    """Return the figures of one measurement, or its error."""
    batch, layer_heads = (heads // 8, 8) if heads % 8 == 0 else (1, heads)
    kind, causal = MECHANISMS.get(name, "lsh"), not args.bidirectional
    model = model_of(kind, length, layer_heads, dim, args.rounds, args.window, args.hashes, causal)
    try:
        result = alone(measure, Case(name, model, batch, args.dtype, args.device, args.repeat, SEED))
    except MeasurementError as error:
        return {"error": error.problem}
    fewer = f"{len(result.both)} runs" if len(result.both) < args.repeat else ""
    return {
        "forward": spread(result.forward),
        "forward_backward": spread(result.both),
        "extra_bytes": result.extra_bytes,
        "testing_bytes": result.testing_bytes,
        "kept_bytes": result.kept_bytes,
        "note": ", ".join(filter(None, [result.note, fewer])),
    }


def spread(seconds: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "seconds": seconds}


def compared(rows: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Return the rows with their ratios to each peer at the same length (speed of forward and backward, and memory),
    and the crossovers with SDPA.
    """
    at = {(row["implementation"], row["heads"], row["head_dim"], row["length"]): row for row in rows}
    times: dict[tuple, dict[int, float]] = {}
    for (name, heads, dim, length), row in at.items():
        seconds = math.inf if "error" in row else row["forward_backward"]["median"]
        times.setdefault((name, heads, dim), {})[length] = seconds
        row["beside"] = {}
        for peer in args.compare if name in args.mechanisms and "error" not in row else ():
            other = at.get((peer, heads, dim, length), {"error": ""})
            if "error" not in other:
                memory = row["extra_bytes"] / max(1, other["extra_bytes"])
                row["beside"][peer] = {"faster": other["forward_backward"]["median"] / seconds, "memory": memory}
    crossovers = [
        {"implementation": name, "heads": heads, "head_dim": dim, "length": crossover(ours, times["sdpa", heads, dim])}
        for (name, heads, dim), ours in times.items()
        if name in args.mechanisms and ("sdpa", heads, dim) in times
    ]
    return {"rows": rows, "crossovers": crossovers}


def report(result: dict[str, Any], args: argparse.Namespace) -> Iterator[str]:
    """Yield Markdown: a table for every number of heads and head dim, and the crossovers with SDPA."""
    about = result["machine"]
    yield f"`{result['command']}` on {about['device']}, torch {about['torch']}, {about['threads']} threads"
    mask = "both sides" if args.bidirectional else "causal"
    for heads, dim in product(args.heads, args.head_dim):
        sizes = f"batch × heads {heads}, head dim {dim}, {args.dtype}, {args.rounds} rounds, M = {args.window}"
        yield f"\n{sizes}, {mask}: median (least to greatest) of {args.repeat}\n"
        yield from table([row for row in result["rows"] if (row["heads"], row["head_dim"]) == (heads, dim)], args)
        for line in result["crossovers"]:
            name, length = line["implementation"], line["length"]
            if (line["heads"], line["head_dim"]) != (heads, dim):
                continue
            if length is None:
                yield f"\n{name} is not faster than SDPA at {args.lengths[-1]:,} tokens."
            else:
                more = " or fewer" if length == args.lengths[0] else ""
                yield f"\n{name} is faster than SDPA, forward + backward, from {length:,} tokens{more} on."


def table(rows: list[dict[str, Any]], args: argparse.Namespace) -> Iterator[str]:
    heading = ["attention", "tokens", "forward, ms", "forward + backward, ms", "ns per token"]
    heading += ["extra memory, GB", "in testing, GB", "kept, GB"]
    heading += [f"faster than {peer} × / its memory ×" for peer in args.compare]
    yield f"| {' | '.join(heading)} |"
    yield "|" + "---|" * len(heading)
    for row in rows:
        cells = [row["implementation"] + (f" ({row['note']})" if row.get("note") else ""), f"{row['length']:,}"]
        if "error" in row:
            cells += [row["error"].replace("|", "/"), *[""] * (len(heading) - 3)]
        else:
            for times in (row["forward"], row["forward_backward"]):
                low, middle, high = (f"{1000 * times[key]:.4g}" for key in ("min", "median", "max"))
                cells.append(f"{middle} ({low} to {high})")
            cells += [f"{row['forward_backward']['median'] / row['length'] * 1e9:,.0f}"]
            cells += [f"{row[f'{name}_bytes'] / 1e9:.3f}" for name in ("extra", "testing", "kept")]
            ratios = (row["beside"].get(peer) for peer in args.compare)
            cells += ["" if ratio is None else f"{ratio['faster']:.3g} / {ratio['memory']:.3g}" for ratio in ratios]
        yield f"| {' | '.join(cells)} |"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Raises ConfigError for conflicting options and missing packages."""
    args = arguments(words)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "torch does not find a GPU", "Use --device cpu")
    installed = [peer for peer in PEERS if peer not in NEEDS or importlib.util.find_spec(NEEDS[peer]) is not None]
    for key, value in {**DEFAULTS[args.device], "compare": installed}.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    args.compare = [] if args.compare == ["none"] else args.compare
    for option, values, allowed in (("mechanisms", args.mechanisms, MECHANISMS), ("compare", args.compare, PEERS)):
        for name in values:
            if name not in allowed:
                raise ConfigError(f"--{option}", f'unknown name "{name}"', did_you_mean(name, allowed))
    if missing := [peer for peer in args.compare if peer not in installed]:
        hint = "Run pip install -e '.[bench]', or remove it"
        raise ConfigError("--compare", f"{missing[0]} is not installed", hint)
    causal = sorted(set(NEEDS) & set(args.compare))
    if args.bidirectional and causal:
        raise ConfigError("--bidirectional", f"{causal[0]} is only measured with a causal mask", "Use --compare sdpa")
    args.lengths = sorted(args.lengths)
    if causal and (unfit := [length for length in args.lengths if length % (2 * args.window)]):
        hint = f"Give multiples of {2 * args.window}, or --compare sdpa"
        raise ConfigError("--lengths", f"{unfit[0]} is not a multiple of two windows, as {causal[0]} needs", hint)
    return args


@report_user_errors
def main(words: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else [str(word) for word in words]
    args = parse(words)
    result = bench_attention(args, shlex.join(["python", "tools/bench/attention.py", *words]))
    print("\n".join(report(result, args)))


if __name__ == "__main__":
    main()
