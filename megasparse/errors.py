"""What a user can get wrong, as exceptions that name the key or file, the value and the mend.

Every entry point wraps its `main` in `report_user_errors`: a `UserError` ends as one line on stderr and exit code 2,
never as a traceback. A bug of ours keeps its traceback.
"""

import difflib
import functools
import os
import sys
from collections.abc import Callable, Iterable


class UserError(Exception):
    """Something the user can mend. The message is one line: what is wrong, where, its value, and what to do."""


class ConfigError(UserError):
    """A configuration key that is unknown, of the wrong type, or in conflict with another."""

    def __init__(self, key: str, problem: str, mend: str):
        super().__init__(f"{key}: {problem}. {mend}")
        self.key = key


class DataError(UserError):
    """A shard, index or source file that is missing, damaged, or made for something else."""

    def __init__(self, path: str | os.PathLike[str], problem: str, mend: str):
        super().__init__(f"{os.fspath(path)}: {problem}. {mend}")
        self.path = os.fspath(path)


class CheckpointError(UserError):
    """A checkpoint that is incomplete, damaged, or made by another configuration."""

    def __init__(self, path: str | os.PathLike[str], problem: str, mend: str):
        super().__init__(f"{os.fspath(path)}: {problem}. {mend}")
        self.path = os.fspath(path)


class TrainingError(UserError):
    """Training cannot go on: the loss is not finite step after step, or a rank failed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`Did you mean "x"?` for the nearest of `known`, or the list of them where none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f'Did you mean "{near[0]}"?' if near else f"Known here: {', '.join(known)}"


def report_user_errors(main: Callable[..., None]) -> Callable[..., None]:
    """Run an entry point; a `UserError` becomes one line on stderr and exit code 2."""

    @functools.wraps(main)
    def run(*args: object, **kwargs: object) -> None:
        try:
            main(*args, **kwargs)
        except UserError as error:
            rank = int(os.environ.get("RANK", "0"))
            print(f"error: {error}" if rank == 0 else f"error on rank {rank}: {error}", file=sys.stderr)
            sys.exit(2)

    return run
