"""The prefix cache of models with states on a small trace."""

from __future__ import annotations

import pytest

from runtime.bench.load.traces import shared_prefixes
from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.state_cache import HYBRIDS, bench_state_cache


def test_with_room_for_all_only_first_branches_are_missed() -> None:
    trace = shared_prefixes(num_requests=30, num_prefixes=2, prefix_len=1024, own_len=768, output_len=1)
    report = bench_state_cache(trace, ["qwen3.5-9b"], [2.0], state_share=0.25, max_num_seqs=1, report_progress=len)
    attention, hybrid = report["results"]
    assert attention["hit_tokens"] == 28 * 1024
    assert hybrid["hit_tokens"] == 26 * 1024  # the second prompt of each prefix shows where it ends
    assert hybrid["missed_tokens"]["no_checkpoint"] == 2 * 1024
    assert hybrid["queried_tokens"] == hybrid["hit_tokens"] + sum(hybrid["missed_tokens"].values())
    with pytest.raises(BenchmarkError, match="models: 'gpt'"):
        bench_state_cache(trace, ["gpt"])


def test_states_have_the_published_bytes() -> None:
    assert 50.3e6 < HYBRIDS["qwen3.5-9b"].state_bytes < 52e6
    assert 151e6 <= HYBRIDS["qwen3.5-27b"].state_bytes < 155e6
    assert HYBRIDS["qwen3.5-27b"].token_bytes == 64 << 10
