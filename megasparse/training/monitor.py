"""What a run reports: every scalar of every step to metrics.jsonl, some to TensorBoard and to the progress line.

docs/monitoring.md lists the scalars. Only rank 0 writes.
"""

import json
import math
import os
import resource
import sys
import time
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from megasparse.config.schema import Config
from megasparse.training.ranks import Ranks

PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0}
"""Dense bf16 peak of one device, by a word of its name."""

PLAIN_LINE_SECONDS = 10.0
"""Where stderr is no terminal, a line at most this often."""


class Monitor:
    """Writes a run's scalars and texts; a context manager. On other ranks than 0 it does nothing.

    `start_step`: the step that the run goes on from. What an earlier process wrote of later steps is cut off, so that
    metrics.jsonl has exactly one line a step.
    """

    def __init__(self, config: Config, ranks: Ranks, start_step: int, flops_per_token: float | None = None):
        self.writing = ranks.rank == 0
        self._every, self._steps = config.logging.every, config.training.steps
        self._device, self._world_size = ranks.device, ranks.world_size
        self._peak = config.logging.peak_tflops or _known_peak(ranks.device)
        self._flops_per_token = flops_per_token
        if not self.writing:
            return
        directory = Path(config.run.directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(config.model_dump_json(indent=2) + "\n")
        cut_metrics(directory / "metrics.jsonl", start_step)
        self._lines = (directory / "metrics.jsonl").open("a")
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=start_step + 1)
        self._bar = tqdm(
            total=self._steps, initial=start_step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty()
        )
        self._began, self._start_step, self._last_plain = time.monotonic(), start_step, -math.inf

    def speed(self, tokens: int, step_seconds: float, wait_seconds: float) -> dict[str, float]:
        """The scalars of speed and memory for a step of `tokens` tokens over all ranks."""
        rate = tokens / step_seconds
        scalars = {
            "speed/tokens_per_second": rate,
            "speed/step_seconds": step_seconds,
            "speed/data_wait_seconds": wait_seconds,
            "memory/peak_bytes": float(_peak_memory(self._device)),
        }
        if self._flops_per_token is not None and self._peak is not None:
            peak = self._world_size * self._peak * 1e12
            scalars["speed/model_flops_utilisation"] = self._flops_per_token * rate / peak
        return scalars

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """One step: a line of metrics.jsonl, and as often as `logging.every` says TensorBoard and the progress line."""
        if not self.writing:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._lines.write(json.dumps({"step": step, **finite}) + "\n")
        self._lines.flush()
        self._bar.update()
        evaluated = any(name.startswith(("evaluation/", "quality/")) for name in scalars)
        if step % self._every == 0 or step == self._steps or evaluated:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)
            self._show_progress(step, scalars, evaluated)

    def text(self, step: int, name: str, text: str) -> None:
        """A text sample, to TensorBoard."""
        if self.writing:
            self._board.add_text(name, f"```\n{text}\n```", step)
            self._board.flush()

    def image(self, step: int, name: str, picture: Tensor) -> None:
        """A picture (height, width, 3) uint8, to TensorBoard."""
        if self.writing:
            self._board.add_image(name, picture.cpu(), step, dataformats="HWC")
            self._board.flush()

    def say(self, message: str) -> None:
        """A line for people, on rank 0's stderr."""
        if self.writing:
            self._bar.write(message, file=sys.stderr)

    def _show_progress(self, step: int, scalars: dict[str, float], evaluated: bool) -> None:
        told = [f"loss {scalars['train/loss']:.4f}"]
        if "train/bits_per_dim" in scalars:
            told.append(f"{scalars['train/bits_per_dim']:.4f} bits/dim")
        told += [f"lr {scalars['optimizer/learning_rate']:.2e}", f"{scalars['speed/tokens_per_second']:,.0f} tokens/s"]
        if "evaluation/bits_per_dim" in scalars:
            told.append(f"held-out {scalars['evaluation/bits_per_dim']:.4f} bits/dim")
        elif "evaluation/loss" in scalars:
            told.append(f"held-out loss {scalars['evaluation/loss']:.4f}")
        if not self._bar.disable:
            self._bar.set_postfix_str(", ".join(told))
            return
        now = time.monotonic()
        if now - self._last_plain >= PLAIN_LINE_SECONDS or step == self._steps or evaluated:
            self._last_plain = now
            left = (now - self._began) / (step - self._start_step) * (self._steps - step)
            print(f"step {step}/{self._steps}: {', '.join(told)}, {_clock(left)} left", file=sys.stderr, flush=True)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.writing:
            self._bar.close()
            self._lines.close()
            self._board.close()


def cut_metrics(path: Path, last_step: int) -> None:
    """Drop the lines of steps after `last_step`, and a line that a crash cut short. The file changes all at once."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            if json.loads(line)["step"] > last_step:
                continue
        except (ValueError, KeyError, TypeError):
            continue
        kept.append(f"{line}\n")
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("w") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _peak_memory(device: torch.device) -> int:
    """Most bytes ever in use: allocated tensors on a GPU, resident memory of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _known_peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAK_TFLOPS.items() if word in name), None)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
