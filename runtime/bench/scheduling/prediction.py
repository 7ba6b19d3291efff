"""`bench simulation`: the simulator's accuracy, in pairs of a real run and its prediction.

The step-time model is fitted to the steps of a first stretch of the trace; then, pair by pair, a held-out stretch goes
through the simulator and then through the engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from runtime.bench.environment import finished
from runtime.bench.load.burst import Burst
from runtime.bench.load.traces import Trace, TraceRequest
from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.engines import local
from runtime.bench.scheduling.schedule import prompts_of, serve_trace
from runtime.bench.scheduling.simulation import Simulation, simulate
from runtime.engine.engine import Engine
from runtime.engine.process.thread_client import BURST_PAUSE_S
from runtime.engine.scheduling.step_model import Fit, StepFeatures, WindowShards, features_of, fit, window_shares
from runtime.engine.timeline import StepRecord
from runtime.kv.kinds import window_of

BUSY_SHARE = 0.7
"""Share of the time in which the engine steps, at the rate that is chosen when none is named."""


AT_ONCE = 1e6  # a rate
NUM_ALONE = 6
"""Requests that run alone for the fit, beside those that run all at once and at the chosen rate."""


def poisson_trace(num_requests: int, *, prompt_len: int, output_len: int, max_len: int, seed: int) -> Trace:
    """One request a second on average, with exponential gaps; log-normal lengths about these medians, at most
    ``max_len`` tokens together."""
    generator = np.random.default_rng(seed)
    times = np.cumsum(generator.exponential(1.0, num_requests))
    prompts = np.rint(generator.lognormal(np.log(prompt_len), 0.6, num_requests)).astype(int)
    outputs = np.rint(generator.lognormal(np.log(output_len), 0.4, num_requests)).astype(int)
    requests = [
        TraceRequest(float(time - times[0]), max(1, int(prompt)), max(1, int(output)))
        for time, prompt, output in zip(times, prompts, outputs)
    ]
    return Trace("poisson", tuple(requests)).scaled(max_len=max_len)


def step_times(records: Sequence[StepRecord], windows: WindowShards = ()) -> tuple[list[StepFeatures], list[float]]:
    """Features and seconds of each step. If the next step continues a sequence of this one, there was no pause, and the
    step lasts until the next one: delivering its tokens is part of it."""
    features, seconds = [], []
    for record, after in zip(records, [*records[1:], None]):
        end_s = record.end_s
        if after is not None:
            mine = {(chunk.request_id, chunk.index) for chunk in record.chunks}
            if any((chunk.request_id, chunk.index) in mine for chunk in after.chunks):
                end_s = after.start_s
        if record.chunks:
            features.append(features_of([(chunk.start, chunk.num_tokens) for chunk in record.chunks], windows))
            seconds.append(end_s - record.start_s)
    return features, seconds


def bench_simulation(
    engine: Engine, trace: Trace, *, rate: float | None, num_requests: int, num_pairs: int, seed: int = 0
) -> dict[str, Any]:
    """Median TTFT and throughput of `num_pairs` stretches of `num_requests`, predicted and measured.

    rate  arrivals this many times as dense; None keeps the simulator busy for `BUSY_SHARE` of the time

    `ttft_error` and `throughput_error` are the medians over the pairs of |predicted / measured - 1|; `step_model` is
    the fit, with `layer_windows` for `tools/simulate.py --step-model`.
    """
    if num_pairs < 1 or num_requests < 2:
        raise BenchmarkError("at least one pair of at least two requests is needed")
    if len(trace.requests) < (num_pairs + 1) * num_requests:
        raise BenchmarkError(f"{num_pairs} pairs and a fit of {num_requests} requests need a longer trace")
    stretches = [_stretch(trace, index * num_requests, num_requests) for index in range(num_pairs + 1)]
    first = stretches[0]
    at_once = first.scaled(rate=AT_ONCE)
    _run(engine, at_once, seed)  # warms up
    _, records = _run(engine, at_once, seed)
    for index in range(min(NUM_ALONE, num_requests)):
        records += _run(engine, _stretch(first, index, 1), seed + index)[1]
    chosen = rate if rate is not None else _rate_for(BUSY_SHARE, engine, first, _fit(engine, records))
    fitted = _fit(engine, [*records, *_run(engine, first.scaled(rate=chosen), seed)[1]])
    pairs: list[dict[str, Any]] = []
    for index, stretch in enumerate(stretches[1:]):
        scaled = stretch.scaled(rate=chosen)
        predicted = _figures_of(_simulate(engine, scaled, fitted))
        measured = _figures_of_run(_run(engine, scaled, seed + index)[0])
        errors = {f"{name}_error": predicted[name] / measured[name] - 1.0 for name in measured}
        pairs.append({"predicted": predicted, "measured": measured, **errors})
    report: dict[str, Any] = {
        name: statistics.median(abs(pair[name]) for pair in pairs)
        for name in ("median_ttft_s_error", "output_throughput_error", "median_tpot_s_error")
    }
    report |= {
        "rate": chosen,
        "num_requests": num_requests,
        "num_pairs": num_pairs,
        "fit": {
            "num_steps": fitted.num_steps,
            "median_relative_error": fitted.relative_error,
            "total_error": fitted.total_error,
        },
        "step_model": fitted.model.as_json(),
        "layer_windows": list(_layer_windows(engine)),
        "pairs": pairs,
    }
    return finished(report, engine.info)


def _run(engine: Engine, trace: Trace, seed: int) -> tuple[Burst, list[StepRecord]]:
    """Serves the trace with an empty prefix cache; returns its requests, and its steps."""
    burst, other = serve_trace(engine, trace, prompts_of(trace, engine.info.vocab_size, seed), {})
    return burst, list(other.timeline)


def _simulate(engine: Engine, trace: Trace, fitted: Fit) -> Simulation:
    return simulate(
        trace, engine.limits, fitted.model, windows=window_shares(_layer_windows(engine)), wake_s=BURST_PAUSE_S
    )


def _fit(engine: Engine, records: Sequence[StepRecord]) -> Fit:
    return fit(*step_times(records, window_shares(_layer_windows(engine))))


def _layer_windows(engine: Engine) -> tuple[int | None, ...]:
    spec = local(engine).kv_cache.spec
    return tuple(window_of(spec.of_layer(layer).kind) for layer in spec.layers_with_pages)


def _figures_of_run(burst: Burst) -> dict[str, float]:
    return _figures(
        [record.ttft_s for record in burst.records],
        [record.tpot_s for record in burst.records if record.tpot_s is not None],
        sum(len(record.token_ids) for record in burst.records) / burst.wall_s,
    )


def _figures_of(simulation: Simulation) -> dict[str, float]:
    return _figures(simulation.ttfts_s, simulation.tpots_s, simulation.report()["output_throughput"])


def _figures(ttfts: Sequence[float], tpots: Sequence[float], throughput: float) -> dict[str, float]:
    return {
        "median_ttft_s": statistics.median(ttfts),
        "median_tpot_s": statistics.median(tpots or [0.0]),
        "output_throughput": throughput,
    }


def _rate_for(busy_share: float, engine: Engine, trace: Trace, fitted: Fit) -> float:
    """The rate at which the simulated engine is busy for this share of the time, by bisection in the exponent."""
    low, high = -20.0, 20.0
    for _ in range(20):
        middle = (low + high) / 2
        simulation = _simulate(engine, trace.scaled(rate=2.0**middle), fitted)
        if simulation.report()["busy_share"][0] < busy_share:
            low = middle
        else:
            high = middle
    return float(2.0**low)


def _stretch(trace: Trace, first: int, count: int) -> Trace:
    """Some successive requests of a trace, the first at time zero."""
    requests = trace.requests[first : first + count]
    begin = requests[0].arrival_s
    return replace(trace, requests=tuple(replace(each, arrival_s=each.arrival_s - begin) for each in requests))
