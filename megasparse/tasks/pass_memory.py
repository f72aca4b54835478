"""How the memory of a fine-tuning run's passes grows with their length, from a few short ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megasparse.attention.contract import Attention
from megasparse.errors import UserError
from megasparse.ops.random import EVALUATION_STEP, RngContext
from megasparse.planning.memory_curves import Curve, Phases, continued, of_one_length, phases
from megasparse.tasks.backbones import HuggingFaceBody, set_activations
from megasparse.tasks.run import TaskRun
from megasparse.training.ranks import Ranks

LONGEST_TRIAL = 1024
"""Tokens; longer runs are predicted from passes of this length, a half and a quarter of it."""


class TaskPassMemory:
    """The memory curves of a run's model, which is left as it was; each is measured once."""

    def __init__(self, run: TaskRun, ranks: Ranks, length: int, activations: str):
        """Prepare to measure a model. length: of the run's longest input. activations: as `model.activations`."""
        self.run, self.ranks, self.model = run, ranks, run.model
        self.length, self.activations = length, activations
        self.measured: dict[tuple[str, str], Curve] = {}

    def curve(self, activations: str, precision: str) -> Curve:
        """The memory of a pass, "scored" without gradients. Raises UserError where not even the shortest fits."""
        key = (activations, precision)
        if key not in self.measured:
            with _untouched(self.model, precision):
                if activations != "scored":
                    set_activations(self.model.body, activations)
                try:
                    self.measured[key] = self._measured(activations != "scored")
                except torch.OutOfMemoryError:
                    tokens = min(self.length, LONGEST_TRIAL)
                    problem = f"this run cannot fit: not even one sequence of {tokens} tokens does"
                    raise UserError(f"{problem}. Choose a smaller model, or lower task.max_length") from None
                finally:
                    set_activations(self.model.body, self.activations)
        return self.measured[key]

    def _measured(self, learns: bool) -> Curve:
        if self.length <= LONGEST_TRIAL:  # no need to continue: one sequence, and two
            one, two = (self._phases(batch, self.length, learns) for batch in (1, 2))
            return of_one_length(one, two, self.length)
        lengths = [LONGEST_TRIAL // 4, LONGEST_TRIAL // 2, LONGEST_TRIAL]
        return continued(lengths, [self._phases(1, length, learns) for length in lengths], _sees_all_pairs(self.model))

    def _phases(self, batch: int, length: int, learns: bool) -> Phases:
        device = self.ranks.device
        inputs = self.run.form.dummy_batch(self.model.body, batch, length).to(device)
        step = 0 if learns else EVALUATION_STEP
        rng = RngContext(self.run.config.run.seed, step, torch.arange(batch, device=device), training=learns)
        return phases(self.model, lambda: self.model.train(learns)(inputs, rng)[0], device, learns)


def _sees_all_pairs(model: Any) -> bool:
    body = model.body
    unreplaced = isinstance(body, HuggingFaceBody) and not body.replaced
    return unreplaced or any(isinstance(module, Attention) and module.all_pairs for module in body.modules())


@contextmanager
def _untouched(model: Any, precision: str) -> Iterator[None]:
    """Cast the weights inside the block. Afterwards weights, generators and mechanisms' sums are as before."""
    cuda = [weight.device for weight in model.parameters() if weight.device.type == "cuda"][:1]
    kept, training = {weight: weight.data for weight in model.parameters()}, model.training
    with torch.random.fork_rng(cuda):
        try:
            if precision == "bf16":
                for weight in kept:
                    weight.data = weight.data.bfloat16()
            yield
        finally:
            for weight, data in kept.items():
                weight.data = data
            model.train(training)
            for module in model.modules():
                if isinstance(module, Attention):
                    module.after_step(False, lambda sums: sums)
