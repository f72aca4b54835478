"""The part of the training loop's state that checkpoints store."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasparse.files import write_file
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines.contract import Engine

KEPT = ("step", "value", "scalars", "without_better")


class Selection:
    """The best value so far of one scalar, and the step it was reached at.

    patience: end training after this many evaluations in a row without a better value; 0 disables. scalars: of the
    evaluation at the best step. without_better: evaluations since.
    """

    def __init__(self, scalar: str, patience: int = 0, lower: bool = False):
        self.scalar, self.patience, self.sign = scalar, patience, -1 if lower else 1
        self.step: int | None = None
        self.value: float | None = None
        self.scalars: dict[str, float] = {}
        self.without_better = 0

    def note(self, step: int, scalars: Mapping[str, float]) -> bool:
        """Record a step's scalars, if it was evaluated. Return True if they contain the best value so far, of equal
        values the first. NaN is worse than any number.
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
        return 0 < self.patience <= self.without_better

    def state(self) -> dict[str, Any]:
        return {"metric": self.scalar, **{name: getattr(self, name) for name in KEPT}}

    def write(self, file: Path) -> None:
        write_file(file, json.dumps(self.state(), indent=2) + "\n")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`, unless it is empty or of another scalar, which is not comparable."""
        if state.get("metric") == self.scalar:
            for name in KEPT:
                setattr(self, name, state[name])


class LoopState:
    """Step, position in the data, last loss and selection, restored from the checkpoint `start`."""

    def __init__(self, start: Checkpoint | None, selection: Selection | None):
        state: dict[str, Any] = start.state if start else {}
        self.step = start.step if start else 0
        self.sequences = start.sequences if start else 0
        self.pending: bool = state.get("evaluation_pending", False)  # a stop interrupted the evaluation of this step
        self.loss: float | None = state.get("loss")
        """Loss of the last step; None if it is not finite."""
        self.skipped_in_a_row: int = state.get("skipped_in_a_row", 0)
        """Steps since the last applied one."""
        self.selection = selection or Selection("")  # no scalar has this name
        self.selection.restore(state.get("selection") or {})

    @property
    def ended_early(self) -> str:
        """Reason why the selection ended training, if it did."""
        if not (best := self.selection).exhausted:
            return ""
        return f"{best.scalar} has not been better than at step {best.step} for {best.without_better} evaluations"

    def state(self) -> dict[str, Any]:
        selection = self.selection.state() if self.selection.scalar else None
        return {
            "loss": self.loss,
            "skipped_in_a_row": self.skipped_in_a_row,
            "selection": selection,
            "evaluation_pending": self.pending,
        }

    def save(self, engine: Engine, saver: Saver) -> None:
        """Save this step, unless its checkpoint exists or is being written."""
        saver.finish()
        if saver.saved != self.step:
            saver.save(engine, self.step, self.sequences, self.state())
