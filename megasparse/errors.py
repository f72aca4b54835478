"""Exceptions for errors that users can correct. Each names the key or file, the value and a hint.

Every entry point wraps its `main` in `report_user_errors`: a `UserError` ends as one line on stderr with an exit code
(docs/reference/exit-codes.md), without a traceback. A bug in megasparse prints its traceback and exits with 1.
"""

import argparse
import contextlib
import copyreg
import difflib
import functools
import io
import os
import re
import select
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

HANG = 5
LOST_PEER = 6
"""Exit codes of the watchdog, and of a rank that lost another rank."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell. Training saves first and exits with 0."""
PIPE_CLOSED = 141
"""Exit code, as in a shell, of a program whose reader (such as `head`) has closed the pipe."""


LONGEST_MESSAGE = 4000


def one_line(text: str, longest: int = 200) -> str:
    """Return untrusted text shortened, with control characters escaped."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1]
        for character in (text if len(text) <= longest else f"{text[:longest]}…")
    )


QUERY = re.compile(r"""(://(?:(?!://)[^\s'"?#])*)[?#](?:[^\s'"]|['"](?=[\w&=%]))*(?<![:;,.)])""")


def without_secrets(text: str) -> str:
    """Return a text with credentials, query and fragment removed from its URLs."""
    return QUERY.sub(r"\1", re.sub(r"""(?<=://)[^/\s'"]*@""", "", text))


def report_line(path: object, line: str) -> None:
    """Print a line about a file, a folder or a URL on stderr."""
    print(f"{one_line(without_secrets(str(path)))}: {line}", file=sys.stderr)


class UserError(Exception):
    """An error that the user can correct. The message is one line: key or path, problem, value and hint."""

    exit_code = 2

    def __init__(self, message: str):
        super().__init__(one_line(without_secrets(message), LONGEST_MESSAGE))

    def __reduce__(self) -> tuple[Any, ...]:  # unpickle without the constructors, whose arguments differ
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class ConfigError(UserError):
    """A configuration key is unknown, of the wrong type, or in conflict with another one."""

    def __init__(self, key: str, problem: str, hint: str):
        super().__init__(f"{key}: {problem}. {hint}")
        self.key, self.problem, self.hint = key, problem, hint


class FileError(UserError):
    """A problem with a file, a folder or a URL."""

    def __init__(self, path: object, problem: str, hint: str):
        super().__init__(f"{path}: {problem}. {hint}")
        self.path, self.problem, self.hint = str(path), problem, hint

    @classmethod
    @contextlib.contextmanager
    def instead_of(
        cls, errors: type[Exception] | tuple[type[Exception], ...], path: object, problem: str, hint: str
    ) -> Iterator[None]:
        """Raise this error if one of `errors` is raised in the block. problem: may contain {}, the reason."""
        try:
            yield
        except errors as error:
            reason = getattr(error, "strerror", None) or one_line(" ".join(str(error).split()), 1000)
            raise cls(path, problem.replace("{}", reason), hint) from None


class DataError(FileError):
    """A shard, index or source file is missing, damaged, or does not fit the run."""


class CheckpointError(FileError):
    """A checkpoint is incomplete, damaged, or belongs to another configuration."""


class StorageError(CheckpointError):
    """A checkpoint could not be written; older checkpoints are unchanged."""

    exit_code = 3


class TrainingError(UserError):
    """Training cannot continue because the loss is not finite in many consecutive steps."""

    exit_code = 4


class MemoryShortage(UserError):
    """A device or the host ran out of memory."""

    exit_code = 7


class HubError(FileError):
    """A Hugging Face model is damaged, or the target format cannot express the model."""


class SourceError(DataError):
    """A source changed while it was read, or does not fit the settings; shards made from it are invalid."""


class LostPeer(UserError):
    """Another rank has ended or cannot continue; its message gives the reason."""

    exit_code = LOST_PEER


MOST_NAMES = 60


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `Did you mean "x"?` for the nearest of `names`, or a list of the names if none is near."""
    names = sorted(names)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    more = f" and {len(names) - MOST_NAMES:,} more" * (len(names) > MOST_NAMES)
    return f'Did you mean "{near[0]}"?' if near else f"Known here: {', '.join(names[:MOST_NAMES])}{more}"


def whole(text: str, least: int = 0) -> int:
    """Parse a whole number from `least` to 2^63 - 1, as the type of an option."""
    if not re.fullmatch(r"[0-9]{1,19}", text) or not least <= int(text) < 1 << 63:
        raise argparse.ArgumentTypeError(f"{one_line(text, 40)} is not a whole number of {least} or more, below 2^63")
    return int(text)


def positive(text: str) -> int:
    return whole(text, 1)


def report_user_errors(main: Callable[..., object]) -> Callable[..., None]:
    """Wrap an entry point: a `UserError` or the loss of another rank becomes one line on stderr and an exit code."""

    @functools.wraps(main)
    def run(*args: object, **kwargs: object) -> None:
        code = 0
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal in ASCII shows ? for characters such as ×
            sys.stdout.reconfigure(errors="replace")
        try:
            main(*args, **kwargs)
            if sys.stdout is not None:  # None if the program was started without stdout
                sys.stdout.flush()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = INTERRUPTED
        except Exception as error:
            code = _report(error)
        if _has_peers():
            leave(code)
        if code:
            sys.exit(code)

    return run


def _report(error: Exception) -> int:
    """Print an error that users can correct as one line and return the exit code. Raise any other error again."""
    if _has_lost_its_reader(error):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard buffered output at exit
        return PIPE_CLOSED
    if isinstance(error, UserError):
        problem = error
    elif _is_broken_connection(error):
        problem = LostPeer("the connection to another rank was lost; see the message of that rank for the reason")
    elif _has_peers():
        traceback.print_exc()
        leave(1)
    else:
        raise error
    rank = one_line(os.environ.get("RANK", "0"))
    print(f"error: {problem}" if rank == "0" else f"error on rank {rank}: {problem}", file=sys.stderr)
    return problem.exit_code


def leave(code: int) -> NoReturn:
    """End a rank's process without the interpreter's shutdown, in which gloo's threads abort it in about one of five
    cases if another rank ends at the same moment, so that the exit code is lost (torch 2.13).
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def write_error(line: str) -> None:
    """Write a line to fd 2 directly, because another thread may hold the lock of sys.stderr; ignore a closed pipe."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _has_peers() -> bool:
    return os.environ.get("WORLD_SIZE", "1") not in ("1", "0")


def rank_variable(name: str, default: int) -> int:
    """Return the number in a launcher's environment variable."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,7}", text):
        raise ConfigError(name, f"{text!r} in the environment is not a number of 0 or more", NO_LAUNCHER)
    return int(text)


NO_LAUNCHER = "Start ranks with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK to run one process"


def _has_lost_its_reader(error: Exception) -> bool:
    """True if stdout, rather than another pipe, was closed by its reader."""
    if not isinstance(error, BrokenPipeError) or not hasattr(select, "poll"):  # not on Windows
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _is_broken_connection(error: Exception) -> bool:
    """True if torch.distributed reports that another process is gone."""
    own_types = {"DistBackendError", "DistNetworkError", "DistStoreError"}
    return type(error).__name__ in own_types or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
