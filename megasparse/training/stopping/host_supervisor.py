"""A supervisor whose run goes on with the hosts that are left, and takes in those that come back. No torch here."""

import time
from collections.abc import Sequence
from pathlib import Path

from megasparse.errors import HANG, LOST_PEER
from megasparse.training.stopping.hosts_left import PERIOD, HostsLeft
from megasparse.training.stopping.ranks_left import NodeLayout
from megasparse.training.stopping.supervisor import POLL, SIGNAL_NAMES, RunOver, Supervisor, report

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
