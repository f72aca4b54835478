"""The best step by a held-out scalar, and early stopping."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasparse.data.files import replacing

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
        """Whether `patience` evaluations in a row were no better."""
        return 0 < self.patience <= self.without_better

    def verdict(self) -> str:
        """Why training ended, for people."""
        return f"{self.scalar} has not been better than at step {self.step} for {self.without_better} evaluations"

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
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
