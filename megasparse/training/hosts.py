"""Which hosts take part in the next start of a run: those that are left, and those that have come back.

Each supervisor rewrites a file of its own beside the ranks' heartbeats, and reads those of the others. A host whose
file stands still has vanished, by the reader's own clock: no clock is compared between hosts. Of the hosts that wait
for a start the one with the lowest number decides who takes part in it, once all that live are waiting; the others read
it in that host's file. The disk that they share is what a host must reach to take part. Should two of them decide
at once, the lock on the run's folder lets one of their runs begin.
"""

import math
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megasparse.errors import HANG, LOST_PEER
from megasparse.training.stopping.watchdog import read_beat, write_beat
from megasparse.training.supervisor import POLL, SIGNAL_NAMES, NodeLayout, RunOver, Supervisor, report

PERIOD = 0.5
"""Seconds between two looks."""
VANISHED = 30.0
"""Seconds without a new heartbeat after which a host has vanished."""
ABSENT = 300.0
"""Seconds that hosts wait for one that nobody has heard of yet, before the first start, and where too few are left."""
WAITING, RUNNING, LEFT, OVER = "waiting", "running", "left", "over"


@dataclass(frozen=True)
class HostBeat:
    """Heartbeat of a host's supervisor."""

    node: int
    address: str
    """Address by which the others reach it."""
    beats: int = 0
    state: str = WAITING
    """RUNNING its ranks; LEFT: the others may go on without it; OVER: they may not."""
    start: int = 0
    """Number of the newest start that it knows of."""
    members: Sequence[int] = ()
    """Hosts of the last start in which it took part, the first of them with rank 0; none before the first."""
    grown: int = 0
    """The last start that it ended so that more hosts could take part in the next."""
    code: int = 0
    """Its exit code, where it has ended."""


class HostsLeft:
    """This host among those of a run.

    folder: of the heartbeats, on the disk that all hosts share. whole: all hosts, of which this is one. sizes: numbers
    of ranks that the run may have, the largest first. clock: seconds since any moment.
    """

    def __init__(self, folder: Path, whole: NodeLayout, sizes: Sequence[int], clock: Callable[[], float]):
        assert whole.address is not None
        self.whole, self._folder, self._sizes, self._clock = whole, folder, sizes, clock
        self._own = HostBeat(whole.node_rank, own_address(whole.address))
        self._others = [node for node in range(whole.nodes) if node != whole.node_rank]
        self._heard: dict[int, tuple[HostBeat, float]] = {}  # and when it was new to us
        self._found = {node: self._read(node) for node in self._others}  # may be of an earlier run
        self._look_at, self._waits_since = -math.inf, clock()
        self._writes, self._taken = True, 0  # the last start in which it took part

    @property
    def members(self) -> tuple[int, ...]:
        """Hosts of the last start in which this one took part."""
        return tuple(self._own.members)

    def look(self) -> None:
        """Write this host's heartbeat and read those of the others, where it is time."""
        if self._clock() >= self._look_at:
            self._look()

    def agree(self, used_up: bool) -> NodeLayout | None:
        """The layout of the next start; None while the hosts have not agreed, or can do without this one.

        used_up: whether a start of the same hosts would be of no use. Raises RunOver where there is no next start.
        """
        if self._own.state != WAITING:
            self._own, self._waits_since = replace(self._own, state=WAITING), self._clock()
            self._look()
        self.look()
        if not self._writes:
            return None
        heard = [beat for beat, _ in self._heard.values()]
        if over := [beat for beat in heard if beat.state == OVER]:
            raise RunOver(f"node {over[0].node} has ended the run", over[0].code)
        self._own = replace(self._own, start=max(beat.start for beat in [self._own, *heard]))
        for beat in self._living():
            decided = beat.state == RUNNING and beat.members[0] == beat.node
            if decided and beat.start == self._own.start > self._taken and self._own.node in beat.members:
                return self._take_part(beat.members)
        return self._decide(used_up)

    def _decide(self, used_up: bool) -> NodeLayout | None:
        """Decide for all hosts, where that is for this one to do and all that live are waiting."""
        living, waited = self._living(), self._clock() - self._waits_since
        if self._own.node != min(beat.node for beat in living):
            return None
        if any(beat.state != WAITING or beat.start != self._own.start for beat in living):
            return None
        first, all_known = not any(beat.members for beat in living), len(self._heard) == len(self._others)
        if first and not all_known and waited < ABSENT:
            return None
        size = self._largest(len(living))
        if size is None and waited < ABSENT:
            return None
        if size is None:
            raise RunOver(f"{len(living)} of {self.whole.nodes} nodes are left, too few for {self._sizes[-1]} ranks")
        members = tuple(sorted(beat.node for beat in living))[: math.ceil(size / self.whole.ranks)]
        if used_up and members == self.members:
            raise RunOver("no node is at fault that the others could do without")
        return self._take_part(members)

    def due(self) -> bool:
        """True if hosts wait with which the run could have more ranks, and it is for this host to let them in."""
        waiting = [beat for beat in self._living() if beat.node not in self.members]
        now, then = (self._largest(len(self.members) + more) for more in (0, len(waiting)))
        return self.members[0] == self._own.node and now is not None and then is not None and then > now

    def grow(self) -> None:
        """Note that this start ends for the sake of hosts that wait."""
        self._own = replace(self._own, grown=self._own.start)
        self._look()

    def growing(self) -> bool:
        """True if this start has ended for the sake of hosts that wait."""
        self._look()
        return any(beat.grown == self._own.start for beat in [self._own, *(beat for beat, _ in self._heard.values())])

    def end(self, code: int, here: bool) -> None:
        """Note that this host takes part no more. here: whether the others may go on without it."""
        self._own = replace(self._own, state=LEFT if here else OVER, code=code)
        self._look()

    def _take_part(self, members: Sequence[int]) -> NodeLayout:
        """Begin a start of these hosts."""
        assert self.whole.address is not None
        start = self._own.start + (members[0] == self._own.node)
        self._own, self._taken = replace(self._own, state=RUNNING, start=start, members=tuple(members)), start
        self._look()
        host, port = self.whole.address
        if members[0] != 0:
            host = next(beat.address for beat in self._living() if beat.node == members[0])
        size, rank = self._largest(len(members)), members.index(self._own.node)
        return replace(self.whole, nodes=len(members), node_rank=rank, address=(host, port), total=size)

    def _living(self) -> list[HostBeat]:
        """This host and those that have not vanished and go on."""
        now, going_on = self._clock(), (WAITING, RUNNING)
        heard = [beat for beat, when in self._heard.values() if now - when < VANISHED and beat.state in going_on]
        return [self._own, *heard]

    def _largest(self, hosts: int) -> int | None:
        return next((size for size in self._sizes if size <= hosts * self.whole.ranks), None)

    def _look(self) -> None:
        now = self._clock()
        self._look_at = now + PERIOD
        self._own = replace(self._own, beats=self._own.beats + 1)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_beat(self._path(self._own.node), asdict(self._own))
            self._writes = True
        except OSError as error:
            if self._writes:
                why = f"{self._folder} cannot be written to ({error.strerror})"
                report(f"{why}: no start before it can, as the other nodes do not know of this one")
            self._writes = False
        for node in self._others:
            beat, known = self._read(node), self._heard.get(node)
            if beat is not None and beat != (known[0] if known else self._found[node]):
                self._heard[node] = beat, now

    def _path(self, node: int) -> Path:
        return self._folder / f"host-{node:05}.json"

    def _read(self, node: int) -> HostBeat | None:
        """Read the heartbeat of another host; None while it is being written, or if it cannot be read."""
        with suppress(OSError, TypeError):
            fields = read_beat(self._path(node))
            return None if fields is None else HostBeat(**fields)
        return None


def own_address(first: tuple[str, int]) -> str:
    """The address by which this host reaches the first one, and the others this host."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(*first, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()


CAUSED_ELSEWHERE = (HANG, LOST_PEER)
"""Exit codes of ranks of which another host may be the cause."""


class HostSupervisor(Supervisor):
    """A supervisor that agrees with those of the other hosts, before each start, on the hosts that take part.

    A host leaves where its supervisor ends badly, and the cause was there. When hosts wait that would make the run
    larger, it saves and starts again with them, at the earliest after its next checkpoint. heartbeats: the run's folder
    of them.
    """

    def __init__(
        self,
        command: list[str],
        layout: NodeLayout,
        checkpoints: Path,
        restarts: int,
        sizes: Sequence[int],
        heartbeats: Path,
    ):
        super().__init__(command, layout, checkpoints, restarts, sizes)
        self.hosts, self._due_at = HostsLeft(heartbeats, layout, sizes, self._clock), 0.0

    def run(self) -> int:
        """Return the exit code, as `Supervisor.run` does."""
        code = 1
        try:
            code = super().run()
            return code
        finally:
            self.hosts.end(code, here=code not in (0, *CAUSED_ELSEWHERE) and not self._stopping())

    def _agree(self, used_up: bool) -> bool:
        before = self.hosts.members
        while (layout := self.hosts.agree(used_up)) is None:
            if self._stopping():
                raise RunOver(f"{SIGNAL_NAMES[self.arrived[0]]} while it waited for other nodes")
            time.sleep(POLL)
        self.layout, now = layout, self.hosts.members
        if now != before:
            named = ", ".join(map(str, now))
            report(f"nodes {named} of {self.hosts.whole.nodes} take part, with {layout.world_size} ranks")
        return now != before

    def _grows(self) -> bool:
        return self.hosts.growing()

    def _look(self) -> None:
        self.hosts.look()

    def _due(self) -> bool:
        now = self._clock()
        if now < self._due_at:
            return False
        self._due_at = now + PERIOD  # a new checkpoint is looked for where hosts wait, on a disk that all share
        return self.hosts.due()

    def _announce(self) -> None:
        self.hosts.grow()
        report("nodes wait that can take part: saving, and starting again with them")

    def _go_on_with_fewer(self, code: int, cause: str) -> bool:
        if code not in CAUSED_ELSEWHERE:
            return False
        report(f"{cause}; going on if another node is at fault, and leaves")
        return True
