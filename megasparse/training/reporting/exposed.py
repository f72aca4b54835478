"""Communication that no computation hides: the part of a step that a rank spends on, or waiting for, the others."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megasparse.training.reporting.stopwatch import Stopwatch


class ExposedCommunication:
    """Seconds between the end of a rank's own backward pass (its last gradient is there) and the end of the update,
    without those in which its optimizer computes; and those inside `meeting`.

    That is what is left of reducing gradients, the gradient's norm, gathering updated weights, and waiting for slower
    ranks; with an optimizer whose state is on a disk its reading and writing too. Communication inside the two passes
    (gathering the weights under ZeRO 3, reductions that block the backward) is not seen: it is a lower bound. A hook a
    gradient; only `seconds` waits, for the end of the update, as the ranks' next meeting would.
    """

    def __init__(self, device: torch.device, weights: Iterable[Tensor], optimizer: torch.optim.Optimizer):
        """Hook into the gradients of `weights`. Made before anyone else hooks into them."""
        self._after_backward, self._optimizing, self.meeting = (Stopwatch(device) for _ in range(3))
        for weight in weights:
            weight.register_post_accumulate_grad_hook(self._computed)
        optimizer.register_step_pre_hook(lambda *_: self._optimizing.start())
        optimizer.register_step_post_hook(lambda *_: self._optimizing.stop())

    def _computed(self, weight: Any) -> None:
        self._after_backward.start()

    def seconds(self) -> float:
        """Exposed communication of the step whose update was just done."""
        self._after_backward.stop()
        return max(0.0, self._after_backward.seconds() - self._optimizing.seconds()) + self.meeting.seconds()
