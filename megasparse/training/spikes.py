"""Loss spikes: a loss far above those of the last steps, found before the update (OLMo 2's rule, arXiv:2501.00656)."""

import math
from collections import deque
from typing import Any

HISTORY = 128
"""Applied losses that a new one is compared with."""
FEWEST = 32
"""With fewer of them nothing is a spike."""
DEVIATIONS = 6.0
SMALLEST_DEVIATION = 1e-3
"""Part of the mean that counts at least: a constant loss deviates by rounding noise, and all else would be a spike."""


class LossGuard:
    """Compares each step's loss with the last applied ones. Decides the same on every rank, and after a resume.

    skip: whether a spike is left out, or only reported.
    """

    def __init__(self, skip: bool):
        self.skip = skip
        self.skipped_in_a_row = 0
        """Steps since the last one that was applied."""
        self.spikes = 0
        """All so far, applied or not."""
        self._losses: deque[float] = deque(maxlen=HISTORY)

    def is_spike(self, loss: float) -> bool:
        """Whether `loss` is finite and more than 6 standard deviations above the mean of the last 128 applied ones."""
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
