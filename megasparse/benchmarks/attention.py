"""Time and memory of one attention operation, heads in and heads out: ours, torch's, and that of published Reformers.

B batch, H heads, L length, D head dim, E = H·D, M window, R rounds.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megasparse.attention.contract import Attention, AttentionContext, Targets
from megasparse.attention.heads import Padding, build_mechanism, head_dim, split_heads_by_mechanism
from megasparse.config.attention import AttentionConfig
from megasparse.config.schema import ModelConfig
from megasparse.model.build import initialise
from megasparse.ops.random import RngContext
from megasparse.planning.measure import peak, reset_peak, time_passes

Pass = Callable[[], Callable[[], None]]
"""A forward pass, which gives back its backward pass."""
CLUSTERED = "yoso-clustered"
"""YOSO on queries and keys that lie together, as trained ones do and random ones do not: its cost depends on them."""
MECHANISMS: dict[str, str] = {
    "lsh": "lsh",
    "lha": "lha",
    "yoso": "yoso",
    CLUSTERED: "yoso",
    "smart_bird": "smart_bird",
    "local": "local",
    "full": "full",
}
"""Ours by the names of the benchmark."""
CLUSTER = 64
SPREAD = 1 / 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP = {"cpu": 1, "cuda": 3}


@dataclass(frozen=True)
class Case:
    """What is measured. implementation: one of MECHANISMS or PEERS, or a kind of attention. model: of which it is a
    layer; its longest length is that of the measurement.
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
    """Seconds of each repeat. extra_bytes: peak of memory beyond inputs and the outputs' gradient. testing_bytes: that
    of a forward pass without gradients. kept_bytes: what a forward pass keeps for the backward, inputs included. note:
    what else was chosen here.
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
    """A decoder, or an encoder, whose layers have this mechanism. LSH has the paper's 2·L/M buckets. hashes: YOSO's."""
    attention = {
        "pattern": [kind],
        "lsh": {"rounds": rounds, "chunk": min(window, length)},
        "lha": {"chunk": min(window, length)},
        "yoso": {"hashes": hashes},
        "local": {"chunk": window},
    }
    made = AttentionConfig.model_validate(attention)
    return ModelConfig(
        kind="decoder" if causal else "encoder",
        max_length=length,
        heads=heads,
        head_dim=dim,
        d_model=heads * dim,
        attention=made,
    )


def measure(case: Case) -> Measurement:
    """Takes memory that nothing else may have taken before: one call a process."""
    device = torch.device(case.device)
    warm_up = WARM_UP[device.type]
    short = min(max(256, 4 * case.model.attention.lsh.chunk), case.model.max_length)
    tiny = replace(case, model=case.model.model_copy(update={"max_length": short}))
    time_passes(build(tiny, device)[0], device, 1, 0)  # what libraries take for themselves is not the operation's
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
    """Bytes of the tensors that a forward pass keeps for its backward, each once."""
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        backward = run()
    del backward
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def build(case: Case, device: torch.device) -> tuple[Pass, str]:
    """The implementation on random inputs, and what was chosen for it."""
    heads = Inputs(case, device)
    peer = PEERS.get(case.implementation)
    return (_ours(case, heads), "") if peer is None else peer(case, heads)


class Inputs:
    """Tensors q, k, v (B, H, L, D) and the outputs' gradient g: standard normal, the same for every implementation.

    Of `CLUSTERED`, q and k are one of L/64 random centres each (the same 64 tokens' of both on average) plus noise a
    third as long: two of a cluster have a cosine of about 0.9.
    """

    def __init__(self, case: Case, device: torch.device):
        model = case.model
        self._generator = torch.Generator(device).manual_seed(case.seed)
        self._dtype, self._device = DTYPES[case.dtype], device
        shape = (case.batch, model.heads, model.max_length, head_dim(model))
        self.q, self.k, self.v, self.g = (self._normal(*shape) for _ in range(4))
        if case.implementation == CLUSTERED:
            centres = self._normal(*shape[:2], max(1, shape[2] // CLUSTER), shape[3])
            self.q, self.k = (self._near(centres, noise) for noise in (self.q, self.k))

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device, generator=self._generator)

    def _near(self, centres: Tensor, noise: Tensor) -> Tensor:
        own = torch.randint(
            centres.shape[2], noise.shape[:3], device=noise.device, generator=self._generator
        ).unsqueeze(-1)
        return centres.gather(2, own.expand_as(noise)) + SPREAD * noise

    def layer_input(self, case: Case) -> Tensor:
        """Input of the layer, x (B, L, E), which Smart Bird alone reads."""
        shape = (case.batch, case.model.max_length, case.model.d_model)
        if case.implementation == "smart_bird":
            return self._normal(*shape)
        return self.q.new_zeros(1).expand(shape)


def _ours(case: Case, heads: Inputs) -> Pass:
    """Our mechanism, called as `AttentionLayer` calls it in training; with what the mechanism itself learns."""
    model, kind = case.model, MECHANISMS.get(case.implementation, case.implementation)
    mechanism = build_mechanism(kind, model, model.heads)
    initialise(mechanism, model, case.seed)
    mechanism.to(heads.q.device, heads.q.dtype)
    x, samples = heads.layer_input(case), torch.arange(case.batch, device=heads.q.device)
    wanted = torch.randint(model.vocabulary, (case.batch, model.max_length)).to(heads.q.device)
    leaves = _leaves(heads.q, heads.v) if mechanism.shared_qk else _leaves(heads.q, heads.v, heads.k)

    def attend() -> list[Tensor]:
        mechanism.zero_grad(set_to_none=True)
        q, v, *k = leaves
        return outputs_of(kind, mechanism, model, (q, *k, v), x, samples, wanted, case.seed)

    return _passes(attend, leaves, heads.g)


def outputs_of(
    kind: str, mechanism: Attention, model: ModelConfig, heads: Sequence[Tensor], x: Tensor, samples: Tensor,
    wanted: Tensor, seed: int = 0,
) -> list[Tensor]:  # fmt: skip
    """The output of a mechanism over all heads of a layer in training, and the loss of what it learns itself, if any.
    heads: q, k and v (B, H, L, D), without k where the queries are the keys.
    """
    q, v = heads[0], heads[-1]
    keys = q[:, :0] if mechanism.shared_qk else heads[1]
    context = AttentionContext(0, RngContext(seed, 0, samples, True), targets=Targets(wanted, None))
    causal = model.kind != "encoder"
    [(_, own, context)] = split_heads_by_mechanism(
        {kind: mechanism}, {kind: model.heads}, (q, keys, v), Padding(), causal, context
    )
    out, auxiliary, *_ = mechanism(x, own, context)
    return [out] if auxiliary is None else [out, auxiliary]


def _leaves(*inputs: Tensor) -> list[Tensor]:
    return [x.requires_grad_() for x in inputs]


def _passes(attend: Callable[[], list[Tensor]], leaves: list[Tensor], g: Tensor) -> Pass:
    """Return a pass forward and backward. attend: gives the output, whose gradient is g, and any auxiliary loss."""

    def forward() -> Callable[[], None]:
        for leaf in leaves:
            leaf.grad = None
        outs = attend()
        gradients = [g, *(torch.ones_like(loss) for loss in outs[1:])]
        return lambda: torch.autograd.backward(outs, gradients)

    return forward


def _sdpa(case: Case, heads: Inputs) -> tuple[Pass, str]:
    """PyTorch's attention, on a GPU by the fastest of its fused backends."""
    leaves = _leaves(heads.q, heads.k, heads.v)
    causal = case.model.kind != "encoder"

    def attend() -> list[Tensor]:
        q, k, v = leaves
        return [F.scaled_dot_product_attention(q, k, v, is_causal=causal)]

    run = _passes(attend, leaves, heads.g)
    if heads.q.device.type != "cuda":
        return run, ""

    def by(backend: SDPBackend) -> Pass:
        def forward() -> Callable[[], None]:
            with sdpa_kernel(backend):
                return run()

        return forward

    times = dict(_tried(by, heads.q.device))
    for leaf in leaves:  # what is measured after it allocates its own
        leaf.grad = None
    if not times:
        return run, ""
    best = min(times, key=lambda backend: times[backend])
    return by(best), best.name.removesuffix("_ATTENTION").lower()


def _tried(by: Callable[[SDPBackend], Pass], device: torch.device) -> Iterator[tuple[SDPBackend, float]]:
    """Each backend that can do it, and its seconds."""
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            yield backend, min(both for _, both in time_passes(by(backend), device, 2, 1))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # it does not take this dtype, head dim or GPU
            continue


class _Given(nn.Module):
    """In place of a projection: the given vectors, already projected."""

    def __init__(self, x: Tensor):
        super().__init__()
        self.x = x

    def forward(self, hidden: Tensor) -> Tensor:
        return self.x


def _hf(case: Case, heads: Inputs) -> tuple[Pass, str]:
    """HuggingFace's LSHSelfAttention without its projections: queries and values go in as (B, L, E), as it splits them
    itself. It takes numbers of buckets that are powers of two, here the nearest to 2·L/M, above 128 in two factors.
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
    attention.query_key, attention.value = (_Given(leaf) for leaf in leaves)
    attention.to(g.device)
    return _passes(lambda: [attention(leaves[0]).hidden_states], leaves, g), ""


def _reformer_pytorch(case: Case, heads: Inputs) -> tuple[Pass, str]:
    """LSHAttention as lucidrains published it, which takes (B·H, L, D) and gives its output first."""
    from reformer_pytorch.reformer_pytorch import LSHAttention

    lsh = case.model.attention.lsh
    attention = LSHAttention(bucket_size=lsh.chunk, n_hashes=lsh.rounds, causal=True).to(heads.q.device)
    leaves = _leaves(*(x.flatten(0, 1) for x in (heads.q, heads.v)))
    return _passes(lambda: [attention(*leaves)[0]], leaves, heads.g.flatten(0, 1)), ""


PEERS: dict[str, Callable[[Case, Inputs], tuple[Pass, str]]] = {
    "sdpa": _sdpa,
    "hf": _hf,
    "reformer-pytorch": _reformer_pytorch,
}
NEEDS = {"hf": "transformers", "reformer-pytorch": "reformer_pytorch"}
"""The package that a peer is in, where it is not torch."""


def crossover(ours: dict[int, float], theirs: dict[int, float]) -> int | None:
    """The length from which on ours is faster, interpolated on logarithmic scales; the shortest one measured, if it is
    faster already there; None where it is not at the longest one. Seconds by length; infinite where it failed.
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
