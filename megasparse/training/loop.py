"""The training loop: agree, step, log, evaluate, save, stop."""

import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megasparse.data.batches import Step, WaitingStopped
from megasparse.errors import LostPeer, StorageError, TrainingError
from megasparse.training.engines.contract import StepResult
from megasparse.training.loop_state import LoopState
from megasparse.training.reporting.monitor import Monitor
from megasparse.training.reporting.rank_table import StepTimes
from megasparse.training.reporting.tracing import Tracer
from megasparse.training.run import Evaluate, RunResult, TrainingRun
from megasparse.training.schedule import learning_rate
from megasparse.training.step_reports import StepReports
from megasparse.training.stopping.hooks import StepConsensus, StopWanted, sync_step


def train(run: TrainingRun) -> RunResult:
    """Train from after `run.start` to `config.training.steps`, saving as `config.checkpoint` says and at the end.

    A stop that `run.hooks` wants on any rank takes effect on all of them before the next step, after a save.

    With `checkpoint.bucket` it ends when its last checkpoint is uploaded.

    Raises TrainingError after `training.max_skipped_steps` steps in a row that were not applied; StorageError where a
    checkpoint cannot be written; DataError where a rank cannot read its data, and LostPeer on the other ranks.
    """
    config, saver, steps = run.config, run.saver, run.config.training.steps
    here = LoopState(run.start, config.training.skip_loss_spikes, run.selection)
    last = min(steps, run.stop_at or steps)
    if run.selection is not None:
        saver.best = run.selection.step
    saver.begin_uploads()
    if here.step >= last or here.ended_early:
        run.monitor.say(_why_not_begun(here, steps, last))
        saver.finish_uploads()
        return _result(run, here)
    if here.step:
        run.monitor.event(here.step, f"started again, after step {here.step}")
    source, reports = iter(run.batches), StepReports(run, last)
    for step in Tracer(config, run.ranks, run.hooks.trace_wanted).steps(range(here.step + 1, last + 1)):
        began = time.perf_counter()
        data = _next_data(source, step, run)
        consensus = _agree(run, data, reports.spent)
        if not consensus.writing:
            here.finish(saver)
        if consensus.stop:
            break
        assert isinstance(data, Step)
        rate = learning_rate(step, steps, config.optimizer)
        result = run.engine.train_step(data.micro_batches, step, rate, here.accepts, run.hooks.progress)
        spike = here.advance(data, result)

        scalars, events = reports.describe(here, result, rate, spike, consensus, data.wait_seconds, began)
        if run.evaluate is not None:
            scalars |= _evaluate(run.evaluate, run.monitor, step)
        reports.write(step, scalars, events)
        _stop_if_diverged(run, here, result)

        reports.stall_seconds = _save_if_due(run, here, scalars)
        if here.ended_early:
            break
    here.save(run.engine, saver)
    here.finish(saver)
    if here.saved != here.step:
        problem = f"step {here.step}, the last, is not saved"
        raise StorageError(saver.directory, problem, "Repair the storage and start again")
    saver.finish_uploads()
    run.monitor.say(_last_word(here, steps))
    return _result(run, here)


def _result(run: TrainingRun, here: LoopState) -> RunResult:
    complete = here.step >= run.config.training.steps or here.ended_early
    return RunResult(Path(run.config.run.directory), here.step, complete)


def _why_not_begun(here: LoopState, steps: int, last: int) -> str:
    if here.ended_early:
        return f"nothing left to do: {here.verdict}"
    if here.step < steps:
        where = "is" if last == here.step else "lies behind"
        return f"--stop-at {last}: step {last} {where} the run's step {here.step} of {steps}. Give a later one"
    return f"nothing left to do: all {steps} steps are done (training.steps)"


def _last_word(here: LoopState, steps: int) -> str:
    if here.step == steps:
        return f"done: {steps} steps"
    if here.ended_early:
        return f"done early, after step {here.step} of {steps}: {here.verdict}"
    return f"stopped after step {here.step} of {steps}, as asked; started again, the run goes on from there"


def _next_data(source: Iterator[Step], step: int, run: TrainingRun) -> Step | Exception:
    """The data of a step, or why this rank has none."""
    run.hooks.progress(f"step {step}: reading data")
    try:
        return next(source)
    except Exception as error:  # the other ranks must hear of it, whatever it is
        return error
    finally:
        run.hooks.progress(f"step {step}: meeting the other ranks")


def _agree(run: TrainingRun, data: Step | Exception, spent: StepTimes) -> StepConsensus:
    """What all ranks do next: train, stop, or fail together."""
    stopped = isinstance(data, WaitingStopped)
    failed = isinstance(data, Exception) and not stopped
    consensus = sync_step(
        run.ranks,
        stop=stopped or run.hooks.stop_wanted(),
        failed=failed,
        writing=run.saver.pending(),
        spent=spent,
    )
    if consensus.failed:
        failures = run.ranks.gather(type(data).__name__ if failed else None)
        if isinstance(data, Exception) and failed:
            raise data
        failing = ", ".join(f"rank {rank} ({name})" for rank, name in enumerate(failures) if name)
        raise LostPeer(f"{failing} cannot read its data; its own message says why")
    return consensus


def _evaluate(evaluate: Evaluate, monitor: Monitor, step: int) -> dict[str, float]:
    """The scalars of what is due, unless a stop interrupts it; texts and pictures go to the monitor."""
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


def _stop_if_diverged(run: TrainingRun, here: LoopState, result: StepResult) -> None:
    if here.guard.skipped_in_a_row >= run.config.training.max_skipped_steps:
        raise TrainingError(
            f"step {here.step}: {here.guard.skipped_in_a_row} steps in a row were not applied "
            f"(training.max_skipped_steps), the last with loss {result.loss} and gradient norm {result.grad_norm}. "
            "Lower optimizer.learning_rate, or warm up for longer"
        )


def _save_if_due(run: TrainingRun, here: LoopState, scalars: dict[str, float]) -> float:
    """Save where the interval or the selection asks for it. Returns the seconds that training stood still for it."""
    began, every = time.perf_counter(), run.config.checkpoint.every
    better = run.selection is not None and run.selection.note(here.step, scalars)
    if better:
        run.saver.best = here.step
    if better or (every > 0 and here.step % every == 0):
        here.save(run.engine, run.saver)
    return time.perf_counter() - began
