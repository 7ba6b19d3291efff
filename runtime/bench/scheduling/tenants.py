"""The service and the waits of tenants while one of them floods the engine, by the simulator.

Every tenant sends a trace of its own, with other prompts. Then the first sends several at once, which is more than its
share. The others' requests are the same in all runs, so that each is compared with itself.

A tenant's service is the cost of its tokens, as the fair policy counts them, in the time in which requests arrive. It
is due its service without the flood, at most an equal share of all service with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from runtime.bench.load.traces import Trace
from runtime.bench.metrics import BenchmarkError, percentiles_of
from runtime.bench.scheduling.simulation import Simulation, simulate
from runtime.engine.config import Policy
from runtime.engine.limits import EngineLimits
from runtime.engine.scheduling.sequence import Request
from runtime.engine.scheduling.step_model import Pipeline, StepModel, WindowShards

PERCENTILES = (50.0, 90.0, 99.0)
FLOODING = "0"
"""The tenant that floods."""


@dataclass(frozen=True, slots=True)
class Flood:
    """``num_tenants`` send a trace each, the first ``factor`` of them; the traces begin within ``spread_s``."""

    num_tenants: int
    factor: int
    spread_s: float = 60.0

    def __post_init__(self) -> None:
        if self.num_tenants < 2 or self.factor < 2:
            raise BenchmarkError(f"{self.num_tenants} tenants, one with {self.factor} traces: at least 2 are needed")

    def of(self, trace: Trace) -> Trace:
        """All requests."""
        more = [FLOODING] * (self.factor - 1)
        tenants = [*map(str, range(self.num_tenants)), *more]
        return trace.multiplied(len(tenants), self.spread_s, tenants)

    def without(self, trace: Trace) -> Trace:
        """The same without those that are too many."""
        share = self.num_tenants / (self.num_tenants + self.factor - 1)
        return trace.multiplied(self.num_tenants, self.spread_s * share, [*map(str, range(self.num_tenants))])


def compare(
    trace: Trace, flood: Flood, limits: EngineLimits, model: StepModel | Pipeline, *, policies: Sequence[Policy],
    windows: WindowShards = (), wake_s: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """The report: by policy, the runs without and with the flood, the others' least share, and the greatest ratio of
    a tenant's times to the first token between the two."""
    report: dict[str, Any] = {"num_tenants": flood.num_tenants, "factor": flood.factor, "policies": {}}
    for policy in policies:
        limited = replace(limits, scheduling=replace(limits.scheduling, scheduling_policy=policy))
        quiet, flooded = (
            simulate(each, limited, model, windows=windows, wake_s=wake_s)
            for each in (flood.without(trace), flood.of(trace))
        )
        report["policies"][policy] = _compared(quiet, flooded, flood, limits)
    return report


def text_of(report: dict[str, Any]) -> str:
    """The report as a table: the worst of the tenants who do not flood."""
    columns = ("mean", *(f"p{name:.0f}" for name in PERCENTILES))
    rows = [f"{'policy':<10}{'share':>10}" + "".join(f"{'TTFT ' + name:>14}" for name in columns)]
    for policy, found in report["policies"].items():
        times = "".join(f"{value:>13.2f}x" for value in found["ttft_ratio"].values())
        rows.append(f"{policy:<10}{found['least_share']:>10.3f}{times}")
    return "\n".join(rows)


def _compared(quiet: Simulation, flooded: Simulation, flood: Flood, limits: EngineLimits) -> dict[str, Any]:
    end_s = quiet.trace.requests[-1].arrival_s
    costs = limits.scheduling.output_token_cost, limits.scheduling.cached_token_cost
    tenants = [str(number) for number in range(flood.num_tenants)]
    before, after = ({each: _of(run, each, end_s, costs) for each in tenants} for run in (quiet, flooded))
    share = sum(each["service"] for each in after.values()) / flood.num_tenants
    others = [each for each in tenants if each != FLOODING]
    due = {each: min(before[each]["service"], share) for each in others}
    return {
        "busy_share": {"quiet": quiet.report()["busy_share"][0], "flooded": flooded.report()["busy_share"][0]},
        "duration_s": end_s,
        "tenants": {"quiet": before, "flooded": after},
        "least_share": min(after[each]["service"] / due[each] for each in others),
        "ttft_ratio": {
            name: max(after[each]["ttft_s"][name] / before[each]["ttft_s"][name] for each in others)
            for name in before[others[0]]["ttft_s"]
        },
    }


def _of(run: Simulation, tenant: str, end_s: float, costs: tuple[float, float]) -> dict[str, Any]:
    """A tenant's requests, their service until then, and their times to the first token."""
    requests = [each for each in run.requests if each.tenant == tenant]
    ttfts = [_first_token_s(each) - each.arrival_s for each in requests]
    return {
        "num_requests": len(requests),
        "service": sum(_service(each, end_s, costs) for each in requests),
        "ttft_s": {
            "mean": float(np.mean(ttfts)),
            **{f"p{name}": value for name, value in percentiles_of(ttfts, PERCENTILES).items()},
        },
    }


def _service(request: Request, end_s: float, costs: tuple[float, float]) -> float:
    """The cost of its tokens until then; those after the first are taken to have come evenly."""
    life, (output_cost, cached_cost) = request.sequences[0], costs
    first_s, last_s = _first_token_s(request), life.last_token_s
    assert last_s is not None, "a request has not ended"
    if first_s > end_s:
        return 0.0
    num_cached = life.num_cached_tokens or 0
    share = 1.0 if last_s <= end_s else (end_s - first_s) / (last_s - first_s)
    num_outputs = 1 + share * (life.num_output_tokens - 1)
    return life.num_prompt_tokens - num_cached + cached_cost * num_cached + output_cost * num_outputs


def _first_token_s(request: Request) -> float:
    first_s = request.sequences[0].first_token_s
    assert first_s is not None, "a request has not ended"
    return first_s
