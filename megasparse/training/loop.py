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
from megasparse.training.ranks import StopWanted
from megasparse.training.reporting.memory import memory_scalars, speed_scalars
from megasparse.training.reporting.trace import traced
from megasparse.training.run import RunResult, TrainingRun
from megasparse.training.state import LoopState

MAX_SKIPPED = 20
"""Consecutive skipped steps after which a run stops, because it does not recover."""


def train(run: TrainingRun) -> RunResult:
    """Train from `run.start` to `config.training.steps`. Save every `config.checkpoint.every` steps and at the end.

    If `run.hooks` requests a stop on any rank, all ranks save and stop before the next step. An evaluation that a stop
    interrupted is repeated when the run resumes. Raises TrainingError if MAX_SKIPPED steps in a row were skipped,
    StorageError if a checkpoint cannot be written, DataError if this rank cannot read its data, LostPeer on the other
    ranks.
    """
    config, saver, tracker, steps = run.config, run.saver, run.tracker, run.config.training.steps
    state = LoopState(run.start, run.selection)
    last = steps if run.stop_at is None else min(steps, run.stop_at)
    saver.saved = state.step
    if state.pending and (scalars := _evaluate(run, state)):
        tracker.log(state.step, scalars, amend=True)
        state.selection.note(state.step, scalars)
        saver.replace_state(state.state())
    saver.best = state.selection.step
    saver.begin_uploads()
    if state.step >= last or state.ended_early or state.pending:
        tracker.say(_last_words(state, steps) if state.pending else _nothing_to_do(state, steps, last))
        saver.finish_uploads()
        return _result(run, state)
    if state.step:
        tracker.event(state.step, f"resumed from step {state.step}")
    source, stall_seconds = iter(run.batches), 0.0
    for step in traced(range(state.step + 1, last + 1), config, run.ranks, run.hooks.trace_wanted):
        began = time.perf_counter()
        data = _next_data(run, source, step)
        stop, writing = _agree(run, data)
        if not writing:
            saver.finish()
        if stop:
            break
        assert isinstance(data, Step)
        rate = learning_rate(step, steps, config.optimizer)
        result = run.engine.train_step(data.micro_batches, step, rate, run.hooks.progress)
        state.step, state.sequences = step, data.position
        state.loss = result.loss if math.isfinite(result.loss) else None
        state.skipped_in_a_row = 0 if result.applied else state.skipped_in_a_row + 1

        scalars = _scalars(run, state, result) | {
            "optimizer/learning_rate": rate,
            "checkpoint/stall_seconds": stall_seconds,
            **speed_scalars(run.ranks, run.flops, result.tokens, time.perf_counter() - began, data.wait_seconds),
            **_evaluate(run, state),
        }
        tracker.log(step, scalars)
        if not result.applied:
            problem = f"(not finite): loss {result.loss}, gradient norm {result.grad_norm}"
            tracker.event(step, f"STEP {step} SKIPPED on all ranks {problem}")
        if state.skipped_in_a_row >= MAX_SKIPPED:
            raise TrainingError(
                f"step {step}: {state.skipped_in_a_row} steps in a row were not applied, "
                f"the last with loss {result.loss} and gradient norm {result.grad_norm}. "
                "Lower optimizer.learning_rate, or use a longer warm-up"
            )

        began = time.perf_counter()
        if better := state.selection.note(step, scalars):
            saver.best = step
        if better or (config.checkpoint.every > 0 and step % config.checkpoint.every == 0):
            state.save(run.engine, saver)
        stall_seconds = time.perf_counter() - began
        if state.ended_early or state.pending:
            break
    state.save(run.engine, saver)
    saver.finish()
    if saver.saved != state.step:
        raise StorageError(
            saver.directory, f"the last step, {state.step}, is not saved", "Repair the storage, then resume"
        )
    saver.finish_uploads()
    tracker.say(_last_words(state, steps))
    return _result(run, state)


def _result(run: TrainingRun, state: LoopState) -> RunResult:
    complete = (state.step >= run.config.training.steps or bool(state.ended_early)) and not state.pending
    return RunResult(Path(run.config.run.directory), state.step, complete)


def _nothing_to_do(state: LoopState, steps: int, last: int) -> str:
    if state.ended_early:
        return f"nothing left to do: {state.ended_early}"
    if state.step < steps:
        relation = "is" if last == state.step else "is before"
        return f"--stop-at {last}: step {last} {relation} the run's step {state.step} of {steps}. Use a later step"
    return f"nothing left to do: all {steps} steps are done (training.steps)"


def _last_words(state: LoopState, steps: int) -> str:
    if state.step == steps and not state.pending:
        return f"done: {steps} steps"
    if state.ended_early:
        return f"done early, after step {state.step} of {steps}: {state.ended_early}"
    return f"stopped after step {state.step} of {steps}, as requested. Run the same command to resume"


def _next_data(run: TrainingRun, source: Iterator[Step], step: int) -> Step | Exception:
    """Return a step's data, or the error that prevented reading it."""
    run.hooks.progress(f"step {step}: reading data")
    try:
        return next(source)
    except Exception as error:  # of any type: the other ranks must learn of it
        return error
    finally:
        run.hooks.progress(f"step {step}: waiting for the other ranks")


def _agree(run: TrainingRun, data: Step | Exception) -> tuple[bool, bool]:
    """Find out, in one small all-reduce, whether any rank should stop, is writing a checkpoint, or could not read its
    data, which raises an error on all ranks.
    """
    stopped = isinstance(data, WaitingStopped)
    failed = isinstance(data, Exception) and not stopped
    stop, writing, failure = run.ranks.any_of(stopped or run.hooks.stop_wanted(), run.saver.pending(), failed)
    if failure:
        names = run.ranks.gather(type(data).__name__ if failed else None)
        if isinstance(data, Exception) and failed:
            raise data
        failing = ", ".join(f"rank {rank} ({name})" for rank, name in enumerate(names) if name)
        raise LostPeer(f"{failing} cannot read its data; see the error of that rank")
    return stop, writing


def _scalars(run: TrainingRun, state: LoopState, result: StepResult) -> dict[str, float]:
    by_layer = state.step % run.config.logging.every == 0 or state.step == run.config.training.steps
    scalars = {
        "train/loss": result.loss,
        "train/skipped_steps": state.step - run.engine.steps_done(),
        "optimizer/gradient_norm": result.grad_norm,
        **{f"model/{name}": x for name, x in result.statistics.items() if by_layer or "/layer_" not in name},
        **memory_scalars(run.ranks.device, result.held),
    }
    if getattr(run.engine.module, "is_autoregressive", False):
        scalars["train/bits_per_dim"] = result.loss / math.log(2)
    return scalars


def _evaluate(run: TrainingRun, state: LoopState) -> dict[str, float]:
    """Return the scalars that are due; texts and pictures go to the tracker. A stop leaves the evaluation pending."""
    state.pending = False
    try:
        results = run.evaluate(state.step) if run.evaluate else {}
    except StopWanted:
        state.pending, results = True, {}
    for name, value in results.items():
        if isinstance(value, str | Tensor):
            run.tracker.show(state.step, name, value)
    return {name: value for name, value in results.items() if not isinstance(value, str | Tensor)}
