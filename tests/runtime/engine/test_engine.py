"""The plain loop, on a model whose tokens are a known function of what lies in its KV cache."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runtime.engine.errors import ContextLengthExceededError, RequestError
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.step import Chunk
from tests.runtime.engine.fakes import (
    VOCAB_SIZE,
    Collected,
    FakeModel,
    collect,
    each_loop,
    fake_logits,
    greedy,
    make_engine,
    one,
    prefix_hashes,
    random_prompt,
    request,
    run_to_end,
)

__all__ = ["each_loop"]

pytestmark = pytest.mark.usefixtures("each_loop")


@pytest.mark.parametrize("prompt_len", [1, 7, 8, 9, 31, 32, 33, 100])
def test_greedy_equals_the_model_without_an_engine(prompt_len: int) -> None:
    prompt = random_prompt(random.Random(prompt_len), prompt_len)
    result = one(make_engine(), prompt, max_tokens=20)
    assert result.token_ids() == greedy(prompt, 20)
    assert result.finish_reason() == "length"
    assert [len(output.new_token_ids) for output in result.outputs] == [1] * 20


def test_a_prompt_is_computed_once_and_in_chunks_of_the_budget() -> None:
    model = FakeModel()
    sizes: list[int] = []
    model.before_forward = lambda batch: sizes.append(batch.num_tokens)
    one(make_engine(model=model, max_num_batched_tokens=32), random_prompt(random.Random(0), 70), max_tokens=3)
    assert sizes == [32, 32, 6, 1, 1]


def test_decodes_come_first_and_several_prompts_share_a_step() -> None:
    model = FakeModel()
    engine = make_engine(model=model, max_num_batched_tokens=32)
    engine.add(request("a", [1], max_tokens=10))
    engine.step()
    engine.executor.synchronize()
    shapes: list[list[int]] = []
    model.before_forward = lambda batch: shapes.append(np.diff(batch.query_start.array).tolist())
    for name in "bcd":
        engine.add(request(name, random_prompt(random.Random(name), 20), max_tokens=10))
    engine.step()
    engine.step()
    engine.executor.synchronize()
    assert shapes[:2] == [[1, 20, 11], [1, 1, 9, 20]]


def test_max_tokens_is_cut_at_the_end_of_the_context() -> None:
    engine = make_engine(max_model_len=32)
    for name, max_tokens in (("none", None), ("many", 1000)):
        engine.add(request(name, range(20), max_tokens=max_tokens))
    results = run_to_end(engine)
    assert [len(results[name].token_ids()) for name in ("none", "many")] == [12, 12]
    assert results["none"].finish_reason() == "length"


def test_prompts_that_leave_no_room_are_refused() -> None:
    engine = make_engine(max_model_len=32)
    for length in (32, 33, 1000):
        with pytest.raises(ContextLengthExceededError, match=f"32 tokens. The prompt has {length}, ") as caught:
            engine.add(request("x", [1] * length))
        assert caught.value.code == "context_length_exceeded"
    assert len(one(engine, [1] * 31, max_tokens=None).token_ids()) == 1


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ([VOCAB_SIZE], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([2**70], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([True], {}, "prompt"),
        (["a"], {}, "prompt"),
        ([1], {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ([1], {"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ([1], {"min_tokens": 128, "max_tokens": None}, "min_tokens"),
        ([1], {"eos": (VOCAB_SIZE,)}, "eos_token_ids"),
    ],
)
def test_bad_requests_never_get_in(prompt: list[int], params: dict[str, object], param: str) -> None:
    engine = make_engine()
    with pytest.raises(RequestError) as caught:
        engine.add(request("x", prompt, **params))  # type: ignore[arg-type]
    assert caught.value.param == param
    assert not engine.has_work
    engine.check_invariants()


def test_a_request_id_in_use_is_refused() -> None:
    engine = make_engine()
    engine.add(request("x", [1]))
    with pytest.raises(RequestError, match="in use"):
        engine.add(request("x", [2]))
    with pytest.raises(RequestError, match="request_id"):
        engine.add(request("", [2]))
    run_to_end(engine)
    engine.add(request("x", [3]))  # free again


def hundred_requests(rng: random.Random) -> list[EngineRequest]:
    requests = []
    for i in range(100):
        params: dict[str, object] = {"max_tokens": rng.randrange(1, 50)}
        if i % 2:
            params |= {
                "temperature": rng.uniform(0.3, 1.5),
                "seed": rng.randrange(2**40),
                "n": rng.choice([1, 1, 1, 3]),
            }
            params |= rng.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}])
        params |= rng.choice(
            [
                {},
                {"frequency_penalty": 0.5, "presence_penalty": 0.2},
                {"repetition_penalty": 1.3},
                {"logit_bias": {4: 2.0}},
                {"stop_token_ids": [17, 18], "min_tokens": 1},
                {"logprobs": 2},
                {"prompt_logprobs": 0},
            ]
        )
        requests.append(request(f"r{i}", random_prompt(rng, rng.randrange(1, 70)), **params))
    return requests


def test_a_hundred_requests_with_preemption_each_equal_their_lone_run() -> None:
    rng = random.Random(0)
    requests = hundred_requests(rng)
    engine = make_engine(num_blocks=24, max_num_seqs=10, max_num_batched_tokens=24)
    results: dict[str, Collected] = {}
    waiting = list(requests)
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 4]))):
            engine.add(waiting.pop(0))
        collect(engine.step(), results)
        engine.check_invariants()
    run_to_end(engine)
    assert engine.scheduler.num_preemptions > 20
    for each in requests:
        alone = make_engine()
        alone.add(each)
        expected = run_to_end(alone)[each.request_id]
        for index in range(each.params.n):
            assert results[each.request_id].token_ids(index) == expected.token_ids(index)
            assert results[each.request_id].finish_reason(index) == expected.finish_reason(index)
            entries = [output.logprobs for output in results[each.request_id].of(index)]
            assert entries == [output.logprobs for output in expected.of(index)]
        assert results[each.request_id].of(0)[0].prompt_logprobs == expected.of(0)[0].prompt_logprobs


def test_priority_is_admitted_first_and_preempted_last() -> None:
    engine = make_engine(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 5), ("urgent", -1)):
        engine.add(request(name, [1, 2], priority=priority, max_tokens=2))
    finished = []
    while engine.has_work:
        finished += [output.request_id for output in engine.step() if output.finish_reason]
    assert finished == ["urgent", "a", "b"]


@pytest.mark.parametrize("num_steps", range(8))
def test_cancel_in_every_state(num_steps: int) -> None:
    """Waiting, held behind its first choice, in the middle of the prompt, decoding, after preemption,
    finished."""
    engine = make_engine(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=16)
    results: dict[str, Collected] = {}
    engine.add(request("other", [3] * 10, max_tokens=60))
    for i in range(3):
        engine.add(request(f"x{i}", [i] * 40, n=2, max_tokens=6))
    for _ in range(num_steps):
        collect(engine.step(), results)
    for i in range(3):
        free = engine.pool.num_free
        held = engine.requests[f"x{i}"].sequences if f"x{i}" in engine.requests else []
        blocks = {block for sequence in held for block in sequence.held_blocks}
        outputs = engine.cancel(f"x{i}")
        assert engine.pool.num_free == free + len(blocks)
        collect(outputs, results)
        assert [output.finish_reason for output in outputs] == ["abort"] * len(outputs)
        assert engine.cancel(f"x{i}") == []
        assert {results[f"x{i}"].finish_reason(index) for index in (0, 1)} <= {"abort", "length"}
        engine.check_invariants()
    assert engine.cancel("never seen") == []
    run_to_end(engine, results)
    assert results["other"].token_ids() == greedy([3] * 10, 60)


def test_stats_and_times(each_loop: bool) -> None:
    engine = make_engine()
    engine.add(request("x", [1] * 9, max_tokens=3, n=2))
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_free_blocks) == (1, 0, 64)
    engine.step()
    stats = engine.stats()
    used = 3 if each_loop else 2  # the second choice runs already, in a block of its own
    assert (stats.num_waiting, stats.num_running, stats.num_free_blocks) == (3 - used, used - 1, 64 - used)
    assert stats.kv_cache_usage == used / 64
    outputs = run_to_end(engine)["x"].outputs
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.num_requests, stats.num_errors) == (
        9,
        6,
        1,
        0,
    )
    assert stats.num_steps >= 4
    times = [output.times for output in outputs if output.times]
    assert len(times) == 2
    for each in times:
        assert each.arrival_s <= each.first_scheduled_s <= each.first_token_s <= each.last_token_s <= stats.last_step_s


def test_logits_of_every_position_in_chunks() -> None:
    engine = make_engine(max_num_batched_tokens=16, max_model_len=64)
    engine.add(request("x", [1, 2], max_tokens=4))
    engine.step()
    prompt = random_prompt(random.Random(2), 64)
    logits = engine.logits(prompt)
    assert logits.dtype == np.float32
    assert np.array_equal(logits, fake_logits(np.array(prefix_hashes(np.array(prompt)))))
    assert run_to_end(engine)["x"].token_ids() == greedy([1, 2], 4)[1:]
    with pytest.raises(ContextLengthExceededError):
        engine.logits([1] * 65)
    with pytest.raises(RequestError, match="token_ids"):
        engine.logits([])


def test_a_decode_step_does_not_depend_on_the_context() -> None:
    """The executor copies nothing that grows with the context: the batch's block table is a view of one of its own."""
    model = FakeModel()
    engine = make_engine(model=model, max_model_len=128, max_num_batched_tokens=128)
    tables: list[object] = []
    model.before_forward = lambda batch: tables.append(batch.block_tables[0].array)
    for name in "abc":
        engine.add(request(name, [1] * 30, max_tokens=5))
    run_to_end(engine)
    own = engine.executor.rows.tables
    assert all(np.shares_memory(table, own.table) for table in tables)


def test_rows_with_holes_give_the_same_tokens() -> None:
    engine = make_engine(max_num_seqs=4)
    lengths = {"a": 2, "b": 30, "c": 4, "d": 30, "e": 20, "f": 5}
    for name, max_tokens in lengths.items():
        engine.add(request(name, [ord(name) % 50] * 9, max_tokens=max_tokens))
    results = run_to_end(engine)
    for name, max_tokens in lengths.items():
        assert results[name].token_ids() == greedy([ord(name) % 50] * 9, max_tokens)


def test_chunk_is_plain_data() -> None:
    engine = make_engine()
    engine.add(EngineRequest(request_id="x", prompt_token_ids=[1, 2], params=SamplingParams()))
    (chunk,) = engine.scheduler.schedule().chunks
    assert isinstance(chunk, Chunk)
    assert (chunk.start, chunk.num_tokens, chunk.is_first, chunk.is_last) == (0, 2, True, True)
