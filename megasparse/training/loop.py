"""The training loop (agree, step, log, evaluate, save, stop) and the part of its state that checkpoints store."""

import gzip
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megasparse.config.schema import RunSettings
from megasparse.data.batches import Step, WaitingStopped
from megasparse.errors import LostPeer, StorageError, TrainingError, write_error
from megasparse.files import write_file
from megasparse.optimizers import learning_rate
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines.contract import Engine, StepResult
from megasparse.training.ranks import Ranks, StopWanted
from megasparse.training.reporting.memory import memory_scalars, speed_scalars
from megasparse.training.run import RunResult, TrainingRun

KEPT = ("step", "value", "scalars", "without_better")
"""Attributes of a Selection that checkpoints store."""


class Selection:
    """The best value so far of one scalar, and the step it was reached at. Checkpoints store it.

    patience: end training after this many evaluations in a row without a better value; 0 disables. lower: True if lower
    values are better.
    """

    def __init__(self, scalar: str, patience: int = 0, lower: bool = False):
        self.scalar, self.patience, self.sign = scalar, patience, -1 if lower else 1
        self.step: int | None = None
        """Step of the best value."""
        self.value: float | None = None
        self.scalars: dict[str, float] = {}
        """All scalars of the evaluation at that step."""
        self.without_better = 0
        """Evaluations since that step."""

    def note(self, step: int, scalars: Mapping[str, float]) -> bool:
        """Record a step's scalars. Return True if they contain the best value so far (of equal values the first).

        A step without an evaluation does not contain the scalar and changes nothing. NaN is worse than any number.
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
        """True if the last `patience` evaluations did not improve the value."""
        return 0 < self.patience <= self.without_better

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores, as JSON."""
        return {"metric": self.scalar, **{name: getattr(self, name) for name in KEPT}}

    def write(self, file: Path) -> None:
        write_file(file, json.dumps(self.state(), indent=2) + "\n")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`, unless it is empty or belongs to another scalar, which is not comparable."""
        if state.get("metric") == self.scalar:
            for name in KEPT:
                setattr(self, name, state[name])


class LoopState:
    """Step, position in the data, last loss and selection, restored from the checkpoint `start`."""

    def __init__(self, start: Checkpoint | None, selection: Selection | None):
        state: dict[str, Any] = start.state if start else {}
        self.step = start.step if start else 0
        self.sequences = start.sequences if start else 0
        """Position in the data."""
        self.pending: bool = state.get("evaluation_pending", False)  # a stop interrupted the evaluation of this step
        self.loss: float | None = state.get("loss")
        """Loss of the last step; None if it is not finite."""
        self.skipped_in_a_row: int = state.get("skipped_in_a_row", 0)
        """Number of steps since the last applied one."""
        self.selection = selection or Selection("")  # no scalar has this name
        self.selection.restore(state.get("selection") or {})

    @property
    def ended_early(self) -> str:
        """Reason why the selection ended training; empty if it did not."""
        if not (best := self.selection).exhausted:
            return ""
        return f"{best.scalar} has not been better than at step {best.step} for {best.without_better} evaluations"

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores, as JSON."""
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


MAX_SKIPPED = 20
"""Consecutive steps with a non-finite loss or gradient after which a run stops: such a run does not recover."""


def train(run: TrainingRun) -> RunResult:
    """Train from `run.start` to `config.training.steps`. Save every `config.checkpoint.every` steps and at the end.

    If `run.hooks` requests a stop on any rank, all ranks save and stop before the next step. An evaluation that a stop
    interrupted is repeated when the run resumes. With `checkpoint.bucket`, return once the last checkpoint is uploaded.

    Raises:
        TrainingError: MAX_SKIPPED steps in a row were skipped.
        StorageError: A checkpoint cannot be written.
        DataError: This rank cannot read its data; the other ranks raise LostPeer.
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
        problem = f"the last step, {state.step}, is not saved"
        raise StorageError(saver.directory, problem, "Repair the storage, then run the same command again to resume")
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
    """Find out, in one small all-reduce, whether any rank should stop and whether any is writing a checkpoint.

    Raises an error on all ranks together if the data of some rank failed.
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


TRACED_STEPS = 3
"""Number of steps per trace."""


def traced(steps: Iterable[int], config: RunSettings, ranks: Ranks, requested: Callable[[], bool]) -> Iterator[int]:
    """Yield the steps; write run.directory/traces/step-00000012-rank-00000.json.gz, a Chrome trace from step 12 on.

    requested: Returns True once per request to trace the next steps on this rank. Failures are reported on stderr and
    do not stop training.
    """
    tracing, first = None, 0
    try:
        for step in steps:
            if tracing is not None and step >= first + TRACED_STEPS:
                _end_trace(tracing, first, config, ranks)
                tracing = None
            if tracing is None and requested():
                tracing, first = _begin_trace(step, ranks), step
            yield step
    finally:
        if tracing is not None:
            _end_trace(tracing, first, config, ranks)


def _begin_trace(step: int, ranks: Ranks) -> profile | None:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (ranks.device.type == "cuda")
    tracing = profile(activities=activities)
    try:
        tracing.start()
    except RuntimeError as error:  # another profiler uses the device
        reason = str(error).splitlines()[0]
        write_error(f"rank {ranks.rank}: steps {step} to {step + TRACED_STEPS - 1} cannot be traced ({reason})")
        return None
    return tracing


def _end_trace(tracing: profile, first: int, config: RunSettings, ranks: Ranks) -> None:
    path = Path(config.run.directory) / "traces" / f"step-{first:08d}-rank-{ranks.rank:05d}.json.gz"
    try:
        tracing.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(suffix=".json") as plain:
            tracing.export_chrome_trace(plain.name)
            trace = Path(plain.name).read_bytes()
        if not trace.rstrip().endswith(b"}"):  # the exporter does not report a full disk
            raise OSError(f"not enough space in {tempfile.gettempdir()}")
        write_file(path, gzip.compress(trace, compresslevel=3))
        write_error(f"rank {ranks.rank}: {path}: a trace; open it at https://ui.perfetto.dev or chrome://tracing")
    except (OSError, RuntimeError) as error:
        write_error(f"rank {ranks.rank}: {path} cannot be written ({error}). Training continues")
