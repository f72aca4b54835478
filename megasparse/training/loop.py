"""The training loop: agree, step, evaluate, log, save, stop."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megasparse.config.schema import RunSettings
from megasparse.data.batches import Step, WaitingStopped
from megasparse.errors import LostPeer, StorageError, TrainingError
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engine import Engine, StepResult
from megasparse.training.reporting.memory import memory_scalars
from megasparse.training.reporting.monitor import Monitor
from megasparse.training.reporting.rank_table import EVERY as TABLE_EVERY
from megasparse.training.reporting.rank_table import RankTable, StepTimes
from megasparse.training.reporting.stragglers import Stragglers
from megasparse.training.reporting.tracing import Tracer
from megasparse.training.schedule import learning_rate
from megasparse.training.selection import Selection
from megasparse.training.spikes import LossGuard
from megasparse.training.stopping.hooks import RunHooks, StepConsensus, StopWanted, sync_step

Evaluate = Callable[[int], Mapping[str, float | str | Tensor]]
"""step -> scalars, and texts and pictures for TensorBoard, by their names; none where nothing is due. Called after
every step on every rank, where it may raise StopWanted, on all of them together."""


Damaged = dict[str, dict[str, int]]
"""Damaged samples by shard and reason."""


class Progress:
    """How far a run is: what a checkpoint keeps of the loop."""

    def __init__(self, start: Checkpoint | None, skip_loss_spikes: bool, selection: Selection | None):
        state: dict[str, Any] = start.state if start else {}
        self.step = start.step if start else 0
        self.sequences = start.sequences if start else 0
        """Position in the data."""
        self.skipped_sequences = int(state.get("skipped_sequences", 0))
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

    def advance(self, data: Step, skipped_sequences: int, result: StepResult) -> None:
        """One step is done; over all ranks, `skipped_sequences` of its sequences were damaged."""
        self.step += 1
        self.sequences = data.position
        self.skipped_sequences += skipped_sequences
        self.guard.note(result.loss, result.applied)

    @property
    def ended_early(self) -> bool:
        """Whether the selection has ended training."""
        return self.selection is not None and self.selection.exhausted

    @property
    def verdict(self) -> str:
        return "" if self.selection is None else self.selection.verdict()

    def save(self, engine: Engine, saver: Saver) -> None:
        """A checkpoint of here, unless there is one, or one of here is being written."""
        self.finish(saver)
        if self.saved != self.step:
            state = {"skipped_sequences": self.skipped_sequences, "loss_guard": self.guard.state()}
            if self.selection is not None:
                state["selection"] = self.selection.state()
            self._note(saver.save(engine, self.step, self.sequences, state))

    def finish(self, saver: Saver) -> None:
        """Complete the checkpoint that is being written, if any."""
        self._note(saver.finish())

    def _note(self, path: Path | None) -> None:
        if path is not None:
            self.saved = int(path.name)


def train(
    engine: Engine,
    config: RunSettings,
    batches: Iterable[Step],
    saver: Saver,
    monitor: Monitor,
    start: Checkpoint | None = None,
    evaluate: Evaluate | None = None,
    stop_at: int | None = None,
    hooks: RunHooks = RunHooks(),  # noqa: B008  (frozen)
    damage: Callable[[], Damaged] = dict,
    selection: Selection | None = None,
) -> bool:
    """Train from after `start` to `config.training.steps`, saving as `config.checkpoint` says and at the end.

    stop_at: end after that step instead, saving; schedules still end at `training.steps`, so the run can go on exactly.
    watch: a stop that it wants on any rank takes effect on all of them before the next step, after a save.
    damage: what this rank has found damaged in the data so far. selection: keeps the best checkpoint, and ends training
    where it is exhausted.

    Returns whether the run is complete: all steps are done, or the selection ended it.

    Raises TrainingError after `training.max_skipped_steps` steps in a row that were not applied; StorageError where a
    checkpoint cannot be written; DataError where a rank cannot read its data, and LostPeer on the other ranks.
    """
    steps, source = config.training.steps, iter(batches)
    here = Progress(start, config.training.skip_loss_spikes, selection)
    last = min(steps, stop_at or steps)
    if here.step >= last or here.ended_early:
        done = f"all {steps}" if last == steps else f"{here.step} of {steps}"
        why = f"{done} steps are done (training.steps)" if here.step >= last else here.verdict
        monitor.say(f"nothing left to do: {why}")
        return last == steps or here.ended_early
    if here.step:
        monitor.event(here.step, f"started again, after step {here.step}")
    if selection is not None:
        saver.best = selection.step
    stragglers, stall_seconds = Stragglers(engine.ranks.world_size), 0.0
    table, spent = RankTable(engine.ranks.world_size), StepTimes()
    tracer = Tracer(config, engine.ranks, hooks.trace_wanted)
    for step in tracer.steps(range(here.step + 1, last + 1)):
        began = time.perf_counter()
        data = _next(source, step, hooks)
        roll = _agree(engine, saver, hooks, data, spent)
        if not roll.writing:
            here.finish(saver)
        if roll.stop:
            break
        assert isinstance(data, Step)
        rate = learning_rate(step, steps, config.optimizer)
        result = engine.train_step(data.micro_batches, step, rate, here.accepts, hooks.progress)
        spike = here.guard.is_spike(result.loss)
        here.advance(data, roll.skipped, result)
        spent = StepTimes(data.wait_seconds, result.forward_seconds, roll.waited + result.communication_seconds)
        table.add(roll.spent)

        scalars = _describe(config, engine, here, result, rate)
        scalars |= {"speed/straggler_ratio": stragglers.worst_ratio, "checkpoint/stall_seconds": stall_seconds}
        scalars |= monitor.speed(result.tokens, time.perf_counter() - began, spent)
        slow = stragglers.add([each.own for each in roll.spent])
        events = [*_events(step, result, spike), *slow]
        if roll.skipped:
            found = _merge(engine.ranks.gather(damage()))
            scalars |= {f"data/damaged_samples/{reason}": count for reason, count in _by_reason(found).items()}
            events.append(f"step {step}: {roll.skipped} sequences are damaged, others took their place; so far {found}")
        if evaluate is not None:
            scalars |= _evaluate(evaluate, monitor, step)
        monitor.write(step, scalars)
        if slow or _due(step, TABLE_EVERY) or step == last:
            monitor.ranks(step, table)
        for event in events:
            monitor.event(step, event)
        _stop_if_diverged(config, here, result)

        began = time.perf_counter()
        better = selection is not None and selection.note(step, scalars)
        if better:
            saver.best = step
        if better or _due(step, config.checkpoint.every):
            here.save(engine, saver)
        stall_seconds = time.perf_counter() - began
        if here.ended_early:
            break
    here.save(engine, saver)
    here.finish(saver)
    if here.saved != here.step:
        raise StorageError(saver.directory, f"step {here.step}, the last, is not saved", "Mend that and start again")
    monitor.say(_last_word(here, steps))
    return here.step == steps or here.ended_early


def _last_word(here: Progress, steps: int) -> str:
    if here.step == steps:
        return f"done: {steps} steps"
    if here.ended_early:
        return f"done early, after step {here.step} of {steps}: {here.verdict}"
    return f"stopped after step {here.step} of {steps}, as asked; started again, the run goes on from there"


def _next(source: Iterator[Step], step: int, hooks: RunHooks) -> Step | Exception:
    """The data of a step, or why this rank has none."""
    hooks.progress(f"step {step}: reading data")
    try:
        return next(source)
    except Exception as error:  # the other ranks must hear of it, whatever it is
        return error
    finally:
        hooks.progress(f"step {step}: meeting the other ranks")


def _agree(engine: Engine, saver: Saver, hooks: RunHooks, data: Step | Exception, spent: StepTimes) -> StepConsensus:
    """What all ranks do next: train, stop, or fail together."""
    stopped, failed = isinstance(data, WaitingStopped), isinstance(data, Exception)
    roll = sync_step(
        engine.ranks,
        stop=stopped or hooks.stop_wanted(),
        failed=failed and not stopped,
        writing=saver.pending(),
        skipped=data.skipped if isinstance(data, Step) else 0,
        spent=spent,
    )
    if roll.failed:
        failures = engine.ranks.gather(f"{type(data).__name__}" if failed and not stopped else None)
        if isinstance(data, Exception) and not stopped:
            raise data
        failing = ", ".join(f"rank {rank} ({name})" for rank, name in enumerate(failures) if name)
        raise LostPeer(f"{failing} cannot read its data; its own message says why")
    return roll


def _evaluate(evaluate: Evaluate, monitor: Monitor, step: int) -> dict[str, float]:
    """The scalars of what is due, if it is not broken off; texts and pictures go to the monitor."""
    scalars: dict[str, float] = {}
    try:
        found = evaluate(step)
    except StopWanted:
        return scalars
    for name, value in found.items():
        if isinstance(value, str):
            monitor.text(step, name, value)
        elif isinstance(value, Tensor):
            monitor.image(step, name, value)
        else:
            scalars[name] = value
    return scalars


def _stop_if_diverged(config: RunSettings, here: Progress, result: StepResult) -> None:
    if here.guard.skipped_in_a_row >= config.training.max_skipped_steps:
        raise TrainingError(
            f"step {here.step}: {here.guard.skipped_in_a_row} steps in a row were not applied "
            f"(training.max_skipped_steps), the last with loss {result.loss} and gradient norm {result.grad_norm}. "
            "Lower optimizer.learning_rate, or warm up for longer"
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _describe(config: RunSettings, engine: Engine, here: Progress, result: StepResult, rate: float) -> dict[str, float]:
    layers = _due(here.step, config.logging.every) or here.step == config.training.steps
    scalars = {
        "train/loss": result.loss,
        "train/skipped_steps": here.step - engine.steps_done(),
        "train/loss_spikes": here.guard.spikes,
        "data/skipped_sequences": here.skipped_sequences,
        "optimizer/learning_rate": rate,
        "optimizer/gradient_norm": result.grad_norm,
        **{f"model/{name}": x for name, x in result.statistics.items() if layers or "/layer_" not in name},
        **memory_scalars(engine.ranks.device, result.held),
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


def _merge(found: Iterable[Damaged]) -> Damaged:
    """What the ranks have found; where several read the same shard, they found the same in it, or less so far."""
    merged: Damaged = {}
    for rank in found:
        for shard, counts in rank.items():
            known = merged.setdefault(shard, {})
            known |= {reason: max(count, known.get(reason, 0)) for reason, count in counts.items()}
    return merged


def _by_reason(found: Damaged) -> Counter[str]:
    total: Counter[str] = Counter()
    for counts in found.values():
        total.update(counts)
    return total
