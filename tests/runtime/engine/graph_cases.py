"""Engines and requests for which recorded decode steps are held against eager ones, on every device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from runtime.engine.engine import Engine
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineOutput, EngineRequest
from tests.runtime.engine.fakes import Collected, collect, request

KINDS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"temperature": 0.9, "seed": 3, "top_k": 8, "logprobs": 0},
    {"temperature": 0.8, "seed": 4, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.7, "seed": 5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.3, "logprobs": 1},
    {"logit_bias": {4: 3.0, 5: -9.0}},
    {"stop_token_ids": [7, 8, 9, 10, 11, 12], "min_tokens": 3},
    {"temperature": 1.0, "seed": 6, "n": 2},
    {"prompt_logprobs": 1},
]


def new_engine(folder: Path, device: str, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {
        "max_model_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 32, "block_size": 8, "num_blocks": 64,
    }  # fmt: skip
    return build_engine(folder, device=device, **{**defaults, **settings})


def mixed_requests(count: int, vocab_size: int) -> list[EngineRequest]:
    """All kinds of sampling; prompts with common beginnings."""
    rng = random.Random(2)
    stem = [rng.randrange(13, vocab_size) for _ in range(20)]
    made = []
    for i in range(count):
        prompt = stem[: rng.randrange(8, 20)] + [rng.randrange(13, vocab_size) for _ in range(rng.randrange(1, 6))]
        params = {"max_tokens": rng.randrange(6, 22), **KINDS[i % len(KINDS)]}
        made.append(request(f"r{i}", prompt, eos=(), **params))
    return made


def serve(engine: Engine, requests: list[EngineRequest], *, cancelled: str = "") -> dict[str, Collected]:
    """Some arrive before each step; one may be cancelled after its third token."""
    rng = random.Random(7)
    results: dict[str, Collected] = {}
    waiting = list(requests)
    while waiting or engine.has_work:
        for _ in range(rng.randrange(3)):
            if waiting:
                engine.add(waiting.pop(0))
        if cancelled in engine.requests and cancelled in results and len(results[cancelled].token_ids()) >= 3:
            collect(engine.cancel(cancelled), results)
        collect(engine.step(), results)
        engine.check_invariants()
    assert engine.pool.num_free == engine.pool.num_blocks
    return results


def comparable(output: EngineOutput) -> tuple[Any, ...]:
    return (output.new_token_ids, output.logprobs, output.prompt_logprobs, output.finish_reason, output.stop_reason)


def check_equal(ours: dict[str, Collected], theirs: dict[str, Collected]) -> None:
    assert ours.keys() == theirs.keys()
    for name, collected in ours.items():
        for index in (0, 1):
            assert [comparable(o) for o in collected.of(index)] == [comparable(o) for o in theirs[name].of(index)], name


def check_replay_equals_eager(
    folder: Path, device: str, *, fewest_steps: int, fewest_bytes: int, **settings: Any
) -> None:
    """To the bit, with arrivals, ends, prefix hits, preemption (of the kind that the settings name), and every kind of
    draw. Graphs run more than ``fewest_steps`` steps and hold more than ``fewest_bytes``."""
    answers = {}
    for mode in ("on", "off"):
        engine = new_engine(folder, device, exact=True, decode_graphs=mode, swap_space_bytes=1 << 16, **settings)
        answers[mode] = serve(engine, mixed_requests(len(KINDS), engine.info.vocab_size))
        stats = engine.stats()
        if mode == "on":
            assert stats.num_graph_steps > fewest_steps
            assert 0 < stats.num_decode_graphs < stats.num_graph_steps
            assert stats.decode_graph_bytes > fewest_bytes
            assert stats.prefix_cache_hits > 0
            if "preemption" in settings:
                assert stats.num_preemptions > 0
                assert (stats.num_swaps > 0) == (settings["preemption"] == "swap")
        else:
            assert (stats.num_graph_steps, stats.num_decode_graphs, stats.decode_graph_bytes) == (0, 0, 0)
        engine.close()
    check_equal(answers["on"], answers["off"])
