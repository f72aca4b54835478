"""The training loop: agree, step, log, evaluate, save, stop."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megasparse.data.batches import Step, WaitingStopped
from megasparse.errors import LostPeer, StorageError, TrainingError
from megasparse.optimizers import learning_rate
from megasparse.training.engines.contract import StepResult
from megasparse.training.loop_state import LoopState
from megasparse.training.ranks import StopWanted
from megasparse.training.reporting.memory import memory_scalars
from megasparse.training.reporting.tracing import Tracer
from megasparse.training.run import RunResult, TrainingRun

MAX_SKIPPED = 20
"""A run stops after so many steps in a row that were not finite: what drove it there does not pass by itself."""


def train(run: TrainingRun) -> RunResult:
    """Train from after `run.start` to `config.training.steps`, saving as `config.checkpoint` says and at the end.

    A stop that `run.hooks` wants on any rank takes effect on all of them before the next step, after a save.

    With `checkpoint.bucket` it ends when its last checkpoint is uploaded.

    Raises TrainingError after MAX_SKIPPED steps in a row that were not applied; StorageError where a checkpoint cannot
    be written; DataError where a rank cannot read its data, and LostPeer on the other ranks.
    """
    config, saver, tracker, steps = run.config, run.saver, run.tracker, run.config.training.steps
    state = LoopState(run.start, run.selection)
    last = min(steps, run.stop_at or steps)
    if run.selection is not None:
        saver.best = run.selection.step
    saver.begin_uploads()
    if state.step >= last or state.ended_early:
        tracker.say(_nothing_to_do(state, steps, last))
        saver.finish_uploads()
        return _result(run, state)
    if state.step:
        tracker.event(state.step, f"started again, after step {state.step}")
    source, stall_seconds = iter(run.batches), 0.0
    for step in Tracer(config, run.ranks, run.hooks.trace_wanted).steps(range(state.step + 1, last + 1)):
        began = time.perf_counter()
        data = _next_data(run, source, step)
        stop, writing = _agree(run, data)
        if not writing:
            state.finish(saver)
        if stop:
            break
        assert isinstance(data, Step)
        rate = learning_rate(step, steps, config.optimizer)
        result = run.engine.train_step(data.micro_batches, step, rate, run.hooks.progress)
        spike = state.advance(data, result)

        scalars = _scalars(run, state, result) | {
            "optimizer/learning_rate": rate,
            "checkpoint/stall_seconds": stall_seconds,
            **tracker.speed(result.tokens, time.perf_counter() - began, data.wait_seconds),
            **_evaluate(run, step),
        }
        tracker.log(step, scalars)
        _report_trouble(run, step, result, spike)
        if state.guard.skipped_in_a_row >= MAX_SKIPPED:
            raise TrainingError(
                f"step {step}: {state.guard.skipped_in_a_row} steps in a row were not applied, "
                f"the last with loss {result.loss} and gradient norm {result.grad_norm}. "
                "Lower optimizer.learning_rate, or warm up for longer"
            )

        began = time.perf_counter()
        better = run.selection is not None and run.selection.note(step, scalars)
        if better:
            saver.best = step
        if better or (config.checkpoint.every > 0 and step % config.checkpoint.every == 0):
            state.save(run.engine, saver)
        stall_seconds = time.perf_counter() - began
        if state.ended_early:
            break
    state.save(run.engine, saver)
    state.finish(saver)
    if state.saved != state.step:
        problem = f"step {state.step}, the last, is not saved"
        raise StorageError(saver.directory, problem, "Repair the storage and start again")
    saver.finish_uploads()
    tracker.say(_last_words(state, steps))
    return _result(run, state)


def _result(run: TrainingRun, state: LoopState) -> RunResult:
    complete = state.step >= run.config.training.steps or bool(state.ended_early)
    return RunResult(Path(run.config.run.directory), state.step, complete)


def _nothing_to_do(state: LoopState, steps: int, last: int) -> str:
    if state.ended_early:
        return f"nothing left to do: {state.ended_early}"
    if state.step < steps:
        where = "is" if last == state.step else "lies behind"
        return f"--stop-at {last}: step {last} {where} the run's step {state.step} of {steps}. Give a later one"
    return f"nothing left to do: all {steps} steps are done (training.steps)"


def _last_words(state: LoopState, steps: int) -> str:
    if state.step == steps:
        return f"done: {steps} steps"
    if state.ended_early:
        return f"done early, after step {state.step} of {steps}: {state.ended_early}"
    return f"stopped after step {state.step} of {steps}, as asked; started again, the run goes on from there"


def _next_data(run: TrainingRun, source: Iterator[Step], step: int) -> Step | Exception:
    """Return the data of a step, or the error for which this rank has none."""
    run.hooks.progress(f"step {step}: reading data")
    try:
        return next(source)
    except Exception as error:  # the other ranks must hear of it, whatever it is
        return error
    finally:
        run.hooks.progress(f"step {step}: meeting the other ranks")


def _agree(run: TrainingRun, data: Step | Exception) -> tuple[bool, bool]:
    """Share in one small all-reduce whether any rank should stop, and whether any is still writing a checkpoint.

    Raises on all ranks together where some rank has no data.
    """
    stopped = isinstance(data, WaitingStopped)
    failed = isinstance(data, Exception) and not stopped
    stop, writing, failure = run.ranks.any_of(stopped or run.hooks.stop_wanted(), run.saver.pending(), failed)
    if failure:
        names = run.ranks.gather(type(data).__name__ if failed else None)
        if isinstance(data, Exception) and failed:
            raise data
        failing = ", ".join(f"rank {rank} ({name})" for rank, name in enumerate(names) if name)
        raise LostPeer(f"{failing} cannot read its data; its own message says why")
    return stop, writing


def _scalars(run: TrainingRun, state: LoopState, result: StepResult) -> dict[str, float]:
    by_layer = state.step % run.config.logging.every == 0 or state.step == run.config.training.steps
    scalars = {
        "train/loss": result.loss,
        "train/skipped_steps": state.step - run.engine.steps_done(),
        "train/loss_spikes": state.guard.spikes,
        "optimizer/gradient_norm": result.grad_norm,
        **{f"model/{name}": x for name, x in result.statistics.items() if by_layer or "/layer_" not in name},
        **memory_scalars(run.ranks.device, result.held),
    }
    if getattr(run.engine.module, "is_autoregressive", False):
        scalars["train/bits_per_dim"] = result.loss / math.log(2)
    return scalars


def _evaluate(run: TrainingRun, step: int) -> dict[str, float]:
    """Return the scalars that are due, unless a stop interrupts them; texts and pictures go to the tracker."""
    scalars: dict[str, float] = {}
    if run.evaluate is None:
        return scalars
    try:
        results = run.evaluate(step)
    except StopWanted:
        return scalars
    for name, value in results.items():
        if isinstance(value, str):
            run.tracker.text(step, name, value)
        elif isinstance(value, Tensor):
            run.tracker.image(step, name, value)
        else:
            scalars[name] = value
    return scalars


def _report_trouble(run: TrainingRun, step: int, result: StepResult, spike: bool) -> None:
    if not result.applied:
        problem = f"(not finite): loss {result.loss}, gradient norm {result.grad_norm}"
        run.tracker.event(step, f"STEP {step} SKIPPED on all ranks {problem}")
    elif spike:
        run.tracker.event(step, f"step {step}: loss spike, {result.loss}")
