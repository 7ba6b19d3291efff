"""What only the overlapped loop can get wrong: things that happen between a step's plan and its start."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from runtime.batch import Batch
from runtime.engine.engine import Engine
from runtime.engine.messages import EngineOutput
from runtime.engine.scheduling.sequence import Sequence
from runtime.engine.scheduling.step import Step
from tests.runtime.engine.fakes import Collected, FakeModel, collect, greedy, make_engine, request, run_to_end
from tests.waiting import TIMEOUT_S


def shapes_of(model: FakeModel) -> list[list[int]]:
    """The chunks' sizes of each batch that the model sees from now on."""
    shapes: list[list[int]] = []
    model.before_forward = lambda batch: shapes.append(np.diff(batch.query_start.array).tolist())
    return shapes


def once(action: Callable[[], list[EngineOutput]]) -> Callable[[], list[EngineOutput]]:
    """A poll that acts the first time."""
    actions = [action]
    return lambda: actions.pop()() if actions else []


def test_the_next_step_is_planned_while_one_runs() -> None:
    model = FakeModel()
    entered, planned = threading.Event(), threading.Event()

    def wait(batch: Batch) -> None:
        entered.set()
        assert planned.wait(TIMEOUT_S), "the next step was not planned while this one ran"

    model.before_forward = wait
    engine = make_engine(model=model, overlap="on")
    schedule = engine.scheduler.schedule

    def scheduled() -> Step:
        step = schedule()
        if step.number == 1:
            assert entered.wait(TIMEOUT_S)
            planned.set()
        return step

    engine.scheduler.schedule = scheduled  # type: ignore[method-assign]
    engine.add(request("x", [1, 2, 3], max_tokens=9))
    assert run_to_end(engine)["x"].token_ids() == greedy([1, 2, 3], 9)


def test_who_is_cancelled_between_plan_and_start_is_left_out() -> None:
    model = FakeModel()
    engine = make_engine(model=model, overlap="on")
    for name in "abc":
        engine.add(request(name, [ord(name) % 50, 1], max_tokens=8))
    results: dict[str, Collected] = {}
    shapes = shapes_of(model)
    collect(engine.step(), results)
    collect(engine.step(once(lambda: engine.cancel("b"))), results)
    engine.executor.synchronize()
    assert shapes == [[2, 2, 2], [1, 1, 1], [1, 1]]
    assert (results["b"].finish_reason(), results["b"].token_ids()) == ("abort", greedy([48, 1], 2))
    engine.check_invariants()
    run_to_end(engine, results)
    for name in "ac":
        assert results[name].token_ids() == greedy([ord(name) % 50, 1], 8)


def test_who_arrives_between_plan_and_start_joins_the_step() -> None:
    model = FakeModel()
    engine = make_engine(model=model, overlap="on")
    engine.add(request("old", [1, 2], max_tokens=8))
    results: dict[str, Collected] = {}
    shapes = shapes_of(model)
    collect(engine.step(), results)

    def arrive() -> list[EngineOutput]:
        engine.add(request("new", [3, 4, 5], max_tokens=8))
        return []

    collect(engine.step(once(arrive)), results)
    engine.executor.synchronize()
    assert shapes == [[2], [1], [1, 3]]
    run_to_end(engine, results)
    assert results["old"].token_ids() == greedy([1, 2], 8)
    assert results["new"].token_ids() == greedy([3, 4, 5], 8)


def test_a_step_that_loses_all_its_chunks_makes_room_for_another() -> None:
    """The only running request is cancelled after the next step was planned; the one that waited for its row starts at
    once."""
    model = FakeModel()
    engine = make_engine(model=model, overlap="on", max_num_seqs=1)
    for name in ("first", "second"):
        engine.add(request(name, [5, 6], max_tokens=5))
    shapes = shapes_of(model)
    results: dict[str, Collected] = {}
    collect(engine.step(once(lambda: engine.cancel("first"))), results)
    engine.executor.synchronize()
    assert shapes == [[2], [1]], "all but the last token of the second's prompt is found in the cache"
    run_to_end(engine, results)
    assert results["first"].finish_reason() == "abort"
    assert results["second"].token_ids() == greedy([5, 6], 5)


def test_a_stop_id_takes_the_sequence_out_of_the_planned_step() -> None:
    model = FakeModel()
    expected = greedy([5, 6], 6)
    engine = make_engine(model=model, overlap="on")
    engine.add(request("stops", [5, 6], max_tokens=6, stop_token_ids=[expected[1]]))
    engine.add(request("goes on", [7, 8], max_tokens=6))
    shapes = shapes_of(model)
    results = run_to_end(engine)
    assert results["stops"].token_ids() == expected[:2]
    assert results["goes on"].token_ids() == greedy([7, 8], 6)
    assert shapes == [[2, 2], [1, 1], [1], [1], [1], [1]], "nothing was computed for nobody"


def test_the_last_token_is_not_computed_in_vain() -> None:
    model = FakeModel()
    engine = make_engine(model=model, overlap="on")
    engine.add(request("x", [5, 6, 7], max_tokens=4))
    assert run_to_end(engine)["x"].token_ids() == greedy([5, 6, 7], 4)
    assert model.num_computed_tokens == 3 + 3


def test_a_sequence_is_preempted_while_its_token_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    pending: list[tuple[int, bool]] = []
    engine = make_engine(
        overlap="on", num_blocks=16, max_num_seqs=6, preemption="swap", swap_space_bytes=10 * 8 * 17 * 4
    )
    assert engine.limits.num_host_blocks == 10
    preempt = engine.scheduler._preempt

    def preempted(sequence: Sequence, step: Step) -> None:
        number = sequence.num_pending
        preempt(sequence, step)
        pending.append((number, bool(sequence.host_slots)))

    monkeypatch.setattr(engine.scheduler, "_preempt", preempted)
    prompts = {f"r{i}": [i, 1, 2] for i in range(6)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_tokens=60, frequency_penalty=0.3, logprobs=1))
    results = run_to_end(engine)
    assert {(1, True), (1, False)} <= set(pending), "some were swapped out, and some not, with a token to come"
    for name, prompt in prompts.items():
        alone = make_engine(overlap="off")
        alone.add(request(name, prompt, max_tokens=60, frequency_penalty=0.3, logprobs=1))
        expected = run_to_end(alone)[name]
        assert [o.new_token_ids for o in results[name].outputs] == [o.new_token_ids for o in expected.outputs]
        assert [o.logprobs for o in results[name].outputs] == [o.logprobs for o in expected.outputs]


def test_a_failed_step_takes_its_sequences_out_of_the_planned_one() -> None:
    model = FakeModel()
    engine = make_engine(model=model, overlap="on", max_num_batched_tokens=8)
    engine.add(request("short", [5, 6], max_tokens=30))
    engine.add(request("long", list(range(40)), max_tokens=3))
    calls: list[list[int]] = []

    def fail(batch: Batch) -> None:
        calls.append(np.diff(batch.query_start.array).tolist())
        if len(calls) == 3:
            raise FloatingPointError("planted")

    model.before_forward = fail
    results: dict[str, Collected] = {}
    for _ in range(2):
        collect(engine.step(), results)

    def arrive() -> list[EngineOutput]:
        engine.add(request("new", [8, 9], max_tokens=4))
        return []

    collect(engine.step(once(arrive)), results)
    assert results["short"].finish_reason() == results["long"].finish_reason() == "error"
    engine.check_invariants()
    run_to_end(engine, results)
    assert calls[2:4] == [[1, 7], [2]]
    assert results["new"].token_ids() == greedy([8, 9], 4)


def test_what_a_failed_step_wrote_is_not_found_by_others() -> None:
    """The model fails after it has written its pages; the same prompt is computed again."""
    model = FakeModel()
    engine = make_engine(model=model, overlap="on", max_num_batched_tokens=64)
    forward = model.forward
    failures = [True]

    def fail(batch: Batch, kv_cache: object) -> object:
        hidden = forward(batch, kv_cache)  # type: ignore[arg-type]
        if failures and failures.pop():
            raise MemoryError("planted")
        return hidden

    model.forward = fail  # type: ignore[method-assign,assignment]
    prompt = list(range(40))
    for name in ("fails", "works"):
        engine.add(request(name, prompt, max_tokens=3))
        if name == "fails":
            assert run_to_end(engine)[name].finish_reason() == "error"
    results = run_to_end(engine)
    assert results["works"].token_ids() == greedy(prompt, 3)
    assert results["works"].outputs[0].num_cached_tokens == 0


@pytest.mark.parametrize("drains", [False, True])
def test_close_ends_the_step_that_runs(drains: bool) -> None:
    engine = make_engine(overlap="on")
    for name in "ab":
        engine.add(request(name, [1, 2, 3], max_tokens=20))
    engine.step()
    if drains:
        run_to_end(engine)
    engine.cancel_all()
    engine.close()
    engine.close()
    assert not engine.has_work
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.check_invariants()


def test_logits_wait_for_the_step_that_runs() -> None:
    model = FakeModel()
    engine = make_engine(model=model, overlap="on")
    inside: list[str] = []

    def alone(batch: Batch) -> None:
        assert inside == [], "two forward passes at once"
        inside.append("a step")
        threading.Event().wait(0.01)
        inside.pop()

    model.before_forward = alone
    engine.add(request("x", [1, 2], max_tokens=10))
    for _ in range(4):
        engine.step()
        assert engine.logits([1, 2, 3]).shape == (3, engine.info.vocab_size)
    run_to_end(engine)


def test_the_loop_is_chosen_by_the_device_unless_named() -> None:
    assert not make_engine(overlap="auto").overlaps
    assert not make_engine(overlap="off").overlaps
    assert make_engine(overlap="on").overlaps


def test_both_loops_give_the_same_outputs() -> None:
    """Arrivals after the same outputs, a pool that is too small: every output equal, if not in the same step."""

    def serve(engine: Engine) -> dict[str, list[EngineOutput]]:
        rng = random.Random(4)
        results: dict[str, Collected] = {}
        for i in range(30):
            prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 40))]
            params: dict[str, object] = rng.choice(
                [{"logprobs": 2}, {"prompt_logprobs": 1}, {"repetition_penalty": 1.3}, {"n": 2}]
            )
            engine.add(request(f"r{i}", prompt, max_tokens=rng.randrange(1, 40), temperature=0.8, seed=i, **params))
            if i % 3 == 0:
                collect(engine.step(), results)
        run_to_end(engine, results)
        return {name: collected.outputs for name, collected in results.items()}

    plain = serve(make_engine(overlap="off", num_blocks=20))
    overlapped = serve(make_engine(overlap="on", num_blocks=20))
    assert plain.keys() == overlapped.keys()
    for name, outputs in plain.items():
        for index in (0, 1):
            ours = [comparable(output) for output in overlapped[name] if output.index == index]
            assert ours == [comparable(output) for output in outputs if output.index == index]


def comparable(output: EngineOutput) -> tuple[object, ...]:
    return (output.new_token_ids, output.logprobs, output.prompt_logprobs, output.finish_reason, output.stop_reason)
