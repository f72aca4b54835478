"""What a run reports of each step: its scalars, and the events that should not happen."""

import math
import time
from collections.abc import Iterable, Iterator

from megasparse.training.engines.contract import StepResult
from megasparse.training.loop_state import LoopState
from megasparse.training.reporting.memory import memory_scalars
from megasparse.training.reporting.rank_table import EVERY, RankTable, StepTimes
from megasparse.training.reporting.stragglers import Stragglers
from megasparse.training.run import TrainingRun
from megasparse.training.stopping.hooks import StepConsensus


class StepReports:
    """Describes each step and hands the description to the monitor. last: the step at which this process ends."""

    def __init__(self, run: TrainingRun, last: int):
        self.run, self.last = run, last
        self.spent = StepTimes()
        """What this rank spent of the last step."""
        self.stall_seconds = 0.0
        """Time that training stood still for a save after the last step."""
        self._stragglers, self._table = Stragglers(run.ranks.world_size), RankTable(run.ranks.world_size)
        self._table_due = False

    def describe(
        self,
        here: LoopState,
        result: StepResult,
        rate: float,
        spike: bool,
        consensus: StepConsensus,
        data_seconds: float,
        began: float,
    ) -> tuple[dict[str, float], list[str]]:
        """The scalars and the events of the step that ends now; all ranks call it together."""
        waited = consensus.waited + result.communication_seconds
        self.spent = StepTimes(data_seconds, result.forward_seconds, waited)
        self._table.add(consensus.spent)
        scalars = self._scalars(here, result, rate)
        scalars |= {
            "speed/straggler_ratio": self._stragglers.worst_ratio,
            "checkpoint/stall_seconds": self.stall_seconds,
        }
        scalars |= self.run.monitor.speed(result.tokens, time.perf_counter() - began, self.spent)
        slow = self._stragglers.add([each.own for each in consensus.spent])
        events = [*_events(here.step, result, spike), *slow]
        self._table_due = bool(slow) or here.step % EVERY == 0 or here.step == self.last
        return scalars, events

    def write(self, step: int, scalars: dict[str, float], events: Iterable[str]) -> None:
        """Hand the step to the monitor."""
        self.run.monitor.write(step, scalars)
        if self._table_due:
            self.run.monitor.ranks(step, self._table)
        for event in events:
            self.run.monitor.event(step, event)

    def _scalars(self, here: LoopState, result: StepResult, rate: float) -> dict[str, float]:
        engine, config = self.run.engine, self.run.config
        layers = here.step % config.logging.every == 0 or here.step == config.training.steps
        scalars = {
            "train/loss": result.loss,
            "train/skipped_steps": here.step - engine.steps_done(),
            "train/loss_spikes": here.guard.spikes,
            "optimizer/learning_rate": rate,
            "optimizer/gradient_norm": result.grad_norm,
            **{f"model/{name}": x for name, x in result.statistics.items() if layers or "/layer_" not in name},
            **memory_scalars(self.run.ranks.device, result.held),
        }
        if getattr(engine.module, "is_autoregressive", False):
            scalars["train/bits_per_dim"] = result.loss / math.log(2)
        return scalars


def _events(step: int, result: StepResult, spike: bool) -> Iterator[str]:
    """What happened in a step that should not."""
    if not result.applied:
        why = "a loss spike" if spike else "not finite"
        yield f"STEP {step} SKIPPED on all ranks ({why}): loss {result.loss}, gradient norm {result.grad_norm}"
    elif spike:
        yield f"step {step}: loss spike, {result.loss} (applied; training.skip_loss_spikes would leave it out)"
