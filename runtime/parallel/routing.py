"""Routes requests to one of several engines: in turn, by load, or by the prefixes in the engines' blocks.

The unit of load is the token. An engine's load is the number of prompt tokens that it has still to compute, and for
each open choice the mean length of past answers. "prefix-aware" takes the engine with the least sum of that and of the
prompt's tokens that its blocks do not hold, these counted twice: they take time, and room in its cache from others.

A prefix that many requests share must not keep other engines idle. So each engine has an account of the cost of its
prefixes: whenever a request goes there for its prefix although another engine has less than half as many open ones,
the difference is added, in tokens; if it has more, it is subtracted. As soon as the account exceeds the cost of a copy
of the prefix, the request goes to that other engine, which then has the prefix, too. (This is the ski-rental argument:
at most twice the cost of the optimum. A copy costs computing the prefix again, and the room that it takes
from others as long as it is used.)

With roles (``roles``) the engine of a prompt has the least of their costs instead, and `hand_over` names the one that
goes on after the first token.

The module is free of clocks, threads and processes, so that the simulator can run it. Its caller holds a lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from runtime.engine.config import RoutingPolicy
from runtime.engine.messages import RoutingStats
from runtime.engine.scheduling.block_events import BlockChanges
from runtime.engine.scheduling.sequence import Request
from runtime.parallel.prefix_index import MOST_DIGESTS, PrefixIndex, PromptDigests, found_tokens
from runtime.parallel.roles import EngineLoad, OpenAnswers, Roles

FIRST_OUTPUT_TOKENS = 128.0
"""The assumed length of an answer before one has ended."""

FORGETTING = 1 / 64
"""The weight of the latest request in the means."""

MISS_WEIGHT = 2
"""The weight of a token that an engine must compute although another one has it."""

MOVE_WEIGHT = 8
"""Its weight against an engine's account: a copy of a prefix takes room for long, from prefixes that are then
recomputed in turn. Simulated and measured, 2 and 4 lose throughput on shared prefixes, and win none on skewed."""


@dataclass(slots=True, eq=False)
class Route:
    """A routed request, and its part of its engine's load.

    engine            its number
    num_prompt_tokens of the request
    num_cached        tokens of its prompt that the engine was expected to have
    num_prompt        the remaining ones, until its first token is there
    num_answer        the load of an open choice
    num_choices, num_open  of the request, and those that have not ended
    num_tokens        computed for it in all, as far as is known
    num_decodes       its choices that count as decodes of its engine: none before its first token
    promised          the engine that will go on with it, and the decodes that count as its already; or None
    expected          digests of its prompt's pages that the engine will have once it has computed them
    """

    engine: int
    num_prompt_tokens: int
    num_cached: int
    num_prompt: int
    num_answer: int
    num_choices: int
    num_open: int
    num_tokens: int
    num_decodes: int = 0
    promised: tuple[int, int] | None = None
    expected: list[int] = field(default_factory=list)
    num_output_tokens: int = 0


class Router:
    """The engines' loads and prefixes, and the choice among them. Not thread-safe."""

    def __init__(
        self,
        policy: RoutingPolicy,
        num_engines: int,
        digests: PromptDigests,
        most_digests: int = MOST_DIGESTS,
        roles: Roles | None = None,
    ) -> None:
        self.policy = policy
        self.roles = roles
        self.digests = digests
        self.index = PrefixIndex(most_digests)
        self.expected = PrefixIndex(most_digests)
        """Prefixes that engines will have when they have computed the prompts sent to them."""
        self.num_routed = [0] * num_engines
        self.num_found_tokens = 0
        self.num_moved = 0
        """Requests sent elsewhere than to the engine with their prefix, which was overloaded."""
        self.num_continued = [0] * num_engines
        self.num_recomputed = 0
        self.mean_output_tokens = FIRST_OUTPUT_TOKENS
        self.mean_request_tokens = FIRST_OUTPUT_TOKENS
        self.num_prompt = [0] * num_engines
        self._num_answer = [0] * num_engines
        self._num_open = [0] * num_engines  # choices
        self._num_decodes = [0] * num_engines  # those with a first token
        self._num_context = [0] * num_engines  # tokens of their prompts
        self._num_begun = self._num_begun_tokens = 0  # requests with a first token, and their answers' tokens
        self._account = [0.0] * num_engines  # the cost of prefixes
        self._turn = 0

    def stats(self) -> RoutingStats:
        """Its counters. Thread-safe."""
        return RoutingStats(
            policy=self.policy,
            num_requests=list(self.num_routed),
            num_found_tokens=self.num_found_tokens,
            num_moved=self.num_moved,
            num_digests=len(self.index),
            num_untaken=self.index.num_untaken,
            num_continued=list(self.num_continued),
            num_recomputed=self.num_recomputed,
        )

    def loads(self) -> list[int]:
        """The load of each engine in tokens."""
        return [prompt + answer for prompt, answer in zip(self.num_prompt, self._num_answer)]

    def engine_loads(self, is_ready: Sequence[bool]) -> list[EngineLoad]:
        """The loads for roles."""
        columns = (self.num_prompt, self._num_decodes, self._num_context, is_ready)
        return [EngineLoad(*each) for each in zip(*columns, strict=True)]

    def digests_of(self, request: Request) -> list[list[int]]:
        """The digests for ``choose``; empty if the policy uses none. Thread-safe."""
        return self.digests.of(request) if self.policy == "prefix-aware" else []

    def choose(self, request: Request, digests: Sequence[Sequence[int]], is_ready: Sequence[bool]) -> Route:
        """Route a request to one of the ready engines, at least one, and add it to that engine's load."""
        count, turn = len(is_ready), self._turn
        ready = [engine % count for engine in range(turn, turn + count) if is_ready[engine % count]]
        cached: list[int] = [0] * count
        if self.policy == "round-robin" and self.roles is None:
            engine = ready[0]
        else:
            if self.policy == "prefix-aware" and digests:
                how = self.digests
                cached = found_tokens(digests, how.kinds, how.block_size, (self.index, self.expected), count).tolist()
            if self.roles is not None:
                missing = [request.num_prompt_tokens - each for each in cached]
                costs = self.roles.prompt_costs(self.engine_loads(is_ready), missing)
                engine = min(ready, key=costs.__getitem__)
            else:
                loads = self.loads()
                engine = min(ready, key=lambda each: loads[each] - MISS_WEIGHT * cached[each])
                engine = self._moved(engine, ready, cached)
        self._turn = (engine + 1) % count
        num_choices = request.params.n
        num_answer = round(min(self.mean_output_tokens, request.max_tokens))
        num_cached = cached[engine]
        num_new = request.num_prompt_tokens - num_cached
        route = Route(
            engine, request.num_prompt_tokens, num_cached, num_new, num_answer, num_choices, num_choices, num_new
        )
        if digests:
            first = num_cached // self.digests.block_size
            route.expected = list(chain.from_iterable(each[first:] for each in digests))
            self.expected.add(engine, route.expected)
        self.num_routed[engine] += 1
        self.num_found_tokens += num_cached
        self.num_prompt[engine] += route.num_prompt
        self._num_answer[engine] += num_answer * num_choices
        self._num_open[engine] += num_choices
        return route

    def _moved(self, engine: int, ready: Sequence[int], cached: Sequence[int]) -> int:
        """The engine for a request that would go to this one: another if the prefixes' account here is exhausted."""
        num_open = self._num_open
        if not cached[engine]:
            return engine
        idlest = min(ready, key=num_open.__getitem__)
        again = MOVE_WEIGHT * (cached[engine] - cached[idlest])
        if again <= 0:
            return engine
        more = num_open[engine] - 2 * num_open[idlest] - 1
        account = max(0.0, self._account[engine] + more * self.mean_request_tokens)
        if account < again:
            self._account[engine] = account
            return engine
        self._account[engine] = account - again
        self.num_moved += 1
        return idlest

    def drawn(self, route: Route, num_tokens: int) -> None:
        """Record so many new tokens of a request; with the first its prompt is computed."""
        if not route.num_output_tokens:
            self._num_begun += 1
        route.num_output_tokens += num_tokens
        self._num_begun_tokens += num_tokens
        self._leave_prompt(route)
        if not route.num_decodes:
            self._count_decodes(route, route.num_open)

    def progressed(self, num_tokens: int) -> None:
        """Record so many more tokens of open requests with a first token, which are told apart at their end."""
        self._num_begun_tokens += num_tokens

    def hand_over(self, route: Route, is_ready: Sequence[bool]) -> int:
        """The engine that goes on with a request whose first token is drawn, by the roles; its load moves there."""
        assert self.roles is not None, "the engines have no roles"
        assert route.num_decodes, "the request has no first token yet"
        self.take_back(route)
        engine = self.roles.decode_engine(self.engine_loads(is_ready), route.engine)
        self.go_on(route, engine)
        return engine

    def go_on(self, route: Route, engine: int) -> None:
        """This engine continues a request; its load moves there."""
        if engine != route.engine:
            self.num_continued[engine] += 1
            self.move(route, engine)

    def promise(self, route: Route, engine: int) -> None:
        """This engine will go on with a request: its answers count as decodes there, lest all go to one engine."""
        self.take_back(route)
        route.promised = engine, route.num_open
        self._add_decodes(route, engine, route.num_open)

    def take_back(self, route: Route) -> None:
        """Undo `promise`."""
        if route.promised is not None:
            (engine, count), route.promised = route.promised, None
            self._add_decodes(route, engine, -count)

    def _add_decodes(self, route: Route, engine: int, count: int) -> None:
        self._num_decodes[engine] += count
        self._num_context[engine] += count * route.num_prompt_tokens

    def move(self, route: Route, engine: int) -> None:
        """Move a request's load to another engine."""
        self.take_back(route)
        before, num_decodes = route.engine, route.num_decodes
        self._count_decodes(route, -num_decodes)
        for engines, count in (
            (self._num_open, route.num_open),
            (self._num_answer, route.num_answer * route.num_open),
            (self.num_prompt, route.num_prompt),
        ):
            engines[before] -= count
            engines[engine] += count
        if route.expected:
            self.expected.discard(before, route.expected)
            self.expected.add(engine, route.expected)
        route.engine = engine
        self._count_decodes(route, num_decodes)

    def ended(self, route: Route, *, has_failed: bool = False) -> None:
        """Record that one of its choices has ended. The tokens of all count for the mean, unless it failed."""
        route.num_open -= 1
        if route.num_decodes:
            self._count_decodes(route, -1)
        self._num_open[route.engine] -= 1
        self._num_answer[route.engine] -= route.num_answer
        if route.num_open == 0:
            self.take_back(route)
            self._leave_prompt(route)
            self._num_begun -= route.num_output_tokens > 0
            self._num_begun_tokens -= route.num_output_tokens
            if not has_failed:
                if self.roles is not None:
                    others = OpenAnswers(self._num_begun, self._num_begun_tokens)
                    self.roles.ended(route.num_prompt_tokens, route.num_tokens, route.num_output_tokens, others)
                mean, total = route.num_output_tokens / route.num_choices, route.num_tokens + route.num_output_tokens
                self.mean_output_tokens += FORGETTING * (mean - self.mean_output_tokens)
                self.mean_request_tokens += FORGETTING * (total - self.mean_request_tokens)

    def withdrawn(self, route: Route) -> None:
        """Record that the engine has refused the request."""
        self.num_routed[route.engine] -= 1
        self.num_found_tokens -= route.num_cached
        self._num_open[route.engine] -= route.num_open
        self._num_answer[route.engine] -= route.num_answer * route.num_open
        self._count_decodes(route, -route.num_decodes)
        self.take_back(route)
        self._leave_prompt(route)

    def change(self, engine: int, changes: BlockChanges | None) -> None:
        """Apply an engine's report of its blocks; None means that it has none any more."""
        if changes is None:
            self.index.clear(engine)
            self.expected.clear(engine)
        else:
            self.index.change(engine, changes)

    def _count_decodes(self, route: Route, count: int) -> None:
        route.num_decodes += count
        self._add_decodes(route, route.engine, count)

    def _leave_prompt(self, route: Route) -> None:
        self.num_prompt[route.engine] -= route.num_prompt
        route.num_prompt = 0
        if route.expected:
            self.expected.discard(route.engine, route.expected)
            route.expected = []
