"""Two ranks, then one, then two again in the middle of an epoch; each is asked to stop as a user or a cluster would.
Then more of them, through several epochs, and a number that does not divide the batch.
"""

import os
import signal
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megasparse.data.index import Index
from megasparse.data.reader import ShardReader
from tests.helpers.faults import Ended, Run, fault, running


@dataclass
class Story:
    run: Run
    ends: list[Ended] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    """The newest checkpoint after each end."""


@pytest.fixture(scope="module")
def story(tmp_path_factory, data):
    """Two ranks whose launcher gets SIGTERM in step 4, one rank that gets SIGUSR1 in step 7, two to the end."""
    run = Run(tmp_path_factory.mktemp("ranks"), data)
    story = Story(run)
    with running(run):
        for ranks, step in ((2, 4), (1, 7), (2, None)):
            run.start(ranks=ranks, faults=[fault(f"forward {step}$", "sleep 1", rank=ranks - 1)] if step else [])
            if step is not None:
                run.wait_for_fault(0)
                pid, name = (run.launcher, signal.SIGTERM) if ranks == 2 else (run.rank(0), signal.SIGUSR1)
                os.kill(pid, name)
            story.ends.append(run.wait())
            story.saved.append(max(run.checkpoints()))
            assert run.leftovers() == []
    return story


def test_S1_a_signal_to_launcher_or_rank_saves_after_the_step_and_ends_well(story):
    assert [end.code for end in story.ends] == [0, 0, 0], [end.said for end in story.ends]
    assert story.saved == [4, 7, 20]
    assert "SIGTERM: saving and stopping" in story.ends[0].said
    assert "SIGUSR1: saving and stopping" in story.ends[1].said


def sequences_of(data: Path) -> list[bytes]:
    """The tokens of every sequence of an epoch."""
    reader = ShardReader(Index.load(data), "train")
    sequences = [
        reader.read(number, start, start + 64).numpy().tobytes()
        for number, shard in enumerate(reader.shards)
        for start in range(0, shard.tokens - 63, 64)
    ]
    reader.close()
    return sequences


def test_R3_every_sequence_of_the_epoch_comes_once(story, clean, data):
    assert story.run.samples() == clean.samples()
    sequences = sequences_of(data)
    assert 7 * 4 < len(sequences) < 20 * 4, "the epoch ends after the changes, and within the run"
    trained = {sample: crc for step in story.run.samples().values() for sample, crc in step.items()}
    assert sorted(trained) == list(range(20 * 4))
    assert Counter(trained[n] for n in range(len(sequences))) == Counter(map(zlib.crc32, sequences))


def test_R3_losses_are_those_of_the_same_number_of_ranks_throughout(story, clean):
    found = {step: float.fromhex(loss) for step, loss in story.run.losses().items()}
    expected = {step: float.fromhex(loss) for step, loss in clean.losses().items()}
    assert list(found) == list(range(1, 21))
    assert [found[step] for step in range(1, 5)] == [expected[step] for step in range(1, 5)]
    for step in range(5, 18):
        assert found[step] == pytest.approx(expected[step], rel=1e-6), step


BATCH = 12


@pytest.mark.soak
def test_R3_two_four_three_one_two_ranks_of_the_same_global_batch(tmp_path, data):
    """Through nearly five epochs, with every number of ranks that was not there before: nothing lost or repeated."""
    batch = {"steps": 20, "global_batch": BATCH, "micro_batch": 1}
    clean, run = (Run(tmp_path / name, data, training=batch) for name in ("clean", "run"))
    with running(clean, run):
        clean.start()
        assert clean.wait().code == 0, clean.said()
        for ranks, stop in ((2, 4), (4, 8), (3, 12), (1, 16), (2, 20)):
            run.start("--stop-at", str(stop), ranks=ranks)
            assert run.wait().code == 0, run.said()
            assert max(run.checkpoints()) == stop and max(run.losses()) == stop
    samples = run.samples(ranks=4)
    assert {step: sorted(numbers) for step, numbers in samples.items()} == {
        step: list(range((step - 1) * BATCH, step * BATCH)) for step in range(1, 21)
    }
    assert samples == clean.samples()
    sequences = Counter(map(zlib.crc32, sequences_of(data)))
    trained = {number: crc for numbers in samples.values() for number, crc in numbers.items()}
    size = sequences.total()
    assert len(trained) > 4 * size
    for epoch in range(4):
        assert Counter(trained[number] for number in range(epoch * size, (epoch + 1) * size)) == sequences
    for step, loss in clean.losses().items():
        assert float.fromhex(run.losses()[step]) == pytest.approx(float.fromhex(loss), rel=1e-5), step


def test_R3_a_number_of_ranks_that_does_not_divide_the_batch_is_refused(tmp_path, data):
    run = Run(tmp_path / "run", data, training={"steps": 2, "global_batch": 9, "micro_batch": 1})
    with running(run):
        run.start()
        ended = run.wait()
    assert ended.code == 2 and "Traceback" not in ended.said, ended.said
    refused = "error: training.global_batch: 9 is not a multiple of micro_batch × ranks = 1 × 2. "
    assert refused + "Set it to 8, or change micro_batch, or run it on another number of ranks: 1, 3, 9" in ended.said
    assert not run.checkpoints()
