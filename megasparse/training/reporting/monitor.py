"""What a run reports: every scalar of every step to metrics.jsonl, some to its sinks and to the progress line.

docs/monitoring.md lists the scalars. Only rank 0 writes. Storage or a terminal that fails ends no training.
"""

import contextlib
import math
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from tqdm import tqdm

from megasparse.config.schema import RunSettings
from megasparse.data.files import replacing
from megasparse.errors import ConfigError
from megasparse.training.ranks import Ranks
from megasparse.training.reporting.board import Board
from megasparse.training.reporting.json_lines import JsonLines
from megasparse.training.reporting.rank_table import RankTable, StepTimes

PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0}
"""Dense bf16 peak of one device, by a word of its name."""

PLAIN_LINE_SECONDS = 10.0
"""Where stderr is no terminal, a line at most this often."""


class Monitor:
    """Writes a run's scalars and texts; a context manager. On other ranks than 0 it does nothing.

    `start_step`: the step that the run goes on from. What an earlier process wrote of later steps is cut off, so that
    metrics.jsonl has exactly one line a step. Of a token: FLOPs that the model needs, and those that its devices do.
    """

    def __init__(
        self,
        config: RunSettings,
        ranks: Ranks,
        start_step: int,
        flops_per_token: float | None = None,
        hardware_flops_per_token: float | None = None,
    ):
        self.writing = ranks.rank == 0
        self._every, self._steps = config.logging.every, config.training.steps
        self._device, self._world_size = ranks.device, ranks.world_size
        self._peak = config.logging.peak_tflops or _known_peak(ranks.device)
        self._flops = {"model": flops_per_token, "hardware": hardware_flops_per_token}
        if not self.writing:
            return
        self._bar = tqdm(total=self._steps, initial=start_step, unit="step", dynamic_ncols=True, disable=None)
        self._began, self._start_step, self._last_plain = time.monotonic(), start_step, -math.inf
        directory = Path(config.run.directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            hint = "Choose a folder that can be written"
            raise ConfigError("run.directory", f"{directory} cannot be made ({error.strerror})", hint) from None
        try:
            with replacing(directory / "config.json") as file:
                file.write(config.model_dump_json(indent=2).encode() + b"\n")
        except OSError as error:
            self.say(f"{directory / 'config.json'} cannot be written ({error.strerror})")
        self._directory = directory
        self._lines = JsonLines(directory / "metrics.jsonl", self.say, start_step)
        self._events = JsonLines(directory / "events.jsonl", self.say)
        self._board = Board(config, start_step + 1, self.say)

    def speed(self, tokens: int, step_seconds: float, spent: StepTimes) -> dict[str, float]:
        """The scalars of speed for a step of `tokens` tokens over all ranks, of which this one spent its time so."""
        rate = tokens / step_seconds
        scalars = {
            "speed/tokens_per_second": rate,
            "speed/tokens_per_second_per_device": rate / self._world_size,
            "speed/step_seconds": step_seconds,
            "speed/data_wait_seconds": spent.data,
        }
        if self._world_size > 1:
            scalars["speed/exposed_communication_seconds"] = spent.communication
        for kind, flops in self._flops.items():
            if flops is not None and self._peak is not None:
                scalars[f"speed/{kind}_flops_utilisation"] = flops * rate / (self._world_size * self._peak * 1e12)
        return scalars

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Write a step to metrics.jsonl, and every `logging.every` steps to the sinks and the progress line."""
        if not self.writing:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        self._lines.append({"step": step, **finite})
        with _no_terminal_matters():
            self._bar.update()
        evaluated = any(name.startswith(("evaluation/", "quality/")) for name in scalars)
        if step % self._every == 0 or step == self._steps or evaluated:
            self._board.scalars(step, scalars)
            self._show_progress(step, scalars, evaluated)

    def ranks(self, step: int, table: RankTable) -> None:
        """Write what each of several ranks spends of a step to ranks.json, which is replaced, and to the sinks."""
        if self.writing and self._world_size > 1:
            self._board.text(step, "ranks", table.text())
            try:
                table.write(self._directory / "ranks.json", step)
            except OSError as error:
                self.say(f"{self._directory / 'ranks.json'} cannot be written ({error.strerror})")

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text sample to the sinks."""
        if self.writing:
            self._board.text(step, name, f"```\n{text}\n```")

    def image(self, step: int, name: str, picture: Tensor) -> None:
        """Write a picture (height, width, 3) uint8 to the sinks."""
        if self.writing:
            self._board.image(step, name, picture)

    def event(self, step: int, message: str) -> None:
        """Report something out of the ordinary to stderr, the sinks, and events.jsonl, which restarts leave whole."""
        if self.writing:
            self.say(message)
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            self._events.append({"step": step, "time": now, "message": message})
            self._board.text(step, "events", message)

    def say(self, message: str) -> None:
        """Print a line for people on rank 0's stderr."""
        if self.writing:
            with _no_terminal_matters():
                self._bar.write(message, file=sys.stderr)

    def _show_progress(self, step: int, scalars: dict[str, float], evaluated: bool) -> None:
        reported = [f"loss {scalars['train/loss']:.4f}"]
        if "train/bits_per_dim" in scalars:
            reported.append(f"{scalars['train/bits_per_dim']:.4f} bits/dim")
        reported += [
            f"lr {scalars['optimizer/learning_rate']:.2e}",
            f"{scalars['speed/tokens_per_second']:,.0f} tokens/s",
        ]
        if "evaluation/bits_per_dim" in scalars:
            reported.append(f"held-out {scalars['evaluation/bits_per_dim']:.4f} bits/dim")
        elif "evaluation/loss" in scalars:
            found = {
                name.removeprefix("evaluation/"): x for name, x in scalars.items() if name.startswith("evaluation/")
            }
            reported.append(f"held-out {', '.join(f'{name} {x:.4f}' for name, x in found.items())}")
        if not self._bar.disable:
            with _no_terminal_matters():
                self._bar.set_postfix_str(", ".join(reported))
            return
        now = time.monotonic()
        if now - self._last_plain >= PLAIN_LINE_SECONDS or step == self._steps or evaluated:
            self._last_plain = now
            left = (now - self._began) / (step - self._start_step) * (self._steps - step)
            line = f"step {step}/{self._steps}: {', '.join(reported)}, {_clock(left)} left"
            with _no_terminal_matters():
                print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.writing:
            with _no_terminal_matters():
                self._bar.close()
            for part in (self._lines, self._events, self._board):
                part.close()


def _no_terminal_matters() -> contextlib.suppress:
    """Write to stderr, which may be a pipe whose reader is gone, or a file on a full disk."""
    return contextlib.suppress(OSError)


def _known_peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAK_TFLOPS.items() if word in name), None)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
