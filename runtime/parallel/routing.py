"""Which of several engines gets a request: in turn, by load, or by the prefixes that the engines' blocks hold.

The unit of load is the token. What an engine has to do is the tokens of prompts that it has still to compute, and for
each open choice as many as an answer has, by the mean of those that have ended. "prefix-aware" takes the engine with
the least sum of that and of the prompt's tokens that its blocks do not hold, these counted twice: they take time, and
room in its cache from others.

A prefix that many requests share must not keep other engines idle. So each engine has an account of what its prefixes
have cost: whenever a request goes there for its prefix although another engine has less than half as many open ones,
the difference is added, in tokens; where it has more, taken off. As soon as the account exceeds what a copy of the
prefix costs, the request goes to that other engine, which then has the prefix, too. (The argument is that of renting or
buying skis: at most twice the cost of having known. A copy costs computing the prefix again, and the room that it takes
from others as long as it is used.)

This module knows no clock, no threads and no processes: the simulator runs it, too. Its caller holds a lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from runtime.engine.config import RoutingPolicy
from runtime.engine.messages import RoutingStats
from runtime.engine.scheduling.block_events import BlockChanges
from runtime.engine.scheduling.sequence import Request
from runtime.parallel.prefix_index import MOST_DIGESTS, PrefixIndex, PromptDigests, found_tokens

FIRST_OUTPUT_TOKENS = 128.0
"""What an answer is taken to have before one has ended."""

FORGETTING = 1 / 64
"""The weight of the latest request in the means."""

MISS_WEIGHT = 2
"""What a token counts that an engine must compute although another one has it."""

MOVE_WEIGHT = 8
"""What it counts against an engine's account: a copy of a prefix takes room for long, from prefixes that are then
computed again in turn. Simulated and measured, 2 and 4 lose throughput on shared prefixes, and win none on skewed."""


@dataclass(slots=True, eq=False)
class Route:
    """Where a request went, and what it counts there.

    engine            its number
    num_cached        tokens of its prompt that the engine was taken to have
    num_prompt        what is left of them, until its first token is there
    num_answer        what an open choice counts
    num_choices, num_open  of the request, and those that have not ended
    num_tokens        that are computed for it in all, as far as is known
    expected          digests of its prompt's pages that the engine will have as soon as it has computed them
    """

    engine: int
    num_cached: int
    num_prompt: int
    num_answer: int
    num_choices: int
    num_open: int
    num_tokens: int
    expected: list[int] = field(default_factory=list)
    num_output_tokens: int = 0


class Router:
    """The engines' loads and prefixes, and the choice among them. Not thread-safe."""

    def __init__(
        self, policy: RoutingPolicy, num_engines: int, digests: PromptDigests, most_digests: int = MOST_DIGESTS
    ) -> None:
        self.policy = policy
        self.digests = digests
        self.index = PrefixIndex(most_digests)
        self.expected = PrefixIndex(most_digests)
        """What engines will have when they have computed the prompts that they were sent."""
        self.num_routed = [0] * num_engines
        self.num_found_tokens = 0
        self.num_moved = 0
        """Requests that went elsewhere than where their prefix was, since too many had gone there."""
        self.mean_output_tokens = FIRST_OUTPUT_TOKENS
        self.mean_request_tokens = FIRST_OUTPUT_TOKENS
        self._num_prompt = np.zeros(num_engines, np.int64)
        self._num_answer = np.zeros(num_engines, np.int64)
        self._num_open = np.zeros(num_engines, np.int64)  # choices
        self._account = np.zeros(num_engines, np.float64)  # what prefixes have cost
        self._turn = 0

    def stats(self) -> RoutingStats:
        """Its numbers, on any thread."""
        return RoutingStats(
            policy=self.policy,
            num_requests=list(self.num_routed),
            num_found_tokens=self.num_found_tokens,
            num_moved=self.num_moved,
            num_digests=len(self.index),
            num_untaken=self.index.num_untaken,
        )

    def loads(self) -> list[int]:
        """Tokens that each engine has to do."""
        loads: list[int] = (self._num_prompt + self._num_answer).tolist()
        return loads

    def digests_of(self, request: Request) -> list[list[int]]:
        """The digests that ``choose`` wants, by any thread; none where the policy reads none."""
        return self.digests.of(request) if self.policy == "prefix-aware" else []

    def choose(self, request: Request, digests: Sequence[Sequence[int]], is_ready: Sequence[bool]) -> Route:
        """Send a request to one of the engines that are ready, of which there is one: from now on it counts there."""
        ready = np.flatnonzero(is_ready)
        ready = np.roll(ready, -int(np.searchsorted(ready, self._turn)))  # the one whose turn it is comes first
        cached = np.zeros(len(is_ready), np.int64)
        if self.policy == "round-robin":
            engine = int(ready[0])
        else:
            loads = self._num_prompt + self._num_answer
            if self.policy == "prefix-aware":
                how = self.digests
                cached = found_tokens(digests, how.kinds, how.block_size, (self.index, self.expected), len(is_ready))
            engine = int(ready[np.argmin(loads[ready] - MISS_WEIGHT * cached[ready])])
            engine = self._moved(engine, ready, cached)
        self._turn = (engine + 1) % len(is_ready)
        num_choices = request.params.n
        num_answer = round(min(self.mean_output_tokens, request.max_tokens))
        num_cached = int(cached[engine])
        num_new = request.num_prompt_tokens - num_cached
        route = Route(engine, num_cached, num_new, num_answer, num_choices, num_choices, num_new)
        if digests:
            first = num_cached // self.digests.block_size
            route.expected = list(chain.from_iterable(each[first:] for each in digests))
            self.expected.add(engine, route.expected)
        self.num_routed[engine] += 1
        self.num_found_tokens += num_cached
        self._num_prompt[engine] += route.num_prompt
        self._num_answer[engine] += num_answer * num_choices
        self._num_open[engine] += num_choices
        return route

    def _moved(self, engine: int, ready: NDArray[np.intp], cached: NDArray[np.int64]) -> int:
        """The engine for a request that would go to this one: another where its prefix has cost too much."""
        num_open = self._num_open
        idlest = int(ready[np.argmin(num_open[ready])])
        again = MOVE_WEIGHT * int(cached[engine] - cached[idlest])
        if again <= 0:
            return engine
        more = int(num_open[engine]) - 2 * int(num_open[idlest]) - 1
        account = max(0.0, self._account[engine] + more * self.mean_request_tokens)
        if account < again:
            self._account[engine] = account
            return engine
        self._account[engine] = account - again
        self.num_moved += 1
        return idlest

    def drawn(self, route: Route, num_tokens: int) -> None:
        """A request has got so many tokens; with the first its prompt is computed."""
        route.num_output_tokens += num_tokens
        self._leave_prompt(route)

    def ended(self, route: Route, *, has_failed: bool = False) -> None:
        """One of its choices has ended. How many tokens all of them had counts for the mean, unless it failed."""
        route.num_open -= 1
        self._num_open[route.engine] -= 1
        self._num_answer[route.engine] -= route.num_answer
        if route.num_open == 0:
            self._leave_prompt(route)
            if not has_failed:
                mean, total = route.num_output_tokens / route.num_choices, route.num_tokens + route.num_output_tokens
                self.mean_output_tokens += FORGETTING * (mean - self.mean_output_tokens)
                self.mean_request_tokens += FORGETTING * (total - self.mean_request_tokens)

    def withdrawn(self, route: Route) -> None:
        """The engine has not taken the request."""
        self.num_routed[route.engine] -= 1
        self.num_found_tokens -= route.num_cached
        self._num_open[route.engine] -= route.num_open
        self._num_answer[route.engine] -= route.num_answer * route.num_open
        self._leave_prompt(route)

    def change(self, engine: int, changes: BlockChanges | None) -> None:
        """What an engine tells of its blocks; None: it has none any more."""
        if changes is None:
            self.index.clear(engine)
            self.expected.clear(engine)
        else:
            self.index.change(engine, changes)

    def _leave_prompt(self, route: Route) -> None:
        self._num_prompt[route.engine] -= route.num_prompt
        route.num_prompt = 0
        if route.expected:
            self.expected.discard(route.engine, route.expected)
            route.expected = []
