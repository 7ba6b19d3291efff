"""The engine behind its client: threads, queue bound, faults of sinks and of the loop, closing."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import runtime.engine.process.thread_client as client_module
from runtime.engine.errors import ContextLengthExceededError, EngineDeadError, QueueFullError, RequestError
from runtime.engine.messages import EngineOutput
from runtime.engine.process.thread_client import ThreadEngineClient
from tests.runtime.engine.fakes import Collected, FakeModel, each_loop, greedy, make_engine, request
from tests.waiting import TIMEOUT_S, wait_until

__all__ = ["each_loop"]

pytestmark = pytest.mark.usefixtures("each_loop")


class Sink(Collected):
    """Collects outputs; `wait` returns when every choice has ended."""

    def __init__(self, num_choices: int = 1) -> None:
        super().__init__()
        self.num_open = num_choices
        self.done = threading.Event()

    def __call__(self, output: EngineOutput) -> None:
        assert self.num_open > 0, "an output after the last"
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.num_open -= 1
            if self.num_open == 0:
                self.done.set()

    def wait(self) -> Sink:
        assert self.done.wait(TIMEOUT_S), "the request never ended"
        return self


class Gate:
    """Holds the model's next step until it is opened."""

    def __init__(self, model: FakeModel) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        model.before_forward = self

    def __call__(self, batch: object) -> None:
        self.entered.set()
        assert self.opened.wait(TIMEOUT_S)


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def client(model: FakeModel) -> Iterator[ThreadEngineClient]:
    client = ThreadEngineClient(make_engine(model=model, max_waiting=4))
    yield client
    client.close()
    assert not client._thread.is_alive()


def test_a_request_comes_back(client: ThreadEngineClient) -> None:
    sink = Sink()
    client.submit(request("x", [1, 2], max_tokens=9), sink)
    assert sink.wait().token_ids() == greedy([1, 2], 9)
    assert client.info.model_name == "fake"
    assert client.stats().num_requests == 1


def test_errors_come_before_admission(client: ThreadEngineClient) -> None:
    sink = Sink()
    with pytest.raises(ContextLengthExceededError):
        client.submit(request("x", [1] * 128), sink)
    with pytest.raises(RequestError):
        client.submit(request("x", []), sink)
    assert sink.outputs == []
    assert client.stats().num_requests == 0


def test_eight_threads_submit_at_once() -> None:
    client = ThreadEngineClient(make_engine(num_blocks=24, max_num_seqs=6))
    sinks: dict[str, tuple[list[int], Sink]] = {}
    errors: list[BaseException] = []

    def submit(thread: int) -> None:
        try:
            for i in range(8):
                name, prompt, sink = f"{thread}-{i}", [thread, i, 5], Sink()
                sinks[name] = (prompt, sink)
                client.submit(request(name, prompt, max_tokens=6 + i), sink)
                if i % 4 == 3:
                    client.cancel(name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for name, (prompt, sink) in sinks.items():
        sink.wait()
        expected = greedy(prompt, 6 + int(name[-1]))
        if sink.finish_reason() == "abort":
            assert name[-1] in "37"
            expected = expected[: len(sink.token_ids())]
        assert sink.token_ids() == expected
    client.close()
    assert client._engine.pool.num_free == 24
    assert len(client._delivery) == 0


def test_the_queue_is_bounded(client: ThreadEngineClient, model: FakeModel) -> None:
    gate = Gate(model)
    running = Sink()
    client.submit(request("running", [1], max_tokens=2), running)
    assert gate.entered.wait(TIMEOUT_S)
    sinks = [Sink(3) for _ in range(4)]
    for i, sink in enumerate(sinks):
        client.submit(request(f"w{i}", [2], n=3, max_tokens=2), sink)
    refused = Sink()
    with pytest.raises(QueueFullError, match="4 requests") as caught:
        client.submit(request("w4", [2]), refused)
    assert caught.value.retry_after_s > 0
    assert client.stats().num_waiting == 4
    client.cancel("w0")
    gate.opened.set()
    for sink in [running, *sinks]:
        sink.wait()
    assert refused.outputs == []
    client.submit(request("w4", [2], max_tokens=2), refused)
    assert refused.wait().token_ids() == greedy([2], 2)


def test_an_id_in_use_is_refused_until_it_is_free(client: ThreadEngineClient, model: FakeModel) -> None:
    gate = Gate(model)
    first = Sink()
    client.submit(request("x", [1], max_tokens=2), first)
    with pytest.raises(RequestError, match="in use"):
        client.submit(request("x", [1]), Sink())
    gate.opened.set()
    first.wait()
    second = Sink()
    client.submit(request("x", [1], max_tokens=2), second)
    second.wait()


def test_cancel_while_waiting_running_and_unknown(client: ThreadEngineClient, model: FakeModel) -> None:
    gate = Gate(model)
    running, waiting, other = Sink(2), Sink(), Sink()
    client.submit(request("running", [1] * 40, n=2, max_tokens=60), running)
    assert gate.entered.wait(TIMEOUT_S)
    client.submit(request("waiting", [2], max_tokens=60), waiting)
    client.submit(request("other", [3], max_tokens=5), other)
    for name in ("running", "waiting", "unknown", "running"):
        client.cancel(name)
    gate.opened.set()
    assert running.wait().finish_reason(0) == running.finish_reason(1) == "abort"
    assert waiting.wait().finish_reason() == "abort"
    assert waiting.token_ids() == []
    assert other.wait().token_ids() == greedy([3], 5)
    client.cancel("other")
    assert client.stats().num_free_blocks == client.stats().num_blocks


def test_one_choice_can_be_cancelled(client: ThreadEngineClient, model: FakeModel) -> None:
    gate = Gate(model)
    sink = Sink(3)
    client.submit(request("x", [1] * 20, n=3, max_tokens=8), sink)
    assert gate.entered.wait(TIMEOUT_S)
    client.cancel("x", 0)  # the first, before the others have the prompt
    client.cancel("x", 2)
    client.cancel("x", 7)
    gate.opened.set()
    assert [sink.wait().finish_reason(index) for index in range(3)] == ["abort", "length", "abort"]
    assert sink.token_ids(1) == greedy([1] * 20, 8)
    assert client.stats().num_free_blocks == client.stats().num_blocks


@pytest.mark.parametrize("kind", [RuntimeError, asyncio.CancelledError, SystemExit])
def test_a_sink_that_raises_hurts_itself_alone(
    kind: type[BaseException], client: ThreadEngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[EngineOutput] = []

    def bad(output: EngineOutput) -> None:
        calls.append(output)
        if len(calls) == 3:
            raise kind("planted")

    good = Sink()
    client.submit(request("bad", [1], max_tokens=50), bad)
    client.submit(request("good", [2], max_tokens=20), good)
    assert good.wait().token_ids() == greedy([2], 20)
    assert len(calls) == 3
    stats = client.stats()
    assert stats.generation_tokens == 3 + 20
    assert stats.num_free_blocks == stats.num_blocks
    assert "sink of request bad failed" in caplog.text


def test_a_sink_may_call_the_client(client: ThreadEngineClient) -> None:
    """From the engine's own thread: submit the next request under the same id, cancel, look at the stats."""
    results: queue.Queue[list[int]] = queue.Queue()
    chained = Sink()

    def sink(output: EngineOutput) -> None:
        client.stats()
        if output.finish_reason is not None:
            client.submit(request("x", [2], max_tokens=3), chained)
            results.put(output.new_token_ids)

    client.submit(request("x", [1], max_tokens=1), sink)
    assert results.get(timeout=TIMEOUT_S) == greedy([1], 1)
    assert chained.wait().token_ids() == greedy([2], 3)


def test_close_aborts_and_drain_finishes() -> None:
    for drain, reason in ((False, "abort"), (True, "length")):
        model = FakeModel()
        gate = Gate(model)
        client = ThreadEngineClient(make_engine(model=model, max_num_seqs=1))
        sinks = [Sink() for _ in range(3)]
        for i, sink in enumerate(sinks):
            client.submit(request(f"r{i}", [i], max_tokens=30), sink)
        assert gate.entered.wait(TIMEOUT_S)
        closer = threading.Thread(target=client.close, kwargs={"drain": drain})
        closer.start()
        while not client._is_closing:
            time.sleep(0.001)
        with pytest.raises(EngineDeadError):
            client.submit(request("late", [1]), Sink())
        gate.opened.set()
        closer.join(TIMEOUT_S)
        assert not client._thread.is_alive()
        assert [sink.wait().finish_reason() for sink in sinks] == [reason] * 3
        client.close()
        client.cancel("r0")
        with pytest.raises(EngineDeadError):
            client.submit(request("late", [1]), Sink())
        with pytest.raises(EngineDeadError):
            client.logits([1])
        assert client._engine.pool.num_free == client._engine.pool.num_blocks


def test_a_paused_request_holds_nothing_and_goes_on_as_if_nothing_had_been() -> None:
    client = ThreadEngineClient(make_engine(num_blocks=32))
    paused, other = Sink(2), Sink()

    def pause_in_between(output: EngineOutput) -> None:
        """On the engine's thread: from here it would have ended before a busy machine wakes the test."""
        paused(output)
        if len(paused.outputs) == 21:
            client.pause("paused")

    client.submit(request("paused", [1, 2, 3], n=2, max_tokens=100), pause_in_between)
    wait_until(lambda: client.stats().num_paused == 1 and not client.has_work)
    client.logits([1])  # computed behind the last step, whose outputs have been delivered then
    num_outputs = len(paused.outputs)
    assert client.stats().num_free_blocks == client.stats().num_blocks
    client.submit(request("other", [4], max_tokens=50), other)
    assert other.wait().token_ids() == greedy([4], 50)
    assert len(paused.outputs) == num_outputs < 200
    client.resume("paused")
    assert [paused.wait().token_ids(index) for index in range(2)] == [greedy([1, 2, 3], 100)] * 2
    assert client.stats().num_paused == 0
    client.pause("paused")  # it has ended
    client.resume("nobody")
    client.close()


@pytest.mark.parametrize("drain", [False, True])
def test_closing_while_a_request_is_paused(drain: bool) -> None:
    model = FakeModel()
    gate = Gate(model)  # neither has ended before it is paused
    client = ThreadEngineClient(make_engine(model=model))
    sinks = {name: Sink() for name in ("resumed", "cancelled")}
    for name, sink in sinks.items():
        client.submit(request(name, [1], max_tokens=100), sink)
        client.pause(name)
    gate.opened.set()
    wait_until(lambda: client.stats().num_paused == 2 and not client.has_work)
    closer = threading.Thread(target=client.close, kwargs={"drain": drain})
    closer.start()
    if drain:
        time.sleep(0.05)
        assert client._thread.is_alive(), "a drain waits for it"
        client.cancel("cancelled")
        client.resume("resumed")
    closer.join(TIMEOUT_S)
    assert not client._thread.is_alive()
    assert sinks["cancelled"].wait().finish_reason() == "abort"
    assert sinks["resumed"].wait().finish_reason() == ("length" if drain else "abort")


def test_close_from_a_sink() -> None:
    client = ThreadEngineClient(make_engine())
    ended = Sink()

    def sink(output: EngineOutput) -> None:
        ended(output)
        client.close()

    client.submit(request("x", [1], max_tokens=50), sink)
    assert ended.wait().finish_reason() == "abort"
    client._thread.join(TIMEOUT_S)
    assert not client._thread.is_alive()


def test_a_dead_loop_ends_everything_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    gate = Gate(model)
    engine = make_engine(model=model)
    client = ThreadEngineClient(engine)
    sinks = [Sink(2), Sink()]
    client.submit(request("a", [1], n=2, max_tokens=50), sinks[0])
    assert gate.entered.wait(TIMEOUT_S)
    client.submit(request("b", [1], max_tokens=50), sinks[1])

    def schedule() -> list[object]:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.scheduler, "schedule", schedule)
    gate.opened.set()
    for sink in sinks:
        assert sink.wait().outputs[-1].finish_reason == "error"
    for call in (client.stats, lambda: client.submit(request("c", [1]), Sink())):
        with pytest.raises(EngineDeadError, match="died"):
            call()
    client.cancel("a")
    client.close()


def test_logits_between_steps(client: ThreadEngineClient) -> None:
    sink = Sink()
    client.submit(request("x", [1, 2], max_tokens=40), sink)
    assert client.logits([3, 4, 5]).shape == (3, client.info.vocab_size)
    with pytest.raises(RequestError):
        client.logits([])
    assert sink.wait().token_ids() == greedy([1, 2], 40)


def test_a_burst_shares_its_first_step(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pause lasts until all have come; another follows, in which nobody comes, and ends the waiting."""
    has_paused, all_are_there = threading.Event(), threading.Event()

    def pause(seconds: float) -> None:
        has_paused.set()
        assert all_are_there.wait(TIMEOUT_S)

    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
    monkeypatch.setattr(client_module, "BURST_MOST_S", 2 * TIMEOUT_S)
    sizes: list[int] = []
    model.before_forward = lambda batch: sizes.append(batch.num_seqs)
    client = ThreadEngineClient(make_engine(model=model, max_num_seqs=32, max_num_batched_tokens=128))
    sinks = [Sink() for _ in range(32)]
    for i, sink in enumerate(sinks):
        client.submit(request(f"r{i}", [i, 1, 2, 3], max_tokens=2), sink)
        assert has_paused.wait(TIMEOUT_S)
    all_are_there.set()
    for i, sink in enumerate(sinks):
        assert sink.wait().token_ids() == greedy([i, 1, 2, 3], 2)
    assert sizes == [32, 32]
    client.close()


def test_the_wait_for_a_burst_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BURST_PAUSE_S", 0.001)
    monkeypatch.setattr(client_module, "BURST_MOST_S", 0.05)
    client = ThreadEngineClient(make_engine(max_num_seqs=1, max_waiting=10**6))
    first = Sink()
    client.submit(request("first", [1], max_tokens=1), first)
    number = 0
    end = time.monotonic() + TIMEOUT_S
    while not first.done.is_set():  # they come without a pause
        assert time.monotonic() < end
        client.submit(request(f"r{number}", [2], max_tokens=1), lambda output: None)
        number += 1
    assert first.token_ids() == greedy([1], 1)
    client.close()


def test_who_submits_while_a_step_runs_is_in_the_next(model: FakeModel) -> None:
    gate = Gate(model)
    client = ThreadEngineClient(make_engine(model=model))
    running, arriving = Sink(), Sink()
    client.submit(request("running", [1, 2], max_tokens=6), running)
    assert gate.entered.wait(TIMEOUT_S)
    client.submit(request("arriving", [3, 4], max_tokens=6), arriving)
    sizes: list[int] = []
    model.before_forward = lambda batch: sizes.append(batch.num_tokens)
    gate.opened.set()
    assert running.wait().token_ids() == greedy([1, 2], 6)
    assert arriving.wait().token_ids() == greedy([3, 4], 6)
    assert sizes[0] == 3, "one decode and the new prompt"
    client.close()


def test_a_transfer_that_fails_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are in doubt: every request is told, and none is taken any more."""
    model = FakeModel()
    gate = Gate(model)  # all are submitted while the engine still takes requests
    engine = make_engine(
        model=model, num_blocks=16, max_num_seqs=6, preemption="swap", swap_space_bytes=10 * 8 * 17 * 4
    )

    def run(*pairs: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr(engine.executor.transfer, "run", run)
    client = ThreadEngineClient(engine)
    sinks = [Sink() for _ in range(6)]
    for i, sink in enumerate(sinks):
        client.submit(request(f"r{i}", [i], max_tokens=60), sink)
    gate.opened.set()
    for sink in sinks:
        assert sink.wait().finish_reason() in ("error", "length")
    assert sinks[-1].finish_reason() == "error"
    with pytest.raises(EngineDeadError, match="died"):
        client.stats()
    client.close()


def test_an_idle_engine_sleeps(client: ThreadEngineClient) -> None:
    sink = Sink()
    client.submit(request("x", [1], max_tokens=1), sink)
    sink.wait()
    steps = client.stats().num_steps

    def is_asleep() -> bool:
        clock = time.pthread_getcpuclockid(client._thread.ident)  # type: ignore[arg-type]
        before_s = time.clock_gettime(clock)
        time.sleep(0.3)
        return time.clock_gettime(clock) - before_s < 0.003

    wait_until(is_asleep)
    assert client.stats().num_steps == steps
    gc.collect()
