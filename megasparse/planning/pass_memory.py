"""Memory of a pretraining run's passes: measured at short lengths on the CPU, or counted as a GPU would allocate.

A counted pass runs on torch's meta device, where tensors have shapes and no memory: the host code of the Triton kernels
allocates what it allocates on a GPU, and starts nothing. It takes seconds whatever the model's size, and no weight
exists. What a kernel takes inside itself (shared memory, registers) is no GPU memory; cuBLAS' workspace is not seen.

Blockwise code works on blocks of bounded size, which a short pass may not fill where the run does: a line through short
passes would be too steep. So a pass over a part of the run's length has blocks of the same part (ops/blocks.py): all
that grows with the length, and all blocks, full or not, take that part of what they take in the run.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megasparse.attention.contract import Attention
from megasparse.config.schema import Config
from megasparse.model.adapters import add_adapters
from megasparse.model.build import build_model, empty_model
from megasparse.model.encoder import Encoder
from megasparse.model.head_groups import few_groups
from megasparse.ops.random import RngContext
from megasparse.optimizers import OPTIMIZERS
from megasparse.planning.depth import deeper, shallow
from megasparse.planning.dry_run import dummy_records
from megasparse.planning.memory_curves import Curve, Phases, continued, phases
from megasparse.planning.states import States

Path = Literal["measured", "counted"]
LONGEST_TRIAL = 4096
"""Tokens of a measured pass, at most."""
SHORTEST = 1024
"""Runs up to this length are measured at their own; longer ones from a quarter of it at most."""


class PassMemory:
    """The memory of a rank's passes. path: "measured" by blockwise torch on the CPU, or "counted" by GPU kernels."""

    def __init__(self, config: Config, path: Path):
        # Dropout of attention probabilities has no kernels to count; its blocks are no larger than what it replaces.
        self.config, self.path = _without_attention_dropout(config), path
        self._device = torch.device("cpu" if path == "measured" else "meta")

    @cached_property
    def model(self) -> nn.Module:
        config = self.config.model
        with self._device:
            model: Any = build_model(config, 0) if self.path == "measured" else empty_model(config)
            if isinstance(model, Encoder) and config.masking.whole_words:
                model.word_starts = torch.ones(config.vocabulary, dtype=torch.bool)
            if self.config.lora is not None:
                add_adapters(model, self.config.lora, 0)
        if self.config.training.precision == "bf16":
            for weight in model.parameters():
                weight.data = weight.data.bfloat16()
        return model.train()

    @cached_property
    def states(self) -> States:
        weights = list(self.model.parameters())
        trained = [weight for weight in weights if weight.requires_grad]
        number, largest = sum(w.numel() for w in trained), max(w.numel() for w in trained)
        optimizer = OPTIMIZERS[self.config.optimizer.name]
        moments = sum(optimizer.state_bytes(weight.shape) for weight in trained)
        scratch = max(optimizer.scratch_bytes(weight.shape) for weight in trained)
        frozen = sum(weight.numel() for weight in weights) - number
        rounded = self.config.training.precision == "bf16"
        return States(number, frozen, largest, moments, rounded, scratch, optimizer.state_per_number)

    @property
    def length(self) -> int:
        """Number of tokens of a sequence on one rank."""
        return self.config.data.sequence_length // self.config.parallel.sequence

    @property
    def lengths(self) -> list[int]:
        """Lengths of the passes that the curve is continued from, ascending."""
        longest = self.length
        if self.path == "measured" and longest > SHORTEST:
            longest = min(longest // 4, LONGEST_TRIAL)
        return [longest // 4, longest // 2, longest][0 if self._all_pairs else 1 :]

    @cached_property
    def curve(self) -> Curve:
        """The curve of the configured micro-batch. Away from the run's own length, blocks scale with the length."""
        lengths, batch = self.lengths, self.config.training.micro_batch
        found = continued(lengths, [self._deep_phases(batch, length) for length in lengths], self._all_pairs)
        return replace(found, linear=found.linear / batch, square=found.square / batch)

    @property
    def _all_pairs(self) -> bool:
        source = self.config.model.source
        crosses = source is not None and source.cross_attention == "full"
        return crosses or any(isinstance(module, Attention) and module.all_pairs for module in self.model.modules())

    @cached_property
    def _shallow(self) -> list["PassMemory"]:
        """The passes of two shallow models that stand for a deep one; none where it is measured itself."""
        configs = (self.config.model_copy(update={"model": model}) for model in shallow(self.config.model))
        return [PassMemory(config, self.path) for config in configs]

    def _deep_phases(self, batch: int, length: int) -> Phases:
        if not self._shallow:
            return self._phases(batch, length)
        model = self.config.model
        three, four = (passes._phases(batch, length) for passes in self._shallow)
        return deeper(three, four, len(model.attention.pattern), model.layers)

    def _phases(self, batch: int, length: int) -> Phases:
        model: Any = self.model
        source = self.config.model.source
        config = self.config.model
        if source is not None:  # each side keeps its share of the length
            part = max(1, round(length * source.length / self.config.data.sequence_length))
            model.source_length = part
            config = config.model_copy(update={"source": source.model_copy(update={"length": part})})
        tokens = dummy_records(config, batch, length, 0).to(self._device)
        rng = RngContext(0, 0, torch.arange(batch, device=self._device), training=True)
        place = as_on_a_gpu() if self.path == "counted" else nullcontext()
        with torch.random.fork_rng([]), self._device, place, few_groups():
            return phases(model, lambda: model(tokens, rng)[0], self._device, learns=True)


def _without_attention_dropout(config: Config) -> Config:
    model, source = config.model, config.model.source
    changes: dict[str, Any] = {"attention": model.attention.model_copy(update={"dropout": 0.0})}
    if source is not None and source.attention is not None:
        attention = source.attention.model_copy(update={"dropout": 0.0})
        changes["source"] = source.model_copy(update={"attention": attention})
    return config.model_copy(update={"model": model.model_copy(update=changes)})


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Lets tensors of the meta device go where those of a GPU would: to fused attention, past `nonzero`, and to CPU
    memory and back."""
    experimental = torch.fx.experimental._config
    before = experimental.meta_nonzero_assume_all_nonzero  # where rows are chosen, the most there can be
    experimental.meta_nonzero_assume_all_nonzero = True
    try:
        with _OnGPU():
            yield
    finally:
        experimental.meta_nonzero_assume_all_nonzero = before


class _OnGPU(TorchFunctionMode):
    """Full attention by torch's fused kernels, which the meta device would not choose, and copies to CPU memory, which
    it would refuse: there a tensor takes nothing of the device.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and args[0].is_meta:
            return _fused_attention(*args, **kwargs)
        if function is Tensor.to and args[0].is_meta and len(args) == 2 and isinstance(args[1], str | torch.device):
            return _moved(args[0], torch.device(args[1]))
        return function(*args, **kwargs)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """`x` in CPU memory, a tensor of its shape over one number, or such a tensor back on the device."""
    if device.type == "cpu":
        return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if not any(x.stride()) else x


def _fused_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """The kernel that torch chooses on a GPU: flash attention, or the memory-efficient one in fp32 or with a mask."""
    aten = torch.ops.aten
    if attn_mask is None and q.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    bias = None
    if attn_mask is not None:  # it becomes numbers, a row for every query and head
        bias = torch.zeros_like(attn_mask, dtype=q.dtype).expand(*q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]
