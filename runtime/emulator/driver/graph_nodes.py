"""Graphs as data: nodes with operations and edges, a capture under way, and the executable copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from cuda.bindings import driver as cu

from runtime.emulator.driver.work_queues import Operation, Work
from runtime.emulator.protocols import CapturedStream

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
