"""A rank that does not come back: the run goes on with fewer, and grows again; the samples stay the same."""

import json
import sys
import zlib
from collections import Counter

import pytest

from tests.helpers.faults import SCRIPT, SUPERVISE, Run, fault, running
from tests.reliability.test_restarts import sequences_of

EARLIER = """
import runpy, sys
from megasparse.training.stopping import ranks_left
ranks_left.TRY_AGAIN = float(sys.argv[1])
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_R7_a_run_goes_on_with_the_ranks_that_are_left_and_grows_again(data, clean, tmp_path):
    """Rank 1 of two dies in two starts; one rank goes on, until it has saved and both are tried again."""
    run = Run(tmp_path, data)
    twice = [fault("start", "kill", rank=1)] * 2
    slow = fault("forward", "sleep 0.1", every=True)
    options = ["--ranks", "2", "--restarts", "1", "--min-ranks", "1"]
    command = [sys.executable, "-c", EARLIER, "0", str(SUPERVISE), *options, str(SCRIPT)]
    with running(run):
        faults = json.dumps({"folder": str(run.folder), "faults": [*twice, slow]})
        run.launch([*command, "--config", str(run.folder / "config.json")], MEGASPARSE_FAULTS=faults)
        ended = run.wait(limit=300)
    assert ended.code == 0, ended.said
    assert "going on without its device, with 1 of 2 ranks" in ended.said
    assert "trying all 2 ranks again" in ended.said
    alone, grown = run.first_steps()
    assert alone == 1 and 2 < grown <= 20
    assert run.samples() == clean.samples()
    trained = {sample: crc for step in run.samples().values() for sample, crc in step.items()}
    assert sorted(trained) == list(range(20 * 4))
    sequences = sequences_of(data)
    assert Counter(trained[n] for n in range(len(sequences))) == Counter(map(zlib.crc32, sequences))
    for step, loss in clean.losses().items():
        assert float.fromhex(run.losses()[step]) == pytest.approx(float.fromhex(loss), rel=1e-5), step
