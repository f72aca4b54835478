"""Fewer ranks where some do not come back, and all again later: which numbers are possible, and what a node does."""

import signal

import pytest

from megasparse.config.load import build_config
from megasparse.errors import ConfigError
from megasparse.training import supervisor
from megasparse.training.supervisor import NodeLayout, possible_ranks, ranks_to_go_on_with

BROKEN = """
DEVICE = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")[int(os.environ["LOCAL_RANK"])]
note("ran", f"{DEVICE} of {os.environ['WORLD_SIZE']}")
def starts(rank):
    return len((HERE / f"ran-{rank}").read_text().splitlines()) if (HERE / f"ran-{rank}").exists() else 0
if DEVICE == "1" and not (HERE / "repaired").exists():
    while starts(0) < starts(RANK):  # the first to die ends the others
        time.sleep(0.01)
    sys.exit(1)
"""
"""Ranks of which the one on device 1 fails until it is repaired."""


def config_of(global_batch: int, micro_batch: int = 1, sequence: int = 1):
    values = {"training": {"global_batch": global_batch, "micro_batch": micro_batch}}
    return build_config({**values, "parallel": {"sequence": sequence}}, [])


@pytest.mark.parametrize(
    ("batch", "possible"), [((8, 1, 1), [1, 2, 4, 8]), ((12, 2, 1), [1, 2, 3, 6]), ((4, 1, 2), [2, 4, 8])]
)
def test_the_numbers_of_ranks_that_share_out_a_batch(batch, possible):
    config = config_of(*batch)
    assert possible_ranks(config) == possible
    for most in range(1, 10):
        sizes = [number for number in reversed(possible) if number <= most]
        if sizes:
            assert ranks_to_go_on_with(config, most, 1) == sizes
        if most in possible:
            assert ranks_to_go_on_with(config, most, None) == [most]


def test_what_cannot_be_divided_is_one_error_before_the_run(toy):
    assert toy.run("ready()", "--ranks", "5") == 2
    problem = "5 ranks cannot share out training.global_batch: 24 sequences divide among 1, 2, 3, 4, 6, 8, 12, 24"
    hint = "Start one of these numbers, or give --min-ranks for the next below"
    assert toy.said() == f"error: --ranks: {problem}. {hint}\n"
    with pytest.raises(ConfigError, match=r"^--min-ranks: no number of ranks from 5 to 7 can share out .* 1, 2, 4, 8"):
        ranks_to_go_on_with(config_of(8), 7, 5)
    assert not toy.notes("started", 0)


@pytest.mark.slow
def test_fewer_than_there_are_where_the_batch_does_not_divide(toy):
    assert toy.run("ready()", "--ranks", "5", "--min-ranks", "1") == 0
    assert [len(toy.notes("started", rank)) for rank in range(5)] == [1, 1, 1, 1, 0]
    assert "supervisor: numbers of ranks that this run may have: 4, 3, 2, 1" in toy.said()


def test_ranks_of_several_nodes_that_are_not_all_needed():
    nodes = [NodeLayout(ranks=2, nodes=3, node_rank=node, total=3) for node in range(3)]
    assert [node.here for node in nodes] == [2, 1, 0]
    last = nodes[1].environment(0, ("host", 1))
    assert [last[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["2", "3", "0", "1"]


def test_a_run_goes_on_without_the_device_that_fails_again_and_again(toy):
    lines = BROKEN + "while os.environ['WORLD_SIZE'] == '4': time.sleep(0.01)"
    toy.start(lines, "--ranks", "4", "--restarts", "1", "--min-ranks", "2", LAST_WORDS=0.0)
    assert toy.wait_as_time_passes() == 0
    assert toy.notes("ran", 0) == ["0 of 4", "0 of 4", "0 of 3"]
    assert [toy.notes("ran", rank)[-1] for rank in (1, 2)] == ["2 of 3", "3 of 3"]
    assert "going on without its device, with 3 of 4 ranks" in toy.said()


@pytest.mark.slow
def test_not_with_fewer_than_asked_for_and_not_unless_asked(toy):
    for options in (["--min-ranks", "4"], []):
        for notes in toy.folder.glob("ran-*"):
            notes.unlink()
        toy.start(BROKEN + "time.sleep(60)", "--ranks", "4", "--restarts", "1", *options, LAST_WORDS=0.0)
        assert toy.wait_as_time_passes() == 1
        assert toy.notes("ran", 0) == ["0 of 4", "0 of 4"] and "stopped: ended 2 times" in toy.cause()


SAVES = f"""{BROKEN}
if RANK == 0 and os.environ["WORLD_SIZE"] == "3":
    (CHECKPOINTS / str(len((HERE / 'ran-0').read_text().splitlines())).zfill(8)).mkdir(parents=True)
on_signals(lambda n: (wait_for('ended') if n == signal.SIGTERM else None, sys.exit(0)))
note(f"ready{{os.environ['WORLD_SIZE']}}")
"""
ENDS = "while not (HERE / 'ended').exists(): time.sleep(0.01)"


def ran(toy, start: int) -> None:
    toy.wait_until(lambda: len(toy.notes("ran", 0)) >= start)


@pytest.mark.slow
def test_all_are_tried_again_after_an_hour_and_grow(toy):
    toy.start(SAVES + ENDS, "--ranks", "4", "--restarts", "0", "--min-ranks", "2", LAST_WORDS=0.0)
    ran(toy, 1)
    ran(toy, 2)
    toy.wait_for("ready3", ranks=3)
    toy.allow("repaired")
    toy.turn(supervisor.TRY_AGAIN - 60)
    assert toy.notes("signals", 0) == []
    toy.turn(60)
    ran(toy, 3)
    toy.wait_for("ready4", ranks=4)
    toy.allow("ended")
    assert toy.wait() == 0
    assert toy.notes("ran", 0) == ["0 of 4", "0 of 3", "0 of 4"] and toy.notes("signals", 0) == ["SIGUSR1"]
    assert "supervisor: trying all 4 ranks again" in toy.said()


@pytest.mark.slow
def test_a_try_that_fails_costs_one_start_and_the_next_is_two_hours_away(toy):
    toy.start(SAVES + ENDS, "--ranks", "4", "--restarts", "2", "--min-ranks", "2", LAST_WORDS=0.0)
    ran(toy, 4)
    toy.wait_for("ready3", ranks=3)
    toy.turn(supervisor.TRY_AGAIN)
    ran(toy, 6)
    toy.wait_until(lambda: all(len(toy.notes("ready3", rank)) == 2 for rank in range(3)))
    toy.turn(1.5 * supervisor.TRY_AGAIN)
    assert len(toy.notes("ran", 0)) == 6
    toy.signal(signal.SIGTERM)
    toy.allow("ended")
    assert toy.wait() == 0
    assert [line[-1] for line in toy.notes("ran", 0)] == list("444343")
