"""Times of steps are learned from what engines report, with drafts too, and each engine is told its limits."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.engine.messages import ChunkView, StepView
from runtime.engine.scheduling.step_limit import StepLimit
from runtime.engine.scheduling.step_model import StepFeatures
from runtime.parallel.pacing import Pacer
from runtime.parallel.roles import AutoRoles, OpenAnswers


def step(*chunks: tuple[int, int, int]) -> StepView:
    """Of 1 ms and 0.1 ms a token, with chunks of (start, tokens, prompt)."""
    views = [ChunkView("x", 0, start, count, prompt, 0.0) for start, count, prompt in chunks]
    return StepView(
        step=0, start_s=0.0, duration_s=1e-3 + 1e-4 * sum(each.count for each in views), chunks=views, num_running=1,
        num_waiting=0, num_blocks=9, num_free_blocks=9, num_cached_blocks=0, preempted=[],
    )  # fmt: skip


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_engines_get_limits_once_steps_of_both_kinds_were_seen(num_drafts: int) -> None:
    roles = AutoRoles(2, None, 0.5, 0.05, max_chunk=512, rows=8)
    pacer = Pacer(roles, threading.Lock())
    told: list[StepLimit] = []
    clients: Any = [SimpleNamespace(limit_steps=told.append)] * 2
    info: Any = SimpleNamespace(images=None, max_num_batched_tokens=512, max_num_seqs=8)
    for number in range(64):
        decodes = [(100 + number, 1 + num_drafts, 50)] * (1 + number % 8)
        assert not pacer.see(step(*decodes))
    assert told == []
    seen = [pacer.see(step((0, 8 * number, 500), (100, 1 + num_drafts, 50))) for number in range(1, 17)]
    assert seen == [False] * 15 + [True]
    assert not pacer.see(step((100, 1 + num_drafts, 50)))  # one renewal at a time
    pacer.renew(clients, info)
    assert pacer.steps is not None
    assert pacer.steps.seconds(StepFeatures(40, 2, 780.0, 101.0)) == pytest.approx(5e-3, rel=0.05)
    assert [each.max_tokens for each in told] == [max(8, budget) for budget in roles.budgets]
    assert {each.seconds for each in told} == {roles.limit_s} != {0.0}
    assert {each.most_saved_s for each in told} == {roles.most_saved_s}
    for _ in range(8):
        assert not pacer.see(step((100, 1 + num_drafts, 50)))
        roles.ended(500, 500, 50, OpenAnswers(0, 0))
    assert pacer.see(step((100, 1 + num_drafts, 50)))  # other requests: the roles are chosen again, and told at once
    pacer.renew(clients, info)
    assert len(told) == 4
    assert not pacer.see(step((100, 1 + num_drafts, 50)))
