"""The order in which sequences wait, run and keep their blocks: one number for each, the smallest first.

A policy orders a sequence when it enters the waiting queue, at first and after each preemption. The number depends on
the request and on the tokens sampled so far, so it is constant between two tokens, and the first sequence stays first
until it has made progress.

No policy starves a request: its number is constant while those of later arrivals grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from runtime.engine.config import SchedulingConfig
from runtime.engine.scheduling.sequence import Sequence

Order = tuple[float, int, int]


class Policy(Protocol):
    """``order``: seconds or 0.0, then the request's number and the choice's index, so that all orders differ."""

    def order(self, sequence: Sequence) -> Order: ...


class FirstComeFirstServed:
    """In the order of submission."""

    def order(self, sequence: Sequence) -> Order:
        return (0.0, sequence.request.number, sequence.index)


class Priority:
    """By priority; one unit of it is worth ``ageing_s`` seconds of waiting."""

    def __init__(self, ageing_s: float) -> None:
        self.ageing_s = ageing_s

    def order(self, sequence: Sequence) -> Order:
        request = sequence.request
        return (request.arrival_s + request.priority * self.ageing_s, request.number, sequence.index)


class Deadline:
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


def policy_of(config: SchedulingConfig, prefill_s: Callable[[int], float]) -> Policy:
    """The policy that the configuration names."""
    if config.scheduling_policy == "fcfs":
        return FirstComeFirstServed()
    if config.scheduling_policy == "priority":
        return Priority(config.ageing_s)
    return Deadline(config.ttft_target_s, config.tpot_target_s, prefill_s)
