"""Runs that tolerate damage: what is good is used, what is not is counted, and the two are everything there is."""

import hashlib
import os
import random
import threading
import time
from typing import Any

import pytest

from megasparse.data import reader as reader_module
from megasparse.data.damage import Damage, DamagedSample
from megasparse.data.index import Index
from megasparse.data.members import NO_CHECKSUMS, Run
from megasparse.data.reader import EvaluationStream, ShardReader
from megasparse.errors import DataError
from tests.data.damages import HARMS, HOSTILE, STRUCTURE, denied, do, edit, edit_shards, flip, without_crc32

THIRD = "train-000003.tar"


def tolerant(index: Index, limit: float = 1.0, **options: Any) -> ShardReader:
    index = Index.load(index.directory, tolerant=True)
    return ShardReader(index, "train", damage=Damage(index, "train", limit), **options)


def read_all(reader: ShardReader, text: bytes | None, sample_bytes: int = 100) -> dict[str, int]:
    """Asks for each sample of the split by itself: the number that came, of each shard, all as they are in `text`."""
    good, begin = {}, 0
    for number, shard in enumerate(reader.shards):
        good[shard.file] = 0
        for start in range(0, shard.tokens, sample_bytes):
            stop = min(start + sample_bytes, shard.tokens)
            try:
                got = reader.read(number, start, stop)
            except DamagedSample:
                continue
            assert text is None or bytes(got.tolist()) == text[begin + start : begin + stop]
            good[shard.file] += 1
        begin += shard.tokens
    damaged = {file: sum(reasons.values()) for file, reasons in reader.damage.summary().items()}
    assert all(good[s.file] + damaged.get(s.file, 0) == s.samples for s in reader.shards)
    assert reader.damage.samples == sum(damaged.values())
    return good


def vouch(index: Index, file: str) -> None:
    """Let index.json state what the shard is by now, but for its samples' crc32."""
    tar = (index.directory / file).read_bytes()
    edit_shards(index, file, bytes=max(1, len(tar)), sha256=hashlib.sha256(tar).hexdigest())


@pytest.mark.parametrize(
    ("harm", "vouched"),
    [*((harm, False) for harm in HARMS), *((harm, True) for harm in STRUCTURE)],
    ids=lambda value: {True: "vouched for", False: ""}.get(value, value),
)
def test_each_sample_is_used_or_counted(index, corpus, harm, vouched, figures):
    """Also where the sha256 of the index is that of the damaged shard."""
    path = do(harm, index.directory / THIRD)
    if vouched and path.stat().st_size:
        vouch(index, THIRD)
    reader = tolerant(index)
    good = read_all(reader, corpus)
    if not vouched:
        assert good[THIRD] == HARMS[harm][1]
    assert sum(good.values()) == 71 - 10 + good[THIRD]
    reader.close()
    figures(damages_done=1, damages_detected=1)


@pytest.mark.parametrize("harm", HARMS)
def test_without_crc32_a_damaged_shard_is_passed_over_whole(make_index, corpus, harm, capfd):
    index = without_crc32(make_index(corpus))
    path = do(harm, index.directory / THIRD)
    reader = tolerant(index)
    assert read_all(reader, corpus)[THIRD] == 0
    assert reader.damage.summary() == {THIRD: {NO_CHECKSUMS: 10}}
    line = f"damaged data: {path}: members 0 to 9 at byte 0: {NO_CHECKSUMS}; passed over"
    assert capfd.readouterr().err.splitlines() == [line]


def test_what_is_no_layout_of_ours_is_passed_over_whole(index, corpus):
    (index.directory / THIRD).write_bytes(b"damaged")
    for sample_bytes in (None, "100", 99, 112, True, -1, 10**30, 1.5):
        edit(index, lambda content, size=sample_bytes: content["settings"].update(sample_bytes=size))
        reader = tolerant(index)
        read_all(reader, corpus)
        assert list(reader.damage.summary()) == [THIRD]


def test_damage_is_named_once_for_each_run_of_members(index, corpus, capfd):
    path = do(flip(*(member * 1024 + 600 for member in (1, 2, 7))), index.directory / THIRD)
    os.truncate(path, 9 * 1024 + 520)
    reader = tolerant(index)
    for _ in range(3):
        read_all(reader, corpus)
    again = ShardReader(reader.index, "train", damage=reader.damage)
    read_all(again, corpus)
    assert reader.damage.summary() == {THIRD: {"its crc32 differs": 3, "cut off": 1}}
    assert capfd.readouterr().err.splitlines() == [
        f"damaged data: {path}: members 1 to 2 at byte 1024: its crc32 differs; passed over",
        f"damaged data: {path}: member 7 at byte 7168: its crc32 differs; passed over",
        f"damaged data: {path}: member 9 at byte 9216: cut off; passed over",
    ]


def test_at_most_twenty_lines(make_index, corpus, capfd):
    index = make_index(corpus, shard_bytes=10_000)
    damage, shard = Damage(index, "train", 1.0), index.split("train").shards[0]
    damage.add(shard, [Run(i, i + 1, i, "x") for i in range(0, 30, 2)])
    assert len(capfd.readouterr().err.splitlines()) == 15
    damage.add(shard, [Run(i, i + 1, i, "x") for i in range(0, 60, 2)])
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 6 and lines[-1].endswith("10 more; from here on damage is counted, not named")
    damage.add(shard, [Run(61, 62, 0, "x")])
    assert capfd.readouterr().err == "" and damage.samples == 31


def test_each_sample_is_counted_once_by_many_threads(make_index, corpus):
    index = make_index(corpus, shard_bytes=10_000)
    damage, shard = Damage(index, "train", 1.0), index.split("train").shards[0]
    runs = [Run(i, i + 3, i, "x") for i in range(60)]
    threads = [threading.Thread(target=damage.add, args=(shard, runs)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert damage.samples == 62 and damage.overlaps(shard, 61, 62) and not damage.overlaps(shard, 62, 71)


def test_evaluation_tolerates_nothing_even_after_training_did(index, corpus):
    do("bit flipped in the text", index.directory / THIRD)
    read_all(tolerant(index), corpus)
    for _ in range(2):
        with pytest.raises(DataError, match=r"train-000003\.tar: .*member 5 at byte 5120: its crc32 differs"):
            EvaluationStream(index, "train").read(3000, 3010)


@pytest.mark.parametrize(("limit", "harmed"), [(0.1, 7), (0.1, 8), (0.001, 1), (1.0, 71)])
def test_more_than_max_damaged_is_an_error_with_the_counts(index, corpus, limit, harmed):
    """A tenth of 71 samples is 7.1."""
    for shard in range(8):
        members = range(min(10, max(0, harmed - 10 * shard)))
        do(flip(*(member * 1024 + 512 for member in members)), index.directory / f"train-{shard:06d}.tar")
    reader = tolerant(index, limit)
    if harmed <= limit * 71:
        assert sum(read_all(reader, corpus).values()) == 71 - harmed
        return
    with pytest.raises(DataError) as caught:
        read_all(reader, corpus)
    message = str(caught.value)
    assert caught.value.path == str(index.directory)
    assert f'{harmed} of the 71 samples of "train" are damaged (train-000000.tar: {harmed})' in message
    assert f"more than data.max_damaged = {limit} allows. Prepare the data again" in message
    with pytest.raises(DataError, match="more than data"):
        read_all(reader, corpus)


def test_ten_thousand_bad_samples_are_looked_for_once(make_index, monkeypatch):
    text = random.Random(2).randbytes(1_000_100)
    index = make_index(text, shard_bytes=1_000_000)
    do(flip(*(member * 1024 + 512 for member in range(10_000))), index.directory / "train-000000.tar")
    examined: list[str] = []
    find = reader_module.find_damage
    monkeypatch.setattr(reader_module, "find_damage", lambda *given: examined.append(given[1].file) or find(*given))
    assert read_all(tolerant(index), text) == {"train-000000.tar": 0, "train-000001.tar": 1}
    with pytest.raises(DataError, match=r"10000 of the 10001 samples"):
        tolerant(index, 0.01).read(0, 0, 1)
    assert examined == ["train-000000.tar"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_members_are_passed_over_and_never_written(index, corpus, name):
    path = index.directory / THIRD
    tar, hostile = path.read_bytes(), HOSTILE[name]
    for member in (hostile[:1024], hostile):  # in the place of one sample, and moving those that follow
        path.write_bytes(tar[: 5 * 1024] + member + tar[6 * 1024 :])
        vouch(index, THIRD)
        before = sorted(str(p) for p in index.directory.parent.rglob("*"))
        reader = tolerant(index)
        good = read_all(reader, corpus)[THIRD]
        assert good == 9 if len(member) == 1024 else 5 <= good < 10
        reader.close()
        assert sorted(str(p) for p in index.directory.parent.rglob("*")) == before


def test_a_shard_that_is_missing_or_unreadable_is_lost_whole(index, corpus, monkeypatch):
    (index.directory / "train-000001.tar").unlink()
    (index.directory / "train-000002.tar").unlink()
    os.mkfifo(index.directory / "train-000002.tar")
    denied(monkeypatch, THIRD)
    before = len(os.listdir("/proc/self/fd"))
    reader = tolerant(index)
    good = read_all(reader, corpus)
    assert [good[f"train-{i:06d}.tar"] for i in range(5)] == [10, 0, 0, 0, 10]
    assert reader.damage.summary() == {
        "train-000001.tar": {"cannot be read: No such file or directory": 10},
        "train-000002.tar": {"cannot be read: this is not a regular file": 10},
        THIRD: {"cannot be read: Permission denied": 10},
    }
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("event", ["deleted", "cut", "overwritten", "replaced", "broken disk"])
def test_what_happens_to_a_shard_in_use_is_counted(index, corpus, monkeypatch, event):
    reader = tolerant(index, open_files=1)
    path = reader.index.directory / THIRD
    assert bytes(reader.read(3, 0, 10).tolist()) == corpus[3000:3010]
    if event == "deleted":
        path.unlink()
    elif event == "cut":
        os.truncate(path, 5 * 1024)
    elif event == "overwritten":
        with path.open("r+b") as file:
            file.seek(5 * 1024)
            file.write(b"?" * 1024)
    elif event == "replaced":
        other = reader.index.directory / "other"
        other.write_bytes((reader.index.directory / "train-000004.tar").read_bytes())
        other.replace(path)
    else:
        broken_from(5 * 1024, "preadv", monkeypatch)
    good = read_all(reader, corpus)
    # what is deleted or replaced is still there while it is open, which ends with the next shard: not in read_all's
    assert good[THIRD] == {"deleted": 0, "cut": 5, "overwritten": 9, "replaced": 0, "broken disk": 5}[event]


def broken_from(byte: int, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a function that reads THIRD fail from this byte on."""
    whole = getattr(os, function)

    def read(descriptor: int, what: Any, offset: int) -> Any:
        if offset >= byte and os.readlink(f"/proc/self/fd/{descriptor}").endswith(THIRD):
            raise OSError(5, "Input/output error")
        return whole(descriptor, what, offset)

    monkeypatch.setattr(os, function, read)


def test_the_disk_breaks_while_a_shard_is_verified(index, corpus, monkeypatch):
    do("bit flipped in the text", index.directory / THIRD)
    broken_from(8 * 1024, "pread", monkeypatch)
    reader = tolerant(index)
    assert read_all(reader, corpus)[THIRD] == 7
    assert reader.damage.summary() == {THIRD: {"its crc32 differs": 1, "cannot be read: Input/output error": 2}}


def test_a_sample_once_found_damaged_stays_out(index, corpus):
    reader = tolerant(index)
    path = reader.index.directory / THIRD
    whole = path.read_bytes()
    do("bit flipped in the text", path)
    assert read_all(reader, corpus)[THIRD] == 9
    time.sleep(0.02)
    path.write_bytes(whole)
    assert read_all(reader, corpus)[THIRD] == 9


def mutate(tar: bytes, draw: random.Random) -> bytes:
    """One to three of: a byte changed (mostly in headers), a stretch cut out, doubled, zeroed or moved, the end cut."""
    mutant = bytearray(tar)
    for _ in range(draw.randrange(1, 4)):
        if not mutant:
            break
        place = draw.randrange(len(mutant))
        length = draw.choice([1, 7, 512, 1024, 3000])
        kind = draw.randrange(8)
        if kind < 3:
            place = min(len(mutant) - 1, draw.randrange(10) * 1024 + draw.randrange(620))
            mutant[place] = draw.randrange(256)
        elif kind == 3:
            del mutant[place : place + length]
        elif kind == 4:
            mutant[place:place] = mutant[place : place + length]
        elif kind == 5:
            mutant[place : place + length] = bytes(len(mutant[place : place + length]))
        elif kind == 6:
            piece = mutant[place : place + length]
            del mutant[place : place + length]
            other = draw.randrange(len(mutant) + 1)
            mutant[other:other] = piece
        else:
            del mutant[place:]
    return bytes(mutant)


def mutations(index: Index, corpus: bytes, cases: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Mutates a shard this often. The samples that were neither used nor counted, and those that were good still."""
    path, index_path = index.directory / "train-000000.tar", index.directory / "index.json"
    tar, stated = path.read_bytes(), index_path.read_bytes()
    draw = random.Random(cases)
    uncounted = good = 0
    for case in range(cases):
        monkeypatch.setattr(reader_module, "_examined", {})  # the clock of the files is too coarse for this
        path.write_bytes(mutate(tar, draw))
        index_path.write_bytes(stated)
        if case % 8 == 0:
            vouch(index, path.name)
        elif case % 8 == 1:
            without_crc32(index)
        reader = tolerant(index)
        intact = read_all(reader, corpus if case % 8 else None)[path.name]
        uncounted += 10 - intact - reader.damage.samples
        good += intact
        reader.close()
    return uncounted, good


def test_no_mutation_crashes_or_loses_a_sample(make_index, corpus, monkeypatch):
    uncounted, good = mutations(make_index(corpus[:1000]), corpus[:1000], 400, monkeypatch)
    assert uncounted == 0 and 400 < good < 3600


@pytest.mark.soak
def test_ten_thousand_mutations(make_index, corpus, monkeypatch, figures):
    uncounted, good = mutations(make_index(corpus[:1000]), corpus[:1000], 10_000, monkeypatch)
    figures(shard_mutations=10_000, crashes=0, uncounted_samples=uncounted)
    assert uncounted == 0 and 10_000 < good < 90_000
