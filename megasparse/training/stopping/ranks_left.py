"""Which numbers of ranks a run can have, and the ranks of a node when some of its devices do not come back.

No torch here: the supervisor starts in no time.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from megasparse.config.schema import Config
from megasparse.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
TRY_AGAIN = 3600.0
"""Seconds after which a run that goes on with fewer ranks stops for a try with all; doubled after each that fails."""


@dataclass(frozen=True)
class NodeLayout:
    """The ranks of this node among all, and where they meet. address: (host, port) of rank 0; None on a single node."""

    ranks: int = 1
    """Ranks of every node before the last one that has any."""
    nodes: int = 1
    node_rank: int = 0
    address: tuple[str, int] | None = None
    total: int | None = None
    """Ranks of all nodes; None is nodes × ranks."""
    devices: tuple[str, ...] = ()
    """The devices that the ranks of this node see, each its own; empty: what the environment says."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks if self.total is None else self.total

    @property
    def here(self) -> int:
        """Ranks of this node."""
        return max(0, min(self.ranks, self.world_size - self.node_rank * self.ranks))

    def environment(self, local_rank: int, address: tuple[str, int]) -> dict[str, str]:
        """The environment of a rank, of those that meet at an address."""
        values: dict[str, object] = {
            "RANK": self.node_rank * self.ranks + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.here,
            "LOCAL_SIZE": self.here,  # DeepSpeed's name for it
            "MASTER_ADDR": address[0],
            "MASTER_PORT": address[1],
        }
        if self.devices:
            values[VISIBLE] = ",".join(self.devices)
        return {**os.environ, **{key: str(value) for key, value in values.items()}}


def possible_ranks(config: Config) -> list[int]:
    """Numbers of ranks among which the global batch can be shared out, ascending."""
    batches, sharing = config.training.global_batch // config.training.micro_batch, config.parallel.sequence
    return [number * sharing for number in range(1, batches + 1) if batches % number == 0]


def ranks_to_go_on_with(config: Config, most: int, least: int | None) -> list[int]:
    """The numbers of ranks that a run started on `most` may have, the largest first: that one alone where `least` is
    None. Raises ConfigError, which names those among which the global batch divides, where there is none.
    """
    possible = possible_ranks(config)
    listed = f"{config.training.global_batch} sequences divide among {', '.join(map(str, possible))}"
    if least is None and most not in possible:
        problem = f"{most} ranks cannot share out training.global_batch: {listed}"
        raise ConfigError("--ranks", problem, "Start one of these numbers, or give --min-ranks for the next below")
    found = [number for number in reversed(possible) if (least or most) <= number <= most]
    if not found:
        problem = f"no number of ranks from {least} to {most} can share out training.global_batch: {listed}"
        raise ConfigError("--min-ranks", problem, "Give one of these, or change training.global_batch")
    return found


@dataclass
class RanksLeft:
    """The layout of a node whose devices may be lost for a while. Only on a single node: elsewhere it never changes."""

    whole: NodeLayout
    sizes: list[int]
    """Numbers of ranks of the whole run that are possible, the largest first."""
    clock: Callable[[], float]
    _lost: set[str] = field(default_factory=set)
    _pause: float = 0.0
    _try_at: float = 0.0

    def __post_init__(self) -> None:
        named = os.environ.get(VISIBLE, "")
        self._devices = named.split(",") if named else list(map(str, range(self.whole.ranks)))

    def layout(self) -> NodeLayout:
        """The layout of the next start."""
        left = tuple(device for device in self._devices if device not in self._lost)
        if not self._lost:
            return replace(self.whole, total=self.sizes[0])
        return replace(self.whole, total=self._largest(len(left)), devices=left)

    def lose(self, local_rank: int) -> bool:
        """Go on without the device of a rank of the last layout. False where too few would be left."""
        device = (self.layout().devices or self._devices)[local_rank]
        if self.whole.nodes > 1 or self._largest(len(self._devices) - len(self._lost) - 1) is None:
            return False
        self._lost.add(device)
        self._pause = 2 * self._pause or TRY_AGAIN
        self._try_at = self.clock() + self._pause
        return True

    def due(self) -> bool:
        """Whether it is time for a try with all devices."""
        return bool(self._lost) and self.clock() >= self._try_at

    def restore(self) -> None:
        """Take all devices in the next layout."""
        self._lost.clear()

    def proven(self) -> None:
        """Note a new checkpoint: where all devices made it, the next loss is the first one."""
        if not self._lost:
            self._pause = 0.0

    def _largest(self, devices: int) -> int | None:
        return next((size for size in self.sizes if size <= devices), None)
