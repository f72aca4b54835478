"""The hosts that are left, by a turned clock: who takes part in a start, who decides, who comes back."""

import json

import pytest

from megasparse.training import hosts as hosts_module
from megasparse.training.hosts import ABSENT, PERIOD, VANISHED, HostsLeft
from megasparse.training.supervisor import NodeLayout, RunOver


class Hosts:
    """Hosts of two ranks each, of which some live. `waiting`: those that want to start."""

    def __init__(self, folder, nodes=3, sizes=(6, 4, 2, 1)):
        self.folder, self.nodes, self.sizes, self.now = folder, nodes, sizes, 0.0
        self.living: dict[int, HostsLeft] = {}
        self.layouts: dict[int, NodeLayout] = {}
        self.used_up: set[int] = set()
        for node in range(nodes):
            self.come(node)

    def come(self, node):
        """Start the supervisor of a host."""
        whole = NodeLayout(2, self.nodes, node, ("first", 29500))
        self.living[node] = HostsLeft(self.folder, whole, self.sizes, lambda: self.now)

    def go(self, node):
        """Let a host vanish."""
        del self.living[node]
        self.layouts.pop(node, None)

    def end_ranks(self, *nodes):
        """Let the ranks of these hosts end; they want to start again."""
        for node in nodes or list(self.layouts):
            del self.layouts[node]

    def pass_time(self, seconds=2 * PERIOD):
        """Let those without ranks try to agree, and the others look, again and again."""
        end = self.now + seconds
        while self.now < end:
            self.now += PERIOD
            for node, host in self.living.items():
                if node in self.layouts:
                    host.look()
                elif (layout := host.agree(node in self.used_up)) is not None:
                    self.layouts[node] = layout

    def shown(self):
        """Of each host with ranks: node rank, ranks here, world size, where they meet."""
        return {n: (one.node_rank, one.here, one.world_size, one.address) for n, one in self.layouts.items()}


def test_the_first_start_waits_until_every_host_has_been_heard_of(tmp_path):
    hosts = Hosts(tmp_path)
    second = hosts.living.pop(1)
    hosts.pass_time(ABSENT - 2)
    assert not hosts.layouts
    hosts.living[1] = second
    hosts.pass_time()
    place = ("first", 29500)
    assert hosts.shown() == {0: (0, 2, 6, place), 1: (1, 2, 6, place), 2: (2, 2, 6, place)}


def test_a_host_that_never_comes_is_done_without_after_five_minutes(tmp_path):
    hosts = Hosts(tmp_path)
    hosts.go(1)
    hosts.pass_time(ABSENT - 2)
    assert not hosts.layouts
    hosts.pass_time(4)
    assert hosts.shown() == {0: (0, 2, 4, ("first", 29500)), 2: (1, 2, 4, ("first", 29500))}


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_the_hosts_that_are_left_go_on_when_one_has_been_silent_for_half_a_minute(tmp_path, monkeypatch, gone):
    """The first one too: then they meet at the second, where that reaches it."""
    names = iter(["zero", "one", "two"])
    monkeypatch.setattr(hosts_module, "own_address", lambda first: next(names))
    hosts = Hosts(tmp_path)
    hosts.pass_time()
    hosts.go(gone)
    hosts.end_ranks()
    hosts.pass_time(VANISHED - 2)
    assert not hosts.layouts
    hosts.pass_time(4)
    place = ("one" if gone == 0 else "first", 29500)
    left = [node for node in range(3) if node != gone]
    assert hosts.shown() == {node: (number, 2, 4, place) for number, node in enumerate(left)}


def test_no_start_is_decided_while_a_living_host_still_has_ranks(tmp_path):
    hosts = Hosts(tmp_path)
    hosts.pass_time()
    hosts.end_ranks(0, 1)
    hosts.pass_time(10 * VANISHED)
    assert list(hosts.layouts) == [2]
    hosts.end_ranks(2)
    hosts.pass_time()
    assert len(hosts.layouts) == 3


@pytest.mark.parametrize("back", [0, 2])
def test_a_host_that_comes_back_takes_part_again(tmp_path, back):
    hosts = Hosts(tmp_path)
    hosts.pass_time()
    hosts.go(back)
    hosts.end_ranks()
    hosts.pass_time(VANISHED + 2)
    first, other = sorted(hosts.layouts)
    assert not hosts.living[first].due()
    hosts.come(back)
    hosts.pass_time(10 * VANISHED)
    assert sorted(hosts.layouts) == [first, other] and not hosts.living[first].growing()
    assert hosts.living[first].due() and not hosts.living[other].due()
    hosts.living[first].grow()
    assert hosts.living[first].growing() and hosts.living[other].growing()
    hosts.end_ranks(first)
    hosts.pass_time()
    assert list(hosts.layouts) == [other]
    assert hosts.living[other].growing(), "which is seen late too"
    hosts.end_ranks(other)
    hosts.pass_time()
    assert [hosts.shown()[node][:3] for node in range(3)] == [(0, 2, 6), (1, 2, 6), (2, 2, 6)]
    assert not any(host.growing() for host in hosts.living.values())


def test_hosts_among_which_the_batch_does_not_divide_stay_in_reserve(tmp_path):
    hosts = Hosts(tmp_path, sizes=(4, 2, 1))
    hosts.pass_time()
    assert [hosts.shown()[node][:3] for node in sorted(hosts.layouts)] == [(0, 2, 4), (1, 2, 4)]
    hosts.pass_time(2 * ABSENT)
    assert not hosts.living[0].due()
    hosts.go(1)
    hosts.end_ranks()
    hosts.pass_time(VANISHED + 2)
    assert [hosts.shown()[node][:3] for node in (0, 2)] == [(0, 2, 4), (1, 2, 4)]


def test_the_last_host_may_have_work_for_some_of_its_ranks(tmp_path):
    hosts = Hosts(tmp_path, sizes=(3, 1))
    hosts.pass_time()
    assert [hosts.shown()[node][:3] for node in sorted(hosts.layouts)] == [(0, 2, 3), (1, 1, 3)]


def test_too_few_hosts_wait_for_others_and_then_end(tmp_path):
    hosts = Hosts(tmp_path, sizes=(6, 4))
    hosts.pass_time()
    for node in (0, 2):
        hosts.go(node)
    hosts.end_ranks()
    hosts.pass_time(ABSENT - 2)
    assert not hosts.layouts
    with pytest.raises(RunOver, match=r"^1 of 3 nodes are left, too few for 4 ranks$"):
        hosts.pass_time(4)


def test_a_host_that_ends_for_the_others_ends_all(tmp_path):
    hosts = Hosts(tmp_path)
    hosts.pass_time()
    hosts.end_ranks(0, 2)
    hosts.living[1].end(5, here=False)
    hosts.go(1)
    with pytest.raises(RunOver, match=r"^node 1 has ended the run$") as over:
        hosts.pass_time()
    assert over.value.code == 5


def test_where_restarts_are_used_up_one_host_leaves_or_all_end(tmp_path):
    hosts = Hosts(tmp_path)
    hosts.pass_time()
    hosts.used_up = {0, 1, 2}
    hosts.end_ranks()
    hosts.living[1].end(1, here=True)
    hosts.go(1)
    hosts.pass_time()
    assert [hosts.shown()[node][:3] for node in (0, 2)] == [(0, 2, 4), (1, 2, 4)]
    hosts.end_ranks()
    with pytest.raises(RunOver, match="no node is at fault"):
        hosts.pass_time()


def test_what_an_earlier_run_has_left_is_not_believed(tmp_path):
    before = Hosts(tmp_path)
    before.pass_time()
    before.living[1].end(0, here=False)
    again = Hosts(tmp_path)
    again.go(1)
    again.pass_time(ABSENT - 2)
    assert not again.layouts
    again.pass_time(4)
    assert sorted(again.layouts) == [0, 2]


def test_a_start_that_is_over_before_a_host_has_heard_of_it_is_not_joined(tmp_path):
    hosts = Hosts(tmp_path, nodes=2, sizes=(4, 2))
    hosts.pass_time(PERIOD)
    late = hosts.living.pop(1)
    hosts.layouts.pop(1, None)
    hosts.pass_time()
    assert list(hosts.layouts) == [0]
    hosts.end_ranks(0)
    hosts.pass_time(10 * PERIOD)
    assert not hosts.layouts, "the other may have begun"
    hosts.living[1] = late
    hosts.pass_time(5 * PERIOD)
    assert sorted(hosts.layouts) == [0, 1]
    assert {host._own.start for host in hosts.living.values()} == {2}


def test_a_host_that_cannot_write_takes_no_part(tmp_path, capsys):
    (tmp_path / "file").touch()
    host = HostsLeft(tmp_path / "file", NodeLayout(1, 2, 0, ("first", 1)), (2, 1), iter(range(10_000)).__next__)
    assert [host.agree(False) for _ in range(2 * int(ABSENT))] == [None] * 2 * int(ABSENT)
    assert capsys.readouterr().err.count("cannot be written to (") == 1


def test_a_file_that_is_no_heartbeat_is_no_host(tmp_path):
    hosts = Hosts(tmp_path, nodes=2, sizes=(4, 2))
    hosts.go(1)
    for text in ("{", json.dumps({"crc32": 0, "heartbeat": {}}), "[" * 100_000):
        (tmp_path / "host-00001.json").write_text(text)
        hosts.pass_time()
    assert not hosts.layouts


def test_the_address_of_a_host_is_the_one_that_reaches_the_first():
    assert hosts_module.own_address(("127.0.0.1", 29500)) == "127.0.0.1"
    assert hosts_module.own_address(("no such host", 29500)) == hosts_module.socket.gethostname()
