"""Traces of torch's profiler on demand: of the next steps after a signal."""

import gzip
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from megasparse.config.schema import RunSettings
from megasparse.data.files import replacing
from megasparse.training.ranks import Ranks

STEPS = 3
"""That a signal traces."""


class Tracer:
    """Writes run.directory/traces/step-00000012-rank-00000.json.gz, a Chrome trace of a rank from step 12 on.

    wanted: returns True once for each request to trace the next steps on this rank. What cannot be traced or written
    is reported on stderr, and training goes on.
    """

    def __init__(self, config: RunSettings, ranks: Ranks, wanted: Callable[[], bool]):
        self._ranks, self._wanted = ranks, wanted
        self._directory = Path(config.run.directory) / "traces"
        self._profile: profile | None = None
        self._first, self._last = 0, 0

    def steps(self, steps: Iterable[int]) -> Iterator[int]:
        """The steps, with tracing started and ended between them."""
        try:
            for step in steps:
                if self._profile is not None and step > self._last:
                    self._end()
                if self._profile is None and self._wanted():
                    self._begin(step, step + STEPS - 1)
                yield step
        finally:
            self._end()

    def _begin(self, step: int, last: int) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._ranks.device.type == "cuda")
        tracing = profile(activities=activities)
        try:
            tracing.start()
        except RuntimeError as error:  # another profiler has the device
            self._say(f"steps {step} to {last} cannot be traced ({str(error).splitlines()[0]})")
            return
        self._profile, self._first, self._last = tracing, step, last

    def _end(self) -> None:
        tracing, self._profile = self._profile, None
        if tracing is None:
            return
        path = self._directory / f"step-{self._first:08d}-rank-{self._ranks.rank:05d}.json.gz"
        try:
            tracing.stop()
            _write(tracing, path)
        except (OSError, RuntimeError) as error:
            self._say(f"{path} cannot be written ({error}). Training goes on")
            return
        self._say(f"{path}: a trace; open it at https://ui.perfetto.dev or chrome://tracing")

    def _say(self, message: str) -> None:
        with suppress(OSError):
            os.write(2, f"rank {self._ranks.rank}: {message}\n".encode())


def _write(tracing: profile, path: Path) -> None:
    """The file is there whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(tempfile.NamedTemporaryFile(suffix=".json")) as plain:
        tracing.export_chrome_trace(plain.name)
        with open(plain.name, "rb") as trace:  # the exporter says nothing of a disk that is full
            trace.seek(-min(64, os.path.getsize(plain.name)), os.SEEK_END)
            if not trace.read().rstrip().endswith(b"}"):
                raise OSError(f"{tempfile.gettempdir()} has no room for it")
            trace.seek(0)
            with replacing(path) as file, gzip.GzipFile(fileobj=file, mode="wb", compresslevel=3) as packed:
                shutil.copyfileobj(trace, packed)
