"""Metrics, texts and pictures of a run: metrics.jsonl, events.jsonl, TensorBoard, W&B or MLflow, and the progress line.

docs/reference/scalars.md lists them. Only rank 0 writes. Failures of storage, terminal or backend do not stop a run.
"""

import errno
import importlib.util
import json
import math
import os
import secrets
import shutil
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megasparse.config.schema import RunSettings
from megasparse.errors import ConfigError, one_line, without_secrets
from megasparse.files import open_file, open_regular, read_file, replacing, write_file
from megasparse.training.ranks import Ranks

PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0}
"""Dense bf16 peak per device, by a word in its name."""
PLAIN_LINE_SECONDS = 10.0
"""Minimum seconds between progress lines if stderr is not a terminal."""


class JsonLines:
    """File of JSON lines. If the storage fails, lines wait in memory, in order, until it works again.

    Args:
        report: Called once when the storage fails, and once when it works again.
        last_step: Lines of later steps are removed first; None removes only an incomplete last line.
    """

    def __init__(self, path: Path, report: Callable[[str], None], last_step: int | None = None):
        self.path, self._report, self._last_step = path, report, last_step
        self._length: int | None = None  # bytes of complete lines; None before the file was truncated
        self._waiting: list[bytes] = []
        self._failing = False
        self.flush()

    def append(self, values: dict[str, Any]) -> None:
        """Append one line, now or when the storage works again."""
        self._waiting.append(json.dumps(values).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the waiting lines if the storage works."""
        problem = None
        try:
            self._write()
        except OSError as error:
            problem = error.strerror or str(error)
        if problem and not self._failing:
            free = "free space unknown"
            with suppress(OSError):
                free = f"{shutil.disk_usage(self.path.parent).free:,} bytes are free"
            waiting = "its lines stay in memory until they can be written"
            self._report(f"{self.path} cannot be written ({problem}; {free}): {waiting}")
        elif self._failing and not problem:
            self._report(f"{self.path} can be written again: no line is missing")
        self._failing = problem is not None

    def close(self) -> None:
        """Write the waiting lines, and report those that could not be written."""
        self.flush()
        if self._waiting:
            self._report(f"{self.path}: its last {len(self._waiting)} lines could not be written and are lost")

    def _write(self) -> None:
        if self._length is None:
            cut_lines(self.path, self._last_step)
        data, written = b"".join(self._waiting), 0
        # Created only once: later the path could be on another file system, if a folder was unmounted meanwhile.
        descriptor = open_regular(self.path, os.O_WRONLY | (os.O_CREAT if self._length is None else 0))
        try:
            size = os.fstat(descriptor).st_size
            self._length = size if self._length is None else self._length
            if size < self._length:
                raise OSError(errno.ESTALE, "the file is shorter than its written lines", str(self.path))
            os.ftruncate(descriptor, self._length)  # drops the rest of a failed write
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], self._length + written)
        except OSError:
            with suppress(OSError):  # or when it works again
                os.ftruncate(descriptor, self._length or 0)
            raise
        finally:
            with suppress(OSError):
                os.close(descriptor)
        self._length += len(data)
        self._waiting.clear()


def cut_lines(path: Path, last_step: int | None) -> None:
    """Atomically remove an incomplete last line and the lines of steps after `last_step`."""

    def valid(line: bytes) -> bool:
        try:
            return line.endswith(b"\n") and (last_step is None or json.loads(line)["step"] <= last_step)
        except (ValueError, KeyError, TypeError, RecursionError):
            return False

    if path.exists():
        with open_file(path) as file:
            lines = file.readlines()
        if not all(map(valid, lines)):
            with replacing(path) as out:
                out.writelines(filter(valid, lines))


Backend = namedtuple("Backend", "scalars text image close")
"""Functions that write scalars (step, values by name), a text or picture (step, name, value), and close."""


def tensorboard(directory: Path, first_step: int, config: dict[str, Any]) -> Backend:
    """Write TensorBoard's files. Records of an earlier process from `first_step` on are hidden."""
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
    """Write a run of W&B, which reads its own variables (WANDB_PROJECT, WANDB_MODE=offline). A restart resumes it."""
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


class Tracker:
    """Context manager that writes a run's scalars, texts and pictures; ranks other than 0 write nothing.

    metrics.jsonl gets one line per step and survives storage errors. TensorBoard and the backend of `logging.sink` are
    switched off after their first error, with one warning, until the run is restarted.

    Args:
        start_step: step that the run resumes from; records of later steps are dropped.
        flops_per_token: FLOPs per token of the model and of the hardware; empty if unknown.

    Raises:
        ConfigError: the package of `logging.sink` is not installed.
    """

    def __init__(self, config: RunSettings, ranks: Ranks, start_step: int, flops_per_token: tuple[float, ...] = ()):
        self.writing, directory, sink = ranks.rank == 0, Path(config.run.directory), config.logging.sink
        self._every, self._steps, self._world_size = config.logging.every, config.training.steps, ranks.world_size
        self._flops, self._peak = dict(zip(("model", "hardware"), flops_per_token, strict=False)), _peak(ranks.device)
        self._backends: dict[str, Any] = {}
        if not self.writing:
            return
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
            hint = f"Install it with pip install 'megasparse[{sink}]', or use null"
            raise ConfigError("logging.sink", f'"{sink}" is not installed', hint)
        for name in filter(None, ("TensorBoard", sink)):
            arguments = directory, start_step + 1, config.model_dump(mode="json")
            if backend := self._guard(name, BACKENDS[name], *arguments):
                self._backends[name] = backend

    def speed(self, tokens: int, step_seconds: float, data_seconds: float) -> dict[str, float]:
        """Return a step's speed scalars. tokens: over all ranks. data_seconds: time spent waiting for data."""
        rate = tokens / step_seconds
        scalars = {
            "speed/tokens_per_second": rate, "speed/tokens_per_second_per_device": rate / self._world_size,
            "speed/step_seconds": step_seconds, "speed/data_wait_seconds": data_seconds,
        }  # fmt: skip
        for kind, flops in self._flops.items():
            if self._peak is not None:
                scalars[f"speed/{kind}_flops_utilisation"] = flops * rate / (self._world_size * self._peak * 1e12)
        return scalars

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Write a step to metrics.jsonl, and every `logging.every` steps to all backends and the progress line."""
        if not self.writing:
            return
        self._metrics.append({"step": step, **{name: x if math.isfinite(x) else None for name, x in scalars.items()}})
        with suppress(OSError):
            self._bar.update()
        evaluated = any(name.startswith(("evaluation/", "quality/")) for name in scalars)
        if step % self._every == 0 or step == self._steps or evaluated:
            self._call("scalars", step, scalars)
            self._show_progress(step, scalars, evaluated)

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text sample to the backends."""
        self._call("text", step, name, f"```\n{text}\n```")

    def image(self, step: int, name: str, picture: Tensor) -> None:
        """Write a picture (height, width, 3) uint8 to the backends."""
        self._call("image", step, name, picture.cpu().numpy())

    def event(self, step: int, message: str) -> None:
        """Report an incident to stderr, the backends and events.jsonl, which restarts keep."""
        if self.writing:
            self.say(message)
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            self._events.append({"step": step, "time": now, "message": message})
            self._call("text", step, "events", message)

    def say(self, message: str) -> None:
        """Print a line on rank 0's stderr."""
        if self.writing:
            with suppress(OSError):
                self._bar.write(message, file=sys.stderr)

    def _call(self, method: str, *arguments: Any) -> None:
        for name, backend in list(self._backends.items()):
            self._guard(name, getattr(backend, method), *arguments)

    def _guard(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a backend and return its result. After an error, switch the backend off and return None."""
        try:
            return call(*arguments)
        except Exception as error:  # of any type: errors of background threads are raised by the next call
            self._backends.pop(name, None)
            reason = one_line(without_secrets(str(error)))  # MLflow's messages contain the URI with its password
            self.say(
                f"{name} is switched off until the run is restarted ({reason}). metrics.jsonl contains all metrics"
            )

    def _show_progress(self, step: int, scalars: dict[str, float], evaluated: bool) -> None:
        held_out = {name[11:]: x for name, x in scalars.items() if name.startswith("evaluation/")}
        parts = [f"loss {scalars['train/loss']:.4f}"]
        if "train/bits_per_dim" in scalars:
            parts.append(f"{scalars['train/bits_per_dim']:.4f} bits/dim")
        parts.append(f"lr {scalars['optimizer/learning_rate']:.2e}")
        parts.append(f"{scalars['speed/tokens_per_second']:,.0f} tokens/s")
        if "bits_per_dim" in held_out:
            parts.append(f"held-out {held_out['bits_per_dim']:.4f} bits/dim")
        elif "loss" in held_out:
            parts.append(f"held-out {', '.join(f'{name} {x:.4f}' for name, x in held_out.items())}")
        text, now = ", ".join(parts), time.monotonic()
        with suppress(OSError):
            if not self._bar.disable:
                self._bar.set_postfix_str(text)
            elif now - self._last_plain >= PLAIN_LINE_SECONDS or step == self._steps or evaluated:
                self._last_plain = now
                remaining = (now - self._began) / (step - self._start_step) * (self._steps - step)
                line = f"step {step}/{self._steps}: {text}, {tqdm.format_interval(remaining)} left"
                print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.writing:
            with suppress(OSError):
                self._bar.close()
            self._metrics.close()
            self._events.close()
            self._call("close")
            self._backends.clear()


def _peak(device: torch.device) -> float | None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for word, peak in PEAK_TFLOPS.items() if word in name), None)
