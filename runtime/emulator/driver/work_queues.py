"""Work that has been queued and not yet run: in-order queues, dependencies between them, an order chosen by a seed;
and the nodes of graphs, with a capture under way.

Work does not run when it is queued, but when a caller waits for it (`finish`), polls (`progress`), or when a queue
grows long. Any order that the queues and their waits allow may result, which exposes programs that rely on a stricter
order. Streams' priorities are hints on hardware and have no effect here.
"""

from __future__ import annotations

import functools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cuda.bindings import driver as cu

from runtime.emulator.protocols import CapturedStream

MAX_QUEUED = 512
"""A queue with more works than this is run down to half of it."""

IDLE_S = 0.0002
"""Seconds between two polls of parked works."""

_WEIGHTS = (0.02, 1.0, 50.0)
"""Weights of a queue's turns during one `finish`: some lag, some run ahead."""


class Operation(Protocol):
    """The operation of a work."""

    @property
    def label(self) -> str:
        """Text for messages: "kernel rms_norm_bf16"."""

    def run(self, work: Work) -> None:
        """Runs it. An exception is a fault of the work's context."""


class MeetingTemplate:
    """A collective call that other processes must join."""

    __slots__ = ()

    def queued(self) -> Meeting:
        """The operation of one run, at the moment when it is queued."""
        raise NotImplementedError

    def run(self, work: Work) -> None:
        raise AssertionError("a meeting is queued by `queued`")


class Meeting:
    """One run of it. It parks until the others have come: `advance` takes the place of `run`."""

    __slots__ = ()

    @property
    def label(self) -> str:
        """Words for messages."""
        raise NotImplementedError

    def advance(self, work: Work) -> bool:
        """Makes progress; returns whether it is done."""
        raise NotImplementedError

    def run(self, work: Work) -> None:
        raise AssertionError("a meeting is done by `advance`")


class Work:
    """One operation at its place in a queue.

    Attributes:
        operation: its operation; None for a mark that other works wait for.
        queue: its queue; earlier works of the queue are done first.
        waits: other works that must be done first.
        is_done: it has run, or was dropped with its context.
        ended_s: when, by `time.perf_counter`.
        clock, epoch: its place among all streams, from `StreamOrder.stamp`; None and 0 where order is not checked.
        early, starts_next_early: of a kernel, see `StreamOrder.stamp`.
    """

    __slots__ = ("clock", "early", "ended_s", "epoch", "is_done", "operation", "queue", "starts_next_early", "waits")

    def __init__(self, operation: Operation | None, queue: Queue, waits: tuple[Work, ...]) -> None:
        self.operation, self.queue, self.waits = operation, queue, waits
        self.is_done = False
        self.ended_s = 0.0
        self.clock: Any = None
        self.epoch = 0
        self.early: Any = None
        self.starts_next_early = False


class Queue:
    """Works that run one after another: a stream's, or one branch of a graph's replay.

    Attributes:
        owner: the context; its works fail together.
        last: the work queued last; None before the first.
        slot, side_slots, clock, kernel, host_version: of `StreamOrder`.
    """

    __slots__ = ("clock", "host_version", "kernel", "last", "owner", "side_slots", "slot", "works")

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.works: deque[Work] = deque()
        self.last: Work | None = None
        self.slot = -1
        self.side_slots: list[int] = []
        self.clock: Any = None
        self.kernel: Work | None = None
        self.host_version = 0


class Scheduler:
    """All queues of one driver. Not thread-safe: the driver holds its lock.

    Args:
        seed: of the order; the same calls with the same seed give the same order.
        on_failure: called with the work and the exception that its operation raised.
        on_idle: called, again and again, while all that could run is parked (`Meeting`).
    """

    def __init__(
        self, seed: int, on_failure: Callable[[Work, Exception], None],
        on_idle: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._random = random.Random(seed)
        self._on_failure = on_failure
        self._on_idle = on_idle or functools.partial(time.sleep, IDLE_S)
        self._busy: dict[Queue, None] = {}  # queues with works, in the order in which they became so

    def submit(self, queue: Queue, operation: Operation | None, waits: Sequence[Work] = ()) -> Work:
        """Queues an operation after the queue's last work and after `waits`."""
        work = Work(operation, queue, tuple(other for other in waits if not other.is_done) if waits else ())
        works = queue.works
        if not works:
            self._busy[queue] = None
        works.append(work)
        queue.last = work
        if len(works) > MAX_QUEUED:
            self.finish((works[MAX_QUEUED // 2],), may_wait=False)
        return work

    def finish(self, works: Iterable[Work], *, may_wait: bool = True) -> None:
        """Runs until all of some works are done; others may have run by then or not. Waits for other processes where
        all is parked, or, unless it `may_wait`, returns."""
        pending = [work for work in works if not work.is_done]
        if not pending:
            return
        weights: dict[Queue, float] = {}
        parked: set[Queue] = set()
        while pending:
            if len(self._busy) == 1 and not parked:
                (queue,) = self._busy
            elif (chosen := self._choose(weights, parked)) is not None:
                queue = chosen
            elif not may_wait:
                return
            else:
                self._on_idle()
                parked.clear()
                while pending and pending[-1].is_done:  # by another thread, meanwhile
                    pending.pop()
                continue
            if self._run_first(queue):
                parked.clear()
            else:
                parked.add(queue)
            while pending and pending[-1].is_done:
                pending.pop()

    def finish_all(self, owner: Any = None) -> None:
        """Runs until no work of an owner, or none, is queued."""
        self.finish([queue.works[-1] for queue in self._busy if owner is None or queue.owner is owner])

    def progress(self) -> None:
        """Runs a few works, at least one where there is any."""
        parked: set[Queue] = set()
        for _ in range(self._random.choice((1, 1, 2, 5))):
            if not self._busy:
                return
            queue = self._choose({}, parked)
            if queue is None:
                return
            if not self._run_first(queue):
                parked.add(queue)

    def drop(self, owner: Any) -> None:
        """Forgets all works of an owner, as if they were done: its context has failed or is gone."""
        for queue in [queue for queue in self._busy if queue.owner is owner]:
            now = time.perf_counter()
            for work in queue.works:
                work.is_done, work.ended_s = True, now
            queue.works.clear()
            del self._busy[queue]

    def _choose(self, weights: dict[Queue, float], parked: set[Queue]) -> Queue | None:
        """A queue whose first work may run, or None if all are parked. Works wait for earlier ones only."""
        ready = [
            queue for queue in self._busy
            if queue not in parked
            and (not (waits := queue.works[0].waits) or all(other.is_done for other in waits))
        ]  # fmt: skip
        if not ready:
            return None
        if len(ready) == 1:
            return ready[0]
        for queue in ready:
            if queue not in weights:
                weights[queue] = self._random.choice(_WEIGHTS)
        return self._random.choices(ready, [weights[queue] for queue in ready])[0]

    def _run_first(self, queue: Queue) -> bool:
        """Whether it was done; it may be parked."""
        work = queue.works[0]
        if (operation := work.operation) is not None:
            try:
                if not isinstance(operation, Meeting):
                    operation.run(work)
                elif not operation.advance(work):
                    return False
            except Exception as failure:  # any exception goes to the caller, and the queue goes on
                self._on_failure(work, failure)
        if not work.is_done:  # else its context was dropped
            work.is_done, work.ended_s = True, time.perf_counter()
            work.waits = ()
            queue.works.popleft()
            if not queue.works:
                del self._busy[queue]
        return True


MODE = cu.CUstreamCaptureMode


class NodeOperation(Operation, Protocol):
    """An operation that can be captured."""

    @property
    def node_type(self) -> Any:
        """The CUgraphNodeType of its node."""


@dataclass(eq=False, slots=True)
class Node:
    """One operation of a graph.

    Attributes:
        operation: its work.
        dependencies: the nodes that it comes after.
        programmatic: those of them that it may overlap with (programmatic dependent launch).
    """

    handle: int
    graph: Graph
    operation: NodeOperation
    dependencies: list[Node]
    programmatic: set[Node] = field(default_factory=set)

    @property
    def type(self) -> Any:
        return self.operation.node_type


@dataclass(eq=False, slots=True)
class Graph:
    """Nodes in the order in which they were added, which is one of those that their edges allow."""

    handle: int
    nodes: list[Node] = field(default_factory=list)
    is_owned_by_capture: bool = False

    def ancestors(self, nodes: list[Node]) -> set[Node]:
        """The nodes themselves and all that they come after."""
        found: set[Node] = set()
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node not in found:
                found.add(node)
                pending += node.dependencies
        return found


@dataclass(eq=False, slots=True)
class Capture:
    """A capture under way.

    Attributes:
        streams: those that take part; the one that it began in first.
        thread: the host thread that began it.
        broken_by: the reason why it is invalid; None while it is valid.
    """

    graph: Graph
    mode: Any
    thread: int
    streams: list[CapturedStream]
    broken_by: str | None = None


@dataclass(eq=False, slots=True)
class Step:
    """A node at its place in a replay.

    Attributes:
        branch: index of its in-order queue.
        waits: indices of earlier steps in other branches.
    """

    node: Node
    operation: NodeOperation
    branch: int
    waits: tuple[int, ...]
    is_programmatic: bool


@dataclass(eq=False, slots=True)
class GraphExec:
    """An executable graph: a copy of the operations, and branches that cover its nodes.

    Attributes:
        last: the work that ends its latest launch; the next comes after it.
    """

    handle: int
    source: Graph
    steps: list[Step]
    num_branches: int
    last: Work | None = None


def plan_replay(graph: Graph) -> tuple[list[Step], int]:
    """Covers the nodes with branches: a node goes on in the branch of one of its dependencies where that is its end."""
    tails: list[Node] = []  # of each branch
    place: dict[Node, tuple[int, int]] = {}  # node → (step, branch)
    steps = []
    for index, node in enumerate(graph.nodes):
        branch = next((place[other][1] for other in node.dependencies if tails[place[other][1]] is other), len(tails))
        if branch == len(tails):
            tails.append(node)
        before = tails[branch]
        tails[branch] = node
        place[node] = index, branch
        waits = tuple(place[other][0] for other in node.dependencies if other is not before)
        steps.append(Step(node, node.operation, branch, waits, before in node.programmatic))
    return steps, len(tails)
