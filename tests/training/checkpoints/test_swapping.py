"""Folders for what is swapped to a disk: whose they are, what they refuse, what is left; files written from there."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megasparse.errors import ConfigError, StorageError
from megasparse.training.checkpoints.checkpoint import Fragment, Storage, loaded
from megasparse.training.checkpoints.rank_file import RankFile
from megasparse.training.checkpoints.swap_folder import SwapFolder, verify
from megasparse.training.checkpoints.swapping import SubGroup, Swap
from megasparse.training.engines.deepspeed import DeepSpeedEngine
from megasparse.training.ranks import Ranks
from tests.helpers.run_ranks import ROOT
from tests.helpers.tiny import TinyModel

KEY = "deepspeed.zero_optimization.offload_optimizer.nvme_path"


def nvme(place: Path) -> dict[str, object]:
    return {"device": "nvme", "nvme_path": str(place)}


def test_every_rank_has_a_folder_of_its_own_and_leaves_nothing(tmp_path):
    one, other = SwapFolder(tmp_path, KEY), SwapFolder(tmp_path, KEY)
    assert one.path != other.path
    (one.path / "numbers").write_bytes(b"1")
    assert SwapFolder(tmp_path, KEY).remove() is None and one.path.exists() and other.path.exists()
    one.remove()
    other.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_rank_left_is_removed_by_the_next(tmp_path):
    code = f"""
import time
from pathlib import Path
from megasparse.training.checkpoints.swap_folder import SwapFolder
folder = SwapFolder(Path({str(tmp_path)!r}), "key")
(folder.path / "numbers").write_bytes(b"1")
print(folder.path, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        left = Path(process.stdout.readline().strip())
        SwapFolder(tmp_path, KEY).remove()
        assert (left / "numbers").exists(), "its rank lives"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    SwapFolder(tmp_path, KEY).remove()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_others_are_left_alone(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "megasparse-swap-link").symlink_to(tmp_path / "precious")
    (tmp_path / "precious" / "lock").touch()
    SwapFolder(tmp_path, KEY).remove()
    assert (tmp_path / "precious" / "lock").exists()


def test_a_file_system_without_locks_is_refused_and_nothing_stays_there(tmp_path, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(ConfigError, match=r"cannot be written \(No locks available\)"):
        SwapFolder(tmp_path, KEY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["missing", "file", "/proc/self"])
def test_a_folder_that_cannot_serve_is_refused_with_its_key(tmp_path, place):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{KEY}: .*(is no folder|cannot be written)"):
        SwapFolder(tmp_path / place, KEY)


def test_a_file_system_without_direct_writes_is_refused(tmp_path, monkeypatch):
    def no_direct(path, flags, *mode, real=os.open, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", no_direct)
    with pytest.raises(ConfigError, match="does not take direct writes"):
        SwapFolder(tmp_path, KEY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("written", "kept"), [([(0, 8192)], True), ([(0, 4096)], False), ([(65536, 4096)], False), ([], False)]
)
def test_a_file_that_is_short_or_has_a_hole_is_reported(tmp_path, written, kept):
    """Files such as a full disk leaves, where DeepSpeed checks no write. written: (offset, bytes)."""
    path = tmp_path / "numbers"
    with open(path, "wb") as file:
        for offset, size in written:
            file.seek(offset)
            file.write(b"1" * size)
    size = 8192 if not written or written[0][0] == 0 else 65536 + 4096
    if kept:
        verify({str(path): size})
        return
    with pytest.raises(StorageError, match=rf"numbers: the disk did not keep the {size:,} bytes"):
        verify({str(path): size})


def test_room_for_all_that_is_swapped_is_asked_for_first(tmp_path, monkeypatch):
    """16 bytes a number: weight, two moments and gradient in fp32; and the weights themselves."""
    model = TinyModel()
    model.embedding.weight.requires_grad_(False)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    needed = 16 * trained + 4 * sum(p.numel() for p in model.parameters())
    zero = {"stage": 3, "offload_optimizer": nvme(tmp_path), "offload_param": nvme(tmp_path)}
    monkeypatch.setattr(SwapFolder, "free_bytes", lambda self: needed - 1)
    with pytest.raises(StorageError, match=f"{needed:,} bytes needed, {needed - 1:,} bytes free"):
        Swap(zero, model, Ranks())
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(SwapFolder, "free_bytes", lambda self: needed)
    swap = Swap(zero, model, Ranks())
    (folder,) = tmp_path.iterdir()
    assert swap.section() == {"stage": 3, "offload_optimizer": nvme(folder), "offload_param": nvme(folder)}
    swap.close()
    assert list(tmp_path.iterdir()) == []


def test_a_buffer_that_a_weight_does_not_fit_into_is_refused(tmp_path):
    zero = {"stage": 3, "offload_param": nvme(tmp_path) | {"buffer_size": 100}}
    with pytest.raises(ConfigError, match=r"buffer_size: 100 is too few for a rank's 9,984 numbers of out.weight"):
        Swap(zero, TinyModel(), Ranks())


@pytest.mark.parametrize(("changing", "ending"), [(False, "released"), (True, "written 3")])
def test_a_sub_group_of_deepspeeds_is_in_memory_while_it_is_read_or_changed(changing, ending):
    done = []
    zero = SimpleNamespace(
        _optimizer_states_and_gradient_swap_in=lambda number: done.append(f"read {number}"),
        _optimizer_states_and_gradient_swap_out=lambda number: done.append(f"written {number}"),
        _release_swap_buffers=lambda number: done.append("released"),
    )
    fragment = Fragment("weight", "w", (2,), 0, 2, torch.ones(2), home=SubGroup(zero, 3))
    for _ in loaded([fragment, fragment], changing):
        done.append("used")
    assert done == ["read 3", "used", "used", ending]


class Elsewhere(Storage):
    """Keeps vectors out of memory, and counts."""

    here, brought = 0, 0

    def __init__(self, vectors: list[torch.Tensor]):
        self.vectors, self.kept = vectors, [vector.clone() for vector in vectors]
        self.empty()

    def empty(self) -> None:
        for vector in self.vectors:
            vector.data = torch.empty(0)

    @contextmanager
    def loaded(self, changing=False):
        Elsewhere.here += 1
        Elsewhere.brought += 1
        assert Elsewhere.here == 1, "one at a time"
        for vector, kept in zip(self.vectors, self.kept, strict=True):
            vector.data = kept.clone()
        try:
            yield
        finally:
            if changing:
                self.kept = [vector.clone() for vector in self.vectors]
            self.empty()
            Elsewhere.here -= 1


def test_numbers_that_lie_elsewhere_are_written_and_filled_one_home_at_a_time(tmp_path):
    numbers = torch.arange(12.0)
    vectors = [vector.clone() for vector in numbers.split(3)]
    homes = [Elsewhere(vectors[:2]), Elsewhere(vectors[2:])]
    fragments = [
        Fragment("weight", f"w{i}", (3,), offset, 3 - offset, vector, offset, homes[i // 2])
        for i, vector in enumerate(vectors)
        for offset in (0, 1)
    ]
    expected = [numbers[3 * i + offset : 3 * i + 3] for i in range(4) for offset in (0, 1)]
    Elsewhere.brought = 0
    RankFile(fragments).write(tmp_path / "file", lambda: None)
    copy, _ = RankFile(fragments).copy(torch.empty(0))
    assert Elsewhere.brought == 4 and Elsewhere.here == 0
    copy.write(tmp_path / "copy", lambda: None)
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "file").read_bytes()
    stored = load_file(tmp_path / "file")
    assert all(stored[str(i)].equal(part) for i, part in enumerate(expected))
    for fragment in loaded(fragments, changing=True):
        fragment.write(torch.full((fragment.numel,), 7.0 if fragment.offset else 5.0))
    assert all(kept.tolist() == [5.0, 7.0, 7.0] for home in homes for kept in home.kept)
    for _ in loaded(fragments):
        vectors[0].data.fill_(9.0)
    assert homes[0].kept[0].tolist() == [5.0, 7.0, 7.0], "what is only read is not kept"


def test_counting_memory_leaves_the_disk_alone():
    """What of ZeRO 3's optimizer state is on a disk takes no memory, and is not read in every step to say so."""
    engine = object.__new__(DeepSpeedEngine)
    here, swapped = torch.zeros(3), torch.empty(0)
    zero = SimpleNamespace(fp32_partitioned_groups_flat=[here, swapped], _swappable_optimizer_subgroup=lambda n: n == 1)
    engine.module, engine.ranks, engine._stage = torch.nn.Linear(2, 5), Ranks(), 3
    engine.optimizer, engine._engine = SimpleNamespace(state={}), SimpleNamespace(optimizer=zero)
    assert engine.held() == {"weights": (60, 0), "optimizer": (12, 0)}
