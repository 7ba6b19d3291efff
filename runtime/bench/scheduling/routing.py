"""`bench routing`: several engines under each routing policy, on prompts that share beginnings, and on such of which
nearly all have the same one; and one engine killed in the middle.

Beginnings fill a named share of all engines' caches together, so that no engine alone can keep them all. A fixed number
of requests is open; the next is sent when one has ended. Each round runs every policy on empty caches, with prompts
that no round before had.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np

from runtime.bench.environment import describe_engine
from runtime.bench.load.traces import Trace, random_tokens, shared_prefixes
from runtime.bench.metrics import BenchmarkError
from runtime.engine.config import RoutingPolicy
from runtime.engine.errors import EngineDeadError
from runtime.engine.messages import EngineOutput, EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.parallel.fleet import Fleet

PREFILL_BOUND = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 640, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
"""So small that a round takes seconds; a prompt of 2,100 tokens takes far longer than 16 decodes all the same."""

TIMEOUT_S = 600.0
HOT_SHARE = 0.9


@contextmanager
def small_model() -> Iterator[dict[str, Any]]:
    """Arguments for engines with random weights of these shapes."""
    with tempfile.TemporaryDirectory(prefix="prefill-bound-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(PREFILL_BOUND), encoding="utf-8")
        yield {"model": folder, "load_format": "dummy", "seed": 0}


def bench_routing(
    arguments: dict[str, Any],
    *,
    num_engines: int,
    cached_prefixes: int,
    share: float,
    prefix_len: int,
    own_len: int,
    output_len: int,
    num_requests: int,
    concurrency: int,
    num_rounds: int,
    policies: Sequence[RoutingPolicy] = get_args(RoutingPolicy),
) -> dict[str, Any]:
    """The report. Throughput is requests a second, and a second of processor time of the busiest engine: what the first
    would be if nobody else used the machine. Each engine's cache holds ``cached_prefixes`` beginnings; there are
    ``share`` times as many as all caches hold. Raises ``BenchmarkError``, and what starting engines raises."""
    length = prefix_len + own_len + output_len
    block_size = arguments.get("block_size", 16)
    num_prefixes = max(1, int(share * num_engines * cached_prefixes))
    num_blocks = -(-cached_prefixes * prefix_len // block_size)
    settings = {
        **arguments, "max_model_len": length, "num_blocks": num_blocks, "data_parallel_size": num_engines,
        "routing_policy": "prefix-aware", "max_num_seqs": concurrency,
    }  # fmt: skip
    fleet = Fleet(settings.pop("model", None), **settings)
    try:
        traces = {
            name: shared_prefixes(
                num_requests=num_requests, num_prefixes=num_prefixes, prefix_len=prefix_len, own_len=own_len,
                output_len=output_len, hot_share=hot_share,
            )
            for name, hot_share in (("shared", 0.0), ("skewed", HOT_SHARE))
        }  # fmt: skip
        _run(fleet, traces["shared"].head(2 * num_engines), concurrency, seed=0)  # compiles and records
        rates: dict[str, dict[str, list[float]]] = {name: {} for name in traces}
        hits: dict[str, dict[str, list[float]]] = {name: {} for name in traces}
        busiest: dict[str, dict[str, list[float]]] = {name: {} for name in traces}
        for number in range(num_rounds):
            for name, trace in traces.items():
                for policy in policies:
                    _forget(fleet)
                    fleet.router.policy = policy
                    before, begun = _cache_counts(fleet), _processor_seconds(fleet)
                    seconds, reasons = _run(fleet, trace, concurrency, seed=number + 1)
                    if set(reasons) != {"length"}:
                        ended = sorted(set(map(str, reasons)))
                        raise BenchmarkError(f"{policy} on {name}: requests ended with {ended}")
                    queried, hit = (after - old for after, old in zip(_cache_counts(fleet), before))
                    spent = max(end - start for start, end in zip(begun, _processor_seconds(fleet)))
                    busiest[name].setdefault(policy, []).append(len(reasons) / spent)
                    rates[name].setdefault(policy, []).append(len(reasons) / seconds)
                    hits[name].setdefault(policy, []).append(hit / queried)
        fleet.router.policy = "prefix-aware"
        death = _kill_in_the_middle(fleet, traces["shared"], concurrency)
        return {
            "environment": describe_engine(fleet.info),
            "num_engines": num_engines, "num_prefixes": num_prefixes, "cached_prefixes": cached_prefixes,
            "prefix_len": prefix_len, "own_len": own_len, "output_len": output_len, "concurrency": concurrency,
            "num_requests": num_requests, "num_rounds": num_rounds,
            "requests_per_s": rates,
            "requests_per_processor_s": busiest,
            "hit_rates": {name: {policy: statistics.median(each) for policy, each in found.items()}
                          for name, found in hits.items()},
            "ratios": {name: _ratio(found) for name, found in rates.items()},
            "processor_ratios": {name: _ratio(found) for name, found in busiest.items()},
            "death": death,
        }  # fmt: skip
    finally:
        fleet.close()


def _ratio(rates: dict[str, list[float]]) -> float:
    """Prefix-aware over round-robin, the median of the rounds."""
    return statistics.median(
        aware / plain for aware, plain in zip(rates["prefix-aware"], rates["round-robin"], strict=True)
    )


def _run(
    fleet: Fleet, trace: Trace, concurrency: int, seed: int, kill_after: int | None = None
) -> tuple[float, list[str | None]]:
    """Seconds for all requests, and how each has ended; None: it has not. With ``kill_after`` an engine is killed when
    so many were sent; who finds no engine then has ended with "refused"."""
    fill = random_tokens(fleet.info.vocab_size, seed)
    prompts = [trace.prompt_ids(index, fill).tolist() for index in range(len(trace.requests))]
    reasons: list[str | None] = [None] * len(prompts)
    room, done = threading.Semaphore(concurrency), threading.Semaphore(0)

    def sink(index: int, output: EngineOutput) -> None:
        if output.finish_reason is not None:
            reasons[index] = output.finish_reason
            room.release()
            done.release()

    begun = time.perf_counter()
    for index, (prompt, entry) in enumerate(zip(prompts, trace.requests)):
        if not room.acquire(timeout=TIMEOUT_S):
            break
        if index == kill_after:
            pid = fleet.engines[0].pid
            assert pid is not None, "the engine to be killed is not there"
            os.kill(pid, signal.SIGKILL)
        request = EngineRequest(
            request_id=f"{seed}-{index}",
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0.0, max_tokens=entry.output_len, ignore_eos=True, detokenize=False),
        )
        try:
            fleet.submit(request, lambda output, index=index: sink(index, output))  # type: ignore[misc]
        except EngineDeadError:
            reasons[index] = "refused"
            room.release()
            done.release()
    for _ in prompts:
        if not done.acquire(timeout=TIMEOUT_S):
            break
    return time.perf_counter() - begun, reasons


def _kill_in_the_middle(fleet: Fleet, trace: Trace, concurrency: int) -> dict[str, Any]:
    """What becomes of the requests when an engine is killed at half of them: each must end, and only those that were
    there with an error."""
    _forget(fleet)
    seconds, reasons = _run(fleet, trace, concurrency, seed=0, kill_after=len(trace.requests) // 2)
    counts = {reason or "lost": reasons.count(reason) for reason in dict.fromkeys(reasons)}
    return {"seconds": seconds, "ended": counts, "lost": reasons.count(None)}


def _forget(fleet: Fleet) -> None:
    """Empties all caches, and waits until the router knows."""
    fleet.reset_prefix_cache().result(TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while len(fleet.router.index):
        if time.monotonic() > deadline:
            raise BenchmarkError("the engines did not forget their prefixes")
        time.sleep(0.01)


def _processor_seconds(fleet: Fleet) -> list[float]:
    """Of each engine's process so far."""
    found = []
    for client in fleet.engines:
        fields = Path(f"/proc/{client.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return found


def _cache_counts(fleet: Fleet) -> Sequence[int]:
    """Tokens looked up and found, of all engines; waits until these have said what they did last."""
    time.sleep(1.2)
    stats = fleet.stats()
    return np.array([stats.prefix_cache_queries, stats.prefix_cache_hits]).tolist()  # type: ignore[no-any-return]
