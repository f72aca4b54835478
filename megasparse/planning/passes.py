"""Memory of a forward and backward pass, counted as the bytes of all live tensors.

A pass of a pretraining configuration runs on torch's meta device, whose tensors do not use memory: the host code of the
Triton kernels makes the same allocations as on a GPU, without launching kernels. It takes seconds for any model size.
Shared memory and registers of kernels are not GPU memory; cuBLAS' workspace is not counted.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megasparse.config.schema import Config, ModelConfig
from megasparse.model.adapters import add_adapters, quantise_layers
from megasparse.model.build import empty_model
from megasparse.model.encoder import Encoder
from megasparse.ops.operator import counted_times
from megasparse.ops.quantised import Quantised
from megasparse.ops.random import RngContext
from megasparse.optimizers import OPTIMIZERS
from megasparse.planning.flops import tiled_layers
from megasparse.planning.states import States

META = torch.device("meta")
TORCH_LAUNCH, KERNEL_LAUNCH = 20e-6, 150e-6
"""Seconds of host time per torch operation and per Triton kernel, autograd and Python included; from eager passes of
LSH (1 and 18 of them in 2.5 ms), local attention (1 and 6, 1.3 ms) and LHA (345 and 20, 9.7 ms) on a virtual machine
with an H200."""
PERIODS = 7, 8
"""Periods of the pattern in the two shallow models from which the pass of a deeper model is extrapolated linearly."""
SHORT = 1, 2
"""The same if layers are recomputed or stored one by one."""
SHORTEST = 8192
"""Tokens of the shorter of two passes from which a pass of many recomputed tiles is extrapolated."""
VIEWS = {
    *("alias", "as_strided", "detach", "diagonal", "expand", "is_same_size", "lift_fresh", "narrow", "permute"),
    *("promote_types", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind"),
    *("unfold", "unsqueeze", "view", "_reshape_alias", "_unsafe_view", "empty", "empty_like", "empty_permuted"),
    *("empty_strided", "new_empty", "new_empty_strided"),
}
"""Operations that create a view or allocate memory, and do not move bytes."""
SELECTIONS, ASSIGNMENTS = {"index", "index_select", "embedding", "gather"}, {"index_put_", "scatter_"}
"""Operations whose first tensor is a table of which they read, or write, some rows or numbers."""


class LiveBytes(TorchDispatchMode):
    """Counter of the bytes of storages created in its context: `live` now, and `peak` since `mark`.

    `moved`: bytes read and written by operations other than matrix products. `launches`: number of operations that are
    not views. Temporary memory inside a kernel is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.moved = self.launches = 0.0
        self._storages: set[int] = set()

    def mark(self) -> int:
        """Return the peak since the last mark, and reset it."""
        peak, self.peak = self.peak, self.live
        return peak

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Quantised in types:  # it dequantises its arguments and calls this again
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        existing = {_identity(x) for x in inputs}
        for x in outputs:
            if (identity := _identity(x)) not in self._storages and identity not in existing:
                storage = x.untyped_storage()
                self._storages.add(identity)
                self._made(storage.nbytes())
                weakref.finalize(storage, self._release, identity, storage.nbytes())
        if function.overloadpacket.__name__.rstrip("_") not in VIEWS:
            self.launches += counted_times()
            if function.overloadpacket not in flop_registry:
                self.moved += counted_times() * _moved_by(function.overloadpacket.__name__, inputs, outputs)
        return result

    def _made(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, identity: int, size: int) -> None:
        self._storages.discard(identity)
        self.live -= size


def _identity(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _bytes(x: Tensor) -> int:
    """Return the bytes of a tensor; of an expanded one, the bytes of its storage."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _moved_by(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Return the bytes that an operation reads and writes; of a table, only the selected or written rows."""
    if name in SELECTIONS:
        inputs = [*outputs, *inputs[1:]]
    elif name in ASSIGNMENTS:
        outputs = inputs = inputs[1:]
    return sum(_bytes(x) for x in (*inputs, *outputs))


def _bytes_of(launch: Any) -> int:
    """Return the bytes that a kernel reads and writes: of its tensors, and of all rows that an index selects."""
    constants = launch.kernel.fn.__annotations__
    names = (name for name in launch.kernel.arg_names if name not in constants)
    tensors = {name: x for name, x in zip(names, launch.arguments, strict=True) if isinstance(x, Tensor)}
    rows = tensors["q"].shape[:-1].numel() * tensors["index"].shape[-1] if "index" in tensors else None
    return sum(
        _bytes(x) if rows is None or name not in ("k", "v") else rows * x.shape[-1] * x.element_size()
        for name, x in tensors.items()
    )


@dataclass(frozen=True)
class PassBytes:
    """Bytes of one pass. A phase ends when the gradient of a weight is complete; the last phase ends with the pass."""

    gradients: np.ndarray
    """Bytes of weight gradients that exist at the start of each phase."""
    beside: np.ndarray
    """Peak live bytes of each phase without weight gradients."""
    moved: float = 0.0
    """Bytes moved by torch's operations other than matrix products, and by kernels outside of attention."""
    by_attention: float = 0.0
    """Bytes moved by attention's kernels."""
    host: float = 0.0
    """Seconds of host time for all launches."""

    def peak(self, gradients: int | None = None) -> int:
        """Return the peak. gradients: bytes of gradients during the pass; None uses the gradients of this pass."""
        return int(((self.gradients if gradients is None else gradients) + self.beside).max())


def count_pass(model: nn.Module, forward: Callable[[], Tensor]) -> PassBytes:
    """Count one pass of `forward`, which returns the objective, and its backward.

    Gradients of the model are None afterwards.
    """
    from megasparse.ops.kernels import Launch, observed  # imports Triton, which exists on Linux only

    names = {id(weight): name for name, weight in model.named_parameters()}
    sizes, peaks, ends, moved, kernels = [0], [], set(), {True: 0.0, False: 0.0}, [0.0]
    counter = LiveBytes()

    def end_phase(weight: Tensor) -> None:
        if names[id(weight)] not in ends:
            ends.add(names[id(weight)])
            peaks.append(counter.mark())
            sizes.append(weight.numel() * weight.element_size())

    def skip(launch: Launch) -> None:
        moved["attention" in launch.kernel.fn.__module__] += counted_times() * _bytes_of(launch)
        kernels[0] += counted_times()
        launch.start()

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    hooks = [weight.register_post_accumulate_grad_hook(end_phase) for weight in trained]
    try:
        with observed(skip), counter, torch.enable_grad():
            objective = forward()
            # Tensor.backward with the active function modes, which torch's version disables.
            ones = (torch.ones_like(objective),)
            _engine_run_backward((objective,), ones, False, False, (), allow_unreachable=True, accumulate_grad=True)
            peaks.append(counter.mark())
    finally:
        for hook in hooks:
            hook.remove()
        for weight in model.parameters():
            weight.grad = None
    gradients = np.array(list(accumulate(sizes)), dtype=np.float64)
    others = np.maximum(0.0, np.array(peaks) - gradients)
    host = counter.launches * TORCH_LAUNCH + kernels[0] * KERNEL_LAUNCH
    return PassBytes(gradients, others, float(counter.moved + moved[False]), float(moved[True]), host)


class ConfiguredPass:
    """The model of a configuration on the meta device, its states, and its counted passes."""

    def __init__(self, config: Config):
        # Dropout of attention probabilities cannot be counted without kernels; its blocks do not need more memory.
        without: dict[str, Any] = {"attention": {"dropout": 0.0}}
        self.config = config.changed(model=without | ({"source": without} if config.model.source else {}))
        self.count, self._whole, self._reduced = cache(self._count), cache(self._count_whole), cache(self._with)

    @cached_property
    def model(self) -> Any:
        config = self.config.model
        with META:
            model: Any = empty_model(config)
            if isinstance(model, Encoder) and config.masking.whole_words:
                model.word_starts = torch.ones(config.vocabulary, dtype=torch.bool)
            if self.config.lora is not None:
                add_adapters(model, self.config.lora, 0)
        rounded = self.config.training.precision == "bf16"
        if self.config.lora is not None:
            quantise_layers(model, self.config.lora, torch.bfloat16 if rounded else torch.float32, META)
        if rounded:
            for weight in model.parameters():
                if weight.dtype == torch.float32:
                    weight.data = weight.data.bfloat16()
        tiled = tiled_layers(config, self.config.parallel.sequence)
        for block, in_tiles in zip(model.layers, tiled, strict=True):
            block.tiles = block.tiles if in_tiles else 1  # the counted pass is of one rank, with all heads
        return model.train()

    @cached_property
    def states(self) -> States:
        trained = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        number, largest = sum(w.numel() for w in trained.values()), max(w.numel() for w in trained.values())
        optimizer = OPTIMIZERS[self.config.optimizer.name]
        moments = factors = 0
        for name, weight in trained.items():
            size = optimizer.state_bytes(name, weight.shape)
            if optimizer.state_per_number or weight.dim() < 2:
                moments += size
            else:
                factors += size
        scratch = optimizer.scratch_bytes({name: weight.shape for name, weight in trained.items()})
        frozen = [weight for weight in self.model.parameters() if not weight.requires_grad]
        sizes = [w.stored_bytes if isinstance(w, Quantised) else w.numel() * w.element_size() for w in frozen]
        frozen_largest = max((w.numel() for w in frozen), default=0)
        rounded = self.config.training.precision == "bf16"
        numbers = sum(w.numel() for w in frozen)
        return States(number, numbers, largest, moments, rounded, scratch, factors, sum(sizes), frozen_largest)

    def _count(self, length: int) -> PassBytes:
        """Count a pass of the configured micro-batch. length: tokens per sequence on this rank."""
        model, period = self.config.model, len(self.config.model.attention.pattern)
        rest, periods = model.layers % period, PERIODS if model.activations == "reversible" else SHORT
        if model.source is not None or model.layers <= max(periods) * period + rest:
            return self._count_long(length)
        few, many = (self._reduced(layers=number * period + rest) for number in periods)
        share = (model.layers - max(periods) * period - rest) / ((periods[1] - periods[0]) * period)
        return extrapolated(few._count_long(length), many._count_long(length), share)

    @property
    def tile(self) -> int:
        """Tokens of a tile of recomputed layers."""
        config = self.config
        return -(-config.data.sequence_length // (config.parallel.sequence * config.model.feed_forward_tiles))

    @cached_property
    def short_tiles(self) -> int | None:
        """Tiles of the shortest pass from which passes of all lengths follow; None if each length is counted whole."""
        few = max(2, min(SHORTEST // self.tile, self.config.model.feed_forward_tiles // 2))
        return few if all(tiled_layers(self.config.model, self.config.parallel.sequence)) else None

    def _count_long(self, length: int) -> PassBytes:
        """Count a pass of all layers; of recomputed tiles from two short passes with tiles of the same size."""
        if (few := self.short_tiles) is None:
            return self._count_whole(length)
        tile = self.tile
        short, double = (self._reduced(tiles=number)._whole(number * tile) for number in (few, 2 * few))
        times = length / (few * tile)  # in units of the first pass

        def line(low: Any, high: Any) -> Any:
            return high + (high - low) * (times - 2)

        def parabola(low: float, high: float) -> float:
            """Return at least a·n + b·n²: tiles read longer and longer prefixes."""
            return max(line(low, high), low * times + (high - 2 * low) / 2 * times * (times - 1))

        names = "moved", "by_attention", "host"
        of_all = (parabola(getattr(short, name), getattr(double, name)) for name in names)
        return PassBytes(short.gradients, line(short.beside, double.beside), *of_all)

    def _with(self, tiles: int | None = None, layers: int | None = None) -> "ConfiguredPass":
        """Return the pass with fewer layers, or with fewer tiles of the same size of a shorter sequence."""
        model = self.config.model
        changes = {"layers": layers or model.layers, "checkpoint_layers": 1}  # which changes CPU memory only
        if tiles is not None:
            losses = max(1, model.loss_tiles * tiles // model.feed_forward_tiles)
            changes |= {"feed_forward_tiles": tiles, "loss_tiles": losses}
        return ConfiguredPass(self.config.changed(model=changes))

    def _count_whole(self, length: int) -> PassBytes:
        model, config, batch = self.model, self.config.model, self.config.training.micro_batch
        if config.source is not None:  # source and target keep their fractions of the length
            part = max(1, round(length * config.source.length / self.config.data.sequence_length))
            model.source_length = part
            config = config.changed(source={"length": part})
        tokens = dummy_records(config, batch, length, 0).to(META)
        rng = RngContext(0, 0, torch.arange(batch, device=META), training=True)
        with torch.random.fork_rng([]), META, as_on_a_gpu():
            return count_pass(model, lambda: model(tokens, rng)[0])


def extrapolated(few: PassBytes, many: PassBytes, times: float) -> PassBytes:
    """Add `times` the difference of two passes to the second."""

    def line(low: float, high: float) -> float:
        return high + (high - low) * times

    # Gradients at the end, and gradients when activations are largest; both grow with depth.
    first = line(few.peak(0), many.peak(0))
    last = line(few.peak(int(few.gradients[-1])), many.peak(int(many.gradients[-1])))
    peak = min(last, max(first, line(few.peak(), many.peak())))
    of_all = (line(getattr(few, name), getattr(many, name)) for name in ("moved", "by_attention", "host"))
    return PassBytes(np.array([peak - first]), np.array([first]), *of_all)


def dummy_records(model: ModelConfig, batch: int, length: int, seed: int) -> Tensor:
    """Return (batch, length) random token ids in the form of the model's records.

    With `sentence_order` they consist of two segments that end with the separator; with `padding_token` the last eighth
    is padding, also in the source.
    """
    separator = model.sentence_order.separator if model.sentence_order else None
    special = {model.padding_token, model.document_separator, separator}
    ids = torch.tensor([token for token in range(model.vocabulary) if token not in special])
    tokens = ids[torch.randint(len(ids), (batch, length), generator=torch.Generator().manual_seed(seed))]
    sides = [tokens] if model.source is None else tokens.split([model.source.length, length - model.source.length], 1)
    for side in sides:
        real = side.shape[1] if model.padding_token is None else side.shape[1] - side.shape[1] // 8
        if separator is not None:
            side[:, [real // 2, real - 1]] = separator
        if model.padding_token is not None:
            side[:, real:] = model.padding_token
    return tokens


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Run meta tensors like GPU tensors: with fused attention, `nonzero`, and copies to the CPU and back."""
    experimental = torch.fx.experimental._config
    before = experimental.meta_nonzero_assume_all_nonzero  # assume that `nonzero` selects all elements
    experimental.meta_nonzero_assume_all_nonzero = True
    try:
        with _OnGPU():
            yield
    finally:
        experimental.meta_nonzero_assume_all_nonzero = before


class _OnGPU(TorchFunctionMode):
    """Full attention with torch's fused kernels, not selected for meta tensors, and copies to CPU memory, not supported
    for meta tensors: CPU tensors do not use device memory.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and args[0].is_meta:
            return _fused_attention(*args, **kwargs)
        if function is Tensor.to and args[0].is_meta and len(args) == 2 and isinstance(args[1], str | torch.device):
            return _moved(args[0], torch.device(args[1]))
        return function(*args, **kwargs)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """Return x in CPU memory, represented by one number expanded to its shape, or such a tensor back on the device."""
    if device.type == "cpu":
        return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if not any(x.stride()) else x


def _fused_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Run the kernel that torch selects on a GPU: flash attention, or memory-efficient attention (fp32 or masked)."""
    aten = torch.ops.aten
    if attn_mask is None and q.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    bias = None
    if attn_mask is not None:  # converted to an additive bias for every query and head
        bias = torch.zeros_like(attn_mask, dtype=q.dtype).expand(*q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]
