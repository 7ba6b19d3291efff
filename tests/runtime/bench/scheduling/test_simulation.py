"""The simulator, on traces short enough to compute every time by hand."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.bench.load.traces import Trace, TraceRequest, shared_prefixes
from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.simulation import simulate
from runtime.engine.config import EngineConfig
from runtime.engine.limits import EngineLimits, resolve
from runtime.engine.scheduling.step_model import StepFeatures


class TenthOfASecondPerToken:
    """A step takes 1 s and 0.1 s a token."""

    def seconds(self, features: StepFeatures) -> float:
        return 1.0 + 0.1 * features.tokens


def limits(**settings: Any) -> EngineLimits:
    config = EngineConfig(**{"block_size": 4, "num_blocks": 100, "max_num_batched_tokens": 10, **settings})
    return resolve(config, max_position_embeddings=100, bytes_per_block=1, available_bytes=100)


def trace(*requests: tuple[float, int, int]) -> Trace:
    return Trace("t", tuple(TraceRequest(*request) for request in requests))


def test_times_by_hand() -> None:
    """A prompt of 14 in chunks of 10 and 4; one of 3 that comes in the second step and shares the third."""
    run = simulate(trace((0.0, 14, 3), (2.5, 3, 2)), limits(), TenthOfASecondPerToken())
    # Step 1: 0 → 2.0 (10 tokens). Step 2: 2.0 → 3.4 (4, the first token of A). Step 3: 3.4 → 4.8 (one decode, the
    # prompt of B). Step 4: 4.8 → 6.0 (two decodes; both end).
    first, second = (request.sequences[0] for request in run.requests)
    assert (first.first_token_s, first.last_token_s) == (pytest.approx(3.4), pytest.approx(6.0))
    assert (second.first_token_s, second.last_token_s) == (pytest.approx(4.8), pytest.approx(6.0))
    report = run.report()
    assert report["ttft_s"]["p50"] == pytest.approx((3.4 + 2.3) / 2)
    assert report["tpot_s"]["max"] == pytest.approx(1.3)
    assert report["tpot_s"]["p50"] == pytest.approx((1.3 + 1.2) / 2)
    assert report["worst_gap_s"]["max"] == pytest.approx(1.4)
    assert report["latency_s"]["max"] == pytest.approx(6.0)
    assert report["duration_s"] == pytest.approx(6.0)
    assert report["output_throughput"] == pytest.approx(5 / 6.0)
    assert report["total_token_throughput"] == pytest.approx(22 / 6.0)
    assert (report["num_steps"], report["num_preemptions"]) == (4, 0)
    assert report["busy_share"] == [pytest.approx(1.0)]


def test_an_idle_replica_waits_for_the_next_request() -> None:
    run = simulate(trace((0.0, 2, 1), (50.0, 2, 1)), limits(), TenthOfASecondPerToken())
    assert [request.sequences[0].last_token_s for request in run.requests] == [pytest.approx(1.2), pytest.approx(51.2)]
    assert run.report()["busy_share"] == [pytest.approx(2.4 / 51.2)]


def test_an_idle_replica_waits_a_moment_for_a_burst() -> None:
    """The second request comes while the engine waits, and shares the step; the third meets a running one."""
    run = simulate(trace((0.0, 2, 1), (0.4, 3, 1), (1.0, 2, 1)), limits(), TenthOfASecondPerToken(), wake_s=0.5)
    ends = [request.sequences[0].last_token_s for request in run.requests]
    assert ends == [pytest.approx(2.0), pytest.approx(2.0), pytest.approx(3.2)]


def test_preemption_is_counted_and_every_request_ends() -> None:
    """Two answers that together outgrow the pool: the later one gives way and starts again."""
    run = simulate(trace((0.0, 4, 12), (0.0, 4, 12)), limits(num_blocks=5, max_model_len=20), TenthOfASecondPerToken())
    report = run.report()
    assert report["num_preemptions"] >= 1
    assert [request.sequences[0].num_output_tokens for request in run.requests] == [12, 12]
    assert run.requests[0].sequences[0].last_token_s < run.requests[1].sequences[0].last_token_s  # type: ignore[operator]
    for replica in run.replicas:
        replica.scheduler.check_invariants()
        assert replica.pool.num_free == 5


def test_round_robin_and_least_load() -> None:
    """One long request, then short ones: in turns, every second waits behind it; by load, none does."""
    requests = trace((0.0, 4, 90), *((10.0 + 9 * i, 4, 2) for i in range(6)))
    homes = {}
    for name in ("round-robin", "least-load"):
        run = simulate(requests, limits(max_num_seqs=1), TenthOfASecondPerToken(), num_replicas=2, routing_policy=name)
        homes[name] = run.report()
    assert homes["least-load"]["ttft_s"]["max"] == pytest.approx(1.4)
    assert homes["round-robin"]["ttft_s"]["max"] > 50.0
    assert len(homes["round-robin"]["busy_share"]) == 2


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="101 tokens exceeds max_model_len=100"):
        simulate(trace((0.0, 100, 1)), limits(), TenthOfASecondPerToken())
    with pytest.raises(BenchmarkError, match="0 replicas"):
        simulate(trace((0.0, 1, 1)), limits(), TenthOfASecondPerToken(), num_replicas=0)


def test_prefix_hits_and_the_prefix_aware_router() -> None:
    """Two conversations, four turns each: in turns over three replicas most beginnings are computed again, a
    prefix-aware router finds nearly all of them."""
    turns = [
        TraceRequest(10.0 * i, 16 * (i // 2 + 1), 1, tuple(range(100 * (i % 2), 100 * (i % 2) + i // 2 + 1)))
        for i in range(8)
    ]
    chats = Trace("chats", tuple(turns), hash_block_len=16)
    rates = {}
    for name in ("round-robin", "prefix-aware"):
        run = simulate(chats, limits(), TenthOfASecondPerToken(), num_replicas=3, routing_policy=name)
        rates[name] = run.report()["hit_rate"]
    # Of 2 x (16 + 32 + 48 + 64) tokens the turn before has all but the new block, or none.
    assert rates["prefix-aware"] == pytest.approx(2 * (16 + 32 + 48) / 320)
    assert rates["round-robin"] < 0.5
    without = simulate(chats, limits(enable_prefix_caching=False), TenthOfASecondPerToken())
    assert without.report()["hit_rate"] == 0.0


def test_swapped_blocks_take_their_time() -> None:
    settings: dict[str, Any] = {"num_blocks": 5, "max_model_len": 20, "preemption": "swap", "swap_space_bytes": 8}
    requests = trace((0.0, 4, 12), (0.0, 4, 12))
    quick, slow = (
        simulate(requests, limits(**settings), TenthOfASecondPerToken(), block_transfer_s=seconds).report()
        for seconds in (0.0, 100.0)
    )
    assert quick["num_swaps"] == slow["num_swaps"] >= 1
    assert slow["duration_s"] > quick["duration_s"] + 200.0


def test_the_router_of_a_fleet_keeps_prefixes_together_and_shares_a_skewed_load_out() -> None:
    """Prefixes that fill 0.8 of two caches: in turns half of them are computed again and again."""
    config = limits(num_blocks=100, max_num_batched_tokens=64, max_model_len=60)
    ratios = {}
    for hot_share in (0.0, 0.9, 1.0):
        requests = shared_prefixes(
            num_requests=600, num_prefixes=13, prefix_len=40, own_len=4, output_len=4, hot_share=hot_share
        )
        rates = {}
        for policy in ("round-robin", "prefix-aware"):
            run = simulate(
                requests,
                config,
                TokenBound(),
                num_replicas=2,
                routing_policy=policy,
                max_concurrency=8,  # type: ignore[arg-type]
            )
            assert sum(run.router.num_routed) == 600
            assert run.router.loads() == [0, 0]
            rates[policy] = run.report()["request_throughput"]
        ratios[hot_share] = rates["prefix-aware"] / rates["round-robin"]
    assert ratios[0.0] >= 2.0
    assert min(ratios.values()) >= 0.95


class TokenBound:
    """A step takes 0.01 s, and 0.1 s a token."""

    def seconds(self, features: StepFeatures) -> float:
        return 0.01 + 0.1 * features.tokens
