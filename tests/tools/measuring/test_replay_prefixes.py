"""The replay's own oracles on small cases, and what the pool finds again in the recorded conversations."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from runtime.engine.scheduling.eviction import POLICIES
from tools.measuring.replay_prefixes import (
    belady_hits,
    lru_hits,
    main,
    read_prompts,
    replay,
    scheduler_hits,
    unlimited_hits,
)

TRACE = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces" / "mooncake_conversation.jsonl"


def best_hits(prompts: list[list[int]], num_blocks: int) -> int:
    """The optimum by trying every choice of victims (one block a prompt)."""
    states = {frozenset[int](): 0}
    for (block,) in prompts:
        following: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            if block in kept:
                choices = [kept]
            elif len(kept) < num_blocks:
                choices = [kept | {block}]
            else:
                choices = [kept - {victim} | {block} for victim in kept]
            for choice in choices:
                following[choice] = max(following.get(choice, 0), hits + (block in kept))
        states = following
    return max(states.values())


def test_belady_is_the_best_of_all_choices() -> None:
    for blocks in product(range(4), repeat=6):
        prompts = [[block] for block in blocks]
        assert belady_hits(prompts, 2) == best_hits(prompts, 2)


def test_hits_by_hand() -> None:
    prompts = [[1, 2], [1, 3], [4], [1, 2], [1, 3]]
    assert unlimited_hits(prompts) == 5
    assert lru_hits(prompts, 3) == 3  # block 1 each time: [4] pushes out 2, and 2 then pushes out 3
    assert belady_hits(prompts, 3) == 4
    for eviction in POLICIES:
        assert scheduler_hits(prompts, 9, eviction) == 5


def test_the_pools_lru_is_the_independent_one(tmp_path: Path) -> None:
    prompts = [[0, 1 + turn % 7, 100 + turn % 13, 1000 + turn % 91] for turn in range(500)]
    for number, prompt in enumerate(prompts):  # an id means one block after one prefix
        prompts[number] = [prompt[0], prompt[1], prompt[1] * 1000 + prompt[2], number if number % 3 else -prompt[1]]
    for num_blocks in (5, 20, 60):
        assert scheduler_hits(prompts, num_blocks, "lru") == lru_hits(prompts, num_blocks)


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1, 2]}\n{"hash_ids": [1, 2]}\n{"hash_ids": [3]}\n')
    main([str(trace), "--num-blocks", "3", "--num-requests", "2"])
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "3", "2", "1.000", "2", "1.000", "2", "1.000", "2", "0.0%",
    ]  # fmt: skip


@pytest.mark.skipif(not TRACE.is_file(), reason="no ../shared/data/traces")
@pytest.mark.parametrize(
    ("num_blocks", "lru_share", "least_closed"),
    [
        (5_000, 0.31, 0.25),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in ((10_000, 0.58, 0.04), (20_000, 0.79, 0.14), (50_000, 0.97, 0.05))
        ),
    ],
)
@pytest.mark.exhaustive
def test_conversations_hit_at_least_as_often_as_lru(num_blocks: int, lru_share: float, least_closed: float) -> None:
    row = replay(read_prompts(TRACE), num_blocks, "reuse-gap")
    assert row.lru / row.unlimited == pytest.approx(lru_share, abs=0.01)
    assert row.lru <= row.ours <= row.belady <= row.unlimited
    assert row.closed >= least_closed
