"""The order in which sequences wait, run and keep their blocks: one number for each, the smallest first.

A policy orders a sequence when it enters the waiting queue, at first and after each preemption. The number depends on
the request and on the tokens sampled so far, so it is constant between two tokens, and the first sequence stays first
until it has made progress. ``FairShares`` starts other sequences than the first in order.

No policy starves a request: its number, or its tenant's counter, is constant while those of others grow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping

from runtime.engine.config import SchedulingConfig
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.scheduling.step import Chunk, Step

Order = tuple[float, int, int]


class Policy(ABC):
    """The scheduler asks it for the order of sequences, and tells it what becomes of them."""

    @abstractmethod
    def order(self, sequence: Sequence) -> Order:
        """Seconds or 0.0, then the request's number and the choice's index, so that all orders differ."""

    def first(self, waiting: list[Sequence]) -> Sequence:
        """The sequence that starts next, of at least one that waits, in order."""
        return waiting[0]

    def is_urgent(self, waiting: Sequence, running: list[Sequence]) -> bool:
        """Whether the sequence that starts next goes before the rest of prompts that have begun."""
        return False

    def closes(self, step: Step, sequence: Sequence) -> bool:
        """Whether the step takes no tokens of this prompt, since it ends one that would wait for them."""
        return False

    def outranks(self, waiting: Sequence, victim: Sequence, running: list[Sequence]) -> bool:
        """Whether a running sequence is preempted so that the one that starts next can."""
        return False

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """The sequences that may be preempted, of at least two that run, in order: the first, which is kept, then at
        least one other."""
        return running

    def joins(self, sequence: Sequence) -> None:  # noqa: B027 - most policies need not know
        """Called when it begins to wait."""

    def leaves(self, sequence: Sequence) -> None:  # noqa: B027
        """Called when it no longer waits."""

    def starts(self, sequence: Sequence) -> None:  # noqa: B027
        """Called when it has its blocks for the first time, after ``leaves``."""

    def computed(  # noqa: B027
        self, chunks: list[Chunk], accepted: Mapping[Sequence, int] | None
    ) -> None:
        """Called when a step has run; ``accepted`` as in ``Scheduler.commit``."""


class FirstComeFirstServed(Policy):
    """In the order of submission."""

    def order(self, sequence: Sequence) -> Order:
        return (0.0, sequence.request.number, sequence.index)


class Priority(Policy):
    """By priority; one unit of it is worth ``ageing_s`` seconds of waiting."""

    def __init__(self, ageing_s: float) -> None:
        self.ageing_s = ageing_s

    def order(self, sequence: Sequence) -> Order:
        request = sequence.request
        return (request.arrival_s + request.priority * self.ageing_s, request.number, sequence.index)


class Deadline(Policy):
    """Least slack first: the time at which the next token is due, minus the time to compute up to it.

    The first token is due ``ttft_target_s`` after the arrival, each later one ``tpot_target_s`` after the previous one;
    the request may have its own. ``prefill_s`` estimates the seconds for computing a number of tokens.
    """

    def __init__(self, ttft_target_s: float, tpot_target_s: float, prefill_s: Callable[[int], float]) -> None:
        self.ttft_target_s = ttft_target_s
        self.tpot_target_s = tpot_target_s
        self._prefill_s = prefill_s

    def order(self, sequence: Sequence) -> Order:
        request = sequence.request
        ttft, tpot = request.ttft_target_s, request.tpot_target_s
        due = request.arrival_s + (self.ttft_target_s if ttft is None else ttft)
        due += sequence.num_output_tokens * (self.tpot_target_s if tpot is None else tpot)
        return (due - self._prefill_s(sequence.num_tokens), request.number, sequence.index)


MOST_TENANTS = 4096
"""Tenants whose counters are kept. Beyond it idle ones are forgotten: at first those who would be lifted anyway."""

_URGENT = -1.0
"""The first number in the order of a running sequence that goes before others."""


class _Tenant:
    """A tenant's counter, its waiting sequences in order, and the number of the start that was its latest."""

    __slots__ = ("counter", "latest_start", "waiting")

    def __init__(self) -> None:
        self.counter = 0.0
        self.latest_start = -1
        self.waiting: list[Sequence] = []


class FairShares(FirstComeFirstServed):
    """Fair shares of tenants by virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language Models",
    OSDI 2024).

    A tenant's counter grows by the cost of what is computed for it, divided by its weight; of those who wait, the
    tenant with the least counter starts its oldest request. A tenant that begins to wait again is lifted to the least
    counter of those who wait (or to that of the tenant who waited last), less ``burst``: idle time is no more credit
    than that.

    A tenant that has most of this credit takes less than its share. Its prompts go before the rest of others' that have
    begun, which may be long; none of these lengthens the step that ends such a prompt; and where rows or blocks are
    missing, one that runs is preempted, of a tenant that has more than its share of those. Any victim is of a tenant of
    which the most run.

    A prompt is charged when it starts, its computed tokens by 1 each, tokens found in the prefix cache by
    ``cached_cost``; each output token by ``output_cost`` when it is sampled, so that answers' lengths need not be
    known. Tokens that are computed again after a preemption are not charged.
    """

    def __init__(self, output_cost: float, cached_cost: float, burst: float = 0.0) -> None:
        self.output_cost = output_cost
        self.cached_cost = cached_cost
        self.burst = burst
        self._tenants: dict[str | None, _Tenant] = {}
        self._waiting: dict[str | None, _Tenant] = {}  # those with waiting sequences
        self._latest = _Tenant()  # the one that left the queue last
        self._num_starts = 0

    def first(self, waiting: list[Sequence]) -> Sequence:
        return min(self._waiting.values(), key=_place).waiting[0]

    def is_urgent(self, waiting: Sequence, running: list[Sequence]) -> bool:
        return self._is_light(waiting) and any(
            each.num_tokens + each.num_pending - each.num_computed > 1 and each.order[0] == 0.0 for each in running
        )

    def closes(self, step: Step, sequence: Sequence) -> bool:
        if sequence.order[0] == _URGENT or (sequence.row is None and self._is_light(sequence)):
            return False
        return any(
            chunk.num_tokens > 1 and chunk.is_last and chunk.sequence.order[0] == _URGENT for chunk in step.chunks
        )

    def outranks(self, waiting: Sequence, victim: Sequence, running: list[Sequence]) -> bool:
        if waiting.num_cached_tokens is not None or not self._is_light(waiting):
            return False  # if it ran before, two that preempt each other would never end
        counts = Counter(each.request.tenant for each in running)
        weights = {each.request.tenant: each.request.tenant_weight for each in (*running, waiting)}
        share = len(running) * weights[victim.request.tenant] / sum(weights.values())
        return counts[victim.request.tenant] - 1 >= share

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        held: dict[str | None, float] = {}
        for each in running:
            held[each.request.tenant] = held.get(each.request.tenant, 0.0) + 1 / each.request.tenant_weight
        most = max(held[each.request.tenant] for each in running[1:])
        return [running[0], *(each for each in running[1:] if held[each.request.tenant] == most)]

    def joins(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence)
        if not tenant.waiting:
            tenant.counter = max(tenant.counter, self._level(tenant) - self.burst)
            self._waiting[sequence.request.tenant] = tenant
        insort(tenant.waiting, sequence, key=_order)

    def leaves(self, sequence: Sequence) -> None:
        tenant = self._waiting[sequence.request.tenant]
        del tenant.waiting[bisect_left(tenant.waiting, sequence.order, key=_order)]
        if not tenant.waiting:
            del self._waiting[sequence.request.tenant]
            self._latest = tenant

    def starts(self, sequence: Sequence) -> None:
        tenant, num_cached = self._tenant(sequence), sequence.num_cached_tokens or 0
        self._num_starts += 1
        tenant.latest_start = self._num_starts
        if self._is_light(sequence):
            sequence.order = (_URGENT, *sequence.order[1:])
        cost = sequence.num_tokens - num_cached + self.cached_cost * num_cached
        tenant.counter += cost / sequence.request.tenant_weight

    def computed(self, chunks: list[Chunk], accepted: Mapping[Sequence, int] | None) -> None:
        for chunk in chunks:
            if chunk.is_last:
                sequence = chunk.sequence
                count = accepted[sequence] if chunk.draft_ids and accepted is not None else 1
                self._tenant(sequence).counter += count * self.output_cost / sequence.request.tenant_weight

    def _level(self, tenant: _Tenant) -> float:
        """The least counter of other tenants who wait, or that of the one who waited last."""
        others = (each.counter for each in self._waiting.values() if each is not tenant)
        return min(others, default=self._latest.counter)

    def _is_light(self, sequence: Sequence) -> bool:
        """Whether its tenant has had less than its share: it has most of its credit."""
        tenant = self._tenant(sequence)
        return tenant.counter < self._level(tenant) - self.burst / 2

    def _tenant(self, sequence: Sequence) -> _Tenant:
        tenant = self._tenants.get(sequence.request.tenant)
        if tenant is None:
            if len(self._tenants) >= MOST_TENANTS:
                self._forget_idle()
            tenant = self._tenants[sequence.request.tenant] = _Tenant()
        return tenant

    def _forget_idle(self) -> None:
        """Forget half of the tenants, if so many do not wait, those with the least counters."""
        idle = sorted(self._tenants.keys() - self._waiting.keys(), key=lambda each: self._tenants[each].counter)
        for key in idle[: MOST_TENANTS // 2]:
            del self._tenants[key]


def _place(tenant: _Tenant) -> tuple[float, int, Order]:
    """A tenant's place among those who wait; of equal counters, the one that started longest ago is first."""
    return tenant.counter, tenant.latest_start, tenant.waiting[0].order


def _order(sequence: Sequence) -> Order:
    return sequence.order


BURST_STEPS = 8
"""An idle tenant's credit: the prompt tokens of so many steps."""


def policy_of(config: SchedulingConfig, max_num_batched_tokens: int, prefill_s: Callable[[int], float]) -> Policy:
    """The policy that the configuration names, for steps of at most so many tokens; ``prefill_s``: see ``Deadline``."""
    if config.scheduling_policy == "fcfs":
        return FirstComeFirstServed()
    if config.scheduling_policy == "priority":
        return Priority(config.ageing_s)
    if config.scheduling_policy == "fair":
        burst = float(BURST_STEPS * max_num_batched_tokens)
        return FairShares(config.output_token_cost, config.cached_token_cost, burst)
    return Deadline(config.ttft_target_s, config.tpot_target_s, prefill_s)
