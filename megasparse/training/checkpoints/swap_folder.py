"""A rank's own folder on a disk that holds weights and optimizer state while they are not used.

    nvme_path/megasparse-swap-k3j2xa/lock                locked (flock) while the rank lives
    nvme_path/megasparse-swap-k3j2xa/zero_stage_3/...    DeepSpeed's files

Every rank of every run has another, so any number of them can be given the same disk. What a killed rank left is known
by its lock, which nobody holds, and removed by the next run on that disk.
"""

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megasparse.errors import ConfigError, StorageError
from megasparse.training.checkpoints.file_lock import FileLock

PREFIX = "megasparse-swap-"
LOCK = "lock"
BLOCK = 4096
MEND = "Make room on nvme_path's disk and start again: the run goes on from its newest checkpoint"


class SwapFolder:
    """A new, empty folder in `place`, until `remove`.

    Raises ConfigError, naming `key`, where `place` is no folder, cannot be written, or cannot be written directly
    (O_DIRECT), as DeepSpeed does.
    """

    def __init__(self, place: Path, key: str):
        if not place.is_dir():
            raise ConfigError(
                key, f'"{place}" is no folder', "Mount the disk there, or create the folder, on every node"
            )
        self._place = place
        remove_leftovers(place)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            try:
                self._lock = self._locked()
            except OSError:
                shutil.rmtree(self.path, ignore_errors=True)  # without a lock no later run would
                raise
        except OSError as error:
            hint = "Give a folder that this user may write to"
            raise ConfigError(key, f'"{place}" cannot be written ({error.strerror})', hint) from None
        try:
            _write_directly(self.path / "probe")
        except OSError as error:
            self.remove()
            problem = f'"{place}" does not take direct writes (O_DIRECT: {error.strerror})'
            hint = "Give a folder on a local disk, of ext4 or xfs"
            raise ConfigError(key, problem, hint) from None

    @property
    def device(self) -> int:
        """Number of the file system."""
        return os.stat(self._place).st_dev

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._place).free

    def remove(self) -> None:
        """Delete the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    def _locked(self) -> FileLock:
        """The lock of this folder. The file takes its name when it is locked: no sweeper can find it unlocked."""
        unnamed = self.path / f"{LOCK}.new"
        lock = FileLock(unnamed, os.O_CREAT | os.O_EXCL)
        os.rename(unnamed, self.path / LOCK)
        return lock


def remove_leftovers(place: Path) -> None:
    """Delete the folders in `place` of ranks that live no more. One that cannot be deleted stays: it is another's."""
    for folder in sorted(place.glob(f"{PREFIX}*")):
        with suppress(OSError):
            lock = FileLock(folder / LOCK)
            try:
                if not folder.is_symlink():
                    shutil.rmtree(folder)
            finally:
                lock.release()


def verify(files: Mapping[str, int]) -> None:
    """Raise StorageError where a file does not hold as many bytes as were written to it: file -> bytes.

    DeepSpeed (0.19.8) does not look at what the kernel says of a write: where the disk is full, a file is too short or
    has a hole, which would be read as zeros.
    """
    for path, size in files.items():
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(path, f"cannot be read ({error.strerror})", MEND) from None
        try:
            kept = os.lseek(descriptor, 0, os.SEEK_HOLE) if os.fstat(descriptor).st_size else 0  # where a hole begins
        finally:
            os.close(descriptor)
        if kept < size:
            free = shutil.disk_usage(Path(path).parent).free
            problem = f"the disk did not keep the {size:,} bytes written to it ({free:,} bytes free)"
            raise StorageError(path, problem, MEND)


def _write_directly(path: Path) -> None:
    """One block, past the page cache."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        with mmap.mmap(-1, BLOCK) as aligned:
            os.write(descriptor, aligned)
    except OSError as error:
        if error.errno != errno.ENOSPC:  # whether there is room is asked later, of all ranks together
            raise
    finally:
        os.close(descriptor)
        path.unlink()
