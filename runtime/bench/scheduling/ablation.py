"""`bench roles`: when are prompts and answers better on engines of their own?

Simulated fleets serve a trace under targets of TTFT and TPOT. A fleet's goodput is the highest rate of arrivals at
which 90 % of the requests keep both targets, found by bisection over scaled arrival times. Compared are chunked
prefill with several budgets, static splits with every ratio, and engines that take either role (`AutoRoles`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bench.environment import finished
from runtime.bench.load.traces import Trace
from runtime.bench.metrics import BenchmarkError, percentiles_of
from runtime.bench.scheduling.fleet_runs import (
    Deployment,
    FleetRun,
    ServedModel,
    TracePrompts,
    run_fleet,
)
from runtime.bench.scheduling.roofline import Link
from runtime.bench.svg import panels
from runtime.engine.scheduling.step_model import StepFeatures
from runtime.parallel.roles import AutoRoles, StaticRoles, StepSeconds, best_chunk

SHARE = 0.9
"""The share of requests that must keep their targets."""

PERCENTILES = (50.0, 90.0, 99.0, 99.9)

_DENSEST = 1e4
"""Times the first guess: then all arrive at once."""

_FINE, _COARSE = 0.012, 0.2
_NEAR = 0.8
"""Variants with at least this share of their kind's best are searched finely."""


@dataclass(frozen=True, slots=True)
class Target:
    """Seconds to the first token, and of each one after it."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run a fleet; ``make`` gives fresh roles for each run."""

    kind: str
    name: str
    make: Callable[[], Deployment]


def variants(
    model: ServedModel,
    num_engines: int,
    target: Target,
    budgets: Sequence[int],
    link: Link,
    *,
    is_layerwise: bool = True,
) -> Iterator[Variant]:
    """All that are compared."""
    for budget in budgets:
        yield Variant("chunked", f"{budget}", partial(Deployment, (budget,) * num_engines))
    for num_prefill in range(1, num_engines):
        yield static(model, num_engines, num_prefill, link, is_layerwise=is_layerwise)
    yield auto(model, num_engines, target, link, is_layerwise=is_layerwise)


def static(model: ServedModel, num_engines: int, num_prefill: int, link: Link, *, is_layerwise: bool = True) -> Variant:
    """So many engines for prompts, the others for answers."""
    num_decode = num_engines - num_prefill
    sizes = (best_chunk(seconds_of(model)),) * num_prefill + (model.max_num_seqs,) * num_decode
    return Variant(
        "static",
        f"{num_prefill}:{num_decode}",
        lambda: Deployment(sizes, StaticRoles(num_prefill, num_engines), None, link, is_layerwise),
    )


def auto(model: ServedModel, num_engines: int, target: Target, link: Link, *, is_layerwise: bool = True) -> Variant:
    """Engines that take either role, with steps as long as the target of TPOT allows."""

    def make() -> Deployment:
        roles = AutoRoles(num_engines, seconds_of(model), target.ttft_s, target.tpot_s, rows=model.max_num_seqs)
        return Deployment(tuple(roles.budgets), roles, roles, link, is_layerwise)

    return Variant("auto", "auto", make)


def seconds_of(model: ServedModel) -> StepSeconds:
    """A model's step times as roles ask for them, with windows."""
    size, share = model.window

    def seconds(tokens: int, sequences: int, pairs: float, context: float) -> float:
        near = min(context, size * sequences)
        mean = (1.0 - share) * context + share * near
        return model.seconds(StepFeatures(tokens, sequences, (1.0 - share) * pairs, mean))

    return seconds


class Search:
    """Goodputs of variants on one trace under one target. A run's result is kept."""

    def __init__(self, prompts: TracePrompts, model: ServedModel, target: Target, guess: float) -> None:
        self.prompts, self.model, self.target = prompts, model, target
        self.base = len(prompts.records) / prompts.duration_s  # requests a second at rate 1
        self.guess = guess / self.base
        self.num_runs = 0
        self._bounds: dict[str, tuple[float, float]] = {}

    def run(self, variant: Variant, rate: float) -> FleetRun:
        run = run_fleet(self.prompts, self.model, variant.make(), rate)
        assert run is not None, "nothing gave it up"
        return run

    def keeps(self, variant: Variant, rate: float) -> bool:
        """Whether the targets are kept at this rate; a run ends as soon as they cannot be any more."""
        self.num_runs += 1
        run = run_fleet(self.prompts, self.model, variant.make(), rate, self._is_lost)
        return run is not None and run.attainment(self.target.ttft_s, self.target.tpot_s) >= SHARE

    def _is_lost(self, requests: NDArray[Any], now_s: float) -> bool:
        first = np.where(requests["first"] >= 0.0, requests["first"], now_s)
        return int((first - requests["arrival"] > self.target.ttft_s).sum()) > (1.0 - SHARE) * len(requests)

    def goodput(self, variant: Variant, tolerance: float) -> float:
        """Requests a second, 0.0 if none; the last rate that kept the targets, within a tolerance of one that does
        not."""
        low, high = self._bounds.get(variant.name) or self._bracket(variant)
        while low and high / low > 1.0 + tolerance:
            middle = (low * high) ** 0.5
            if self.keeps(variant, middle):
                low = middle
            else:
                high = middle
        self._bounds[variant.name] = low, high
        if low:
            self.guess = low
        return low * self.base

    def _bracket(self, variant: Variant) -> tuple[float, float]:
        """A rate that keeps the targets and a higher one that does not, from the last guess on."""
        rate, factor = self.guess, 1.15
        if self.keeps(variant, rate):
            while self.keeps(variant, rate * factor):
                rate, factor = rate * factor, factor**1.5
                if rate > _DENSEST * self.guess:
                    raise BenchmarkError(
                        f"all {len(self.prompts.records)} requests of {self.prompts.name} at once keep the targets: "
                        "give a longer trace, or more requests an engine"
                    )
            return rate, rate * factor
        least = 0.02 * self.guess
        while rate > least:
            rate, high, factor = rate / factor, rate, factor**1.5
            if self.keeps(variant, rate):
                return rate, high
        return 0.0, rate


def bench_roles(
    trace: Trace,
    model: ServedModel,
    *,
    engines: Sequence[int],
    targets: Sequence[Target],
    budgets: Sequence[int],
    links: dict[str, Link],
    requests_per_engine: int,
    report_cell: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """A report with a cell for each number of engines and target. The first of ``links`` joins the engines; with four
    engines all are tried, with and without sending layer by layer. Raises ``BenchmarkError``."""
    if not engines or min(engines) < 2:
        raise BenchmarkError(f"fleets of {list(engines)} engines: prompts and answers need at least 2")
    if not budgets or min(budgets) < 1:
        raise BenchmarkError(f"budgets of {list(budgets)} tokens: each must be at least 1")
    cells = []
    link = next(iter(links.values()))
    for num_engines in engines:
        prompts = TracePrompts(spread(trace).head(min(len(trace.requests), requests_per_engine * num_engines)))
        guess = 0.0
        for target in targets:
            search = Search(prompts, model, target, guess or num_engines * _alone(model, prompts))
            cell = _cell(search, list(variants(model, num_engines, target, budgets, link)), num_engines)
            guess = max(cell["best"].values())
            if num_engines == 4:
                cell["links"] = _over_links(search, cell, num_engines, links)
            cell["num_runs"] = search.num_runs
            cells.append(cell)
            report_cell(cell)
    report = {
        "trace": trace.name,
        "model": model.name,
        "link": next(iter(links)),
        "requests_per_engine": requests_per_engine,
        "cells": cells,
    }
    return finished(report)


def read_targets(text: str) -> list[Target]:
    """Targets written as `TTFT/TPOT,…` in seconds. Raises ``BenchmarkError``."""
    found = []
    for each in text.split(","):
        try:
            ttft_s, tpot_s = map(float, each.split("/"))
        except ValueError:
            raise BenchmarkError(f"a target is {each!r}, must be TTFT/TPOT in seconds, as 0.5/0.015") from None
        if not (0.0 < ttft_s < math.inf and 0.0 < tpot_s < math.inf):
            raise BenchmarkError(f"a target is {each!r}: both times must be positive")
        found.append(Target(ttft_s, tpot_s))
    return found


def line_of(cell: dict[str, Any]) -> str:
    """A cell in a line."""
    words = [f"{cell['engines']:>3} engines, TTFT {cell['ttft_s']:g} s, TPOT {1e3 * cell['tpot_s']:g} ms:"]
    words += [
        f"{kind} {cell['best'][kind]:.3g} requests/s" + (f" ({name})" if name != kind else "")
        for kind, name in cell["best_variant"].items()
    ]
    if cell["auto_of_better"] is not None:
        words.append(f"auto / better {cell['auto_of_better']:.3f}")
    return "  ".join(words)


def spread(trace: Trace) -> Trace:
    """The trace with arrivals of the same time, which some traces round, spread evenly up to the next."""
    requests, result = trace.requests, []
    first = 0
    for index in range(1, len(requests) + 1):
        if index == len(requests) or requests[index].arrival_s > requests[first].arrival_s:
            begin = requests[first].arrival_s
            gap = (requests[index].arrival_s - begin if index < len(requests) else 0.0) / (index - first)
            result += [replace(each, arrival_s=begin + gap * place) for place, each in enumerate(requests[first:index])]
            first = index
    return replace(trace, requests=tuple(result))


def plot(runs: Sequence[dict[str, Any]]) -> str:
    """Reports as an SVG: a panel each, a row a cell, with a bar for each kind as a share of the cell's best."""
    groups = []
    for run in runs:
        rows = []
        for cell in run["cells"]:
            best = max(*cell["best"].values(), 1e-9)
            bars = []
            for kind, rate in cell["best"].items():
                name = cell["best_variant"][kind]
                bars.append((rate / best, f"{kind}{'' if name == kind else f' {name}'}: {rate:.3g}/s"))
            label = f"{cell['engines']} engines, {cell['ttft_s']:g} s / {1e3 * cell['tpot_s']:g} ms"
            rows.append((label, bars))
        groups.append((f"{run['model']}, {run['trace']}: goodput under TTFT / TPOT", rows))
    return panels(groups, width=760, label_width=210, line=13)


def _alone(model: ServedModel, prompts: TracePrompts) -> float:
    """A first guess of an engine's requests a second: half of those whose tokens it could compute."""
    tokens = float(prompts.records["num_prompt"].mean() + prompts.records["num_output"].mean())
    return 0.5 * 1024 / model.steps.seconds(StepFeatures(1024, 1, 0.0, 0.0)) / tokens


def _cell(search: Search, tried: Sequence[Variant], num_engines: int) -> dict[str, Any]:
    rates: dict[str, dict[str, float]] = {"chunked": {}, "static": {}, "auto": {}}
    for variant in tried:
        rates[variant.kind][variant.name] = search.goodput(variant, _FINE if variant.kind == "auto" else _COARSE)
    best: dict[str, str] = {}
    for kind, found in rates.items():
        top = max(found.values())
        for variant in tried:
            if variant.kind == kind and kind != "auto" and found[variant.name] >= _NEAR * top and top:
                found[variant.name] = search.goodput(variant, _FINE)
        best[kind] = max(found, key=found.__getitem__)
    goodputs = {kind: found[best[kind]] for kind, found in rates.items()}
    by_name = {(each.kind, each.name): each for each in tried}
    ends = {}
    for kind, name in best.items():
        if goodputs[kind]:
            run = search.run(by_name[kind, name], goodputs[kind] / search.base)
            ends[kind] = _figures(run, search.target, search.model)
    rival = max(goodputs["chunked"], goodputs["static"])
    return {
        "engines": num_engines,
        "ttft_s": search.target.ttft_s,
        "tpot_s": search.target.tpot_s,
        "num_requests": len(search.prompts.records),
        "goodput": rates,
        "best": goodputs,
        "best_variant": best,
        "auto_of_better": goodputs["auto"] / rival if rival else None,
        "at_goodput": ends,
    }


def _figures(run: FleetRun, target: Target, model: ServedModel) -> dict[str, Any]:
    """Latencies, and what was computed and moved, at the goodput's rate."""
    lives, engines = run.requests, run.engines
    duration_s = float(lives["last"].max() - lives["arrival"].min())
    tokens = int(engines["num_tokens"].sum())
    needed = int((lives["num_prompt"] - lives["num_hit"]).sum())
    kept = (run.ttfts_s <= target.ttft_s) & (run.tpots_s <= target.tpot_s)
    own = lives["num_computed"] + lives["num_output"]
    moved = float(lives["num_moved"].sum()) * model.token_bytes
    moved += float((lives["num_moved"] > 0).sum()) * model.sequence_bytes
    return {
        "attainment": float(kept.mean()),
        "ttft_s": _percentiles(run.ttfts_s),
        "tpot_s": _percentiles(run.tpots_s[lives["num_output"] > 1]),
        "gap_s": {f"p{each:g}": run.gap_s(each) for each in PERCENTILES},
        "output_tokens_per_s": float(lives["num_output"].sum()) / duration_s,
        "busy_share": float(engines["busy"].sum()) / duration_s / len(engines),
        "hit_share": float(lives["num_hit"].sum()) / float(lives["num_prompt"].sum()),
        "computed_again_share": max(0, int(lives["num_computed"].sum()) - needed) / tokens,
        "late_share": float(own[~kept].sum()) / float(own.sum()),
        "num_preemptions": run.num_preemptions,
        "handed_over_share": sum(run.router.num_continued) / len(lives),
        "moved_bytes_per_request": moved / len(lives),
        "moved_bytes_per_s": moved / duration_s,
    }


def _percentiles(values: NDArray[np.float64]) -> dict[str, float]:
    return {f"p{name}": value for name, value in percentiles_of(values.tolist(), PERCENTILES).items()}


def _over_links(search: Search, cell: dict[str, Any], num_engines: int, links: dict[str, Link]) -> dict[str, Any]:
    """The goodput of the best split and of `auto` over each link, sent layer by layer and after the first token."""
    num_prefill = int(cell["best_variant"]["static"].partition(":")[0])
    found: dict[str, Any] = {}
    for name, link in links.items():
        for is_layerwise in (True, False):
            tried = (
                static(search.model, num_engines, num_prefill, link, is_layerwise=is_layerwise),
                auto(search.model, num_engines, search.target, link, is_layerwise=is_layerwise),
            )
            for variant in tried:
                label = f"{name}, {'by layers' if is_layerwise else 'after the first token'}"
                named = Variant(variant.kind, f"{variant.name} over {label}", variant.make)
                search.guess = max(cell["best"][variant.kind], 1e-3) / search.base
                found.setdefault(label, {})[variant.kind] = search.goodput(named, 3 * _FINE)
    return found
