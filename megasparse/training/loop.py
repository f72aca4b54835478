"""The training loop: step, evaluate, log, save, stop."""

import math
import time
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from megasparse.config.schema import Config
from megasparse.data.batches import Step
from megasparse.errors import TrainingError
from megasparse.training.engine import Engine, StepResult
from megasparse.training.monitor import Monitor
from megasparse.training.saving import Saver
from megasparse.training.schedule import learning_rate

Evaluate = Callable[[int], Mapping[str, float | str | Tensor]]
"""step -> scalars, and texts and pictures for TensorBoard, by their names. Called on every rank."""


def train(
    engine: Engine,
    config: Config,
    batches: Iterable[Step],
    saver: Saver,
    monitor: Monitor,
    start_step: int,
    evaluate: Evaluate | None = None,
    stop_at: int | None = None,
) -> None:
    """Train from after `start_step` to `config.training.steps`, saving as `config.checkpoint` says and at the end.

    stop_at: end after that step instead, saving; schedules still end at `training.steps`, so the run can go on exactly.

    Raises TrainingError after `training.max_skipped_steps` steps in a row whose loss or gradient was not finite;
    CheckpointError where a checkpoint cannot be written.
    """
    steps = config.training.steps
    last = min(steps, stop_at or steps)
    if start_step >= last:
        done = f"all {steps}" if last == steps else f"{start_step} of {steps}"
        monitor.say(f"nothing left to do: {done} steps are done (training.steps)")
        return
    source, skipped_in_a_row = iter(batches), 0
    evaluations = (config.evaluation.every, config.logging.attention_quality_every)
    for step in range(start_step + 1, last + 1):
        began = time.perf_counter()
        data = next(source)
        rate = learning_rate(step, steps, config.optimizer)
        result = engine.train_step(data.micro_batches, step, rate)
        scalars = _describe(result, rate, skipped=step - engine.steps_done())
        if config.model.kind == "decoder":  # an encoder sees both sides of a token: no code length
            scalars["train/bits_per_dim"] = result.loss / math.log(2)
        scalars |= monitor.speed(result.tokens, time.perf_counter() - began, data.wait_seconds)

        if evaluate is not None and any(_due(step, every) for every in evaluations):
            for name, value in evaluate(step).items():
                if isinstance(value, str):
                    monitor.text(step, name, value)
                elif isinstance(value, Tensor):
                    monitor.image(step, name, value)
                else:
                    scalars[name] = value

        monitor.write(step, scalars)
        skipped_in_a_row = 0 if result.applied else skipped_in_a_row + 1
        if not result.applied:
            monitor.say(f"STEP {step} SKIPPED on all ranks: loss {result.loss}, gradient norm {result.grad_norm}")
        if skipped_in_a_row >= config.training.max_skipped_steps:
            raise TrainingError(
                f"step {step}: loss or gradient not finite in {skipped_in_a_row} steps in a row, none of them applied "
                "(training.max_skipped_steps). Lower optimizer.learning_rate, or warm up for longer"
            )

        if _due(step, config.checkpoint.every) or step == last:
            saver.save(engine, step, data.position)
    monitor.say(f"done: {steps} steps" if last == steps else f"stopped at step {last} of {steps}, as asked")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _describe(result: StepResult, rate: float, skipped: int) -> dict[str, float]:
    return {
        "train/loss": result.loss,
        "train/skipped_steps": skipped,
        "optimizer/learning_rate": rate,
        "optimizer/gradient_norm": result.grad_norm,
        **{f"model/{name}": value for name, value in result.statistics.items()},
    }
