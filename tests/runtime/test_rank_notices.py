"""Steps of ranks, as others see them."""

from __future__ import annotations

import os

from runtime.rank_notices import NUM_SPANS, Notices, Span, Tally, notices_bytes, shared_memory


def test_latest_steps_are_seen_once_by_every_rank() -> None:
    memory = shared_memory(notices_bytes(2))
    try:
        mine, other = (Notices.open(memory, rank, 2) for rank in range(2))
    finally:
        os.close(memory)
    steps = [Span(number, 10 * number, 10 * number + 7, 2) for number in range(200)]
    for step in steps[:3]:
        mine.count_span(step)
    known, seen = other.spans(0, 0)
    assert (known, seen) == (3, steps[:3])
    assert other.spans(0, known) == (3, [])
    for step in steps[3:]:
        mine.count_span(step)
    known, seen = other.spans(0, known)
    assert known == 200
    assert seen == steps[200 - NUM_SPANS + 1 :]
    assert other.spans(1, 0) == (0, [])
    assert other.tallies() == [Tally(200, 1400, 400), Tally(0, 0, 0)]
