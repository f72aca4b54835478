"""What a user can get wrong, as exceptions that name the key or file, the value and a hint.

Every entry point wraps its `main` in `report_user_errors`: a `UserError` ends as one line on stderr, never as a
traceback, with an exit code that says what to do. A bug of ours keeps its traceback, and exit code 1.

    0  done, or saved and stopped as a signal asked for
    2  a mistake in configuration, data or command: correct it
    3  a checkpoint could not be written: repair the storage
    4  training diverged: starting again does the same again
    5  the run hung; what it was doing was printed
    6  another rank was lost, and its own message says why
    7  memory did not suffice; what held it was printed, and what would fit
    8  a bit had changed in silence, and where was printed
"""

import argparse
import contextlib
import copyreg
import difflib
import functools
import os
import re
import select
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

HANG = 5
LOST_PEER = 6
"""Exit codes of the watchdog, and of a rank that lost another."""
INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended in a shell. Training saves first, and ends with 0."""
PIPE_CLOSED = 141
"""Exit code, as in a shell, of a program whose reader has ended, such as `head`: no error of either."""


LONGEST_MESSAGE = 4000


def one_line(text: str, longest: int = 200) -> str:
    """Return a text from a path, a key, a file or a server shortened, with what a terminal would act on escaped."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1]
        for character in (text if len(text) <= longest else f"{text[:longest]}…")
    )


QUERY = re.compile(r"""(://(?:(?!://)[^\s'"?#])*)[?#](?:[^\s'"]|['"](?=[\w&=%]))*(?<![:;,.)])""")


def without_secrets(text: str) -> str:
    """Return a text whose URLs have no user, password, query or fragment: a presigned URL's signature is its query."""
    return QUERY.sub(r"\1", re.sub(r"""(?<=://)[^/\s'"]*@""", "", text))


def report_line(path: str | os.PathLike[str], line: str) -> None:
    """Print a line about a file, a folder or a URL on stderr."""
    print(f"{one_line(without_secrets(os.fspath(path)))}: {line}", file=sys.stderr)


class UserError(Exception):
    """Something the user can correct. The message is one line: what is wrong, where, its value, and what to do."""

    exit_code = 2

    def __init__(self, message: str):
        super().__init__(one_line(without_secrets(message), LONGEST_MESSAGE))

    def __reduce__(self) -> tuple[Any, ...]:  # unpickled without the constructor, which takes other arguments
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class ConfigError(UserError):
    """A configuration key that is unknown, of the wrong type, or in conflict with another."""

    def __init__(self, key: str, problem: str, hint: str):
        super().__init__(f"{key}: {problem}. {hint}")
        self.key, self.problem, self.hint = key, problem, hint


class FileError(UserError):
    """Something wrong with a file, a folder or a URL."""

    def __init__(self, path: str | os.PathLike[str], problem: str, hint: str):
        super().__init__(f"{os.fspath(path)}: {problem}. {hint}")
        self.path, self.problem, self.hint = os.fspath(path), problem, hint


class DataError(FileError):
    """A shard, index or source file that is missing, damaged, or made for something else."""


class CheckpointError(FileError):
    """A checkpoint that is incomplete, damaged, or made by another configuration."""


class StorageError(CheckpointError):
    """A checkpoint could not be written; the older ones are untouched."""

    exit_code = 3


class TrainingError(UserError):
    """Training cannot go on: the loss is not finite step after step."""

    exit_code = 4


class MemoryShortage(UserError):
    """A device's or the host's memory did not suffice."""

    exit_code = 7


class HubError(FileError):
    """A HuggingFace model that is damaged, or that the other side cannot express."""


class SourceError(DataError):
    """A source that changed while it was read, or does not fit the settings: shards made of it are of no use."""


class LostPeer(UserError):
    """Another rank has ended, or cannot go on; its own message says why."""

    exit_code = LOST_PEER


MOST_NAMES = 60
"""Names that a message lists."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`Did you mean "x"?` for the nearest of `names`, or the list of them where none is near."""
    names = sorted(names)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    more = f" and {len(names) - MOST_NAMES:,} more" * (len(names) > MOST_NAMES)
    return f'Did you mean "{near[0]}"?' if near else f"Known here: {', '.join(names[:MOST_NAMES])}{more}"


def whole(text: str, least: int = 0) -> int:
    """A whole number from `least` to 2^63 - 1, as the type of an option."""
    if not re.fullmatch(r"[0-9]{1,19}", text) or not least <= int(text) < 1 << 63:
        problem = f"{one_line(text, 40)} is not a whole number of {least} or more, below 2^63"
        raise argparse.ArgumentTypeError(problem)
    return int(text)


def positive(text: str) -> int:
    """A whole number of 1 or more, as the type of an option."""
    return whole(text, 1)


def report_user_errors(main: Callable[..., None]) -> Callable[..., None]:
    """Run an entry point; a `UserError`, or the loss of another rank, becomes one line on stderr and an exit code."""

    @functools.wraps(main)
    def run(*args: object, **kwargs: object) -> None:
        code = 0
        try:
            main(*args, **kwargs)
            if sys.stdout is not None:  # as it is where a program is started without one
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
    """Print what a user can correct, in one line, and return the exit code. Raises `error` where it is none of that."""
    if _has_lost_its_reader(error):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter writes the rest there
        return PIPE_CLOSED
    if isinstance(error, UserError):
        problem = error
    elif _is_broken_connection(error):
        problem = LostPeer("the connection to another rank broke; that rank's own message says why")
    elif _has_peers():
        traceback.print_exc()
        leave(1)
    else:
        raise error
    rank = one_line(os.environ.get("RANK", "0"))
    print(f"error: {problem}" if rank == "0" else f"error on rank {rank}: {problem}", file=sys.stderr)
    return problem.exit_code


def leave(code: int) -> NoReturn:
    """End the process of one of several ranks. Not by way of the interpreter's end: there gloo's threads abort it in
    about one of five cases where another rank ends at the same moment, and the exit code is lost (torch 2.13).
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def write_error(line: str) -> None:
    """Write a line past sys.stderr, whose lock another thread may hold; nobody may be reading any more."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _has_peers() -> bool:
    return os.environ.get("WORLD_SIZE", "1") not in ("1", "0")


def rank_variable(name: str, default: int) -> int:
    """Return the number in a launcher's environment variable. Raises ConfigError if it is none."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,7}", text):
        raise ConfigError(name, f"{text!r}, in the environment, is not a number from 0 on", NO_LAUNCHER)
    return int(text)


NO_LAUNCHER = "Start ranks with torchrun, or one process without RANK, WORLD_SIZE and LOCAL_RANK: unset them"


def _has_lost_its_reader(error: Exception) -> bool:
    """Whether it says that nobody reads stdout any more, rather than another pipe."""
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _is_broken_connection(error: Exception) -> bool:
    """Whether torch.distributed says that another process is gone: a secondary error, of no use to a reader."""
    own_types = {"DistBackendError", "DistNetworkError", "DistStoreError"}
    return type(error).__name__ in own_types or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
