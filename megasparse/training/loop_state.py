"""State of the training loop that checkpoints store: progress, the last losses, and the best evaluation."""

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasparse.data.batches import Step
from megasparse.data.files import replacing
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines.contract import Engine, StepResult

HISTORY = 128
"""Applied losses that a new one is compared with."""
FEWEST = 32
"""With fewer of them nothing is a spike."""
DEVIATIONS = 6.0
SMALLEST_DEVIATION = 1e-3
"""Part of the mean that counts at least: a constant loss deviates by rounding noise, and all else would be a spike."""


class LossGuard:
    """Finds loss spikes, losses far above the last applied ones, before the update (OLMo 2's rule, arXiv:2501.00656).

    Decides the same on every rank, and after a resume.
    """

    def __init__(self) -> None:
        self.skipped_in_a_row = 0
        """Steps since the last one that was applied."""
        self.spikes = 0
        """All so far, applied or not."""
        self._losses: deque[float] = deque(maxlen=HISTORY)

    def is_spike(self, loss: float) -> bool:
        """True if `loss` is finite and more than 6 standard deviations above the mean of the last 128 applied ones."""
        if len(self._losses) < FEWEST or not math.isfinite(loss):
            return False
        mean = math.fsum(self._losses) / len(self._losses)
        deviation = math.hypot(*(x - mean for x in self._losses)) / math.sqrt(len(self._losses))
        return loss > mean + DEVIATIONS * max(deviation, SMALLEST_DEVIATION * abs(mean))

    def note(self, loss: float, applied: bool) -> bool:
        """Count a step, and keep its loss if it was applied. Returns whether the loss is a spike."""
        spike = self.is_spike(loss)
        self.spikes += spike
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        if applied and math.isfinite(loss):
            self._losses.append(loss)
        return spike

    def state(self) -> dict[str, Any]:
        """The state as JSON, which keeps every bit of a finite float."""
        return {"losses": list(self._losses), "skipped_in_a_row": self.skipped_in_a_row, "spikes": self.spikes}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`; {} begins anew."""
        self._losses = deque(state.get("losses", []), maxlen=HISTORY)
        self.skipped_in_a_row = state.get("skipped_in_a_row", 0)
        self.spikes = state.get("spikes", 0)


KEPT = ("step", "value", "scalars", "without_better")
"""Attributes of a Selection that a checkpoint keeps."""


class Selection:
    """The best value so far of one scalar; part of a checkpoint's state.

    patience: evaluations in a row without a better one after which training ends; 0 never ends it. lower: lower values
    are better, rather than higher ones.
    """

    def __init__(self, scalar: str, patience: int = 0, lower: bool = False):
        self.scalar, self.patience, self.sign = scalar, patience, -1 if lower else 1
        self.step: int | None = None
        """Step of the best value."""
        self.value: float | None = None
        self.scalars: dict[str, float] = {}
        """All scalars of the evaluation at that step."""
        self.without_better = 0
        """Evaluations since then."""

    def note(self, step: int, scalars: Mapping[str, float]) -> bool:
        """Take in a step's scalars, which include ours where the step was evaluated. Returns whether it is the best so
        far; of equal values the first counts. NaN is worse than anything.
        """
        if (value := scalars.get(self.scalar)) is None:
            return False
        if value != value or (self.value is not None and self.sign * value <= self.sign * self.value):
            self.without_better += 1
            return False
        self.step, self.value, self.without_better = step, value, 0
        self.scalars = {name: reported for name, reported in scalars.items() if name.startswith("evaluation/")}
        return True

    @property
    def exhausted(self) -> bool:
        """True if `patience` evaluations in a row were no better."""
        return 0 < self.patience <= self.without_better

    def verdict(self) -> str:
        """Why training ended, for people."""
        return f"{self.scalar} has not been better than at step {self.step} for {self.without_better} evaluations"

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores, as JSON."""
        return {"metric": self.scalar, **{name: getattr(self, name) for name in KEPT}}

    def write(self, file: Path) -> None:
        """Write the state to a JSON file."""
        with replacing(file) as out:
            out.write(json.dumps(self.state(), indent=2).encode() + b"\n")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave, unless it is empty, or of another scalar, whose values cannot be compared."""
        if state.get("metric") == self.scalar:
            for name in KEPT:
                setattr(self, name, state[name])


class LoopState:
    """Step, position in the data, loss guard and selection, restored from the checkpoint `start`."""

    def __init__(self, start: Checkpoint | None, selection: Selection | None):
        state: dict[str, Any] = start.state if start else {}
        self.step = start.step if start else 0
        self.sequences = start.sequences if start else 0
        """Position in the data."""
        self.saved = self.step
        """Step of the newest checkpoint."""
        self.guard = LossGuard()
        self.guard.restore(state.get("loss_guard", {}))
        self.selection = selection
        if selection is not None:
            selection.restore(state.get("selection", {}))

    def advance(self, data: Step, result: StepResult) -> bool:
        """Count a step. Return True if its loss is a spike."""
        self.step += 1
        self.sequences = data.position
        return self.guard.note(result.loss, result.applied)

    @property
    def ended_early(self) -> str:
        """Reason why the selection ended training; empty if it did not."""
        return self.selection.verdict() if self.selection is not None and self.selection.exhausted else ""

    def save(self, engine: Engine, saver: Saver) -> None:
        """Save this step, unless it is saved or being saved."""
        self.finish(saver)
        if self.saved != self.step:
            state: dict[str, Any] = {"loss_guard": self.guard.state()}
            if self.selection is not None:
                state["selection"] = self.selection.state()
            self._note(saver.save(engine, self.step, self.sequences, state))

    def finish(self, saver: Saver) -> None:
        """Complete the checkpoint that is being written, if any."""
        self._note(saver.finish())

    def _note(self, path: Path | None) -> None:
        if path is not None:
            self.saved = int(path.name)
