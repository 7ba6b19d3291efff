"""`bench encoders`: this engine's vectors against llama.cpp's and transformers', on the same weights, in turns.

For each model and type of the peers' weights all sides load one folder of seeded random weights. Ours loads it once for
each of its types that `PEER_DTYPES` compares with these. Vectors of every workload are compared, then each is timed in
rounds, all sides in turns, the first one rotating. Ours is `LLM.embed`; a peer runs the fastest of its own settings.
Our server is also started on the folder: the time until it is ready, its memory, and how much longer a request over
HTTP takes than `LLM.embed`.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bench.cpu_rates import unit_rates
from runtime.bench.environment import finished, usable_cores
from runtime.bench.memory import MemoryWatch, descendants
from runtime.bench.metrics import BenchmarkError, interleaved
from runtime.bench.peers.child_process import ChildProcess
from runtime.bench.peers.cpu_limits import CpuLimits, LimitMeter, open_meter
from runtime.bench.peers.encoders import PEER_DTYPES, SHAPES, EncoderShape, Texts, judge
from runtime.bench.peers.rounds import CLOCKS, OURS, PEER_ENGINES
from runtime.llm import LLM
from runtime.own_packages import python_module

Vectors = NDArray[np.float32]
Say = Callable[[str], None]

LEAST_COSINE = {"float32": 0.9995, "bfloat16": 0.99, "int8": 0.98}
"""The least cosine of a vector of ours and a peer's; llama.cpp approximates GELU."""
NUM_STARTS = 3
NUM_REQUESTS = 30
_REPEATS_OF_ONE = 20
_MANY_TEXTS = 32
"""With more texts, a peer chooses its setting by every second one, and those are compared."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Vectors and seconds of one call, by the chosen clock and of the processor."""

    vectors: Vectors
    clock_s: float
    used_s: float


class OurSide:
    """`LLM.embed`, vectors of length one."""

    def __init__(self, name: str, llm: LLM, shape: EncoderShape, clock: str) -> None:
        self.name = name
        self._llm, self._pooling, self._clock = llm, shape.pooling, CLOCKS[clock]

    def embed(self, prompts: list[list[int]]) -> Turn:
        start, used = self._clock(), time.process_time()
        found = self._llm.embed(prompts, pooling=self._pooling, normalize=True, use_tqdm=False)
        seconds, used_s = self._clock() - start, time.process_time() - used
        return Turn(np.array([each.outputs.embedding for each in found], np.float32), seconds, used_s)


class PeerSide:
    """A peer in its own process, which has loaded the folder; `variant` is its setting."""

    def __init__(
        self, name: str, child: ChildProcess, folder: Path, shape: EncoderShape, dtype: str, clock: str
    ) -> None:
        self.name = name
        self._child, self._folder, self._pooling = child, folder, shape.pooling
        reply = child.ask(
            "load", folder=str(folder), threads=usable_cores(), dtype=dtype, clock=clock, task="embed"
        )  # fmt: skip
        self._variants: list[str] = reply.pop("variants")
        self.variant = self._variants[0]
        self.versions = {key: value for key, value in reply.items() if key not in ("processor_s", "system")}

    def embed(self, prompts: list[list[int]]) -> Turn:
        path = str(self._folder / "vectors.npy")
        reply = self._child.ask(
            "embed", timeout_s=3600.0, prompts=prompts, pooling=self._pooling, variant=self.variant, path=path
        )
        return Turn(np.load(path), reply["wall_s"], reply["used_s"])

    def choose_variant(self, prompts: list[list[int]]) -> None:
        """The fastest variant, by one run each after a first one of a few texts."""
        self.embed(prompts[:2])
        seconds = {}
        for variant in self._variants:
            self.variant = variant
            seconds[variant] = self.embed(prompts).clock_s
        self.variant = min(seconds, key=lambda variant: seconds[variant])


def bench_encoders(
    pythons: Mapping[str, Path],
    models: Sequence[str],
    dtypes: Sequence[str],
    texts: Sequence[Texts],
    *,
    num_rounds: int = 5,
    clock: str = "wall",
    serves: bool = True,
    shapes: Mapping[str, EncoderShape] = SHAPES,
    meter: LimitMeter | None = None,
    seed: int = 0,
    say: Say = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, Any]:
    """Measures the texts with each of the models and types of weights.

    pythons  each peer's Python, by the engine's name; a peer without one is left out
    clock    "processor" takes each side's processor time, which other processes hardly change; on one core alone
    serves   whether our server is started, too
    meter    of the limits; a new one if None

    `results[i]` has by side the seconds of each round, `ratio` of ours to the better peer (above 1: ours is faster),
    `share_of_limit`, `goal` and `is_met`. `served[i]` has start, memory and HTTP. Raises `BenchmarkError` if vectors
    differ.
    """
    if num_rounds < 1:
        raise BenchmarkError(f"--num-rounds {num_rounds} must be at least 1")
    if clock != "wall" and usable_cores() != 1:
        raise BenchmarkError(f"--clock {clock} needs one core, not {usable_cores()}: `taskset -c 0 xserv bench ...`")
    peers = [engine for engine in PEER_ENGINES if engine.name in pythons]
    report: dict[str, Any] = {
        "clock": clock, "num_rounds": num_rounds, "sides": [OURS, *(engine.name for engine in peers)], "peers": {},
        "results": [], "served": [],
    }  # fmt: skip
    measured = []
    with contextlib.ExitStack() as outer:
        if meter is None:
            one_thread = clock == "processor"
            meter = (
                LimitMeter(partial(CpuLimits.of, 1, unit_rates())) if one_thread else outer.enter_context(open_meter())
            )
        for model in models:
            for peer_dtype in dict.fromkeys(PEER_DTYPES[dtype] for dtype in dtypes):
                own = [dtype for dtype in dtypes if PEER_DTYPES[dtype] == peer_dtype]
                what, shape = f"{model}, {', '.join(own)}", shapes[model]
                say(f"{what}: writing and loading")
                with tempfile.TemporaryDirectory(prefix="xserv-encoders-") as name, contextlib.ExitStack() as stack:
                    folder = Path(name)
                    shape.write(folder, seed, peer_dtype)
                    ours = {}
                    for dtype in own:
                        llm = stack.enter_context(LLM(skip_tokenizer_init=True, **_arguments(folder, dtype)))
                        ours[dtype] = OurSide(f"{OURS} {dtype}", llm, shape, clock)
                    with contextlib.ExitStack() as inner:
                        others = []
                        for engine in peers:
                            child = inner.enter_context(
                                ChildProcess([str(pythons[engine.name]), str(engine.script)], engine.name)
                            )
                            others.append(PeerSide(engine.name, child, folder, shape, peer_dtype, clock))
                            report["peers"].setdefault(engine.name, others[-1].versions)
                        for each in texts:
                            say(f"{what}: {each.name}")
                            prompts = each.ids(shape.config["vocab_size"], seed)
                            for dtype, row in _measured(ours, others, prompts, num_rounds, meter).items():
                                row = {"model": model, "dtype": dtype, "texts": each.name, **row}
                                measured.append((shape, each, row))
                    for dtype in own if serves else ():
                        say(f"{model}, {dtype}: serving")
                        served = _served(folder, ours[dtype], texts[0].ids(shape.config["vocab_size"], seed)[0], dtype)
                        report["served"].append({"model": model, "dtype": dtype, **served})
        report["limits"] = meter.report()
        for shape, each, row in measured:
            limit_s = shape.least_s(meter.best(), row["dtype"], each.lengths)
            median_s = row["sides"][OURS]["median_s"]
            row.update(limit_s=limit_s, times_limit=median_s / limit_s, share_of_limit=limit_s / median_s)
            judge(each, row["dtype"], row)
            report["results"].append(row)
    return finished(report)


def _arguments(folder: Path, dtype: str) -> dict[str, Any]:
    if dtype == "int8":
        return {"model": str(folder), "device": "cpu", "dtype": "float32", "quantization": "int8"}
    return {"model": str(folder), "device": "cpu", "dtype": dtype}


def _measured(
    ours: Mapping[str, OurSide], peers: Sequence[PeerSide], prompts: list[list[int]], num_rounds: int,
    meter: LimitMeter,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """By type of our weights, the row but for the fields that depend on the limits."""
    step = 2 if len(prompts) > _MANY_TEXTS else 1
    few = prompts[::step]
    for peer in peers:
        peer.choose_variant(few)
    vectors = {dtype: side.embed(prompts).vectors.astype(np.float64) for dtype, side in ours.items()}
    agreement: dict[str, dict[str, float]] = {dtype: {} for dtype in ours}
    for peer in peers:
        theirs = peer.embed(few).vectors
        for dtype, found in vectors.items():
            cosine = float((found[::step] * theirs).sum(axis=1).min())
            agreement[dtype][peer.name] = cosine
            if not cosine >= LEAST_COSINE[dtype]:
                raise BenchmarkError(
                    f"{peer.name}'s vectors differ from ours: a cosine is {cosine:.5f}, less than {LEAST_COSINE[dtype]}"
                )
    repeats = _REPEATS_OF_ONE if len(prompts) == 1 else 1

    def turn(side: OurSide | PeerSide) -> Callable[[], list[Turn]]:
        return lambda: [side.embed(prompts) for _ in range(repeats)]

    def limits() -> list[Turn]:
        meter.measure()
        return []

    sides: list[OurSide | PeerSide] = [*ours.values(), *peers]
    turns = interleaved({**{side.name: turn(side) for side in sides}, "limits": limits}, num_rounds)
    summaries = {side.name: _summary(turns[side.name]) for side in sides}
    best = min((summaries[peer.name]["median_s"] for peer in peers), default=None)
    return {
        dtype: {
            "sides": {OURS: summaries[own.name], **{peer.name: summaries[peer.name] for peer in peers}},
            "variants": {peer.name: peer.variant for peer in peers},
            "least_cosine": agreement[dtype],
            "ratio": None if best is None else best / summaries[own.name]["median_s"],
        }
        for dtype, own in ours.items()
    }


def _summary(rounds: list[list[Turn]]) -> dict[str, Any]:
    """The medians of a side's rounds."""
    seconds = [statistics.median(turn.clock_s for turn in turns) for turns in rounds]
    used_s = statistics.median(turn.used_s for turns in rounds for turn in turns)
    return {"median_s": statistics.median(seconds), "median_processor_s": used_s, "rounds_s": seconds}


def _served(folder: Path, ours: OurSide, prompt: list[int], dtype: str) -> dict[str, Any]:
    """A warm start of our server, the best of some, and the processor time of its processes until then; its memory; and
    one text over HTTP in turns with `LLM.embed`."""
    command = [sys.executable, "-P", *python_module("runtime.bench.load.own_server")]
    starts, used = [], []
    for number in range(NUM_STARTS):
        begin = time.perf_counter()
        with ChildProcess(command, "our server") as server, MemoryWatch(server.pid) as watch:
            started = server.ask("start", **_arguments(folder, dtype))
            starts.append(time.perf_counter() - begin)
            used.append([_processor_s(pid) for pid in descendants(server.pid)])
            if number < NUM_STARTS - 1:
                continue
            found = _over_http(started, server.pid, ours, prompt)
            peak = watch.peak.total
    (http_ms, http_used_ms), (direct_ms, direct_used_ms) = (
        [1e3 * statistics.median(each) for each in zip(*found[name], strict=True)] for name in ("http", "direct")
    )
    return {
        "start_s": min(starts),
        "starts_s": starts,
        "starts_processor_s": used,
        "weight_bytes": started["weight_bytes"],
        "kv_cache_bytes": started["kv_cache_bytes"],
        "peak_bytes": peak,
        "processes": watch.peak.processes,
        "beside_weights_bytes": peak - started["weight_bytes"],
        "direct_ms": direct_ms,
        "http_ms": http_ms,
        "more_ms": http_ms - direct_ms,
        "more_processor_ms": http_used_ms - direct_used_ms,
    }


def _processor_s(pid: int) -> float:
    """The processor time of a process so far."""
    ticks = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _thread_s(pid: int) -> float:
    """The processor time of its living threads so far, to the nanosecond."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text(encoding="utf-8").split()[0]) for file in files) / 1e9


def _over_http(
    started: Mapping[str, Any], server: int, ours: OurSide, prompt: list[int]
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of requests for one text, "http" and "direct" in turns, on one connection: of the clock, and of the
    processor in the server's processes, or in ours."""
    connection = http.client.HTTPConnection("127.0.0.1", started["port"])
    body = json.dumps({"model": started["model"], "input": prompt, "encoding_format": "base64"})
    processes = descendants(server)

    def over_http() -> tuple[float, float]:
        used, start = sum(map(_thread_s, processes)), time.perf_counter()
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer = connection.getresponse().read()
        seconds = time.perf_counter() - start
        base64.b64decode(json.loads(answer)["data"][0]["embedding"])
        return seconds, sum(map(_thread_s, processes)) - used

    def direct() -> tuple[float, float]:
        start = time.perf_counter()
        used_s = ours.embed([prompt]).used_s
        return time.perf_counter() - start, used_s

    try:
        return interleaved({"http": over_http, "direct": direct}, NUM_REQUESTS, warm_ups=3)
    finally:
        connection.close()
