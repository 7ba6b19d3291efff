"""One workload of `bench peers`: this engine and peers in their own processes are compared, then timed in turns.

A round measures the processor's limits, followed by one turn of each side; the first side rotates. While one runs, the
others have to be idle, which is measured, as is other load on the machine; the calmest rounds are used.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runtime.bench.environment import Disturbance, usable_cores
from runtime.bench.load.burst import run_burst
from runtime.bench.load.samples import random_prompts
from runtime.bench.metrics import TIE_TOLERANCE, BenchmarkError, check_outputs, check_same_greedy
from runtime.bench.peers.child_process import ChildProcess
from runtime.bench.peers.cpu_limits import LimitMeter
from runtime.bench.peers.workloads import GGUF, Workload
from runtime.engine.messages import AdapterRef
from runtime.llm import LLM

OURS = "xserv"
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
"""The clocks of a process' times. The processor's adds up all threads, so it is used with one alone."""


@dataclass(frozen=True, slots=True)
class PeerEngine:
    """An engine to compare with, and its installation.

    venv      folder of its Python in a checkout
    packages  to install there by pip
    dtypes    its loader's names of the weights' types; unsupported types are absent
    """

    name: str
    script: Path
    venv: str
    packages: str
    dtypes: dict[str, str]

    def python(self, given: Path | None, root: Path) -> Path:
        """The given Python, or that of `venv` in the checkout; `BenchmarkError` names the packages to install."""
        python = given or root / self.venv / "bin" / "python"
        if python.exists():
            return python
        option = "--peer-python" if self.name == TRANSFORMERS.name else "--llama-python"
        raise BenchmarkError(
            f"no Python for {self.name} at {python}: make one with `python3 -m venv {self.venv} && "
            f"{self.venv}/bin/pip install {self.packages}`, or name another with {option}"
        )


TRANSFORMERS = PeerEngine(
    "transformers",
    Path(__file__).with_name("peer_transformers.py"),
    ".venv-reference",
    "torch transformers peft numpy",
    {"float32": "float32", "bfloat16": "bfloat16"},
)
LLAMA = PeerEngine(
    "llama.cpp",
    Path(__file__).with_name("peer_llama.py"),
    ".venv-llama",
    "llama-cpp-python gguf numpy",
    {"float32": "float32", "bfloat16": "bfloat16", "int8": "q8_0", "q4_0": "q4_0", GGUF: GGUF},
)
PEER_ENGINES = (TRANSFORMERS, LLAMA)


def gguf_path(folder: Path, dtype: str) -> Path:
    """The file that llama.cpp's loader makes of a folder's weights as `dtype`."""
    return folder / f"model-{LLAMA.dtypes[dtype]}.gguf"


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a workload by one side; times in seconds since submission of the prompts.

    decode_tokens, decode_s  tokens sampled after every prompt had its first, and their time
    ttft_s, latency_s        medians over the requests
    """

    token_ids: list[list[int]]
    wall_s: float
    decode_tokens: int
    decode_s: float
    ttft_s: float
    latency_s: float

    def rate(self, workload: Workload) -> float:
        """Tokens per second of the workload's measured phase."""
        if workload.measure == "decode":
            return self.decode_tokens / self.decode_s
        per_prompt = workload.prompt_len if workload.measure == "prefill" else workload.new_tokens
        return workload.num_prompts * per_prompt / self.wall_s


class Side(Protocol):
    """A side that can run a workload and report its CPU time."""

    name: str

    def run(self, prompts: list[list[int]], workload: Workload) -> Sample:
        """Greedy tokens of every prompt, end of sequence ignored."""

    def processor_s(self) -> float:
        """The side's CPU time so far."""


class OurSide:
    """This engine through its client: scheduler, paged cache and sampler included."""

    name = OURS

    def __init__(self, llm: LLM, clock: str = "wall") -> None:
        self.llm, self.clock = llm, CLOCKS[clock]

    def run(
        self, prompts: list[list[int]], workload: Workload, adapters: Sequence[AdapterRef | None] | None = None
    ) -> Sample:
        """`adapters` has one for each prompt."""
        burst = run_burst(self.llm.client, prompts, workload.new_tokens, clock=self.clock, adapters=adapters)
        begin = max(record.token_times_s[0] for record in burst.records)
        if workload.measure == "decode" and begin >= min(record.token_times_s[-1] for record in burst.records):
            raise BenchmarkError(
                f"{workload.name}: a sequence ended before another began, since the KV cache holds too few at once: "
                "raise --kv-cache-bytes"
            )
        later = sum(time_s > begin for record in burst.records for time_s in record.token_times_s)
        return Sample(
            token_ids=burst.token_ids,
            wall_s=burst.wall_s,
            decode_tokens=later,
            decode_s=burst.end_s - begin,
            ttft_s=statistics.median(record.ttft_s for record in burst.records),
            latency_s=statistics.median(record.latency_s for record in burst.records),
        )

    def processor_s(self) -> float:
        return time.process_time()


class Peer(ABC):
    """A side that is another engine, with settings of its own; `variant` is the current one."""

    name: str
    variants: list[str]
    variant: str

    @abstractmethod
    def run(self, prompts: list[list[int]], workload: Workload) -> Sample:
        """See `Side`."""

    @abstractmethod
    def processor_s(self) -> float:
        """See `Side`."""

    def choose_variant(self, prompts: list[list[int]], workload: Workload) -> None:
        """Chooses the peer's fastest variant: by one run each, then another of the best two.

        The runs also warm it up.
        """
        best = dict.fromkeys(self.variants, 0.0)

        def by_rate() -> list[str]:
            return sorted(best, key=lambda variant: best[variant], reverse=True)

        def try_out(variants: Sequence[str]) -> None:
            for self.variant in variants:
                best[self.variant] = max(best[self.variant], self.run(prompts, workload).rate(workload))

        self.run(prompts, workload)
        try_out(self.variants)
        try_out(by_rate()[:2])
        self.variant = by_rate()[0]


class PeerSide(Peer):
    """A peer that has loaded the same folder, or GGUF file.

    `logits_error` is the error of its logits relative to ours, max|a - b| / max|b|.
    """

    def __init__(
        self, engine: PeerEngine, child: ChildProcess, folder: Path, model: Path, dtype: str, clock: str = "wall",
        adapters: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        self.name = engine.name
        self._child = child
        self._folder = folder
        name, threads = engine.dtypes[dtype], usable_cores()
        given = [str(each) for each in adapters]
        reply = child.ask("load", folder=str(model), threads=threads, dtype=name, clock=clock, adapters=given)
        del reply["processor_s"]
        self.variants: list[str] = reply.pop("variants")
        self.versions = {**reply, "dtype": engine.dtypes[dtype]}
        self.variant = self.variants[0]
        self.logits_error = 0.0

    def run(self, prompts: list[list[int]], workload: Workload, adapters: Sequence[int] = ()) -> Sample:
        """`adapters` has the number of one for each prompt."""
        reply = self._child.ask(
            "generate", prompts=prompts, new_tokens=workload.new_tokens, variant=self.variant, adapters=list(adapters)
        )
        return Sample(
            token_ids=reply["token_ids"],
            wall_s=reply["total_s"],
            decode_tokens=workload.num_prompts * (workload.new_tokens - 1),
            decode_s=reply["decode_s"],
            ttft_s=reply["prefill_s"],
            latency_s=reply["total_s"],
        )

    def processor_s(self) -> float:
        return float(self._child.ask("clock")["processor_s"])

    def logits(self, token_ids: list[int], adapter: int | None = None) -> np.ndarray[Any, Any]:
        """Float32 `[num_tokens, vocab]`."""
        file = str(self._folder / "logits.npy")
        path = self._child.ask("logits", token_ids=token_ids, path=file, adapter=adapter)["path"]
        return np.asarray(np.load(path))


LOGITS_TOLERANCE = {"float32": 2e-3, "bfloat16": 4e-2, "int8": 8e-2, GGUF: 8e-2}
"""Most of max|a - b| / max|b| between our logits and a peer's. llama.cpp keeps keys and values in float16; with
bfloat16 weights transformers rounds every activation; int8 and q8_0 round weights and activations each in
their way; with a GGUF file, activations alone."""

IDLE_SHARE = 0.10  # most CPU time, as a share of wall time, of idle sides
QUIET_SHARE = 0.08  # most of the machine that other processes may use in a used round
MOST_ATTEMPTS = 2  # times the wanted number of rounds, to find quiet ones
SETTLE_S = 0.05  # between two measurements, for threads that spin before they sleep


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of one side, and other processes' CPU time meanwhile.

    idle_share    of the waiting sides, the worst of them, in cores
    others_share  of unrelated processes, as a share of the machine; None if unknown
    """

    sample: Sample
    idle_share: float
    others_share: float | None

    @property
    def disturbance(self) -> float:
        """The larger of both, relative to their limits."""
        return max(self.idle_share / IDLE_SHARE, (self.others_share or 0.0) / QUIET_SHARE)


def compare_logits(ours: OurSide, peer: PeerSide, length: int, dtype: str, seed: int) -> None:
    """Sets the peer's `logits_error` over a prompt of `length` tokens; `BenchmarkError` above the tolerance."""
    [prompt] = random_prompts(1, length, ours.llm.client.info.vocab_size, seed)
    mine, theirs = np.asarray(ours.llm.logits(prompt)), peer.logits(prompt)
    if mine.shape != theirs.shape:
        raise BenchmarkError(f"logits {mine.shape} of ours, {theirs.shape} of {peer.name}")
    error = float(np.abs(mine - theirs).max() / np.abs(theirs).max())
    if not error <= LOGITS_TOLERANCE[dtype]:
        raise BenchmarkError(f"{peer.name}'s logits differ by {error:.2g}, more than {LOGITS_TOLERANCE[dtype]:g}")
    peer.logits_error = error


def measure_workload(
    ours: OurSide,
    peers: Sequence[Peer],
    workload: Workload,
    dtype: str,
    num_rounds: int,
    seed: int,
    meter: LimitMeter,
    is_calm: bool = True,
) -> dict[str, Any]:
    """Verifies and times one workload. Raises `BenchmarkError` if sides disagree or a waiting side was busy, and
    `PeerDiedError`.

    Without `is_calm` rounds count whatever other processes do.

    In the report `sides` has each side's rates; `ratios` ours to each peer's, of the medians; `round_ratios` round by
    round.
    """
    llm = ours.llm
    vocab_size = llm.client.info.vocab_size
    prompts = random_prompts(workload.num_prompts, workload.prompt_len, vocab_size, seed + 1)
    expected = {OURS: ours.run(prompts, workload).token_ids}
    check_outputs(expected[OURS], workload.new_tokens, vocab_size, f"{workload.name}, {OURS}")
    num_ties = {}
    for peer in peers:
        peer.choose_variant(prompts, workload)
        tokens = expected[peer.name] = peer.run(prompts, workload).token_ids
        if not isinstance(peer, PeerSide):  # it tells times alone
            continue
        what = f"{workload.name}, {peer.name}"
        check_outputs(tokens, workload.new_tokens, vocab_size, what)
        tolerance = _tie_tolerance(llm.logits(prompts[0]), peer.logits_error)
        num_ties[peer.name] = check_same_greedy(what, prompts, expected[OURS], tokens, llm.logits, tolerance)
    ours.run(prompts, workload)

    sides: list[Side] = [ours, *peers]
    rounds: list[dict[str, Turn]] = []
    sequential: list[float] = []
    num_quiet = 0
    while num_quiet < num_rounds and len(rounds) < MOST_ATTEMPTS * num_rounds:
        first = len(rounds) % len(sides)
        turns = {}
        meter.measure()
        for side in (*sides[first:], *sides[:first]):
            time.sleep(SETTLE_S)
            turns[side.name] = _turn(side, sides, prompts, workload)
            if turns[side.name].sample.token_ids != expected[side.name]:
                raise BenchmarkError(f"{workload.name}: {side.name} gave other tokens than before")
        rounds.append(turns)
        num_quiet += not is_calm or _disturbance(turns) <= 1.0
        if workload.is_also_sequential and len(sequential) < num_rounds:
            sequential.append(_sequential_rate(ours, prompts, workload, expected[OURS]))
    best = sorted(rounds, key=_disturbance)[:num_rounds]
    idle_share = max(turn.idle_share for turns in best for turn in turns.values())
    if idle_share > IDLE_SHARE:
        raise BenchmarkError(
            f"{workload.name}: a side that had to wait used {idle_share:.0%} of a core, "
            f"more than {IDLE_SHARE:.0%}: the sides disturbed each other"
        )
    rates = {side.name: [turns[side.name].sample.rate(workload) for turns in best] for side in sides}
    result: dict[str, Any] = {
        "workload": workload.key,
        "name": workload.name,
        "model": workload.model,
        "dtype": dtype,
        "num_prompts": workload.num_prompts,
        "prompt_len": workload.prompt_len,
        "new_tokens": workload.new_tokens,
        "measure": workload.measure,
        "sides": {side.name: _side_report(rates[side.name], best, side.name) for side in sides},
        "variants": {peer.name: peer.variant for peer in peers},
        "num_ties": num_ties,
        "ratios": {peer.name: statistics.median(rates[OURS]) / statistics.median(rates[peer.name]) for peer in peers},
        "round_ratios": {peer.name: [a / b for a, b in zip(rates[OURS], rates[peer.name])] for peer in peers},
        "largest_idle_share": idle_share,
        "largest_others_share": max(turn.others_share or 0.0 for turns in best for turn in turns.values()),
        "num_rounds_tried": len(rounds),
    }
    if sequential:
        result["one_after_another"] = _rates(sequential)
        result["times_one_after_another"] = statistics.median(rates[OURS]) / statistics.median(sequential)
    return result


def _turn(side: Side, sides: Sequence[Side], prompts: list[list[int]], workload: Workload) -> Turn:
    before = {each.name: each.processor_s() for each in sides}
    watch = Disturbance()
    sample = side.run(prompts, workload)
    used = {each.name: each.processor_s() - before[each.name] for each in sides}
    others_share = watch.share(sum(seconds for name, seconds in used.items() if name != OURS))
    waiting = [seconds for name, seconds in used.items() if name != side.name]
    return Turn(sample, max(waiting, default=0.0) / sample.wall_s, others_share)


def _disturbance(turns: dict[str, Turn]) -> float:
    return max(turn.disturbance for turn in turns.values())


def _tie_tolerance(logits: np.ndarray[Any, Any], error: float) -> float:
    """The largest difference of logits that counts as a tie: each may be off by twice the measured error."""
    return max(TIE_TOLERANCE, 4.0 * error * float(np.abs(logits).max()))


def _sequential_rate(ours: OurSide, prompts: list[list[int]], workload: Workload, expected: list[list[int]]) -> float:
    """Ours, one request after another; tokens per second."""
    time.sleep(SETTLE_S)
    samples = [ours.run([prompt], workload) for prompt in prompts]
    tokens = [sample.token_ids[0] for sample in samples]
    check_same_greedy(f"{workload.name}, one by one", prompts, tokens, expected, ours.llm.logits)
    return workload.num_prompts * workload.new_tokens / sum(sample.wall_s for sample in samples)


def _side_report(rates: list[float], rounds: list[dict[str, Turn]], name: str) -> dict[str, Any]:
    samples = [turns[name].sample for turns in rounds]
    return {
        **_rates(rates),
        "ttft_ms": 1e3 * statistics.median(sample.ttft_s for sample in samples),
        "latency_ms": 1e3 * statistics.median(sample.latency_s for sample in samples),
    }


def _rates(rates: list[float]) -> dict[str, Any]:
    return {
        "median_tokens_per_second": statistics.median(rates),
        "min_tokens_per_second": min(rates),
        "max_tokens_per_second": max(rates),
        "tokens_per_second": rates,
    }
