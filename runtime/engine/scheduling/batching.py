"""Policies for batching decodes and prompts: the default, and its predecessors, for comparison.

A policy composes three parts of the scheduler: ``decode`` (running sequences that lack only their last token),
``prefill`` (chunks of prompts that have begun) and ``admit`` (waiting sequences, as long as rows, blocks and budget
last; before ``prefill`` those that are urgent). ``extend`` adds new arrivals to a planned step.
"""

from __future__ import annotations

from typing import Protocol

from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.scheduling.step import Step


class Scheduler(Protocol):  # the parts of ``scheduler.Scheduler`` that a policy composes
    running: list[Sequence]

    @property
    def following(self) -> Sequence | None: ...

    def decode(self, step: Step) -> None: ...
    def prefill(self, step: Step) -> None: ...
    def admit_urgent(self, step: Step) -> None: ...
    def admit(self, step: Step, most: int | None = None) -> None: ...


class StallFree:
    """Decodes first, then prompts in chunks that fill the rest of the budget (Sarathi-Serve, Agrawal et al. 2024)."""

    cuts_prompts = True

    def fill(self, scheduler: Scheduler, step: Step) -> None:
        scheduler.decode(step)
        scheduler.admit_urgent(step)
        scheduler.prefill(step)
        scheduler.admit(step)

    def extend(self, scheduler: Scheduler, step: Step) -> None:
        scheduler.admit(step)


class Orca(StallFree):
    """Decodes and whole prompts in one step (Yu et al. 2022); a prompt beyond the budget has a step of its own."""

    cuts_prompts = False

    def fill(self, scheduler: Scheduler, step: Step) -> None:
        following = scheduler.following
        if following is not None and following.num_tokens > step.max_tokens:
            scheduler.admit(step, most=1)
        if not step.chunks:
            scheduler.decode(step)
            scheduler.admit(step)


class PrefillFirst(StallFree):
    """Whole prompts alone as long as any can be admitted, else decodes (vLLM's first scheduler, Kwon et al. 2023)."""

    cuts_prompts = False

    def fill(self, scheduler: Scheduler, step: Step) -> None:
        scheduler.admit(step)
        if not step.chunks:
            scheduler.decode(step)

    def extend(self, scheduler: Scheduler, step: Step) -> None:
        if all(chunk.is_first for chunk in step.chunks):
            scheduler.admit(step)


class Static(StallFree):
    """A batch is admitted when the previous one has ended."""

    cuts_prompts = False

    def fill(self, scheduler: Scheduler, step: Step) -> None:
        if scheduler.running:
            scheduler.decode(step)
        else:
            scheduler.admit(step)

    def extend(self, scheduler: Scheduler, step: Step) -> None:
        if all(chunk.is_first for chunk in step.chunks) and len(step.chunks) == len(scheduler.running):
            scheduler.admit(step)


BATCHING_STYLES: dict[str, type[StallFree]] = {
    "stall-free": StallFree,
    "orca": Orca,
    "prefill-first": PrefillFirst,
    "static": Static,
}
