"""How far a run is: what a checkpoint keeps of the training loop."""

from pathlib import Path
from typing import Any

from megasparse.data.batches import Step
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines.contract import Engine, StepResult
from megasparse.training.selection import Selection
from megasparse.training.spikes import LossGuard


class LoopState:
    """Step, position in the data, loss guard and selection, restored from the checkpoint `start`."""

    def __init__(self, start: Checkpoint | None, skip_loss_spikes: bool, selection: Selection | None):
        state: dict[str, Any] = start.state if start else {}
        self.step = start.step if start else 0
        self.sequences = start.sequences if start else 0
        """Position in the data."""
        self.saved = self.step
        """Step of the newest checkpoint."""
        self.guard = LossGuard(skip_loss_spikes)
        self.guard.restore(state.get("loss_guard", {}))
        self.selection = selection
        if selection is not None:
            selection.restore(state.get("selection", {}))

    def accepts(self, loss: float) -> bool:
        """Whether a step of this loss is to be applied, if it is finite."""
        return not (self.guard.skip and self.guard.is_spike(loss))

    def advance(self, data: Step, result: StepResult) -> bool:
        """Count a step. Return True if its loss is a spike."""
        self.step += 1
        self.sequences = data.position
        return self.guard.note(result.loss, result.applied)

    @property
    def ended_early(self) -> bool:
        """Whether the selection has ended training."""
        return self.selection is not None and self.selection.exhausted

    @property
    def verdict(self) -> str:
        """What the selection ended training for."""
        return "" if self.selection is None else self.selection.verdict()

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
