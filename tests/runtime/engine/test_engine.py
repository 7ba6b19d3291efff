"""The plain loop, on a model whose tokens are a known function of what lies in its KV cache."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runtime.engine.engine import Engine
from runtime.engine.errors import ContextLengthExceededError, RequestError
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.scheduling.step import Chunk
from runtime.engine.steps.step_input import RowLoad
from tests.runtime.engine.fakes import (
    VOCAB_SIZE,
    Collected,
    FakeModel,
    collect,
    each_loop,
    fake_logits,
    greedy,
    make_engine,
    prefix_hashes,
    request,
    run_to_end,
)

__all__ = ["each_loop"]

pytestmark = pytest.mark.usefixtures("each_loop")


def one(engine: Engine, prompt: list[int], **params: object) -> Collected:
    engine.add(request("one", prompt, **params))
    return run_to_end(engine)["one"]


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE - 1) for _ in range(length)]


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
    one(
        make_engine(model=model, max_num_batched_tokens=32), random_prompt(random.Random(0), 70), max_tokens=3
    )
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
        with pytest.raises(ContextLengthExceededError, match=f"{length} tokens") as caught:
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


def test_stop_ids_and_eos() -> None:
    expected = greedy([5, 6], 12)
    stop = expected[4]
    first = expected.index(stop)
    result = one(make_engine(), [5, 6], max_tokens=12, stop_token_ids=[stop])
    assert result.token_ids() == expected[: first + 1]
    assert (result.finish_reason(), result.outputs[-1].stop_reason) == ("stop", stop)
    result = one(make_engine(), [5, 6], max_tokens=12, eos=(stop,))
    assert result.token_ids() == expected[: first + 1]
    assert (result.finish_reason(), result.outputs[-1].stop_reason) == ("stop", None)
    result = one(make_engine(), [5, 6], max_tokens=12, eos=(stop,), ignore_eos=True)
    assert result.token_ids() == expected


@pytest.mark.parametrize("way", ["stop_token_ids", "eos"])
def test_min_tokens_keeps_stop_ids_away_for_just_as_long(way: str) -> None:
    wanted = {"max_tokens": 12, "logit_bias": {42: 100.0}, way: (42,)}
    result = one(make_engine(), [5, 6], min_tokens=5, **wanted)
    assert 42 not in result.token_ids()[:5]
    assert result.token_ids()[5:] == [42]
    assert result.finish_reason() == "stop"
    assert one(make_engine(), [5, 6], **wanted).token_ids() == [42]


def test_logit_bias_allowed_ids_and_penalties_reach_the_sampler() -> None:
    assert one(make_engine(), [1], max_tokens=5, logit_bias={42: 100.0}).token_ids() == [42] * 5
    allowed = one(make_engine(), [1], max_tokens=30, temperature=2.0, seed=1, allowed_token_ids=[3, 40, 96])
    assert set(allowed.token_ids()) <= {3, 40, 96}
    assert len(set(allowed.token_ids())) > 1
    # A heavy bias draws 42 until the penalties outweigh it; then every id comes at most once.
    result = one(
        make_engine(), [1], max_tokens=30, logit_bias={42: 1.5}, frequency_penalty=2.0, presence_penalty=2.0
    )
    free = one(make_engine(), [1], max_tokens=30, logit_bias={42: 1.5})
    assert max(map(result.token_ids().count, result.token_ids())) < max(
        map(free.token_ids().count, free.token_ids())
    )
    prompt = list(range(60))
    repeated = one(make_engine(), prompt, max_tokens=20, repetition_penalty=1e4)
    assert not set(repeated.token_ids()) & set(prompt)
    assert len(set(repeated.token_ids())) == 20


def test_logprobs_are_those_of_the_raw_logits() -> None:
    prompt = [9, 8, 7]
    result = one(
        make_engine(), prompt, max_tokens=6, logprobs=3, temperature=0.7, seed=4, logit_bias={5: 3.0}
    )
    tokens = list(prompt)
    for output in result.outputs:
        (entry,) = output.logprobs or []
        assert entry.token_id == output.new_token_ids[0]
        check_logprobs(entry, tokens, 3)
        tokens += output.new_token_ids


def check_logprobs(entry: object, context: list[int], num_top: int) -> None:
    logits = fake_logits(np.array(prefix_hashes(np.array(context))[-1:]))[0].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    order = np.argsort(-expected, kind="stable")
    assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-5)
    assert entry.rank == 1 + int((expected > expected[entry.token_id]).sum())
    assert entry.top_ids == order[:num_top].tolist()
    assert entry.top_logprobs == pytest.approx(expected[order[:num_top]].tolist(), abs=1e-5)


@pytest.mark.parametrize("prompt_len", [1, 2, 8, 50])
@pytest.mark.parametrize("budget", [3, 8, 64])
def test_prompt_logprobs_whatever_the_chunks(
    prompt_len: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.engine.steps.side_pass.LOGITS_SLICE_ELEMENTS", 5 * VOCAB_SIZE)  # five rows at a time
    prompt = random_prompt(random.Random(3), prompt_len)
    engine = make_engine(max_num_batched_tokens=budget)
    result = one(engine, prompt, max_tokens=2, prompt_logprobs=2, n=2)
    assert [output.prompt_logprobs is not None for output in result.of(0)] == [True, False]
    assert all(output.prompt_logprobs is None for output in result.of(1))
    entries = result.of(0)[0].prompt_logprobs or []
    assert len(entries) == prompt_len
    assert entries[0] is None
    for position, entry in enumerate(entries[1:], 1):
        assert entry is not None
        assert entry.token_id == prompt[position]
        check_logprobs(entry, prompt[:position], 2)


def test_prompt_logprobs_survive_preemption_in_the_middle_of_the_prompt() -> None:
    """The older request takes a block away while the younger's prompt is half done."""
    prompt = random_prompt(random.Random(5), 60)
    engine = make_engine(num_blocks=16, block_size=8, max_num_batched_tokens=4, max_num_seqs=4)
    results: dict[str, Collected] = {}
    engine.add(request("old", [1] * 7, max_tokens=80))
    while engine.stats().generation_tokens < 48:  # 55 tokens in 7 of 16 blocks; the young one takes 8
        collect(engine.step(), results)
    engine.add(request("young", prompt, max_tokens=4, prompt_logprobs=1))
    was_preempted_midway = False
    for _ in range(1000):
        before = engine.scheduler.num_preemptions
        young = engine.requests["young"].sequences[0] if "young" in engine.requests else None
        computed = young.num_computed if young is not None else 0
        collect(engine.step(), results)
        engine.check_invariants()
        was_preempted_midway |= engine.scheduler.num_preemptions > before and 0 < computed < 60
        if not engine.has_work:
            break
    entries = results["young"].outputs[0].prompt_logprobs or []
    assert results["young"].token_ids() == greedy(prompt, 4)
    assert results["old"].token_ids() == greedy([1] * 7, 80)
    assert len(entries) == 60
    for position, entry in enumerate(entries[1:], 1):
        check_logprobs(entry, prompt[:position], 1)
    assert was_preempted_midway


def test_choices_share_the_prompt_and_differ() -> None:
    model = FakeModel()
    engine = make_engine(
        model=model, num_blocks=64, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64
    )
    prompt = random_prompt(random.Random(1), 50)
    engine.add(request("x", prompt, n=4, max_tokens=8, temperature=1.0, seed=11))
    results: dict[str, Collected] = {}
    collect(engine.step(), results)
    collect(engine.step(), results)
    engine.check_invariants()
    tables = [sequence.blocks[0] for sequence in engine.requests["x"].sequences]
    assert len({tuple(table[:6]) for table in tables}) == 1, "six full blocks of the prompt are shared"
    assert len({table[6] for table in tables}) == 4
    assert model.num_computed_tokens == 50 + 1 + 3, "the partial last block was copied"
    run_to_end(engine, results)
    outputs = [results["x"].token_ids(index) for index in range(4)]
    assert len({tuple(tokens) for tokens in outputs}) == 4
    again = make_engine()
    again.add(request("y", prompt, n=4, max_tokens=8, temperature=1.0, seed=11))
    assert [run_to_end(again)["y"].token_ids(0)] == outputs[:1]


def test_seeded_draws_depend_on_seed_choice_and_position_alone() -> None:
    prompt = random_prompt(random.Random(1), 12)
    params = {"n": 2, "max_tokens": 16, "temperature": 1.0}
    alone = one(make_engine(seed=1), prompt, seed=5, **params)
    crowded = make_engine(seed=2, num_blocks=20, max_num_batched_tokens=8, max_num_seqs=6)
    rng = random.Random(0)
    for i in range(6):
        crowded.add(request(f"other{i}", random_prompt(rng, 30), max_tokens=40, temperature=1.0))
    crowded.add(request("one", prompt, seed=5, **params))
    batched = run_to_end(crowded)["one"]
    assert crowded.scheduler.num_preemptions > 0
    for index in (0, 1):
        assert batched.token_ids(index) == alone.token_ids(index)
    assert alone.token_ids(0) != alone.token_ids(1)
    assert one(make_engine(seed=1), prompt, seed=6, **params).token_ids(0) != alone.token_ids(0)


def test_without_a_seed_runs_differ_unless_the_engine_has_one() -> None:
    params = {"max_tokens": 30, "temperature": 1.5}
    first, second = (one(make_engine(seed=None), [1, 2], **params).token_ids() for _ in range(2))
    assert first != second
    first, second = (one(make_engine(seed=3), [1, 2], **params).token_ids() for _ in range(2))
    assert first == second


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


def test_a_failing_forward_ends_its_step_and_no_more(each_loop: bool) -> None:
    model = FakeModel()
    engine = make_engine(model=model, max_num_seqs=2)
    for name in "abcd":
        engine.add(request(name, [ord(name) % 50, 1], n=2 if name == "a" else 1, max_tokens=4))
    results: dict[str, Collected] = {}
    calls: list[object] = []

    def fail(batch: object) -> None:
        calls.append(batch)
        if len(calls) == 2:
            raise MemoryError("planted")

    model.before_forward = fail
    collect(engine.step(), results)
    outputs = engine.step()
    assert {(output.request_id, output.index, output.finish_reason) for output in outputs} == {
        ("a", 0, "error"),
        ("a", 1, "error"),
        ("b", 0, "error"),
    }
    assert all(output.error and "planted" not in output.error for output in outputs)
    engine.check_invariants()
    if not each_loop:  # else the next two have begun
        assert engine.pool.num_free == engine.pool.num_blocks
    assert [record.has_failed for record in engine.timeline] == [False, True]
    run_to_end(engine, results)
    for name in "cd":
        assert results[name].token_ids() == greedy([ord(name) % 50, 1], 4)
    assert engine.stats().num_errors == 3


def test_nan_logits_end_one_request() -> None:
    model = FakeModel()
    engine = make_engine(model=model)
    expected = greedy([1, 2, 3], 8)
    model.nan_after = 90
    engine.add(request("bad", [4, 90], max_tokens=8))
    engine.add(request("good", [1, 2, 3], max_tokens=8))
    results = run_to_end(engine)
    assert results["bad"].finish_reason() == "error"
    assert results["bad"].token_ids() == []
    assert results["good"].token_ids() == expected
    assert 90 not in expected


def test_a_request_that_cannot_be_loaded_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    original = engine.assembler.load_of

    def load(sequence: Sequence) -> RowLoad:
        if sequence.request.request_id == "bad":
            raise RuntimeError("planted")
        return original(sequence)

    monkeypatch.setattr(engine.assembler, "load_of", load)
    engine.add(request("good", [1, 2, 3], max_tokens=8))
    engine.add(request("bad", [1, 2, 3], max_tokens=8, n=3))
    results = run_to_end(engine)
    assert [results["bad"].finish_reason(index) for index in range(3)] == ["error"] * 3
    assert results["good"].token_ids() == greedy([1, 2, 3], 8)


def test_a_request_that_cannot_be_committed_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: Sequence, token_id: int) -> None:
        if self.request.request_id == "bad" and self.num_output_tokens == 2:
            raise RuntimeError("planted")
        original(self, token_id)

    original = Sequence.append
    monkeypatch.setattr(Sequence, "append", append)
    engine = make_engine()
    for name in ("bad", "good"):
        engine.add(request(name, [1, 2, 3], max_tokens=8))
    results = run_to_end(engine)
    assert (results["bad"].finish_reason(), len(results["bad"].token_ids())) == ("error", 2)
    assert results["good"].token_ids() == greedy([1, 2, 3], 8)


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
        assert (
            each.arrival_s
            <= each.first_scheduled_s
            <= each.first_token_s
            <= each.last_token_s
            <= stats.last_step_s
        )


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


def test_invariant_checks_see_planted_faults() -> None:
    engine = make_engine()
    engine.add(request("x", [1] * 20, max_tokens=5))
    engine.add(request("y", [1] * 20, max_tokens=5))
    engine.step()
    x, y = engine.scheduler.running
    block = x.blocks[0][1]
    x.blocks[0][1] = y.blocks[0][0]
    with pytest.raises(AssertionError):
        engine.check_invariants()
    x.blocks[0][1] = block
    engine.check_invariants()
    engine.pool.allocate(1)
    with pytest.raises(AssertionError):
        engine.check_invariants()


def test_chunk_is_plain_data() -> None:
    engine = make_engine()
    engine.add(EngineRequest(request_id="x", prompt_token_ids=[1, 2], params=SamplingParams()))
    (chunk,) = engine.scheduler.schedule().chunks
    assert isinstance(chunk, Chunk)
    assert (chunk.start, chunk.num_tokens, chunk.is_first, chunk.is_last) == (0, 2, True, True)
