"""A model on several ranks gives what it gives on one: the same tokens, and in exact mode the same bits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from models.errors import ModelLoadError
from runtime.engine.config import EngineConfig
from runtime.engine.engine import Engine
from runtime.engine.errors import RequestError
from runtime.engine.grammar.grammar import Grammar
from runtime.engine.make_engine import build_engine, describe_engine
from runtime.engine.messages import EngineOutput, EngineRequest, PoolingRequest
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.ranks.executor import ParallelExecutor
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.steps.executor import ExecutorLostError
from tests.models.folders import load_golden, write_model
from tests.waiting import wait_until

SPLITTABLE = ["mistral_wide_window", "mistral_window", "qwen2_tied", "qwen2_window", "qwen3_layer_types"]
PROMPTS = [[5, 9, 2, 44, 17], [8] * 30, [3, 1, 4, 1, 5, 9, 2, 6], [11, 12]]


def request_of(request_id: str, ids: list[int], params: SamplingParams) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=ids, params=params)


def run(engine: Engine) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def everything_of(engine: Engine) -> list[Any]:
    """Prompts that begin alike, one after the other; a choice that a grammar allows; an embedding and logits beside;
    log probabilities of a prompt. The engine is closed."""
    client, found = ThreadEngineClient(engine), []

    def ask(name: str, ids: list[int], params: SamplingParams) -> list[EngineOutput]:
        outputs: SimpleQueue[EngineOutput] = SimpleQueue()
        client.submit(request_of(name, ids, params), outputs.put)
        given = [outputs.get(timeout=600)]
        while given[-1].finish_reason is None:
            given.append(outputs.get(timeout=600))
        assert given[-1].finish_reason != "error", given[-1].error
        return given

    try:
        cached = 0
        for number in range(2):
            given = ask(f"p{number}", [7] * 40 + [number], SAMPLED)
            found += [(output.new_token_ids, repr(output.logprobs)) for output in given]
            cached += given[0].num_cached_tokens or 0
        assert cached >= 32
        grammar = Grammar(kind="regex", text="[0-9]{3}")
        params = SamplingParams(max_tokens=6, grammar=grammar, seed=1)
        found += [each.new_token_ids for each in ask("g", [5, 6, 7], params)]
        found.append(client.embed(PoolingRequest([5, 9, 2, 44])).result(timeout=600).tobytes())
        found.append(client.logits([5, 9, 2, 44]).tobytes())
        params = SamplingParams(max_tokens=2, prompt_logprobs=1, temperature=0.0)
        found += [repr(each.prompt_logprobs) for each in ask("l", [5, 9, 2, 44, 12], params)]
        found += [each.new_token_ids for each in ask("b", [5, 6, 7], SAMPLED)]
    finally:
        client.close()
        engine.executor.close()
    return found


@contextmanager
def engine_on(num_ranks: int, folder: Path | None, **settings: Any) -> Iterator[Engine]:
    engine = build_engine(folder, device="cpu", tensor_parallel_size=num_ranks, seed=0, **settings)
    try:
        yield engine
    finally:
        engine.close()


def answers(num_ranks: int, folder: Path | None, params: SamplingParams, **settings: Any) -> list[Any]:
    """Tokens and log probabilities of each prompt's answer."""
    found: dict[str, list[Any]] = {str(number): [] for number in range(len(PROMPTS))}
    with engine_on(num_ranks, folder, **settings) as engine:
        for number, ids in enumerate(PROMPTS):
            engine.add(request_of(str(number), ids, params))
        for output in run(engine):
            found[output.request_id].append((output.new_token_ids, repr(output.logprobs), output.finish_reason))
    return list(found.values())


SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"num_blocks": 12, "max_num_seqs": 4, "swap_space_bytes": 1 << 20}, marks=pytest.mark.exhaustive),
        pytest.param({"overlap": "on", "max_num_batched_tokens": 16, "max_num_seqs": 4}, marks=pytest.mark.exhaustive),
        pytest.param({"speculation": "ngram", "decode_graphs": "off"}, marks=pytest.mark.exhaustive),
        pytest.param({"quantization": "int8"}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_exact_mode_has_the_same_bits_on_any_number_of_ranks(settings: dict[str, Any]) -> None:
    alone = answers(1, None, SAMPLED, exact=True, max_model_len=64, **settings)
    for num_ranks in (2, 4) if settings else (2,):
        assert answers(num_ranks, None, SAMPLED, exact=True, max_model_len=64, **settings) == alone


@pytest.mark.parametrize(
    "case", [SPLITTABLE[0], *(pytest.param(each, marks=pytest.mark.exhaustive) for each in SPLITTABLE[1:])]
)
def test_families_on_two_ranks(case: str, tmp_path: Path) -> None:
    """transformers' greedy tokens."""
    golden = load_golden(case)
    folder, expected = write_model(tmp_path, golden), golden.greedy_ids["float32"]
    params = SamplingParams(max_tokens=len(expected), temperature=0.0, ignore_eos=True)
    with engine_on(2, folder, dtype="float32") as engine:
        engine.add(request_of("a", list(golden.prompt_ids), params))
        found = [token for output in run(engine) for token in output.new_token_ids]
    assert found == expected


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_ends_ends_the_engine(kind: signal.Signals) -> None:
    """And nothing is left of the others. SIGTERM is the terminal's, and for the server."""
    with engine_on(2, None, max_model_len=64) as engine:
        executor = engine.executor
        assert isinstance(executor, ParallelExecutor)
        engine.add(request_of("a", [5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True)))
        engine.step()
        [pid] = executor.ranks.pids
        os.kill(pid, kind)
        if kind is signal.SIGTERM:
            run(engine)
        else:
            begun = time.monotonic()
            with pytest.raises(ExecutorLostError, match="rank 1 ended"):
                run(engine)
            assert time.monotonic() - begun < 30  # less than a second where the machine is not busy
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_lost_rank_is_told_to_every_request() -> None:
    engine = build_engine(None, device="cpu", tensor_parallel_size=2, max_model_len=64)
    assert isinstance(engine.executor, ParallelExecutor)
    [pid] = engine.executor.ranks.pids
    client = ThreadEngineClient(engine)
    seen: list[EngineOutput] = []
    try:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        for number in range(3):
            client.submit(request_of(str(number), [5, 6, 7], params), seen.append)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len([each for each in seen if each.finish_reason]) == 3)
        assert {each.finish_reason for each in seen if each.finish_reason} <= {"error", "length"}
    finally:
        client.close()
        engine.executor.close()


def test_what_cannot_be_split_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    folder = write_model(tmp_path, load_golden("qwen3_odd"))
    with pytest.raises(ModelLoadError, match="num_heads = 5 cannot be split over 2 ranks"):
        build_engine(folder, device="cpu", tensor_parallel_size=2)
    for count in (0, 65):
        with pytest.raises(RequestError, match="tensor_parallel_size must be"):
            build_engine(folder, device="cpu", tensor_parallel_size=count)


def test_what_an_engine_says_of_its_bytes_counts_all_ranks() -> None:
    alone = describe_engine(None, build_config(1))
    split = describe_engine(None, build_config(2))
    assert split.kv_cache_bytes == pytest.approx(alone.kv_cache_bytes, rel=0.01)
    assert alone.weight_bytes < split.weight_bytes < 2 * alone.weight_bytes


def build_config(num_ranks: int) -> EngineConfig:
    return EngineConfig(device="cpu", tensor_parallel_size=num_ranks, kv_cache_bytes=1 << 24)
