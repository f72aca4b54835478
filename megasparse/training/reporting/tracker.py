"""A run's records: every scalar of every step to metrics.jsonl, some to TensorBoard, one more backend and the progress
line.

docs/monitoring.md lists the scalars. Only rank 0 writes. Storage or a terminal that fails ends no training: stderr may
be a pipe whose reader is gone, or a file on a full disk.
"""

import importlib.util
import json
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megasparse.config.schema import RunSettings
from megasparse.errors import ConfigError
from megasparse.files import open_regular, read_file, replacing
from megasparse.training.ranks import Ranks

PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0}
"""Dense bf16 peak of one device, by a word of its name."""

PLAIN_LINE_SECONDS = 10.0
"""Seconds between progress lines, at least, if stderr is not a terminal."""


class Tracker:
    """Writes a run's scalars, texts and pictures; a context manager. On other ranks than 0 it does nothing.

    metrics.jsonl has one line a step and outlives trouble with its storage. Any other backend, TensorBoard and the one
    of `logging.sink`, is switched off at its first error, with one warning, until the run is started again.

    Args:
        start_step: the step that the run resumes from. Records of an earlier process for later steps are cut off.
        flops_per_token: FLOPs that the model needs for a token, and those that its devices compute; empty if unknown.

    Raises ConfigError where the run's folder cannot be made or the package of `logging.sink` is not installed.
    """

    def __init__(
        self,
        config: RunSettings,
        ranks: Ranks,
        start_step: int,
        flops_per_token: tuple[float, float] | tuple[()] = (),
    ):
        self.writing = ranks.rank == 0
        self._every, self._steps, self._world_size = config.logging.every, config.training.steps, ranks.world_size
        self._peak = _known_peak(ranks.device)
        self._flops = dict(zip(("model", "hardware"), flops_per_token, strict=False))
        self._backends: dict[str, Any] = {}
        if not self.writing:
            return
        self._bar = tqdm(total=self._steps, initial=start_step, unit="step", dynamic_ncols=True, disable=None)
        self._began, self._start_step, self._last_plain = time.monotonic(), start_step, -math.inf
        directory, sink = Path(config.run.directory), config.logging.sink
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{directory} cannot be made ({error.strerror})"
            raise ConfigError("run.directory", problem, "Choose a folder that can be written") from None
        try:
            with replacing(directory / "config.json") as file:
                file.write(config.model_dump_json(indent=2).encode() + b"\n")
        except OSError as error:
            self.say(f"{directory / 'config.json'} cannot be written ({error.strerror})")
        self._metrics = JsonLines(directory / "metrics.jsonl", self.say, start_step)
        self._events = JsonLines(directory / "events.jsonl", self.say)
        if sink is not None and importlib.util.find_spec(sink) is None:
            hint = f"pip install 'megasparse[{sink}]', or null"
            raise ConfigError("logging.sink", f'"{sink}" is not installed', hint)
        settings = config.model_dump(mode="json")
        for name in filter(None, ("TensorBoard", sink)):
            if backend := self._guard(name, partial(BACKENDS[name], directory, start_step + 1, settings)):
                self._backends[name] = backend

    def speed(self, tokens: int, step_seconds: float, data_seconds: float) -> dict[str, float]:
        """Return the scalars of speed for a step of `tokens` tokens over all ranks, which waited for its data."""
        rate = tokens / step_seconds
        scalars = {
            "speed/tokens_per_second": rate,
            "speed/tokens_per_second_per_device": rate / self._world_size,
            "speed/step_seconds": step_seconds,
            "speed/data_wait_seconds": data_seconds,
        }
        for kind, flops in self._flops.items():
            if self._peak is not None:
                scalars[f"speed/{kind}_flops_utilisation"] = flops * rate / (self._world_size * self._peak * 1e12)
        return scalars

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Write a step to metrics.jsonl, and every `logging.every` steps to all backends and the progress line."""
        if not self.writing:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._metrics.append({"step": step, **finite})
        with suppress(OSError):
            self._bar.update()
        evaluated = any(name.startswith(("evaluation/", "quality/")) for name in scalars)
        if step % self._every == 0 or step == self._steps or evaluated:
            self._each("scalars", step, scalars)
            self._show_progress(step, scalars, evaluated)

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text sample to the backends."""
        self._each("text", step, name, f"```\n{text}\n```")

    def image(self, step: int, name: str, picture: Tensor) -> None:
        """Write a picture (height, width, 3) uint8 to the backends."""
        self._each("image", step, name, picture)

    def event(self, step: int, message: str) -> None:
        """Report something out of the ordinary to stderr, the backends and events.jsonl, which restarts keep."""
        if self.writing:
            self.say(message)
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            self._events.append({"step": step, "time": now, "message": message})
            self._each("text", step, "events", message)

    def say(self, message: str) -> None:
        """Print a line for people on rank 0's stderr."""
        if self.writing:
            with suppress(OSError):
                self._bar.write(message, file=sys.stderr)

    def _each(self, method: str, *arguments: Any) -> None:
        for name, backend in list(self._backends.items()):
            self._guard(name, partial(getattr(backend, method), *arguments))

    def _guard(self, name: str, call: Callable[[], Any]) -> Any:
        """Return the result of a call to a backend, None after an error, which switches it off."""
        try:
            return call()
        except Exception as error:  # a background thread's is raised at the next call, of whatever kind it was
            self._backends.pop(name, None)
            self.say(f"{name} is switched off until the run is started again ({error}). metrics.jsonl has every number")
            return None

    def _show_progress(self, step: int, scalars: dict[str, float], evaluated: bool) -> None:
        parts = [f"loss {scalars['train/loss']:.4f}"]
        if "train/bits_per_dim" in scalars:
            parts.append(f"{scalars['train/bits_per_dim']:.4f} bits/dim")
        parts += [
            f"lr {scalars['optimizer/learning_rate']:.2e}",
            f"{scalars['speed/tokens_per_second']:,.0f} tokens/s",
        ]
        held_out = {
            name.removeprefix("evaluation/"): x for name, x in scalars.items() if name.startswith("evaluation/")
        }
        if "bits_per_dim" in held_out:
            parts.append(f"held-out {held_out['bits_per_dim']:.4f} bits/dim")
        elif "loss" in held_out:
            parts.append(f"held-out {', '.join(f'{name} {x:.4f}' for name, x in held_out.items())}")
        if not self._bar.disable:
            with suppress(OSError):
                self._bar.set_postfix_str(", ".join(parts))
            return
        now = time.monotonic()
        if now - self._last_plain >= PLAIN_LINE_SECONDS or step == self._steps or evaluated:
            self._last_plain = now
            seconds = (now - self._began) / (step - self._start_step) * (self._steps - step)
            clock = tqdm.format_interval(seconds)
            with suppress(OSError):
                print(f"step {step}/{self._steps}: {', '.join(parts)}, {clock} left", file=sys.stderr, flush=True)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.writing:
            with suppress(OSError):
                self._bar.close()
            self._metrics.close()
            self._events.close()
            self._each("close")
            self._backends.clear()


def _known_peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAK_TFLOPS.items() if word in name), None)


class JsonLines:
    """A file of JSON lines that outlives trouble with its storage: lines that could not be written wait in memory, in
    order, until they can.

    report: called once when the storage fails, and once when it works again. last_step: lines of later steps are cut
    off first; None keeps all but a line that a crash cut short.
    """

    def __init__(self, path: Path, report: Callable[[str], None], last_step: int | None = None):
        self.path, self._report, self._last_step = path, report, last_step
        self._length: int | None = None
        """Bytes of whole lines; None until the file was cut."""
        self._waiting: list[bytes] = []
        self._failing = False
        self.flush()

    def append(self, values: dict[str, Any]) -> None:
        """Append one line, now or when the storage works again."""
        self._waiting.append(json.dumps(values).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the lines that wait, if the storage takes them."""
        try:
            self._write()
        except OSError as error:
            if not self._failing:
                free = "free space unknown"
                with suppress(OSError):
                    free = f"{shutil.disk_usage(self.path.parent).free:,} bytes are free"
                problem = f"{self.path} cannot be written ({error.strerror}; {free})"
                self._report(f"{problem}: its lines are kept in memory and written when it works again")
            self._failing = True
        else:
            if self._failing:
                self._report(f"{self.path} can be written again: no line is missing")
            self._failing = False

    def close(self) -> None:
        """Write the lines that wait, and report those that could not be written."""
        self.flush()
        if self._waiting:
            self._report(f"{self.path}: its last {len(self._waiting)} lines could not be written and are lost")

    def _write(self) -> None:
        if self._length is None:
            cut_lines(self.path, self._last_step)
        data, written = b"".join(self._waiting), 0
        descriptor = open_regular(self.path, os.O_WRONLY | os.O_CREAT)
        try:
            if self._length is None:
                self._length = os.fstat(descriptor).st_size
            os.ftruncate(descriptor, self._length)  # of what a failed write left
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
    """Drop a line that a crash cut short, and the lines of steps after `last_step`. The file changes all at once."""
    if not path.exists():
        return
    lines = read_file(path, sys.maxsize).splitlines(keepends=True)
    valid = [line for line in lines if line.endswith(b"\n") and _is_until(line, last_step)]
    if valid != lines:
        with replacing(path) as file:
            file.writelines(valid)


def _is_until(line: bytes, last_step: int | None) -> bool:
    try:
        return last_step is None or json.loads(line)["step"] <= last_step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


class TensorBoard:
    """TensorBoard's files. Records of an earlier process from `first_step` on are hidden."""

    def __init__(self, directory: Path, first_step: int, config: dict[str, Any]):
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and runs alone need it

        self._writer: Any = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step)

    def scalars(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def image(self, step: int, name: str, picture: Tensor) -> None:
        self._writer.add_image(name, picture.cpu(), step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb, which reads its own variables (WANDB_PROJECT, WANDB_MODE=offline). A restart resumes it."""

    def __init__(self, directory: Path, first_step: int, config: dict[str, Any]):
        import wandb

        self._wandb, path = wandb, directory / "wandb_id"
        if not path.exists():
            path.write_text(secrets.token_hex(8) + "\n")
        self._run: Any = wandb.init(
            id=path.read_text().strip(), resume="allow", dir=str(directory), name=directory.name, config=config
        )
        self._run.define_metric("*", step_metric="step")  # wandb's own count never goes back, and a resumed run does

    def scalars(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({"step": step, name: self._wandb.Html(text, inject=False)})

    def image(self, step: int, name: str, picture: Tensor) -> None:
        self._run.log({"step": step, name: self._wandb.Image(picture.cpu().numpy())})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow's tracking server or folder, by MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, directory: Path, first_step: int, config: dict[str, Any]):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # reports to its makers what it is used for
        import mlflow

        self._client, path = mlflow.MlflowClient(), directory / "mlflow_id"
        if not path.exists():
            name = mlflow.environment_variables.MLFLOW_EXPERIMENT_NAME.get() or "megasparse"
            created = self._client.create_run(mlflow.set_experiment(name).experiment_id, run_name=directory.name)
            path.write_text(created.info.run_id + "\n")
        self._run: str = path.read_text().strip()
        self._client.log_dict(self._run, config, "config.json")

    def scalars(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._client.log_metric(self._run, name, value, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._run, text, f"{name}/{step}.txt")

    def image(self, step: int, name: str, picture: Tensor) -> None:
        self._client.log_image(self._run, picture.cpu().numpy(), f"{name}/{step}.png")

    def close(self) -> None:
        self._client.set_terminated(self._run)


BACKENDS: dict[str, Any] = {"TensorBoard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}
"""Backends by name: built from (run folder, first step, configuration)."""
