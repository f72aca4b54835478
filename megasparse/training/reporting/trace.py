"""Traces of a few steps, written as Chrome traces when a signal requests them."""

import gzip
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from megasparse.config.schema import RunSettings
from megasparse.errors import write_error
from megasparse.files import write_file
from megasparse.training.ranks import Ranks

TRACED_STEPS = 3  # per trace


def traced(steps: Iterable[int], config: RunSettings, ranks: Ranks, requested: Callable[[], bool]) -> Iterator[int]:
    """Yield the steps; write run.directory/traces/step-00000012-rank-00000.json.gz, a Chrome trace from step 12 on.
    requested: returns True once per request on this rank. Failures do not stop training.
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
