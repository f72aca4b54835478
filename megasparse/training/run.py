"""Setup of a training run, shared by pretraining and fine-tuning.

`open_training` locks the run's folder, watches its ranks, finds the checkpoint to resume from, and opens model, data,
engine, evaluation and tracker, in this order. `loop.train` runs the steps.
"""

import os
import socket
import stat
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from torch import Tensor, nn

from megasparse.config.schema import RunSettings
from megasparse.data.batches import Steps
from megasparse.errors import ConfigError
from megasparse.files import LOCK_FILE, FileLock, open_file
from megasparse.system import write_at
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import RunIdentity
from megasparse.training.checkpoints.resume import find_start
from megasparse.training.checkpoints.saving import Saver
from megasparse.training.engines import build_engine
from megasparse.training.engines.contract import Engine, Initial, MakeRng
from megasparse.training.ranks import Ranks, RunHooks
from megasparse.training.reporting.memory import bytes_of, is_out_of_memory, shortage
from megasparse.training.reporting.tracker import Tracker
from megasparse.training.state import Selection
from megasparse.training.stopping.signals import StopSignals
from megasparse.training.stopping.watchdog import Watchdog, connect

Evaluate = Callable[[int], Mapping[str, float | str | Tensor]]
"""Map a step to scalars, and to texts and images for TensorBoard; empty if no evaluation is due. Called after every
step on every rank. May raise StopWanted, on all ranks together.
"""


@dataclass(frozen=True)
class Recipe:
    """The parts of a run that differ between pretraining, fine-tuning and tests, in call order."""

    identity: RunIdentity
    make_rng: MakeRng
    build_model: Callable[[], nn.Module]
    initial: Initial | None = field(kw_only=True, default=None)
    open_data: Callable[[int, RunHooks], Steps]
    """Open this rank's steps, from a global sample number on."""
    build_evaluation: Callable[[Engine, RunHooks], Evaluate | None] = lambda engine, hooks: None
    flops_per_token: tuple[float, float] | tuple[()] = ()
    """FLOPs per token of the model and of the hardware; empty if unknown."""
    selection: Selection | None = None


@dataclass
class TrainingRun:
    """Arguments of `loop.train`."""

    engine: Engine
    batches: Steps
    saver: Saver
    tracker: Tracker
    start: Checkpoint | None = None
    evaluate: Evaluate | None = None
    selection: Selection | None = None
    """Tracks the best checkpoint, and may end training."""
    stop_at: int | None = None
    """Step after which to save and stop, while schedules still end at `training.steps`."""
    hooks: RunHooks = field(default_factory=RunHooks)
    flops: tuple[float, ...] = ()

    @property
    def config(self) -> RunSettings:
        return self.saver.config

    @property
    def ranks(self) -> Ranks:
        return self.engine.ranks


@dataclass(frozen=True)
class RunResult:
    """Progress of a run."""

    directory: Path
    step: int
    """The last completed step, which is saved."""
    complete: bool
    """True if all steps are done or early stopping ended the run."""


@contextmanager
def run_lock(directory: Path, ranks: Ranks) -> Iterator[None]:
    """Keep other runs out of `directory`, which is created if necessary. All ranks call it; rank 0 holds the lock.
    Without lock support in the file system, print a warning.
    """
    with ExitStack() as held:
        ranks.on_first_rank(lambda: _take(directory, held))
        yield


def _take(directory: Path, held: ExitStack) -> None:
    """Lock `directory` until `held` ends, and write the holder's name into the lock file."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files = {path: path.lstat() for path in directory.iterdir() if not path.is_dir()}
    except OSError as error:
        problem = f"{directory} cannot be created or read ({error.strerror})"
        raise ConfigError("run.directory", problem, "Choose a writable folder") from None
    for path, status in files.items():
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            problem = f"{path} is a link or not a regular file, and the run would write to it"
            hint = "Remove it, replace it with a copy, or choose another run.directory"
            raise ConfigError("run.directory", problem, hint)
    path = directory / LOCK_FILE
    try:
        lock = held.enter_context(FileLock(path))
    except BlockingIOError:
        holder = ""
        with suppress(OSError), open_file(path) as file:
            holder = file.read(1024).decode(errors="replace")
        holder = holder if holder and holder.isprintable() else f"not named in {path}"
        problem = f"{directory} is in use by another run ({holder})"
        raise ConfigError("run.directory", problem, "Choose another run.directory, or stop that run first") from None
    except OSError as error:
        problem = f"{path} cannot be locked ({error.strerror})"
        print(f"warning: {problem}: a second run could write to this folder", file=sys.stderr)
        return
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    with suppress(OSError):  # a full disk: the folder is locked anyway
        os.ftruncate(lock.descriptor, 0)
        write_at(lock.descriptor, f"host {socket.gethostname()}, pid {os.getpid()}, since {since}".encode(), 0)
        os.fsync(lock.descriptor)


@contextmanager
def open_training(
    recipe: Recipe,
    ranks: Ranks,
    resume: str = "auto",
    allow_changed_config: bool = False,
    stop_at: int | None = None,
    signals: StopSignals | None = None,
) -> Iterator[TrainingRun]:
    """Set up a run. All ranks call it together.

    The context holds the lock of `run.directory` and watches the ranks: a signal to one rank stops all of them, and a
    rank that hangs ends the run. Without `signals` (in a notebook) these do not stop the run, and a single process runs
    without a watchdog, which would also end the notebook. Raises MemoryShortage if memory runs out, here or in the body
    of the context.
    """
    config, hooks = recipe.identity.config, RunHooks()
    directory, launch = Path(config.run.directory), ranks.gather(uuid.uuid4().hex)[0]
    with run_lock(directory, ranks), ExitStack() as opened:
        if signals is not None or ranks.world_size > 1:
            signalled = lambda: signals is not None and signals.reason is not None  # noqa: E731
            store = connect(launch) if ranks.world_size > 1 else None
            watchdog = Watchdog(store, ranks.rank, ranks.world_size, config.run.hang_timeout, signalled)
            opened.enter_context(watchdog)
            stop_wanted = lambda: signalled() or watchdog.stop_elsewhere()  # noqa: E731
            trace_wanted = signals.trace_wanted if signals else lambda: False
            hooks = RunHooks(stop_wanted, watchdog.progress, watchdog.alive, trace_wanted)
        engine: Engine | None = None
        try:
            start = find_start(recipe.identity, ranks, hooks, resume=resume, allow_changed_config=allow_changed_config)
            step, position = (start.step, start.sequences) if start else (0, 0)
            model = recipe.build_model()
            batches = opened.enter_context(recipe.open_data(position, hooks))
            engine = opened.enter_context(
                closing(build_engine(model, config, recipe.make_rng, ranks, start, recipe.initial))
            )
            evaluate = recipe.build_evaluation(engine, hooks)
            tracker = opened.enter_context(Tracker(config, ranks, step))
            saver = Saver(recipe.identity, ranks, hooks)
            flops = recipe.flops_per_token
            yield TrainingRun(engine, batches, saver, tracker, start, evaluate, recipe.selection, stop_at, hooks, flops)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            held = {"gradients": bytes_of(engine.gradients(), ranks.device), **engine.held()} if engine else {}
            raise shortage(error, held, ranks, directory) from None
