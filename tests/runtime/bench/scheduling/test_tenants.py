"""A tenant that floods the simulator: what the others keep, and that the report would show a policy that takes it."""

from __future__ import annotations

import pytest

from runtime.bench.load.traces import Trace, TraceRequest
from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.tenants import FLOODING, Flood, compare, text_of
from runtime.engine.config import SchedulingConfig
from runtime.engine.limits import EngineLimits
from runtime.engine.scheduling.step_model import TERMS, LinearStepModel

TRACE = Trace("steady", tuple(TraceRequest(number * 0.8, 200, 10) for number in range(30)))
MODEL = LinearStepModel.from_json(dict.fromkeys(TERMS, 0.0) | {"constant": 1e-3, "sequences": 1e-4, "tokens": 5e-4})
LIMITS = EngineLimits(
    max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64, block_size=4, num_blocks=1600, max_waiting=10_000,
    scheduling=SchedulingConfig(),
)  # fmt: skip


def test_the_others_keep_their_shares() -> None:
    report = compare(TRACE, Flood(4, 12, spread_s=2.0), LIMITS, MODEL, policies=("fcfs", "fair"))
    fcfs, fair = (report["policies"][name] for name in ("fcfs", "fair"))
    assert fair["busy_share"]["flooded"] > 0.95, "no flood"
    assert fair["least_share"] >= 0.9
    assert fair["ttft_ratio"]["mean"] <= 1.5
    assert fcfs["least_share"] < 0.8, "the report does not tell a policy that is not fair"
    assert fcfs["ttft_ratio"]["mean"] > 5.0
    assert [line.split()[0] for line in text_of(report).splitlines()] == ["policy", "fcfs", "fair"]


def test_the_others_send_the_same_in_both_runs() -> None:
    flood = Flood(3, 4, spread_s=6.0)
    one, other = flood.without(TRACE).requests, flood.of(TRACE).requests
    assert [each for each in one if each.tenant != FLOODING] == [each for each in other if each.tenant != FLOODING]
    assert sum(each.tenant == FLOODING for each in other) == 4 * sum(each.tenant == FLOODING for each in one)


@pytest.mark.parametrize(("tenants", "factor"), [(1, 5), (5, 1), (0, 0)])
def test_a_flood_needs_two_tenants(tenants: int, factor: int) -> None:
    with pytest.raises(BenchmarkError, match="at least 2 are needed"):
        Flood(tenants, factor)
