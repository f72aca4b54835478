"""A step on every rank as a timeline: what computes, what is exchanged, gathered and swapped, and what waits for it.

Each rank works through one list of tasks. A task runs on one of the rank's resources, when that one is free and what
the task needs has ended; a collective begins on its ranks when the last of them is there, and ends with the slowest.

    compute    passes and the optimizer
    exchange   all-to-alls of ranks that share a sequence; the computing waits for them
    gather     ZeRO: weights of the layers at hand gathered, gradients reduced
    swap       pieces of weights and gradients to and from CPU memory, or a disk where that has too little room

While a layer is at work, the next one's weights are fetched and gathered (`AHEAD`). Seconds of the computing are those
of `Plan.time`, bytes those of `planning/traffic.py`, each shared out evenly among the layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megasparse.planning.plan import Plan

Resource = Literal["compute", "exchange", "gather", "swap"]
RESOURCES: tuple[Resource, ...] = ("compute", "exchange", "gather", "swap")
AHEAD = 1
"""Layers whose weights are fetched before they are needed."""


@dataclass(frozen=True)
class Circumstances:
    """What is not as planned. slow_ranks: rank -> how many times as long it computes. slow_links: rank -> how many
    times as long what it exchanges and gathers takes. host: bytes of a node's CPU memory, or None where it suffices.
    """

    slow_ranks: dict[int, float] = field(default_factory=dict)
    slow_links: dict[int, float] = field(default_factory=dict)
    host: int | None = None


@dataclass(frozen=True)
class Task:
    """A task of every rank. seconds: on a rank where all is as planned. moved: bytes that a rank sends. group: ranks
    that work on it together, neighbours. needs: numbers of earlier tasks.
    """

    name: str
    resource: Resource
    seconds: float
    moved: float = 0.0
    group: int = 1
    needs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """The tasks of a step, and when each begins and ends, in seconds: (tasks, ranks)."""

    tasks: Sequence[Task]
    begin: np.ndarray
    end: np.ndarray

    @property
    def seconds(self) -> float:
        return float(self.end.max())

    def moved(self, resource: Resource) -> float:
        """Bytes that a rank sends."""
        return sum(task.moved for task in self.tasks if task.resource == resource)

    def busy(self, resource: Resource, rank: int) -> float:
        """Seconds in which a rank's resource is at work, the waiting for other ranks left out."""
        mine = [number for number, task in enumerate(self.tasks) if task.resource == resource]
        return float((self.end - self.begin)[mine, rank].sum())


def timeline(plan: Plan, given: Circumstances | None = None) -> Timeline:
    """Simulate a step of `plan`. Raises ConfigError for what has no seconds by part, see `Plan.time`."""
    given = given or Circumstances()
    tasks = list(_tasks(plan, _swap_rate(plan, given.host)))
    return run(tasks, plan.on.gpus, given)


def run(tasks: Sequence[Task], ranks: int, given: Circumstances) -> Timeline:
    """Work through the tasks on so many ranks."""
    computing, linking = np.ones(ranks), np.ones(ranks)
    for factors, slow in ((computing, given.slow_ranks), (linking, given.slow_links)):
        for rank, factor in slow.items():
            factors[rank] = factor
    free = {resource: np.zeros(ranks) for resource in RESOURCES}
    begin, end = np.zeros((len(tasks), ranks)), np.zeros((len(tasks), ranks))
    for number, task in enumerate(tasks):
        ready = np.maximum.reduce([free[task.resource], *(end[each] for each in task.needs)])
        slowed = {"compute": computing, "swap": np.ones(ranks)}.get(task.resource, linking)
        took = task.seconds * slowed
        if task.group > 1:  # all begin when the last is there, and end with the slowest
            ready, took = (_latest(x, task.group) for x in (ready, took))
        begin[number], end[number] = ready, ready + took
        free[task.resource] = end[number]
    return Timeline(tasks, begin, end)


def _latest(times: np.ndarray, group: int) -> np.ndarray:
    """The greatest of each group of neighbours, for all of them."""
    return np.repeat(times.reshape(-1, group).max(1), group)


def _swap_rate(plan: Plan, host: int | None) -> float:
    """Seconds of a byte between a GPU and where its states lie: CPU memory, and a disk for the share without room."""
    gpu, local = plan.on.gpu, plan.cluster.local
    wanted = sum(plan.memory.host.values()) * local
    spilled = 0.0 if host is None or not wanted else max(0.0, 1 - host / wanted)
    disk = 1.0 if plan.offload.nvme else spilled
    return (1 - disk) / gpu.pcie + disk * local / gpu.nvme


def _tasks(plan: Plan, swap_rate: float) -> Iterator[Task]:
    """The tasks of a step, in the order in which a rank issues them."""
    issued: list[Task] = []
    for number in range(plan.micro_batches):
        _Pass(plan, swap_rate, number == plan.micro_batches - 1, issued).issue()
    last = len(issued) - 1
    update = [number for number, task in enumerate(issued) if task.name.startswith("gradients")]
    swap = plan.offload
    issued.append(Task("optimizer", "compute", plan.time.optimizer, needs=(last, *update)))
    back = swap.weights / (2 * plan.micro_batches + 1) + swap.optimizer
    if back:
        issued.append(Task("weights back", "swap", back * swap_rate, back, needs=(len(issued) - 1,)))
    yield from issued


class _Pass:
    """The tasks of one micro-batch, issued in order. last: whether it is the step's last one."""

    def __init__(self, plan: Plan, swap_rate: float, last: bool, issued: list[Task]):
        self.plan, self.swap_rate, self.last, self.issued = plan, swap_rate, last, issued
        model, count = plan.config.model, plan.micro_batches
        self.layers, self.group = model.layers, plan.cluster.sequence
        self.passes = 2 if model.activations == "stored" else 3
        time, found, swap = plan.time, plan.communication, plan.offload
        in_layers = time.passes - time.head
        forward = 1 / (self.passes + 1)  # of a pass's products: forward, perhaps once more, and two of the backward
        self.forward, self.backward = (in_layers * share / count / self.layers for share in (forward, 1 - forward))
        self.head = time.head / count
        self.exchanged = found.sequence / count / self.layers / self.passes
        self.exchange_seconds = found.sequence_seconds / count / self.layers / self.passes
        self.zero = plan.zero.stage
        # Weights are gathered forward and backward by ZeRO 3 alone; gradients are reduced after each micro-batch by
        # ZeRO 2 and 3, by others after the last, when all but ZeRO 3 hand on the new weights too.
        times = {0: 2, 1: 2, 2: count + 1, 3: 3 * count}[self.zero]
        self.gathered, self.gather_seconds = (x / times / self.layers for x in (found.zero, found.zero_seconds))
        self.fetched = swap.weights / (2 * count + 1) / self.layers
        self.away = swap.gradients / count / self.layers

    def issue(self) -> None:
        computed: list[int] = [len(self.issued) - 1] if self.issued else []
        for direction, layers in (("forward", range(self.layers)), ("backward", reversed(range(self.layers)))):
            for layer in layers:
                computed.append(self._layer(direction, layer, computed))
            if direction == "forward":
                computed.append(self._add(Task("head", "compute", self.head, needs=(computed[-1],))))

    def _add(self, task: Task) -> int:
        self.issued.append(task)
        return len(self.issued) - 1

    def _layer(self, direction: str, layer: int, computed: Sequence[int]) -> int:
        """Issue a layer's tasks, and return the number of the one that ends its computing."""
        # The weights wait for the layer before the last one: until then another layer's have their room.
        weights: tuple[int, ...] = (computed[-1 - AHEAD],) if len(computed) > AHEAD else ()
        if self.fetched:
            weights = (self._add(self._swapped("fetch", layer, self.fetched, weights)),)
        if self.zero == 3 and self.plan.on.gpus > 1:
            weights = (self._add(self._together("weights", layer, weights)),)
        before = weights + tuple(computed[-1:])
        seconds, exchanges = (self.forward, 1) if direction == "forward" else (self.backward, self.passes - 1)
        for _ in range(exchanges):
            part = Task(f"{direction} {layer}", "compute", seconds / exchanges / 2, needs=before)
            done = self._add(part)
            if self.exchanged:
                moved = Task(
                    f"exchange {layer}", "exchange", self.exchange_seconds, self.exchanged, self.group, (done,)
                )
                done = self._add(moved)
            done = self._add(Task(f"{direction} {layer}", "compute", seconds / exchanges / 2, needs=(done,)))
            before = (done,)
        if direction == "backward":
            self._gradients(layer, done)
        return done

    def _gradients(self, layer: int, computed: int) -> None:
        """Gradients are reduced as they come, and handed to the optimizer; new weights are handed on after the last."""
        reduced = computed
        if self.plan.on.gpus > 1 and (self.zero >= 2 or self.last):
            reduced = self._add(self._together("gradients", layer, (computed,)))
            if self.zero < 3 and self.last:  # the other half of the all-reduce, or the new weights gathered
                reduced = self._add(self._together("gradients", layer, (reduced,)))
        if self.away:
            self._add(self._swapped("gradients away", layer, self.away, (reduced,)))

    def _together(self, name: str, layer: int, needs: tuple[int, ...]) -> Task:
        return Task(f"{name} {layer}", "gather", self.gather_seconds, self.gathered, self.plan.on.gpus, needs)

    def _swapped(self, name: str, layer: int, moved: float, needs: tuple[int, ...]) -> Task:
        return Task(f"{name} {layer}", "swap", moved * self.swap_rate, moved, needs=needs)
