"""`bench roles`: when are prompts and answers better on engines of their own?

Simulated fleets serve a trace under targets of TTFT and TPOT. A fleet's goodput is the highest rate of arrivals at
which 90 % of the requests keep both targets, found by bisection over scaled arrival times. Compared are chunked
prefill with several budgets, static splits with every ratio, and engines that take either role (`AutoRoles`).

A cell is searched in several windows of the trace, with the same arrivals for all variants: its goodputs are geometric
means over the windows that its kind can serve, and the error of auto's ratio to the better of the others is that of the
windows' ratios.
"""

from __future__ import annotations

import math
import statistics
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
from runtime.bench.svg import COLOURS, page, rectangle, text
from runtime.engine.scheduling.step_model import StepFeatures
from runtime.parallel.roles import AutoRoles, StaticRoles, StepSeconds, best_chunk

KINDS = ("chunked", "static", "auto")

SHARE = 0.9
"""The share of requests that must keep their targets."""

PERCENTILES = (50.0, 90.0, 99.0, 99.9)

_DENSEST = 1e4
"""Times the first guess: then all arrive at once."""

_LOST = 1.5
"""A run ends as soon as so many times the requests that may miss a target have."""

_FINE, _COARSE = 0.012, 0.2
_NEAR, _NEARER = 0.8, 0.9
"""Variants with at least this share of their kind's best are searched finely, and then in the other windows."""

_Point = tuple[float, float]
"""A rate, and the share of requests that keep the targets at it; 0.0 if it is not known."""


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

    def __init__(
        self, prompts: TracePrompts, model: ServedModel, target: Target, guess: float, first_request: int = 0
    ) -> None:
        self.prompts, self.model, self.target, self.first_request = prompts, model, target, first_request
        self.base = len(prompts.records) / prompts.duration_s  # requests a second at rate 1
        self.guess = guess / self.base
        self.num_runs = 0
        self._bounds: dict[str, tuple[_Point, _Point]] = {}

    def run(self, variant: Variant, rate: float) -> FleetRun:
        run = run_fleet(self.prompts, self.model, variant.make(), rate)
        assert run is not None, "nothing gave it up"
        return run

    def kept(self, variant: Variant, rate: float) -> float:
        """The share of requests that keep the targets at this rate; 0.0 if it cannot come near `SHARE` any more, when
        the run ends at once."""
        self.num_runs += 1
        run = run_fleet(self.prompts, self.model, variant.make(), rate, self._is_lost)
        return run.attainment(self.target.ttft_s, self.target.tpot_s) if run is not None else 0.0

    def _is_lost(self, requests: NDArray[Any], now_s: float) -> bool:
        """Whether far too many have missed a target for sure: what has not come comes later than now."""
        first = np.where(requests["first"] >= 0.0, requests["first"], now_s)
        last = np.where(requests["last"] >= 0.0, requests["last"], np.maximum(now_s, first))
        is_late = first - requests["arrival"] > self.target.ttft_s
        is_late |= last - first > self.target.tpot_s * np.maximum(requests["num_output"] - 1, 1) * (1.0 + 1e-9)
        return int(is_late.sum()) > _LOST * (1.0 - SHARE) * len(requests)

    def goodput(self, variant: Variant, tolerance: float) -> float:
        """Requests a second, 0.0 if none; the last rate that kept the targets, within a tolerance of one that does
        not."""
        low, high = self._bounds.get(variant.name) or self._bracket(variant)
        while low[0] and high[0] / low[0] > 1.0 + tolerance:
            width, least = math.log(high[0] / low[0]), 0.5 * math.log(1.0 + tolerance)
            part = (low[1] - SHARE) / (low[1] - high[1]) * width if high[1] else 0.5 * width  # where it crosses
            rate = low[0] * math.exp(min(max(part, least), width - least))
            kept = self.kept(variant, rate)
            if kept >= SHARE:
                low = rate, kept
            else:
                high = rate, kept
        self._bounds[variant.name] = low, high
        if low[0]:
            self.guess = low[0]
        return low[0] * self.base

    def _bracket(self, variant: Variant) -> tuple[_Point, _Point]:
        """A rate that keeps the targets and a higher one that does not, from the last guess on."""
        factor = 1.15
        point = self.guess, self.kept(variant, self.guess)
        if point[1] >= SHARE:
            while True:
                low, rate = point, point[0] * factor
                factor = factor**1.5
                if rate > _DENSEST * self.guess:
                    raise BenchmarkError(
                        f"all {len(self.prompts.records)} requests of {self.prompts.name} at once keep the targets: "
                        "give a longer trace, or more requests an engine"
                    )
                point = rate, self.kept(variant, rate)
                if point[1] < SHARE:
                    return low, point
        least = 0.02 * self.guess
        while point[0] > least:
            high, rate = point, point[0] / factor
            factor = factor**1.5
            point = rate, self.kept(variant, rate)
            if point[1] >= SHARE:
                return point, high
        return (0.0, 1.0), point


def bench_roles(
    trace: Trace,
    model: ServedModel,
    *,
    engines: Sequence[int],
    targets: Sequence[Target],
    budgets: Sequence[int],
    links: dict[str, Link],
    requests_per_engine: int,
    windows: int = 1,
    before: dict[str, Any] | None = None,
    report_cell: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """A report with a cell for each number of engines and target, each searched in at most so many ``windows`` of the
    trace. The first of ``links`` joins the engines; if there are several, with four engines all are tried, with and
    without sending layer by layer. An earlier report (``before``) with the same arguments gives the goodputs of chunked
    prefill and splits; then `auto` alone is searched. Raises ``BenchmarkError``."""
    if not engines or min(engines) < 2:
        raise BenchmarkError(f"fleets of {list(engines)} engines: prompts and answers need at least 2")
    if not budgets or min(budgets) < 1:
        raise BenchmarkError(f"budgets of {list(budgets)} tokens: each must be at least 1")
    cells = []
    link = next(iter(links.values()))
    for num_engines in engines:
        parts = windows_of(trace, windows, requests_per_engine * num_engines)
        guess = num_engines * _alone(model, parts[0][1])
        for target in targets:
            searches = [Search(prompts, model, target, guess, first) for first, prompts in parts]
            known = _known(before, trace, model, num_engines, target, searches) if before else None
            cell = _cell(searches, list(variants(model, num_engines, target, budgets, link)), num_engines, known)
            guess = max(cell["best"].values()) or guess
            if num_engines == 4 and len(links) > 1 and max(cell["best"].values()):
                cell["links"] = _over_links(searches[0], cell, num_engines, links)
            cell["num_runs"] = sum(search.num_runs for search in searches)
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


def windows_of(trace: Trace, most: int, size: int) -> list[tuple[int, TracePrompts]]:
    """Parts of a trace that do not overlap, with the numbers of their first requests: as many as fit, a power of two,
    at most ``most``, evenly over the trace, of at most ``size`` requests."""
    if most < 1:
        raise BenchmarkError(f"{most} windows of a trace: there must be at least 1")
    whole, num = spread(trace).requests, 1
    while 2 * num <= min(most, len(whole) // size):
        num *= 2
    found = []
    for number in range(num):
        first = number * len(whole) // num
        own = whole[first : first + size]
        moved = tuple(replace(each, arrival_s=each.arrival_s - own[0].arrival_s) for each in own)
        found.append((first, TracePrompts(replace(trace, requests=moved))))
    return found


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
        error = f" +- {cell['standard_error']:.3f}" if "standard_error" in cell else ""
        words.append(f"auto / better {cell['auto_of_better']:.3f}{error}")
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
    """Reports as an SVG: a panel each, a row a cell, with a thin bar for each kind as a share of the cell's best."""
    left, full, line = 190.0, 300.0, 5.0
    parts, top = [], 8.0
    for place, (kind, colour) in enumerate(zip(KINDS, COLOURS)):
        parts += [rectangle(left + 100 * place, top, 12, 9, colour), text(left + 100 * place + 16, top + 9, kind)]
    for run in runs:
        top += 26
        parts.append(text(10, top, f"{run['model']}, {run['trace']}: goodput under TTFT / TPOT", style="title"))
        top += 6
        for cell in run["cells"]:
            best, words = max(*cell["best"].values(), 1e-9), []
            for place, (kind, colour) in enumerate(zip(KINDS, COLOURS)):
                rate, name = cell["best"][kind], cell["best_variant"][kind]
                words.append(f"{rate:.3g}/s" + f" ({name})" * (name != kind))
                parts.append(rectangle(left, top + line * place, max(0.5, full * rate / best), line - 0.5, colour))
            ratio, error = cell["auto_of_better"], cell.get("standard_error")
            if ratio is not None:
                words.append(f"auto / better {ratio:.2f}" + (f" \u00b1 {error:.2f}" if error is not None else ""))
            label = f"{cell['engines']} engines, {cell['ttft_s']:g} s / {1e3 * cell['tpot_s']:g} ms"
            parts += [
                text(left - 6, top + 11, label, anchor="end"),
                text(left + full + 6, top + 11, ", ".join(words)),
            ]
            top += 3 * line + 4
    return page(parts, 840, top + 8)


def _alone(model: ServedModel, prompts: TracePrompts) -> float:
    """A first guess of an engine's requests a second: half of those whose tokens it could compute."""
    tokens = float(prompts.records["num_prompt"].mean() + prompts.records["num_output"].mean())
    return 0.5 * 1024 / model.steps.seconds(StepFeatures(1024, 1, 0.0, 0.0)) / tokens


def _known(
    report: dict[str, Any],
    trace: Trace,
    model: ServedModel,
    num_engines: int,
    target: Target,
    searches: Sequence[Search],
) -> dict[str, Any]:
    """The cell of an earlier report. Raises ``BenchmarkError`` if it has none of the same trace, model and windows."""
    asked = {
        "engines": num_engines, "ttft_s": target.ttft_s, "tpot_s": target.tpot_s,
        "num_requests": len(searches[0].prompts.records), "first_requests": [each.first_request for each in searches],
    }  # fmt: skip
    if (report.get("trace"), report.get("model")) == (trace.name, model.name):
        for cell in report["cells"]:
            if asked.items() <= cell.items():
                return dict(cell)
    raise BenchmarkError(f"the report before has no cell of {trace.name}, {model.name} and {asked}")


def _cell(
    searches: Sequence[Search], tried: Sequence[Variant], num_engines: int, known: dict[str, Any] | None = None
) -> dict[str, Any]:
    search = searches[0]
    kinds = [kind for kind in KINDS if not known or kind == "auto"]
    rates: dict[str, dict[str, float]] = {}
    best: dict[str, str] = {}
    in_windows: dict[str, list[float]] = {}
    ends: dict[str, Any] = {}
    if known:
        for kind in KINDS[:2]:
            rates[kind], best[kind] = known["goodput"][kind], known["best_variant"][kind]
            in_windows[kind] = known["in_windows"][kind]
            ends |= {kind: known["at_goodput"][kind]} if kind in known["at_goodput"] else {}
        search.guess = max(each[0] for each in in_windows.values()) / search.base or search.guess
    for kind in kinds:
        own = [each for each in tried if each.kind == kind]
        found = rates[kind] = {each.name: search.goodput(each, _COARSE) for each in own}
        for share in (_NEAR, _NEARER):
            top = max(found.values())
            near = [each for each in own if top and found[each.name] >= share * top]
            for variant in near:
                found[variant.name] = search.goodput(variant, _FINE)
        in_all = {variant.name: _goodputs(searches, variant) for variant in near}
        served = [any(each) for each in zip(*in_all.values())]
        for name, in_each in in_all.items():
            found[name] = _geometric([rate for rate, is_served in zip(in_each, served) if is_served])
        chosen = max(near or own, key=lambda each: found[each.name])
        best[kind] = chosen.name
        in_windows[kind] = in_all.get(chosen.name, [0.0] * len(searches))
        runs = [each.run(chosen, rate / each.base) for each, rate in zip(searches, in_windows[kind]) if rate]
        if runs:
            ends[kind] = _figures(runs, search.target, search.model)
    goodputs = {kind: rates[kind][name] for kind, name in best.items()}
    rival = max(("chunked", "static"), key=goodputs.__getitem__)
    cell = {
        "engines": num_engines,
        "ttft_s": search.target.ttft_s,
        "tpot_s": search.target.tpot_s,
        "num_requests": len(search.prompts.records),
        "first_requests": [each.first_request for each in searches],
        "goodput": rates,
        "best": goodputs,
        "best_variant": best,
        "in_windows": in_windows,
        "at_goodput": ends,
    }
    cell |= ratio(in_windows["auto"], in_windows[rival])
    return cell


def ratio(own: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """The geometric mean of the windows' ratios of auto to the better of the others, and its standard error. Windows in
    which the latter serves nothing do not count."""
    pairs = [(rate, other) for rate, other in zip(own, others) if other]
    if not pairs:
        return {"auto_of_better": None}
    if not all(rate for rate, _ in pairs):
        return {"auto_of_better": 0.0}
    logs = [math.log(rate / other) for rate, other in pairs]
    found = {"auto_of_better": math.exp(statistics.fmean(logs))}
    if len(logs) > 1:
        found["standard_error"] = found["auto_of_better"] * statistics.stdev(logs) / len(logs) ** 0.5
    return found


def _goodputs(searches: Sequence[Search], variant: Variant) -> list[float]:
    """A variant's goodput in each window; each begins at the last one's."""
    found: list[float] = []
    for search in searches:
        if found and found[-1]:
            search.guess = found[-1] / search.base
        found.append(search.goodput(variant, _FINE))
    return found


def _geometric(rates: Sequence[float]) -> float:
    return math.prod(rates) ** (1.0 / len(rates)) if rates else 0.0


def _figures(runs: Sequence[FleetRun], target: Target, model: ServedModel) -> dict[str, Any]:
    """Latencies, and what was computed and moved, at the goodput's rate, of all windows together."""
    lives, engines = np.concatenate([run.requests for run in runs]), np.concatenate([run.engines for run in runs])
    ttfts_s, tpots_s = (np.concatenate([getattr(run, name) for run in runs]) for name in ("ttfts_s", "tpots_s"))
    duration_s = sum(float(run.requests["last"].max() - run.requests["arrival"].min()) for run in runs)
    tokens = int(engines["num_tokens"].sum())
    needed = int((lives["num_prompt"] - lives["num_hit"]).sum())
    kept = (ttfts_s <= target.ttft_s) & (tpots_s <= target.tpot_s)
    own = lives["num_computed"] + lives["num_output"]
    moved = float(lives["num_moved"].sum()) * model.token_bytes
    moved += float((lives["num_moved"] > 0).sum()) * model.sequence_bytes
    gaps = FleetRun(lives, engines, np.sum([run.gaps for run in runs], axis=0), 0, runs[0].router)
    return {
        "attainment": float(kept.mean()),
        "ttft_s": _percentiles(ttfts_s),
        "tpot_s": _percentiles(tpots_s[lives["num_output"] > 1]),
        "gap_s": {f"p{each:g}": gaps.gap_s(each) for each in PERCENTILES},
        "output_tokens_per_s": float(lives["num_output"].sum()) / duration_s,
        "busy_share": float(engines["busy"].sum()) / duration_s / len(runs[0].engines),
        "hit_share": float(lives["num_hit"].sum()) / float(lives["num_prompt"].sum()),
        "computed_again_share": max(0, int(lives["num_computed"].sum()) - needed) / tokens,
        "late_share": float(own[~kept].sum()) / float(own.sum()),
        "num_preemptions": sum(run.num_preemptions for run in runs),
        "handed_over_share": sum(sum(run.router.num_continued) for run in runs) / len(lives),
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
