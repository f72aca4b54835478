"""Metrics, texts and pictures of a run: metrics.jsonl, events.jsonl, TensorBoard, W&B or MLflow, and the progress line.

docs/reference/scalars.md lists them. Only rank 0 writes. Failures of storage, terminal or backend do not stop a run.
"""

import importlib.util
import math
import os
import secrets
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from megasparse.config.schema import Config, RunSettings
from megasparse.errors import ConfigError, one_line, without_secrets
from megasparse.files import JsonLines, read_file, read_line, write_file
from megasparse.settings.checks import BYTE_TOKENS
from megasparse.training.ranks import Ranks

SHOWN = {
    "train/loss": "loss {:.4f}", "train/bits_per_dim": "{:.4f} {unit}", "optimizer/learning_rate": "lr {:.2e}",
    "speed/tokens_per_second": "{:,.0f} tokens/s", "evaluation/bits_per_dim": "held-out {:.4f} {unit}",
}  # fmt: skip
Backend = namedtuple("Backend", "scalars text image close")
"""Functions that write scalars (step, values by name), a text or picture (step, name, value), and close."""


def tensorboard(directory: Path, first_step: int, config: dict[str, Any]) -> Backend:
    """Write TensorBoard's files. Records from `first_step` on are hidden."""
    from torch.utils.tensorboard import SummaryWriter  # takes a second to import

    writer: Any = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step)
    hook = threading.excepthook  # the writer's next call raises its thread's error again, for the tracker to report
    threading.excepthook = lambda args: None if type(args.thread).__name__ == "_AsyncWriterThread" else hook(args)
    return Backend(
        lambda step, scalars: [writer.add_scalar(name, value, step) for name, value in scalars.items()],
        lambda step, name, text: (writer.add_text(name, text, step), writer.flush()),
        lambda step, name, image: (writer.add_image(name, image, step, dataformats="HWC"), writer.flush()),
        lambda: [writer.close(), vars(threading).update(excepthook=hook)],
    )


def wandb(directory: Path, first_step: int, config: dict[str, Any]) -> Backend:
    """Write a run of W&B, which reads its own variables. A restart resumes it."""
    import wandb

    if not (path := directory / "wandb_id").exists():
        write_file(path, secrets.token_hex(8) + "\n")
    name = read_file(path).decode().strip()
    run: Any = wandb.init(id=name, resume="allow", dir=str(directory), name=directory.name, config=config)
    run.define_metric("*", step_metric="step")  # W&B's own step cannot decrease, as it does when a run resumes
    return Backend(
        lambda step, scalars: run.log({"step": step, **scalars}),
        lambda step, name, text: run.log({"step": step, name: wandb.Html(text, inject=False)}),
        lambda step, name, image: run.log({"step": step, name: wandb.Image(image)}),
        run.finish,
    )


def mlflow(directory: Path, first_step: int, config: dict[str, Any]) -> Backend:
    """Write a run to an MLflow server or folder: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", "megasparse")
    import mlflow

    name = read_file(path).decode().strip() if (path := directory / "mlflow_id").exists() else None
    run = mlflow.start_run(run_id=name, run_name=directory.name, nested=mlflow.active_run() is not None)
    write_file(path, run.info.run_id + "\n")
    mlflow.log_dict(config, "config.json")
    return Backend(
        lambda step, scalars: mlflow.log_metrics(scalars, step=step),
        lambda step, name, text: mlflow.log_text(text, f"{name}/{step}.txt"),
        lambda step, name, image: mlflow.log_image(image, f"{name}/{step}.png"),
        mlflow.end_run,
    )


BACKENDS = {"TensorBoard": tensorboard, "wandb": wandb, "mlflow": mlflow}


class Tracker(AbstractContextManager["Tracker"]):
    """Context manager that writes a run's scalars, texts and pictures; ranks other than 0 write nothing.

    metrics.jsonl gets one line per step and survives storage errors. TensorBoard and the backend of `logging.sink` are
    switched off after their first error. start_step: records of later steps are dropped.
    """

    def __init__(self, config: RunSettings, ranks: Ranks, start_step: int):
        self.writing, directory, sink = ranks.rank == 0, Path(config.run.directory), config.logging.sink
        self._every, self._steps, self._backends = config.logging.every, config.training.steps, dict[str, Any]()
        if not self.writing:
            return
        tokens = isinstance(config, Config) and config.data.tokenizer not in BYTE_TOKENS
        self._unit = "bits/token" if tokens else "bits/dim"
        self._bar = tqdm(total=self._steps, initial=start_step, unit="step", dynamic_ncols=True, disable=None)
        self._began, self._start_step, self._last_plain = time.monotonic(), start_step, -math.inf
        directory.mkdir(parents=True, exist_ok=True)
        try:
            write_file(directory / "config.json", config.model_dump_json(indent=2) + "\n")
        except OSError as error:
            self.say(f"{directory / 'config.json'} cannot be written ({error.strerror})")
        self._metrics = JsonLines(directory / "metrics.jsonl", self.say, start_step)
        self._events = JsonLines(directory / "events.jsonl", self.say)
        if sink is not None and importlib.util.find_spec(sink) is None:
            raise ConfigError("logging.sink", f'"{sink}" is not installed', f"pip install -e '.[{sink}]', or use null")
        for name in filter(None, ("TensorBoard", sink)):
            arguments = directory, start_step + 1, config.model_dump(mode="json")
            if backend := self._guard(name, BACKENDS[name], *arguments):
                self._backends[name] = backend

    def log(self, step: int, scalars: dict[str, float], amend: bool = False) -> None:
        """Write a step to metrics.jsonl, and if due to backends and progress line. amend: add to the last line."""
        if not self.writing:
            return
        line = {"step": step, **(read_line(self._metrics.path, step)[1] if amend else {})}
        if amend:
            self._metrics = JsonLines(self._metrics.path, self.say, step - 1)
        self._metrics.append(line | {name: x if math.isfinite(x) else None for name, x in scalars.items()})
        evaluated = any(name.startswith(("evaluation/", "quality/")) for name in scalars)
        with suppress(OSError):
            self._bar.update(not amend)
        if step % self._every == 0 or step == self._steps or evaluated:
            self._call("scalars", step, scalars)
            with suppress(OSError):
                self._show_progress(step, scalars, evaluated or step == self._steps)

    def show(self, step: int, name: str, sample: str | Tensor) -> None:
        """Write a text or a picture (height, width, 3) uint8 to the backends."""
        if isinstance(sample, str):
            self._call("text", step, name, f"```\n{sample}\n```")
        else:
            self._call("image", step, name, sample.cpu().numpy())

    def event(self, step: int, message: str) -> None:
        """Report an incident to stderr, the backends and events.jsonl, which restarts keep."""
        if self.writing:
            self.say(message)
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            self._events.append({"step": step, "time": now, "message": message})
            self._call("text", step, "events", message)

    def say(self, message: str) -> None:
        if self.writing:
            with suppress(OSError):
                self._bar.write(message, file=sys.stderr)

    def _call(self, method: str, *arguments: Any) -> None:
        for name, backend in list(self._backends.items()):
            self._guard(name, getattr(backend, method), *arguments)

    def _guard(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a backend and return its result. After an error, switch the backend off."""
        try:
            return call(*arguments)
        except Exception as error:  # of any type: errors of background threads are raised by the next call
            self._backends.pop(name, None)
            reason = one_line(without_secrets(str(error)))  # MLflow's messages contain the URI with its password
            self.say(f"{name} is switched off until the run is restarted ({reason}). metrics.jsonl is complete")

    def _show_progress(self, step: int, scalars: dict[str, float], is_due: bool) -> None:
        parts = [form.format(scalars[name], unit=self._unit) for name, form in SHOWN.items() if name in scalars]
        if "evaluation/bits_per_dim" not in scalars and "evaluation/loss" in scalars:
            held_out = [f"{name[11:]} {x:.4f}" for name, x in scalars.items() if name.startswith("evaluation/")]
            parts.append(f"held-out {', '.join(held_out)}")
        text, now = ", ".join(parts), time.monotonic()
        if not self._bar.disable:
            self._bar.set_postfix_str(text)
        elif now - self._last_plain >= 10.0 or is_due:  # stderr is not a terminal
            self._last_plain = now
            remaining = (now - self._began) / max(1, step - self._start_step) * (self._steps - step)
            left = f"{tqdm.format_interval(remaining)} left"
            print(f"step {step}/{self._steps}: {text}, {left}", file=sys.stderr, flush=True)

    def __exit__(self, *exception: object) -> None:
        if self.writing:
            with suppress(OSError):
                self._bar.close()
            self._metrics.close()
            self._events.close()
            self._call("close")
            self._backends.clear()
