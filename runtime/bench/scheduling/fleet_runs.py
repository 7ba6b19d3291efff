"""Runs of a trace on a simulated fleet whose engines have roles: the fleet's own `Router` over `fleet_steps`.

A prompt's engine is chosen when it arrives, the engine of its answer when the first token is drawn, both by the router.
The keys and values that another engine needs travel over a link: after the first token, or layer by layer while later
layers and chunks are computed. Each engine has one port, which carries one transfer at a time.

As in `simulation` blocks and tokens are known to the router at the end of their step, and a sampled token is never the
next prompt's. The sender's pages count as free once the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bench.load.traces import Trace
from runtime.bench.metrics import BenchmarkError
from runtime.bench.scheduling.fleet_state import (
    ENGINE,
    GAP_BINS,
    GAP_RATIO,
    LEAST_GAP_S,
    NONE,
    REQUEST,
    FleetState,
)
from runtime.bench.scheduling.fleet_steps import advance, arrive, go_on
from runtime.bench.scheduling.roofline import Link
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Request
from runtime.engine.scheduling.step_model import LinearStepModel, StepFeatures
from runtime.kv.kinds import FULL
from runtime.parallel.prefix_index import PromptDigests
from runtime.parallel.roles import AutoRoles, Roles
from runtime.parallel.routing import Route, Router

AT_ONCE = Link(0.0, 1e15)
_LOG_ROWS = 1 << 14
_ASK_EVERY = 128
_CHANGE_ROWS = 1 << 16
_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model on one engine.

    steps           its step times
    window          of the layers that have one, and their share; (0, 0) without
    num_layers
    num_pages       of the KV cache, with ``page`` tokens each
    max_num_seqs    sequences in a step
    token_bytes     that a hand-over moves for each token, and ``sequence_bytes`` beside them (windows, states)
    eager_s         the least seconds of a step with chunks of prompts, whose launches are not recorded
    """

    name: str
    steps: LinearStepModel
    window: tuple[int, float]
    num_layers: int
    num_pages: int
    page: int
    max_num_seqs: int
    token_bytes: float
    sequence_bytes: float = 0.0
    eager_s: float = 0.0

    def seconds(self, features: StepFeatures) -> float:
        """The time of a step."""
        seconds = self.steps.seconds(features)
        return max(seconds, self.eager_s) if features.prefill_pairs > 0.0 else seconds


@dataclass(frozen=True, slots=True)
class Deployment:
    """A fleet.

    budgets       most tokens of a step, by engine
    roles         which engines compute prompts and which decode; None: all do both, and the router chooses by loads
                  and prefixes
    follows       roles that set budgets, and the most seconds of a step with decodes and prompts, while they learn
    link          between engines; ``is_layerwise``: keys and values travel while others are computed
    """

    budgets: tuple[int, ...]
    roles: Roles | None = None
    follows: AutoRoles | None = None
    link: Link = AT_ONCE
    is_layerwise: bool = False


class TracePrompts:
    """A trace as arrays, at the rate of 1: shared by many runs."""

    def __init__(self, trace: Trace) -> None:
        self.name = trace.name
        self.longest = trace.longest
        self.hash_len = trace.hash_block_len
        self.has_hashes = any(each.hash_ids for each in trace.requests)
        numbers: dict[int, int] = {}
        self.digests: list[list[list[int]]] = []
        self.records = np.zeros(len(trace.requests), REQUEST)
        flat: list[int] = []
        for record, each in zip(self.records, trace.requests):
            own = [numbers.setdefault(hash_id, len(numbers)) for hash_id in each.hash_ids]
            record["arrival"], record["num_prompt"], record["num_output"] = (
                each.arrival_s,
                each.input_len,
                each.output_len,
            )
            record["first_hash"], record["num_hashes"] = len(flat), len(own)
            flat += own
            self.digests.append([own[: (each.input_len - 1) // self.hash_len]] if own else [])
        self.hashes = np.array(flat, np.int32)
        self.num_hashes = len(numbers)
        for name in ("begun", "first", "last"):
            self.records[name] = -1.0
        self.asked = [
            Request(
                str(index),
                np.broadcast_to(np.int32(0), (each.input_len,)),
                _PARAMS,
                max_tokens=each.output_len,
                arrival_s=0.0,
            )
            for index, each in enumerate(trace.requests)
        ]

    @property
    def duration_s(self) -> float:
        return float(self.records["arrival"][-1])


@dataclass(slots=True)
class FleetRun:
    """A finished run: records of requests and engines, the gaps between tokens, and what the router counted."""

    requests: NDArray[Any]
    engines: NDArray[Any]
    gaps: NDArray[np.int64]
    num_preemptions: int
    router: Router = field(repr=False)

    @property
    def ttfts_s(self) -> NDArray[np.float64]:
        found: NDArray[np.float64] = self.requests["first"] - self.requests["arrival"]
        return found

    @property
    def tpots_s(self) -> NDArray[np.float64]:
        """Seconds per token after the first; 0.0 for answers of one token."""
        more = np.maximum(self.requests["num_output"] - 1, 1)
        found: NDArray[np.float64] = (self.requests["last"] - self.requests["first"]) / more
        return found

    def attainment(self, ttft_s: float, tpot_s: float) -> float:
        """The share of requests within both targets."""
        return float(np.mean((self.ttfts_s <= ttft_s) & (self.tpots_s <= tpot_s)))

    def gap_s(self, percentile: float) -> float:
        """A percentile of the gaps between two tokens, in bins of 4 %."""
        total = np.cumsum(self.gaps)
        if not total[-1]:
            return 0.0
        return float(LEAST_GAP_S * GAP_RATIO ** (int(np.searchsorted(total, total[-1] * percentile / 100.0)) + 1))


def run_fleet(
    prompts: TracePrompts,
    model: ServedModel,
    deployment: Deployment,
    rate: float,
    gives_up: Callable[[NDArray[Any], float], bool] | None = None,
) -> FleetRun | None:
    """Serve the whole trace with arrivals ``rate`` times as dense; None if ``gives_up`` was true of the requests'
    records at a time, which it is asked every `_ASK_EVERY` arrivals. Raises ``BenchmarkError`` for a request that does
    not fit an engine's pages."""
    num_engines = len(deployment.budgets)
    state = _state(prompts, model, deployment, rate)
    router = Router(
        "prefix-aware" if prompts.has_hashes else "least-load", num_engines, _digests(prompts), roles=deployment.roles
    )
    run = _Run(state, router, prompts, deployment, model)
    ready = [True] * num_engines
    choose, records = router.choose, state.requests
    for index, arrival_s in enumerate(records["arrival"].tolist()):
        run.advance(arrival_s)
        if gives_up is not None and index % _ASK_EVERY == 0 and gives_up(records, arrival_s):
            return None
        if deployment.follows is not None:
            state.engines["step_s"] = deployment.follows.limit_s
            state.engines["most_saved_s"] = deployment.follows.most_saved_s
            state.engines["budget"] = deployment.follows.budgets
        route = choose(prompts.asked[index], prompts.digests[index], ready)
        run.routes[index] = route
        arrive(state, index, route.engine, arrival_s)
    run.advance(np.inf)
    if run.routes:
        raise BenchmarkError(f"{len(run.routes)} requests of {prompts.name} have not ended")
    return FleetRun(state.requests, state.engines, state.gaps, int(state.counts[2]), router)


class _Run:
    """The loop between steps and router."""

    def __init__(
        self, state: FleetState, router: Router, prompts: TracePrompts, deployment: Deployment, model: ServedModel
    ) -> None:
        self.routes: dict[int, Route] = {}
        self._state, self._router, self._prompts = state, router, prompts
        self._stops = deployment.roles is not None
        self._ready = [True] * len(deployment.budgets)
        link = deployment.link
        self._link = (
            link.latency_s, link.bytes_per_s, model.token_bytes, model.sequence_bytes, float(model.num_layers)
        )  # fmt: skip
        self._is_layerwise = deployment.is_layerwise
        self._news: list[tuple[int, int]] = []  # of steps that end later
        self._num_decoded = 0

    def advance(self, until_s: float) -> None:
        state, engines = self._state, self._state.engines
        while True:
            code = advance(state, until_s, self._stops)
            if code >= 0:
                self._hear(engines[code]["clock"])
                self._decide(code)
                continue
            self._hear(until_s)
            if code == -1:
                return
            if code == -3:
                raise BenchmarkError("an engine has work but can do nothing: its KV cache is too small")

    def _decide(self, engine: int) -> None:
        state, router, routes = self._state, self._router, self.routes
        targets = np.full(state.engines[engine]["num_fresh"], engine, np.int64)
        for place, number in enumerate(state.fresh[engine, : len(targets)].tolist()):
            targets[place] = router.hand_over(routes[number], self._ready)
        go_on(state, engine, targets, self._link, self._is_layerwise)

    def _hear(self, until_s: float) -> None:
        """Tell the router what steps that end by then have done."""
        state, router, routes = self._state, self._router, self.routes
        num_log, num_changes = state.counts[:2].tolist()
        num_decoded = int(state.engines["decode_tokens"].sum())
        router.progressed(num_decoded - self._num_decoded)
        self._num_decoded = num_decoded
        news = self._news + [tuple(row) for row in state.log[:num_log].tolist()]
        self._news = []
        firsts, lasts, outputs = state.requests["first"], state.requests["last"], state.requests["num_output"]
        for number, kind in news:
            if (lasts if kind else firsts)[number] > until_s:
                self._news.append((number, kind))
                continue
            route = routes[number]
            if not route.num_decodes:
                router.drawn(route, 1)
            if not kind:
                continue
            route.num_output_tokens = int(outputs[number])
            router.ended(route)
            del routes[number]
        if num_changes and router.policy == "prefix-aware":
            changes = state.changes[:num_changes].tolist()
            for (engine, is_there), rows in groupby(changes, itemgetter(0, 2)):
                digests = [row[1] for row in rows]
                (router.index.add if is_there else router.index.discard)(engine, digests)
        state.counts[:2] = 0


def _state(prompts: TracePrompts, model: ServedModel, deployment: Deployment, rate: float) -> FleetState:
    num_engines, rows = len(deployment.budgets), model.max_num_seqs
    hash_len = prompts.hash_len if prompts.has_hashes else model.page
    if hash_len % model.page:
        raise BenchmarkError(f"hashes of {hash_len} tokens are not whole pages of {model.page}")
    if prompts.longest + (rows + 1) * model.page > model.num_pages * model.page:
        raise BenchmarkError(f"a request of {prompts.longest} tokens does not fit {model.num_pages} pages")
    if min(deployment.budgets) < rows:
        rows = min(deployment.budgets)
    engines = np.zeros(num_engines, ENGINE)
    engines["budget"] = deployment.budgets
    engines["capacity"] = model.num_pages
    for name in ("first_waiting", "first_coming", "partial"):
        engines[name] = NONE
    requests = prompts.records.copy()
    requests["arrival"] /= rate
    count = prompts.num_hashes
    refs = np.full((num_engines, count), NONE, np.int32)
    order = np.zeros((2, num_engines, count + 1), np.int32)
    order[:, :, count] = count
    most_changes = rows * (prompts.longest // hash_len + 2) if prompts.has_hashes else 0  # of a step
    return FleetState(
        engines, requests, prompts.hashes,
        phases=np.zeros((num_engines, model.page), np.int64),
        heap=np.zeros((num_engines, rows + 1, 2), np.int64),
        fresh=np.zeros((num_engines, rows + 1), np.int64),
        holds=np.zeros(len(prompts.hashes), np.uint8),
        refs=refs, older=order[0], newer=order[1],
        log=np.zeros((_LOG_ROWS, 2), np.int64),
        changes=np.zeros((_CHANGE_ROWS + most_changes, 3), np.int64),
        counts=np.zeros(3, np.int64),
        gaps=np.zeros(GAP_BINS, np.int64),
        coefficients=np.array((*model.steps.coefficients, model.eager_s)),
        window=np.array(model.window, np.float64),
        sizes=np.array([model.page, hash_len, rows, most_changes], np.int64),
    )  # fmt: skip


def _digests(prompts: TracePrompts) -> PromptDigests:
    """The router's digests are the trace's hashes; what it computes from a prompt is not asked."""
    return PromptDigests(b"of no importance", prompts.hash_len, (FULL,))
