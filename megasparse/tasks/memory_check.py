"""Prediction of whether a fine-tuning run fits into memory, before its first step.

States are counted by ZeRO's table. Activations are counted in a few short passes of the run's own model on its device,
phase by phase, and continued to the run's longest input by a line, or by a parabola if attention sees all pairs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megasparse.attention.contract import Attention
from megasparse.config.finetuning import FinetuneConfig, FinetuneTrainingConfig
from megasparse.errors import UserError
from megasparse.ops.random import EVALUATION_STEP, RngContext
from megasparse.optimizers import OPTIMIZERS
from megasparse.planning.passes import PassBytes, count_pass
from megasparse.planning.states import ERROR, MemoryPool, States, Zero, gigabytes, local_ranks, memory
from megasparse.tasks.backbones import HuggingFaceBody, count_layers
from megasparse.tasks.batches import MULTIPLE
from megasparse.tasks.run import TaskRun
from megasparse.training.ranks import Ranks
from megasparse.training.reporting.memory import available_bytes

LONGEST_TRIAL = 1024
"""Tokens; longer inputs are predicted from passes of this length, a half and a quarter of it."""
HINT = (
    'Lower training.micro_batch, evaluation.batch or task.max_length, set training.precision="bf16" or '
    'activations="checkpoint", or train adapters (lora)'
)


@dataclass(frozen=True)
class MemoryEstimate:
    """The predicted memory of a run."""

    config: FinetuneConfig
    trained: int
    frozen: int
    length: int
    pools: list[MemoryPool]
    device: str

    @property
    def fits(self) -> bool:
        return all(pool.peak <= pool.available for pool in self.pools)

    def lines(self) -> str:
        """Return the report that --dry-run prints."""
        training, length = self.config.training, f"{self.length:,}"
        rows = [
            f"parameters       {self.trained:,} trained, {self.frozen:,} frozen",
            f"micro-batch      {_at_once(training, self.length)} × {length} tokens in {training.precision} on "
            f"{self.device}",
        ]
        for pool in self.pools:
            rows += [f"{name:16} {gigabytes(size)}" for name, size in pool.parts.items() if size]
            short = " (does not fit)" if pool.peak > pool.available else ""
            title = f"peak of {pool.name}"
            rows.append(f"{title:16} {gigabytes(pool.peak)}, available {gigabytes(pool.available)}{short}")
        refused = any(pool.peak * (1 - ERROR) > pool.available for pool in self.pools)
        verdict = "fits" if self.fits else "DOES NOT FIT" if refused else "MAY NOT FIT: too near to the limit"
        return "\n".join([*rows, verdict, *([] if self.fits else [HINT])])


def predict(run: TaskRun, ranks: Ranks) -> MemoryEstimate:
    """Predict the peak memory of a run's steps and validations, from a few short passes of its model on its device.

    The model is left as it was.

    Raises:
        UserError: not even the short passes fit.
    """
    config, model, device = run.config, run.model.to(ranks.device), ranks.device
    training, world, cuda = config.training, ranks.world_size, ranks.device.type == "cuda"
    weights = list(model.parameters())
    sizes = [weight.numel() for weight in weights if weight.requires_grad]
    trained, frozen = sum(sizes), sum(weight.numel() for weight in weights) - sum(sizes)
    held = sum(weight.nbytes for weight in weights)
    longest = max(example.length for example in run.train)
    length = min(config.task.max_length, -(-max(longest, 1) // MULTIPLE) * MULTIPLE)
    batch = _at_once(training, length)
    with _unchanged(model, training.precision):
        try:
            learning = _pass_bytes(run, ranks, batch, length, learns=True)
            scoring = _pass_bytes(run, ranks, config.evaluation.batch, length, learns=False)
        except torch.OutOfMemoryError:
            problem = f"this run cannot fit: not even one sequence of {min(length, LONGEST_TRIAL)} tokens does"
            raise UserError(f"{problem}. Choose a smaller model, or lower task.max_length") from None
    moments = OPTIMIZERS[config.optimizer.name].bytes_per_weight * trained
    needed = memory(
        States(trained, frozen, max(sizes), moments, training.precision == "bf16"),
        Zero.of(config.run.engine, config.deepspeed, world > 1 and cuda),
        world,
        passing=learning.peak(),
        again=learning.peak(gradients=0),
        accumulated=training.global_batch > training.micro_batch * world,
        other=scoring.peak(gradients=0),
        on_gpu=cuda,
    )
    available, host = available_bytes(device), {name: size for name, size in needed.host.items() if size}
    if not cuda:
        pool = MemoryPool("memory", needed.device | host, available // local_ranks(world) + held)
        return MemoryEstimate(config, trained, frozen, length, [pool], str(device))
    stack = getattr(model.body, "stack", None)
    settings = config.model or (None if stack is None else stack.config)
    if (config.start.activations or (settings and settings.activations)) == "checkpoint_cpu":
        size = 2 if training.precision == "bf16" else 4
        host["offloaded activations"] = batch * length * model.body.width * size * count_layers(model.body)
    pools = [MemoryPool("GPU memory", needed.device, available + held)]
    if host:
        pools.append(MemoryPool("CPU memory", host, available_bytes(torch.device("cpu")) // local_ranks(world)))
    return MemoryEstimate(config, trained, frozen, length, pools, str(device))


def _pass_bytes(run: TaskRun, ranks: Ranks, batch: int, length: int, learns: bool) -> PassBytes:
    """Return the bytes of a pass of B inputs of L tokens, with its backward if `learns`: in each phase
    constant + B·(linear·L + square·L²), continued from short passes of the run's model.
    """

    def count(examples: int, tokens: int) -> PassBytes:
        inputs = run.form.dummy_batch(run.model.body, examples, tokens).to(ranks.device)
        step = 0 if learns else EVALUATION_STEP
        rng = RngContext(run.config.run.seed, step, torch.arange(examples, device=ranks.device), training=learns)
        return count_pass(run.model, lambda: run.model.train(learns)(inputs, rng)[0], learns)

    if length <= LONGEST_TRIAL:  # no need to continue: one sequence, and two
        one, two = count(1, length), count(2, length)
        linear = np.maximum(two.beside - one.beside, 0) / length
        return PassBytes(one.gradients, one.beside - linear * length + batch * (linear * length))
    lengths, body = np.array([LONGEST_TRIAL // 4, LONGEST_TRIAL // 2, LONGEST_TRIAL]), run.model.body
    passes = [count(1, tokens) for tokens in lengths.tolist()]
    values = np.stack([counted.beside for counted in passes])
    unreplaced = isinstance(body, HuggingFaceBody) and not body.replaced
    square = np.zeros_like(values[2])
    if unreplaced or any(isinstance(module, Attention) and module.all_pairs for module in body.modules()):
        flat, steep = np.diff(values, axis=0) / np.diff(lengths)[:, None]
        square = np.maximum(0.0, (steep - flat) / (lengths[2] - lengths[0]))
    values = values - square * (lengths**2)[:, None]
    linear = np.maximum(0.0, (values[2] - values[1]) / (lengths[2] - lengths[1]))
    constant = values[2] - linear * lengths[2]
    return PassBytes(passes[2].gradients, constant + batch * (linear * length + square * length**2))


def _at_once(training: FinetuneTrainingConfig, length: int) -> int:
    """Examples of a micro-batch whose inputs have this length."""
    return training.micro_batch if training.batch_unit == "examples" else max(1, training.micro_batch // length)


@contextmanager
def _unchanged(model: Any, precision: str) -> Iterator[None]:
    """Cast the weights inside the block; afterwards weights, generators and mechanisms' sums are as before."""
    cuda = [weight.device for weight in model.parameters() if weight.device.type == "cuda"][:1]
    data, training = {weight: weight.data for weight in model.parameters()}, model.training
    with torch.random.fork_rng(cuda):
        try:
            if precision == "bf16":
                for weight in data:
                    weight.data = weight.data.bfloat16()
            yield
        finally:
            for weight, values in data.items():
                weight.data = values
            model.train(training)
            for module in model.modules():
                if isinstance(module, Attention):
                    module.after_step(False, lambda sums: sums)
