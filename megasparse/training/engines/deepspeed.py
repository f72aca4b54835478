"""Training with DeepSpeed ZeRO. Only this file and config/deepspeed_section.py depend on DeepSpeed."""

import io
import itertools
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from megasparse.config.deepspeed_section import import_deepspeed, overlaps_communication
from megasparse.config.schema import RunSettings
from megasparse.data.batches import check_shares
from megasparse.files import open_regular
from megasparse.optimizers import build_optimizer, state_tensors
from megasparse.optimizers.muon import Muon
from megasparse.optimizers.partitioned_adafactor import FACTORS, PartitionedAdafactor, Piece
from megasparse.training.checkpoints.checkpoint import Fragment
from megasparse.training.engines.contract import Engine, MakeRng, Weights, move_buffers, put, whole_fragments
from megasparse.training.ranks import Ranks


class DeepSpeedEngine(Engine):
    """ZeRO stage 0 to 3 on any number of ranks, optimizer and weights on the device or in CPU memory."""

    def __init__(self, model: nn.Module, config: RunSettings, make_rng: MakeRng, ranks: Ranks, weights: Weights):
        super().__init__(model, config, make_rng, ranks)
        self._stage: int = config.zero.get("stage", 0)
        self._rounded = config.training.precision == "bf16"
        deepspeed = _deepspeed_for(ranks)
        self.replicated = self._stage == 0
        self._names = {id(p): name for name, p in self._trained.items()}
        settings = _deepspeed_config(config, self._stage, ranks)
        for module in model.modules():
            if getattr(module, "gathered_at_once", False):
                deepspeed.utils.set_z3_leaf_module(module, True)
        with _lines_in(Path(config.run.directory)):
            if self._stage < 3:
                weights.fill(ranks.device)
            else:
                self._partition(weights, settings)
            self.optimizer = build_optimizer(self._trained, config.optimizer, self._stage > 0, self._shapes)
            groups = enumerate(self.optimizer.param_groups)
            self._group_of = {self._names[id(p)]: number for number, group in groups for p in group["params"]}
            self._engine = deepspeed.initialize(model=model, optimizer=self.optimizer, config=settings)[0]
            self._forward = self._engine
        self.optimizer.state.clear()  # ZeRO 0 in bf16 ran a step with zero gradients, which would count as an update
        if isinstance(self.optimizer, PartitionedAdafactor):
            total = lambda values: ranks.sum(values.to(ranks.device)).to(values.device)  # noqa: E731
            self.optimizer.attach(self._contents(), total)
        elif isinstance(self.optimizer, Muon) and self._stage > 0:
            contents = self._contents()
            pieces = {piece.name: piece for vector in contents.values() for piece in vector}
            places = ranks.gather([(piece.start, piece.numel) for piece in pieces.values()])
            spans = dict(zip(pieces, zip(*places, strict=True), strict=True))
            self.optimizer.attach(contents, spans, ranks.rank, ranks.exchange)

    def _partition(self, weights: Weights, settings: dict[str, Any]) -> None:
        """Partition the model for ZeRO 3, weight by weight, each rank reading only its pieces. `deepspeed.initialize`
        would need the whole model on every rank.
        """
        deepspeed = import_deepspeed()
        deepspeed.init_distributed()  # else the settings are validated for a single rank
        init = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=settings)
        ranks = 1 if init.zero_param_process_group is not None else self.ranks.world_size  # groups need other pieces
        weight: Any
        for name, weight in weights.model.named_parameters():
            size = -(-weight.numel() // ranks)
            start = min(self.ranks.rank % ranks * size, weight.numel())
            stop, dtype = min(start + size, weight.numel()), torch.bfloat16 if self._rounded else weight.dtype
            piece = weights.read(name, weight, start, stop - start)
            whole = torch.empty(weight.shape, dtype=dtype, device=self.ranks.device)  # only this rank's piece is filled
            whole.view(-1)[start:stop] = piece
            put(weight, whole)
            del piece, whole  # else two weights would be in memory at once
            init._convert_to_deepspeed_param(weight)
            weight.partition()
        move_buffers(weights.model, self.ranks.device)

    def _backward(self, objective: Tensor, micro_batches: int, last: bool, poison_gradient: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed skips a step on every rank if its gradient is not finite.
        self._engine.backward(objective * torch.nan if poison_gradient else objective)

    @torch.no_grad()  # DeepSpeed gathers into weights that require gradients, which Gloo of torch 2.7 cannot write
    def _update(self, apply_update: bool, norm: float | None) -> tuple[float, bool]:
        if self._stage == 0 and not self._rounded:  # DeepSpeed would apply a NaN gradient in this case
            gradients = [p.grad for p in self._trained.values() if p.grad is not None]
            whole = torch.nn.utils.get_total_norm(gradients).item()
            if not (apply_update and math.isfinite(whole)):
                self._engine.zero_grad()
                return whole, False
            self._engine.step()
            return whole, True
        self._engine.step()
        return float(self._engine.get_global_grad_norm()), bool(self._engine.was_step_applied())

    def gradients(self) -> Iterable[Tensor]:
        averaged = getattr(self._engine.optimizer, "averaged_gradients", {})  # ZeRO's gradients of this rank's part
        partitioned = (gradient for group in averaged.values() for gradient in group or ())
        return itertools.chain((p.grad for p in self._trained.values() if p.grad is not None), partitioned)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in super().weights():
            yield name, weight if self._stage < 3 else getattr(weight, "ds_tensor", weight)

    def _state(self) -> Iterator[Fragment]:
        if self._stage == 0:
            yield from whole_fragments(self._masters(), self.optimizer)
            return
        for flat, piece in self._pieces():
            state = state_tensors(self.optimizer.state.get(flat, {}))
            aligned = {kind: tensor for kind, tensor in state.items() if kind not in FACTORS}
            for kind, tensor in {"weight": flat, **aligned}.items() if piece.numel else ():
                yield Fragment(kind, piece.name, piece.shape, piece.start, piece.of(tensor.detach()))

    def _state_owners(self) -> Iterator[Tensor]:
        if self._stage < 3:
            yield from (weight for group in self.optimizer.param_groups for weight in group["params"])
            return
        yield from self._engine.optimizer.fp32_partitioned_groups_flat

    def _masters(self) -> dict[str, Tensor]:
        """Map parameter names to fp32 weights under ZeRO 0."""
        if not self._rounded:
            return dict(self._trained)
        wrapper = self._engine.optimizer
        groups = zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        return {self._names[id(p)]: master for pair in groups for p, master in zip(*pair, strict=True)}

    def _pieces(self) -> Iterator[tuple[Tensor, Piece]]:
        """Yield (flat vector, piece of a trained weight in it) under ZeRO 1 to 3; the piece may be empty on this rank.
        ZeRO 1 and 2: a parameter group is one vector, and each rank updates a slice of it. ZeRO 3: each weight is split
        evenly among the ranks, the last piece padded, and the pieces of a sub-group are one vector.
        """
        p: Any
        span: Any
        if self._stage < 3:
            for name, p in self._trained.items():
                flat, span = self.optimizer.param_groups[self._group_of[name]]["params"][0], ()
                if (mapping := p._hp_mapping) is not None:
                    address = mapping.hp_fragment_address
                    span = mapping.lp_fragment_address.start, address.numel, address.start
                yield flat, Piece(name, self._shapes[name], *span)
            return
        zero = self._engine.optimizer
        for number, group in enumerate(zero.fp16_groups):
            for p in group:
                name, size = self._names[id(p)], p.ds_tensor.ds_numel
                start, span = self.ranks.rank * size, ()
                if (numel := min(size, p.ds_numel - start)) > 0:
                    span = start, numel, zero.grad_position[zero.get_param_id(p)][1]
                yield zero.fp32_partitioned_groups_flat[number], Piece(name, self._shapes[name], *span)

    def _contents(self) -> dict[Tensor, list[Piece]]:
        contents: dict[Tensor, list[Piece]] = {}
        for flat, piece in self._pieces():
            contents.setdefault(flat, []).append(piece)
        return contents

    def _replicated_state(self) -> Iterator[Fragment]:
        if isinstance(self.optimizer, PartitionedAdafactor):
            for kind, piece, shape, numbers in self.optimizer.factors():
                yield Fragment(kind, piece.name, shape, 0, numbers)

    def close(self) -> None:
        self._engine.destroy()


@contextmanager
def _lines_in(run: Path) -> Iterator[None]:
    """Append DeepSpeed's output and log to RUN/deepspeed.log, or discard it if that cannot be written."""
    with ExitStack() as opened:
        file: TextIO = io.StringIO()
        with suppress(OSError):
            file = opened.enter_context(open(run / "deepspeed.log", "a", encoding="utf-8", opener=open_regular))
        logger = logging.getLogger("DeepSpeed")
        handlers = [handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]
        streams = [(handler, handler.setStream(file)) for handler in handlers]
        opened.callback(lambda: [handler.setStream(stream) for handler, stream in streams])
        opened.enter_context(redirect_stdout(file))
        yield


def _deepspeed_for(ranks: Ranks) -> Any:
    deepspeed = import_deepspeed()
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if ranks.device.type == "cpu" and get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())
    # A C++ all-reduce for inference only, which needs g++, minutes of compilation, and 69 MB of /dev/shm per rank.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _deepspeed_config(config: RunSettings, stage: int, ranks: Ranks) -> dict[str, Any]:
    """Merge the section `deepspeed` with the settings that other sections determine."""
    training, zero = config.training, config.zero
    share = training.micro_batch * ranks.data_ranks
    check_shares(training.global_batch, training.micro_batch, ranks.world_size, ranks.sequence_size)
    generated: dict[str, Any] = {
        "train_batch_size": training.global_batch * ranks.sequence_size,  # DeepSpeed assumes different data per rank
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": training.global_batch // share,
        "gradient_clipping": training.gradient_clipping,
        "bf16": {"enabled": training.precision == "bf16"},
        "zero_allow_untested_optimizer": True,  # DeepSpeed knows only torch's optimizers; megasparse tests the others
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW also runs on the CPU, with the same result
    }
    if training.precision == "bf16" and stage > 0:  # ZeRO 0 supports only accumulation in bf16
        generated["data_types"] = {"grad_accum_dtype": "fp32"}
    if overlaps_communication(zero, ranks.device.type == "cuda" and ranks.world_size > 1):
        generated["zero_optimization"] = {"overlap_comm": True} | zero
    return {**config.deepspeed, **generated}
