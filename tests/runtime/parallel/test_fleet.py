"""Several engines answer as one does; when one dies or hangs, nobody goes without an answer or an error."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from runtime.engine.errors import EngineDeadError, QueueFullError, RequestError
from runtime.engine.grammar.structured_outputs import StructuredOutputsParams
from runtime.engine.make_client import start_client
from runtime.engine.messages import PoolingRequest, StepView
from runtime.engine.process.child import Supervision
from runtime.engine.sampling_params import SamplingParams
from runtime.llm import LLM
from runtime.parallel.division import cores_of
from runtime.parallel.fleet import Fleet
from tests.runtime.engine.light_engine import EXITS, HANGS
from tests.runtime.engine.process.test_process_faults import LIGHT, Sink, is_gone, request
from tests.waiting import TIMEOUT_S, wait_until


def light_fleet(
    num_engines: int = 2, policy: Any = "round-robin", max_waiting: int = 100, model: str | None = None,
    **supervision: Any,
) -> Fleet:  # fmt: skip
    supervision = {"first_delay_s": 0.05, "healthy_s": 0.0, **supervision}
    return Fleet(
        model, supervision=Supervision(command=LIGHT, **supervision), data_parallel_size=num_engines,
        routing_policy=policy, max_waiting=max_waiting, device="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def one_fleet() -> Iterator[Fleet]:
    fleet = light_fleet()
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(one_fleet: Fleet) -> Iterator[Fleet]:
    """One for many tests, since it recovers from all of them."""
    assert one_fleet._routes == {}
    assert one_fleet.router.loads() == [0, 0]
    yield one_fleet
    wait_until(lambda: all(client.state == "ready" for client in one_fleet.engines))


def pids(fleet: Fleet) -> list[int]:
    found = [client.pid for client in fleet.engines]
    assert None not in found
    return [pid for pid in found if pid is not None]


def test_requests_are_shared_out_and_answered(fleet: Fleet) -> None:
    before = list(fleet.router.num_routed)
    sinks = [Sink(1 + i % 2) for i in range(20)]
    for i, sink in enumerate(sinks):
        fleet.submit(request(f"r{i}", [10 * i], n=sink.num_open, max_tokens=4), sink)
    for i, sink in enumerate(sinks):
        assert sorted(sink.token_ids()) == sorted(10 * i + c + t for c in range(1 + i % 2) for t in range(1, 5))
    assert [after - routed for after, routed in zip(fleet.router.num_routed, before)] == [10, 10]
    wait_until(lambda: all(client.stats().num_requests >= 10 for client in fleet.engines))
    assert fleet.stats().num_requests == sum(client.stats().num_requests for client in fleet.engines)
    assert fleet.info.max_waiting == 100
    assert fleet.state == "ready"


def test_a_name_is_in_use_wherever_its_request_runs(fleet: Fleet) -> None:
    sinks = [Sink(), Sink()]
    fleet.submit(request("same", [1], max_tokens=50_000), sinks[0])
    for _ in range(2):  # both engines' turns
        with pytest.raises(RequestError, match="in use"):
            fleet.submit(request("same", [1], max_tokens=1), Sink())
    assert sinks[0].started.wait(TIMEOUT_S)
    fleet.cancel("same")
    assert sinks[0].reasons() == ["abort"]
    fleet.submit(request("same", [1], max_tokens=1), sinks[1])
    assert sinks[1].reasons() == ["length"]
    fleet.cancel("unknown")
    fleet.pause("unknown")
    fleet.resume("unknown")


def test_none_is_lost_when_an_engine_is_killed(fleet: Fleet) -> None:
    """Under load: who was there is told, all others are answered, also those that come then."""
    for kill in range(4):
        sinks = [Sink() for _ in range(8)]
        is_long = [i % 2 == kill % 2 for i in range(8)]  # in turn: those of one engine, which have not ended by then
        for i, sink in enumerate(sinks):
            fleet.submit(request(f"r{i}", [i], max_tokens=50_000 if is_long[i] else 200), sink)
        victim = fleet._routes[f"r{kill % 2}"].engine
        assert all(sink.started.wait(TIMEOUT_S) for sink in sinks)
        os.kill(pids(fleet)[victim], signal.SIGKILL)
        late = [Sink() for _ in range(8)]
        for i, sink in enumerate(late):
            fleet.submit(request(f"late{i}", [i], max_tokens=3), sink)
            time.sleep(0.01)
        assert fleet.state == "ready"
        for i, sink in enumerate(sinks):
            reasons = sink.reasons()
            died = sink.outputs[-1].engine_died
            assert (reasons, died) == ((["error"], True) if is_long[i] else (["length"], False))
        ended = Counter(sink.reasons()[0] for sink in late)
        assert ended["length"] >= 4, "those that were not sent to the victim before it was known to be dead"
        assert set(ended) <= {"length", "error"}
        wait_until(lambda: all(client.state == "ready" for client in fleet.engines))
    assert fleet.router.loads() == [0, 0]


def test_a_request_that_kills_its_engine_harms_no_other(fleet: Fleet) -> None:
    harm, sinks = Sink(), [Sink() for _ in range(4)]
    for i, sink in enumerate(sinks):  # two of them, with the harm's engine, do not end before
        fleet.submit(request(f"r{i}", [i], max_tokens=100 if i % 2 else 50_000), sink)
    fleet.submit(request("harm", [EXITS], max_tokens=5), harm)
    assert harm.reasons() == ["error"]
    assert [sink.reasons() for sink in sinks] == [["error"], ["length"]] * 2


def test_calls_go_to_the_idlest_and_end_with_its_engine(fleet: Fleet) -> None:
    assert fleet.logits([1, 2, 3]).ravel().tolist() == [1.0, 2.0, 3.0]
    futures = [fleet.embed(PoolingRequest([1])) for _ in range(4)]
    assert [client.num_calls for client in fleet.engines] == [2, 2]
    for pid in pids(fleet):
        os.kill(pid, signal.SIGKILL)
    for future in futures:
        with pytest.raises(EngineDeadError):
            future.result(TIMEOUT_S)


def test_when_all_are_dead_clients_are_told_when_to_come_again(tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"
    fleet = light_fleet(model=str(obstacle), most_delay_s=0.2)
    try:
        obstacle.touch()  # none starts again before it is gone
        for pid in pids(fleet):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: fleet.state != "ready")
        with pytest.raises(EngineDeadError) as caught:
            fleet.submit(request("r", [1]), Sink())
        assert caught.value.retry_after_s is not None
        with pytest.raises(EngineDeadError):
            fleet.stats()
        obstacle.unlink()
        wait_until(lambda: fleet.state == "ready")
    finally:
        fleet.close()


def test_steps_have_their_engines_number(fleet: Fleet) -> None:
    views: list[StepView] = []
    stop = fleet.watch(views.append)
    with_views = [client._watchers for client in fleet.engines]
    view = StepView(
        step=1, start_s=0.0, duration_s=0.0, chunks=[], num_running=0, num_waiting=0, num_blocks=1, num_free_blocks=1,
        num_cached_blocks=0, preempted=[],
    )  # fmt: skip
    for watchers in with_views:
        watchers.show(view)
    stop()
    stop()
    assert [view.engine for view in views] == [0, 1]
    assert not any(with_views)


def test_the_queue_is_bounded_for_all_together() -> None:
    fleet = light_fleet(max_waiting=6)
    try:
        stopped = [psutil.Process(pid) for pid in pids(fleet)]
        for process in stopped:
            process.suspend()
            wait_until(lambda process=process: process.status() == psutil.STATUS_STOPPED)  # type: ignore[misc]
        sinks = [Sink() for _ in range(6)]
        for i, sink in enumerate(sinks):
            fleet.submit(request(f"r{i}", [i], max_tokens=2), sink)
        with pytest.raises(QueueFullError, match="6 requests"):
            fleet.submit(request("r6", [1]), Sink())
        assert fleet.router.num_routed == [3, 3]
        for process in stopped:
            process.resume()
        assert [sink.reasons() for sink in sinks] == [["length"]] * 6
    finally:
        fleet.close()


@pytest.mark.parametrize("policy", ["least-load", "prefix-aware"])
@pytest.mark.exhaustive_cases("least-load")
def test_an_engine_that_is_stopped_gets_no_more_than_others_and_is_killed(policy: str) -> None:
    fleet = light_fleet(policy=policy, hang_timeout_s=4.0)  # the other one may be slow
    try:
        victim = pids(fleet)[0]
        os.kill(victim, signal.SIGSTOP)
        sinks = [Sink() for _ in range(12)]
        for i, sink in enumerate(sinks):
            fleet.submit(request(f"r{i}", [i] * 4, max_tokens=4), sink)
            if (route := fleet._routes.get(f"r{i}")) is None or route.engine:
                sink.wait()
        ended = Counter(sink.reasons()[0] for sink in sinks)
        assert ended == {"error": 1, "length": 11}, "whoever has not answered has most to do"
        wait_until(lambda: is_gone(victim))
        wait_until(lambda: all(client.state == "ready" for client in fleet.engines))
    finally:
        fleet.close()


def test_engines_are_restarted_one_by_one_and_nobody_notices() -> None:
    fleet = light_fleet(3)
    try:
        before, sinks = pids(fleet), []
        is_over = threading.Event()

        def load() -> None:
            while not is_over.is_set():
                sinks.append(Sink())
                fleet.submit(request(f"r{len(sinks)}", [1], max_tokens=20), sinks[-1])
                time.sleep(0.005)

        thread = threading.Thread(target=load)
        thread.start()
        fleet.restart(TIMEOUT_S)
        is_over.set()
        thread.join()
        assert not set(before) & set(pids(fleet))
        assert {reason for sink in sinks for reason in sink.reasons()} == {"length"}
        assert len(sinks) > 20
        hanging = Sink()
        fleet.submit(request("hangs", [HANGS], max_tokens=1), hanging)
        fleet.begin_restart()
        with pytest.raises(RequestError, match="being restarted"):
            fleet.begin_restart()
        fleet.finish_restart(0.2)
        assert hanging.reasons() == ["error"], "it did not end in time"
        assert hanging.outputs[-1].engine_died
    finally:
        fleet.close()


def test_an_engine_that_does_not_start_again_ends_the_restart(tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"
    fleet = light_fleet(model=str(obstacle), most_delay_s=0.2)
    try:
        obstacle.touch()
        with pytest.raises(EngineDeadError, match="engine 0 did not start again"):
            fleet.restart(TIMEOUT_S)
        assert [client.state == "ready" for client in fleet.engines] == [False, True]
        obstacle.unlink()
        wait_until(lambda: fleet.engines[0].state == "ready")
        fleet.restart(TIMEOUT_S)
    finally:
        fleet.close()


def test_closing_ends_all_processes_and_drains_first() -> None:
    fleet = light_fleet(3)
    found, sinks = pids(fleet), [Sink() for _ in range(6)]
    num_threads = threading.active_count()
    for i, sink in enumerate(sinks):
        fleet.submit(request(f"r{i}", [i], max_tokens=30), sink)
    fleet.close(drain=True)
    assert [sink.reasons() for sink in sinks] == [["length"]] * 6
    assert all(map(is_gone, found))
    assert threading.active_count() < num_threads
    with pytest.raises(EngineDeadError, match="closed"):
        fleet.submit(request("r", [1]), Sink())
    assert fleet.state == "closing"


def test_a_fleet_that_cannot_start_leaves_nothing_behind(tmp_path: Path) -> None:
    children = set(psutil.Process().children(recursive=True))
    for model, problem in (("exits", "ended with status 3"), (str(tmp_path), "in the way")):
        with pytest.raises(Exception, match=problem):
            light_fleet(model=model)
    assert set(psutil.Process().children(recursive=True)) <= children


def test_wrong_settings_are_refused() -> None:
    for name, value, words in (
        ("data_parallel_size", 0, "positive"),
        ("data_parallel_size", 65, "at most 64"),
        ("routing_policy", "by-name", "one of"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            start_client(**{name: value})
        assert caught.value.param == name
    with pytest.raises(RequestError, match="processes of their own"):
        start_client(data_parallel_size=2, in_process=True)


def test_processors_are_shared_out() -> None:
    assert [cores_of(i, 2, [0, 1, 2, 3]) for i in range(2)] == [(0, 1), (2, 3)]
    shares = [cores_of(i, 3, list(range(8))) for i in range(3)]
    assert sorted(core for share in shares for core in share) == list(range(8))
    assert {len(share) for share in shares} == {2, 3}
    assert [cores_of(i, 3, [4, 5]) for i in range(3)] == [(4,), (5,), (4,)]


SETTINGS: dict[str, Any] = {"device": "cpu", "num_blocks": 256, "max_model_len": 512}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(n=2, max_tokens=8, logprobs=2, prompt_logprobs=1),  # without a seed of its own
    SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}")),
    SamplingParams(seed=3, max_tokens=12, min_tokens=3, repetition_penalty=1.2),
]


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM(data_parallel_size=2, **SETTINGS) as llm:
        yield llm


def answers(llm: LLM) -> list[Any]:
    prompts = [f"Question {i}: what is {i} plus {i + 2}?" for i in range(12)]
    outputs = llm.generate(prompts, [PARAMS[i % len(PARAMS)] for i in range(12)])
    return [[(each.text, each.token_ids, each.logprobs) for each in output.outputs] for output in outputs]


def test_the_answers_of_two_are_those_of_one(two: LLM) -> None:
    fleet = two.client
    assert isinstance(fleet, Fleet)
    with LLM(**SETTINGS) as one:
        assert answers(two) == answers(one)
        assert min(fleet.router.num_routed) > 0
        assert np.array_equal(fleet.logits([65, 66]), one.client.logits([65, 66]))
        vectors = [llm.embed("a text")[0].outputs.embedding for llm in (two, one)]
        assert vectors[0] == vectors[1]
    with pytest.raises(RequestError, match="tokenizer is given"):
        LLM(data_parallel_size=2, tokenizer=two.get_tokenizer())


def test_requests_go_where_their_prefix_is_until_it_is_forgotten(two: LLM) -> None:
    fleet = two.client
    assert isinstance(fleet, Fleet)
    fleet.reset_prefix_cache().result(TIMEOUT_S)
    wait_until(lambda: len(fleet.router.index) == 0)
    beginnings = [[70 + i] * 200 for i in range(4)]
    first = [two.generate(ids, SamplingParams(max_tokens=1))[0] for ids in beginnings]  # both idle each time: in turn
    assert [output.num_cached_tokens for output in first] == [0] * 4
    wait_until(lambda: len(fleet.router.index) == 4 * (200 // 16))
    before, found = list(fleet.router.num_routed), fleet.router.num_found_tokens
    again = [two.generate([*ids, 90 + i], SamplingParams(max_tokens=4))[0] for i in range(3) for ids in beginnings]
    assert all((output.num_cached_tokens or 0) >= 192 for output in again)
    assert fleet.router.num_found_tokens - found == 12 * 192
    assert [after - routed for after, routed in zip(fleet.router.num_routed, before)] == [6, 6]
    dropped, held = fleet.reset_prefix_cache().result(TIMEOUT_S)
    assert (dropped > 48, held) == (True, 0)
    wait_until(lambda: len(fleet.router.index) == 0)
