"""`bench peers`: this engine against Hugging Face transformers, on the same weights, in turns.

Both sides load one folder of GPT-2's shape with seeded random weights in float32. First they are compared:
logits of one prompt, and the greedy tokens of every workload. Then each workload is timed in rounds, peer and
ours in turns (who begins alternates), while the other side is idle, which is measured too. A ratio above 1
means that ours is faster.

Ours is timed through `EngineClient`, scheduler, paged cache and sampler included; the peer through its
model's forward in the leanest loop (`peer_transformers`), with all cores, inference mode, SDPA, and the
faster of its KV caches.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.bench.burst import Burst, run_burst
from runtime.bench.child_process import ChildProcess
from runtime.bench.disturbance import Disturbance
from runtime.bench.environment import describe_engine, usable_cores
from runtime.bench.gpt2_folder import Gpt2Shape, write_gpt2_folder
from runtime.bench.greedy import check_same_greedy
from runtime.bench.metrics import BenchmarkError, check_finite, check_outputs
from runtime.bench.prompts import random_prompts

if TYPE_CHECKING:
    from runtime.llm import LLM

PEER_SCRIPT = Path(__file__).with_name("peer_transformers.py")
LOGITS_TOLERANCE = 1e-3  # max|a - b| / max|b|
IDLE_SHARE = 0.10  # most processor time, as a share of wall time, that the waiting side may use
QUIET_SHARE = 0.08  # most of the machine that other processes may use in a round that counts
MOST_ATTEMPTS = 4  # times the wanted number of rounds are tried, in the hope of quiet ones
SETTLE_S = 0.05  # between two measurements, for threads that spin a little before they sleep


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_prompts` prompts of `prompt_len` tokens, `new_tokens` each; what counts is `measure`.

    measure: "decode" (tokens after the first, per second), "prefill" (prompt tokens per second until the first
    new token) or "burst" (all new tokens per second of the whole). `key` is its name on the command line.
    `is_also_sequential`: ours is measured once more with one request after another.
    """

    key: str
    name: str
    num_prompts: int
    prompt_len: int
    new_tokens: int
    measure: str
    is_also_sequential: bool = False


WORKLOADS = (
    Workload("decode-1", "decode, batch 1", 1, 16, 33, "decode"),
    Workload("decode-32", "decode, batch 32", 32, 16, 17, "decode"),
    Workload("prefill", "prefill 512", 1, 512, 1, "prefill"),
    Workload("burst", "burst 32 x 4 -> 8", 32, 4, 8, "burst"),
    Workload("concurrent-8", "8 x 32 -> 32 at once", 8, 32, 32, "burst", is_also_sequential=True),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of one side: tokens per second, and the processor time that others used meanwhile.

    idle_share    of the side that waited, in cores
    others_share  of processes that are no part of this, as a share of the machine; None: unknown
    """

    rate: float
    idle_share: float
    others_share: float | None


@dataclass(slots=True)
class Side:
    """The token rates of one side, one a round."""

    tokens_per_second: list[float]

    def report(self) -> dict[str, Any]:
        rates = self.tokens_per_second
        return {
            "median_tokens_per_second": statistics.median(rates),
            "min_tokens_per_second": min(rates),
            "max_tokens_per_second": max(rates),
            "tokens_per_second": rates,
        }


def named_workloads(names: str) -> tuple[Workload, ...]:
    """Those of comma-separated keys, in the table's order; `BenchmarkError` for one that is not there."""
    wanted = {name.strip() for name in names.split(",")}
    if unknown := wanted - {workload.key for workload in WORKLOADS}:
        known = ", ".join(workload.key for workload in WORKLOADS)
        raise BenchmarkError(f"--workloads: {', '.join(sorted(unknown))!r} is none of {known}")
    return tuple(workload for workload in WORKLOADS if workload.key in wanted)


def find_peer_python(given: Path | None, root: Path) -> Path:
    """The Python named, else `.venv-reference` of the checkout; `BenchmarkError` says what to install."""
    python = given or root / ".venv-reference" / "bin" / "python"
    if python.exists():
        return python
    raise BenchmarkError(
        f"no peer's Python at {python}: make one with `python3 -m venv .venv-reference && "
        ".venv-reference/bin/pip install torch transformers numpy`, or name another with --peer-python"
    )


def bench_peers(
    peer_python: Path,
    *,
    num_rounds: int = 7,
    shape: Gpt2Shape | None = None,
    workloads: tuple[Workload, ...] = WORKLOADS,
    seed: int = 0,
) -> dict[str, Any]:
    """Verifies, then times every workload; `results[i]` has `ours`, `peer`, `ratio` (of the medians) and
    `ratios` (round by round). Raises `BenchmarkError` when the sides disagree or one was not idle."""
    from runtime.llm import LLM

    if num_rounds < 1:
        raise BenchmarkError(f"--num-rounds {num_rounds} must be at least 1")
    shape = shape or Gpt2Shape()
    longest = max(workload.prompt_len + workload.new_tokens for workload in workloads)
    if longest > shape.max_positions:
        raise BenchmarkError(f"a workload of {longest} tokens exceeds the {shape.max_positions} positions")
    with tempfile.TemporaryDirectory(prefix="xserv-peers-") as name:
        folder = Path(name)
        write_gpt2_folder(folder, shape, seed)
        with ChildProcess([str(peer_python), str(PEER_SCRIPT)], "the peer") as peer:
            versions = peer.ask("load", folder=name, threads=usable_cores(), dtype="float32")
            with LLM(name, device="cpu", dtype="float32", skip_tokenizer_init=True) as llm:
                agreement = _compare_logits(llm, peer, folder, min(64, longest), seed)
                results = [_measure(llm, peer, workload, num_rounds, seed) for workload in workloads]
                environment = describe_engine(llm.client.info)
    report = {
        "shape": {
            "hidden_size": shape.hidden_size,
            "num_layers": shape.num_layers,
            "num_heads": shape.num_heads,
            "vocab_size": shape.vocab_size,
        },
        "peer": {"engine": "transformers", "python": str(peer_python), **versions},
        "logits_relative_error": agreement,
        "num_rounds": num_rounds,
        "results": results,
        "environment": environment,
    }
    check_finite(report)
    return report


def _compare_logits(llm: LLM, peer: ChildProcess, folder: Path, length: int, seed: int) -> float:
    [prompt] = random_prompts(1, length, llm.client.info.vocab_size, seed)
    path = peer.ask("logits", token_ids=prompt, path=str(folder / "logits.npy"))["path"]
    theirs = np.load(path)
    ours = np.asarray(llm.logits(prompt))
    if ours.shape != theirs.shape:
        raise BenchmarkError(f"logits {ours.shape} of ours, {theirs.shape} of the peer's")
    error = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not error <= LOGITS_TOLERANCE:
        raise BenchmarkError(f"the peer's logits differ by {error:.2g}, more than {LOGITS_TOLERANCE:g}")
    return error


def _measure(llm: LLM, peer: ChildProcess, workload: Workload, num_rounds: int, seed: int) -> dict[str, Any]:
    vocab_size = llm.client.info.vocab_size
    prompts = random_prompts(workload.num_prompts, workload.prompt_len, vocab_size, seed + 1)
    cache = _faster_cache(peer, prompts, workload)
    expected = peer.ask("generate", prompts=prompts, new_tokens=workload.new_tokens, cache=cache)["token_ids"]
    check_outputs(expected, workload.new_tokens, vocab_size, f"{workload.name}, the peer")
    warm = run_burst(llm.client, prompts, workload.new_tokens)
    check_outputs(warm.token_ids, workload.new_tokens, vocab_size, f"{workload.name}, ours")
    num_ties = check_same_greedy(workload.name, prompts, warm.token_ids, expected, llm.logits)
    run_burst(llm.client, prompts, workload.new_tokens)

    def measure_ours() -> Turn:
        before = peer.ask("clock")["processor_s"]
        watch = Disturbance()
        burst = run_burst(llm.client, prompts, workload.new_tokens)
        used = peer.ask("clock")["processor_s"] - before
        others = watch.share(used)
        check_outputs(burst.token_ids, workload.new_tokens, vocab_size, f"{workload.name}, ours")
        return Turn(_our_rate(burst, workload), used / burst.wall_s, others)

    def measure_peer() -> Turn:
        before = peer.ask("clock")["processor_s"]
        watch, ours_before = Disturbance(), time.process_time()
        reply = peer.ask("generate", prompts=prompts, new_tokens=workload.new_tokens, cache=cache)
        used = time.process_time() - ours_before
        others = watch.share(reply["processor_s"] - before)
        if reply["token_ids"] != expected:
            raise BenchmarkError(f"{workload.name}: the peer gave other tokens than before")
        return Turn(_peer_rate(reply, workload), used / reply["total_s"], others)

    def sequential_rate() -> float:
        """Ours, one request after another; tokens per second."""
        time.sleep(SETTLE_S)
        bursts = [run_burst(llm.client, [prompt], workload.new_tokens) for prompt in prompts]
        tokens = [burst.token_ids[0] for burst in bursts]
        check_same_greedy(f"{workload.name}, one by one", prompts, tokens, expected, llm.logits)
        return workload.num_prompts * workload.new_tokens / sum(burst.wall_s for burst in bursts)

    rounds: list[tuple[Turn, Turn]] = []  # ours, the peer's
    sequential: list[float] = []
    num_quiet = 0
    while num_quiet < num_rounds and len(rounds) < MOST_ATTEMPTS * num_rounds:
        is_ours_first = len(rounds) % 2 == 1
        turns = []
        for measure in (measure_ours, measure_peer) if is_ours_first else (measure_peer, measure_ours):
            time.sleep(SETTLE_S)
            turns.append(measure())
        rounds.append((turns[0], turns[1]) if is_ours_first else (turns[1], turns[0]))
        num_quiet += _others_in(rounds[-1]) <= QUIET_SHARE
        if workload.is_also_sequential and len(sequential) < num_rounds:
            sequential.append(sequential_rate())
    idle_share = max(turn.idle_share for each in rounds for turn in each)
    if idle_share > IDLE_SHARE:
        raise BenchmarkError(
            f"{workload.name}: the side that had to wait used {idle_share:.0%} of a core, "
            f"more than {IDLE_SHARE:.0%}: the two disturbed each other"
        )
    best = sorted(rounds, key=_others_in)[:num_rounds]
    ours, theirs = (Side([each[side].rate for each in best]) for side in (0, 1))
    result: dict[str, Any] = {
        "workload": workload.name,
        "num_prompts": workload.num_prompts,
        "prompt_len": workload.prompt_len,
        "new_tokens": workload.new_tokens,
        "measure": workload.measure,
        "peer_cache": cache,
        "num_ties": num_ties,
        "ours": ours.report(),
        "peer": theirs.report(),
        "ratio": statistics.median(ours.tokens_per_second) / statistics.median(theirs.tokens_per_second),
        "ratios": [a / b for a, b in zip(ours.tokens_per_second, theirs.tokens_per_second)],
        "largest_idle_share": idle_share,
        "largest_others_share": max(map(_others_in, best)),
        "num_rounds_tried": len(rounds),
    }
    if sequential:
        result["one_after_another"] = Side(sequential).report()
        result["times_one_after_another"] = statistics.median(ours.tokens_per_second) / statistics.median(sequential)
    return result


def _others_in(turns: tuple[Turn, Turn]) -> float:
    """The share of the machine that strangers used in the worse of both turns; 0 where the system does not tell."""
    return max(turn.others_share or 0.0 for turn in turns)


def _faster_cache(peer: ChildProcess, prompts: list[list[int]], workload: Workload) -> str:
    """The KV cache of transformers with which the peer is faster here; these runs also warm it up."""
    best = {"dynamic": float("inf"), "static": float("inf")}
    for _ in range(2):
        for cache in best:
            reply = peer.ask("generate", prompts=prompts, new_tokens=workload.new_tokens, cache=cache)
            best[cache] = min(best[cache], 1.0 / _peer_rate(reply, workload))
    return min(best, key=lambda cache: best[cache])


def _our_rate(burst: Burst, workload: Workload) -> float:
    """Tokens per second of what the workload measures."""
    if workload.measure == "decode":
        begin = max(record.token_times_s[0] for record in burst.records)
        later = sum(time_s > begin for record in burst.records for time_s in record.token_times_s)
        return later / (burst.end_s - begin)
    if workload.measure == "prefill":
        return workload.num_prompts * workload.prompt_len / burst.wall_s
    return workload.num_prompts * workload.new_tokens / burst.wall_s


def _peer_rate(reply: dict[str, Any], workload: Workload) -> float:
    if workload.measure == "decode":
        return float(workload.num_prompts * (workload.new_tokens - 1) / reply["decode_s"])
    if workload.measure == "prefill":
        return float(workload.num_prompts * workload.prompt_len / reply["total_s"])
    return float(workload.num_prompts * workload.new_tokens / reply["total_s"])
