"""Serves a stretch of a trace with two real CPU engines of one thread each, and says what the simulator predicts.

    chrt -r 2 python -m tools.serving.serve_roles measure TRACE FILE.json --variants 512 split --rates 2,3,4
    python -m tools.serving.serve_roles predict TRACE FILE.json

`measure` runs each variant at each rate of requests a second and adds the runs to the file: a number is chunked prefill
with that budget, `split` an engine for prompts and one for answers, `auto` two that take either role. The first call
measures the times of steps on a stretch of its own, to which it fits the simulator's model. `predict` simulates the
same requests at the same rates with it, and compares goodput: the rate at which 90 % keep both targets, interpolated
between the rates that were run. Runs of the same rate count with their mean. The model is a quarter of a Qwen3-0.6B
with random weights."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import psutil

from runtime.bench.environment import finished
from runtime.bench.load.traces import Trace, read_trace
from runtime.bench.metrics import percentiles_of
from runtime.bench.scheduling.ablation import PERCENTILES, SHARE, Target, seconds_of
from runtime.bench.scheduling.fleet_runs import Deployment, FleetRun, ServedModel, TracePrompts, run_fleet
from runtime.bench.scheduling.roofline import Link
from runtime.engine.messages import EngineOutput, EngineRequest, StepView
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.step_model import Fit, LinearStepModel, StepFeatures, features_of, fit
from runtime.parallel.fleet import Fleet
from runtime.parallel.handing_fleet import HandingFleet
from runtime.parallel.roles import AutoRoles, StaticRoles
from tools.measure_decisions import write_model
from tools.serving.time_second_token import priority

LAYERS = 7
MOST_TOKENS = 2048
SETTINGS: dict[str, Any] = {
    "device": "cpu", "load_format": "dummy", "max_model_len": MOST_TOKENS, "max_num_seqs": 64,
    "kv_cache_bytes": 256 << 20, "routing_policy": "least-load", "speculation": "off",
}  # fmt: skip
SHARED_MEMORY = Link(2e-3, 2e9)
"""Between two processes: what `time_second_token` finds that a hand-over adds."""
WAIT_S = 120.0
LEARNED = 100
"""Requests at the first rate before the measured ones: `auto` plans by those that have ended, and again with 128."""


def warm_up(fleet: Fleet, trace: Trace) -> None:
    """Serve all at once. Then the thread that computed in each engine gets a lower real-time priority than all others:
    at the same one each message waits up to 100 ms for it. Without real-time priority the system lets them go first."""
    processes = [psutil.Process(engine.pid) for engine in fleet.engines]
    before = [_processor_s(each) for each in processes]
    serve(fleet, trace, 1e6)
    policy, level = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority
    if level < 2:
        return
    for process, used_s in zip(processes, before):
        now_s = _processor_s(process)
        computing = max(now_s, key=lambda thread: now_s[thread] - used_s.get(thread, 0.0))
        os.sched_setscheduler(computing, policy, os.sched_param(level - 1))


def _processor_s(process: psutil.Process) -> dict[int, float]:
    """The processor time of each thread so far."""
    return {each.id: each.user_time + each.system_time for each in process.threads()}


class Client:
    """A request, and when its tokens came."""

    def __init__(self, request: EngineRequest) -> None:
        self.request, self.submitted_s = request, 0.0
        self.at_s: list[float] = []
        self.reason: str | None = None
        self.done = threading.Event()

    def __call__(self, output: EngineOutput) -> None:
        self.at_s += [time.monotonic()] * len(output.new_token_ids)
        if output.finish_reason is not None:
            self.reason = output.finish_reason
            self.done.set()


def stretch(trace: Trace, given: argparse.Namespace, first: int, count: int) -> Trace:
    """Requests of the trace from this one on, at one a second on average."""
    requests = trace.requests[first : first + count]
    rate = (requests[-1].arrival_s - requests[0].arrival_s) / (count - 1)
    begin_s = requests[0].arrival_s
    moved = tuple(
        type(each)(each.arrival_s - begin_s, each.input_len, each.output_len) for each in requests
    )  # without hashes: nothing is shared
    return Trace(trace.name, moved).scaled(rate=rate, length=given.length, max_len=MOST_TOKENS)


def serve(fleet: Fleet, trace: Trace, rate: float) -> list[Client]:
    """All requests, answered."""
    generator = np.random.default_rng(int(1000 * rate))
    clients = []
    for number, each in enumerate(trace.requests):
        params = SamplingParams(temperature=0.0, max_tokens=each.output_len, ignore_eos=True, detokenize=False)
        ids = generator.integers(3, 600, each.input_len).tolist()
        clients.append(Client(EngineRequest(request_id=f"{rate:g} {number}", prompt_token_ids=ids, params=params)))
    begin_s = time.monotonic() + 0.2
    for client, each in zip(clients, trace.requests, strict=True):
        time.sleep(max(0.0, begin_s + each.arrival_s / rate - time.monotonic()))
        client.submitted_s = time.monotonic()
        fleet.submit(client.request, client)
    for client, each in zip(clients, trace.requests, strict=True):
        assert client.done.wait(WAIT_S), "no answer came"
        assert client.reason == "length", f"a request ended with {client.reason}"
        assert len(client.at_s) == each.output_len, f"{len(client.at_s)} tokens instead of {each.output_len}"
    return clients


def fleet_of(variant: str, folder: Path, given: argparse.Namespace) -> Fleet:
    settings = {**SETTINGS, "max_num_batched_tokens": int(variant) if variant.isdigit() else given.budget}
    if variant == "split":
        return HandingFleet(folder, prefill_engines=1, decode_engines=1, **settings)
    if variant == "auto":
        targets = {"ttft_target_s": given.targets.ttft_s, "tpot_target_s": given.targets.tpot_s}
        return HandingFleet(folder, engine_roles="auto", data_parallel_size=2, **targets, **settings)
    return Fleet(folder, data_parallel_size=2, **settings)


def step_times(views: Sequence[StepView]) -> tuple[list[StepFeatures], list[float]]:
    """Features and seconds of steps; if the next one continues a sequence, the step lasts until that begins."""
    features, seconds = [], []
    for engine in {each.engine for each in views}:
        own = sorted((each for each in views if each.engine == engine and each.chunks), key=lambda each: each.start_s)
        for view, after in zip(own, [*own[1:], None]):
            lasts_s = view.duration_s
            mine = {each.request_id for each in view.chunks}
            if after is not None and any(each.request_id in mine for each in after.chunks):
                lasts_s = after.start_s - view.start_s
            features.append(features_of([(each.start, each.count) for each in view.chunks]))
            seconds.append(lasts_s)
    return features, seconds


def measured_steps(folder: Path, trace: Trace, given: argparse.Namespace) -> dict[str, Any]:
    """The step times' fit, and the facts of an engine that the simulator needs."""
    views: list[StepView] = []
    with closing(fleet_of(f"{given.budget}", folder, given)) as fleet:
        warm_up(fleet, stretch(trace, given, 0, 20))
        stop = fleet.watch(views.append)
        for rate in (1e6, *given.rates[:2]):
            serve(fleet, stretch(trace, given, 20, given.fit_requests), rate)
        time.sleep(0.2)
        stop()
        info = fleet.engines[0].info
    found: Fit = fit(*step_times(views))
    return {
        "step_model": found.model.as_json(), "num_steps": found.num_steps, "median_error": found.relative_error,
        "num_pages": info.num_blocks, "page": info.block_size, "max_num_seqs": info.max_num_seqs,
        "token_bytes": SETTINGS["kv_cache_bytes"] / info.num_blocks / info.block_size, "num_layers": LAYERS,
    }  # fmt: skip


def run_of(variant: str, fleet: Fleet, trace: Trace, rate: float, targets: Target) -> dict[str, Any]:
    sent = fleet.stats().transfer_sent_bytes
    clients = serve(fleet, trace, rate)
    time.sleep(1.1)  # until the engines have told of it
    stats = fleet.stats()
    ttfts = np.array([each.at_s[0] - each.submitted_s for each in clients])
    tpots = np.array([(each.at_s[-1] - each.at_s[0]) / max(1, len(each.at_s) - 1) for each in clients])
    figures = figures_of(ttfts, tpots, targets)
    figures["gap_s"] = percentiles([gap for each in clients for gap in np.diff(each.at_s).tolist()])
    figures["moved_bytes"] = stats.transfer_sent_bytes - sent
    figures["num_lost_transfers"] = stats.num_lost_transfers
    print(f"{variant:>6} {rate:5.2f}/s {figures['attainment']:.3f}", file=sys.stderr, flush=True)
    return {"variant": variant, "rate": rate, "measured": figures}


def figures_of(ttfts: Any, tpots: Any, targets: Target) -> dict[str, Any]:
    return {
        "attainment": float(np.mean((ttfts <= targets.ttft_s) & (tpots <= targets.tpot_s))),
        "ttft_s": percentiles(ttfts.tolist()),
        "tpot_s": percentiles(tpots[tpots > 0.0].tolist()),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{name}": round(value, 5) for name, value in percentiles_of(values, PERCENTILES).items()}


def measure(given: argparse.Namespace, report: dict[str, Any]) -> None:
    trace = read_trace(given.trace)
    first = 20 + given.fit_requests
    measured = stretch(trace, given, first, given.num_requests)
    learned = stretch(trace, given, first + given.num_requests, LEARNED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, 1024, LAYERS, MOST_TOKENS)
        if "engine" not in report:
            report["engine"] = measured_steps(folder, trace, given)
        for variant in given.variants:
            with closing(fleet_of(variant, folder, given)) as fleet:
                warm_up(fleet, stretch(trace, given, 0, 40))
                serve(fleet, learned, 0.99 * given.rates[0])  # other prompts than those of this rate
                for rate in given.rates:
                    report.setdefault("runs", []).append(run_of(variant, fleet, measured, rate, given.targets))


def predict(given: argparse.Namespace, report: dict[str, Any]) -> None:
    trace, facts = read_trace(given.trace), report["engine"]
    prompts = TracePrompts(stretch(trace, given, 20 + given.fit_requests, given.num_requests))
    model = ServedModel(
        "quarter of 0.6B", LinearStepModel.from_json(facts["step_model"]), (0, 0.0), facts["num_layers"],
        facts["num_pages"], facts["page"], facts["max_num_seqs"], facts["token_bytes"],
    )  # fmt: skip
    for each in report["runs"]:
        run = run_fleet(prompts, model, deployment_of(each["variant"], model, given), each["rate"])
        assert run is not None, "nothing gave it up"
        each["predicted"] = predicted(run, model, given.targets)
    names = list(dict.fromkeys(each["variant"] for each in report["runs"]))
    report["goodput"] = {
        name: {kind: goodput(report["runs"], name, kind) for kind in ("measured", "predicted")} for name in names
    }


def deployment_of(variant: str, model: ServedModel, given: argparse.Namespace) -> Deployment:
    if variant == "auto":
        targets = given.targets.ttft_s, given.targets.tpot_s
        roles = AutoRoles(2, seconds_of(model), *targets, max_chunk=given.budget, rows=model.max_num_seqs)
        return Deployment(tuple(roles.budgets), roles, roles, SHARED_MEMORY)
    if variant == "split":
        return Deployment((given.budget,) * 2, StaticRoles(1, 2), None, SHARED_MEMORY)
    return Deployment((int(variant),) * 2)


def predicted(run: FleetRun, model: ServedModel, targets: Target) -> dict[str, Any]:
    figures = figures_of(run.ttfts_s, run.tpots_s, targets)
    figures["gap_s"] = {f"p{each:g}": round(run.gap_s(each), 5) for each in PERCENTILES}
    figures["moved_bytes"] = float(run.requests["num_moved"].sum()) * model.token_bytes
    return figures


def goodput(runs: Sequence[dict[str, Any]], variant: str, kind: str) -> float | None:
    """Requests a second; None if the lowest rate does not keep the targets, or the highest still does. If by chance
    more requests keep them at a higher rate than at a lower one, both rates count with the mean of their runs."""
    shares: dict[float, list[float]] = {}
    for each in runs:
        if each["variant"] == variant:
            shares.setdefault(each["rate"], []).append(each[kind]["attainment"])
    pools: list[tuple[list[float], list[float]]] = []  # rates, and their runs' shares
    for rate, found in sorted(shares.items()):
        pools.append(([rate], found))
        while len(pools) > 1 and fmean(pools[-2][1]) <= fmean(pools[-1][1]):
            rates, more = pools.pop()
            pools[-1] = (pools[-1][0] + rates, pools[-1][1] + more)
    points = [(rate, fmean(found)) for rates, found in pools for rate in rates]
    for (rate, share), (higher, less) in pairwise(points):
        if share >= SHARE > less:
            return float(round(rate + (higher - rate) * (share - SHARE) / (share - less), 3))
    return None


def targets_of(text: str) -> Target:
    ttft_s, tpot_s = map(float, text.split("/"))
    return Target(ttft_s, tpot_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["measure", "predict"])
    parser.add_argument("trace", type=Path, help="A trace, as bench roles takes it.")
    parser.add_argument("file", type=Path, help="JSON file of the report; runs are added to those that it has.")
    parser.add_argument("--variants", nargs="+", default=["512", "split", "auto"], help="Budgets, split, auto.")
    parser.add_argument("--rates", type=lambda text: [float(each) for each in text.split(",")], default=[2.0, 4.0])
    parser.add_argument("--targets", type=targets_of, default="1/0.02", help="TTFT/TPOT in seconds.")
    parser.add_argument("--length", type=float, default=0.25, help="Factor of the trace's lengths.")
    parser.add_argument("--budget", type=int, default=512, help="Tokens of a step, unless a variant names them.")
    parser.add_argument("--num-requests", type=int, default=80, help="Requests of a run.")
    parser.add_argument("--fit-requests", type=int, default=40, help="Requests to whose steps the times are fitted.")
    parser.add_argument("--note", default="", help="About the machine, kept in the file.")
    given = parser.parse_args()
    report = json.loads(given.file.read_text(encoding="utf-8")) if given.file.exists() else {}
    (measure if given.mode == "measure" else predict)(given, report)
    if given.mode == "measure":
        report["priority"], report["note"] = priority(), given.note or report.get("note", "")
    report["commands"] = [*report.get("commands", []), f"python -m tools.serving.serve_roles {' '.join(sys.argv[1:])}"]
    report |= {"ttft_s": given.targets.ttft_s, "tpot_s": given.targets.tpot_s, "num_requests": given.num_requests}
    given.file.write_text(json.dumps(finished(report), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report.get("goodput", "measured")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
