"""The engine's process dies, hangs or does not start: who waits is told, the next serves, nothing is left behind."""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

import runtime.engine.process.spawning as spawning
from models.errors import ModelLoadError
from runtime.engine.config import EngineConfig
from runtime.engine.errors import EngineDeadError, QueueFullError, RequestError
from runtime.engine.messages import EngineInfo, EngineOutput, EngineRequest, PoolingRequest
from runtime.engine.process.child import EngineProcess, Supervision
from runtime.engine.process.main import EXIT_LOOP_DIED, EXIT_SERVER_GONE, EXIT_STUCK, ProcessServer
from runtime.engine.process.process_client import ProcessEngineClient
from runtime.engine.process.wire import Call, FromEngine, Outputs, Start, Started, frame
from runtime.engine.sampling_params import SamplingParams
from runtime.errors import OutOfMemoryError, XservError
from runtime.own_packages import python_module
from tests.runtime.engine.light_engine import EXITS, HANGS, RAISES, REFUSED
from tests.waiting import TIMEOUT_S, wait_until

ROOT = Path(__file__).parents[4]
LIGHT = python_module("tests.runtime.engine.light_engine")


class Sink:
    """Collects outputs of one request; `wait` returns when every choice has ended."""

    def __init__(self, num_choices: int = 1) -> None:
        self.outputs: list[EngineOutput] = []
        self.num_open = num_choices
        self.started, self.done = threading.Event(), threading.Event()

    def __call__(self, output: EngineOutput) -> None:
        assert self.num_open > 0, "an output after the last"
        self.outputs.append(output)
        self.started.set()
        if output.finish_reason is not None:
            self.num_open -= 1
            if self.num_open == 0:
                self.done.set()

    def wait(self) -> list[EngineOutput]:
        assert self.done.wait(TIMEOUT_S), "the request never ended"
        return self.outputs

    def token_ids(self) -> list[int]:
        return [token_id for output in self.wait() for token_id in output.new_token_ids]

    def reasons(self) -> list[str | None]:
        return [output.finish_reason for output in self.wait() if output.finish_reason is not None]


def request(request_id: str, prompt: list[int], **params: Any) -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=SamplingParams(**params))


def light_client(model: str | None = None, max_waiting: int = 100, **supervision: Any) -> ProcessEngineClient:
    supervision = {"first_delay_s": 0.05, "healthy_s": 0.0, **supervision}
    return ProcessEngineClient(model, max_waiting=max_waiting, supervision=Supervision(command=LIGHT, **supervision))


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def one_client() -> Iterator[ProcessEngineClient]:
    client = light_client()
    yield client
    client.close()


@pytest.fixture
def client(one_client: ProcessEngineClient) -> Iterator[ProcessEngineClient]:
    """One for many tests, since it recovers from all of them."""
    assert len(one_client._delivery) == 0
    yield one_client
    wait_until(lambda: one_client.state == "ready")


def serves(client: ProcessEngineClient) -> bool:
    sink = Sink()
    client.submit(request("alive", [5], max_tokens=3), sink)
    return sink.token_ids() == [6, 7, 8]


def test_ten_kills_in_mid_stream(client: ProcessEngineClient) -> None:
    """Every choice ends once, with an error that says it was the engine; what is not open is not told anything."""
    for kill in range(10):
        sinks = [Sink(n) for n in (1, 3, 1)]
        for i, (sink, prompt_len) in enumerate(zip(sinks, (1, 7, 50_000))):
            client.submit(request(f"r{i}", [i] * prompt_len, n=sink.num_open, max_tokens=40_000), sink)
        over = Sink()
        client.submit(request("over", [1], max_tokens=1), over)
        over.wait()
        for sink in sinks:
            assert sink.started.wait(TIMEOUT_S)
        pid = client.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for sink in sinks:
            last = [output for output in sink.wait() if output.finish_reason is not None]
            assert sorted(output.index for output in last) == list(range(len(last)))
            assert all(output.finish_reason == "error" and output.engine_died for output in last)
        assert over.reasons() == ["length"]
        wait_until(lambda: client.state == "ready")
        assert serves(client), kill
        assert client.pid != pid
    assert is_gone(pid)


def test_while_it_is_down_requests_are_told_when_to_come_again(tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"
    with_obstacle = light_client(str(obstacle), first_delay_s=0.1, most_delay_s=0.4, healthy_s=60.0)
    try:
        first = with_obstacle.pid
        assert first is not None
        obstacle.touch()  # the next starts fail
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: with_obstacle.state != "ready")
        views: set[str] = set()

        def has_been_seen_down_and_starting() -> bool:
            views.add(with_obstacle.state)
            for call in (with_obstacle.stats, lambda: with_obstacle.submit(request("x", [1]), Sink())):
                with pytest.raises(EngineDeadError) as caught:
                    call()
                assert caught.value.retry_after_s is not None
                assert 1.0 <= caught.value.retry_after_s < 120.0
            return len(views) > 1

        wait_until(has_been_seen_down_and_starting)
        assert views == {"down", "starting"}
        obstacle.unlink()
        wait_until(lambda: with_obstacle.state == "ready")
        assert serves(with_obstacle)
    finally:
        with_obstacle.close()


def test_the_pause_between_starts_grows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    obstacle = tmp_path / "obstacle"
    client = light_client(str(obstacle), first_delay_s=0.01, most_delay_s=0.04, healthy_s=60.0)
    obstacle.touch()
    os.kill(client.pid or 0, signal.SIGKILL)

    def pauses() -> list[str]:
        return [text.split("again in ")[1] for text in caplog.messages if "again in" in text]

    wait_until(lambda: len(pauses()) >= 4)
    client.close()
    assert client.state == "closing"
    assert pauses()[:4] == ["0.01 s", "0.02 s", "0.04 s", "0.04 s"]
    assert any("SIGKILL" in text for text in caplog.messages)
    assert any("is in the way" in text for text in caplog.messages)


@pytest.mark.parametrize(("token_id", "status"), [(EXITS, 9), (RAISES, EXIT_LOOP_DIED)])
def test_a_request_that_breaks_the_engine(
    client: ProcessEngineClient, caplog: pytest.LogCaptureFixture, token_id: int, status: int
) -> None:
    sinks = [Sink(), Sink()]
    client.submit(request("other", [1], max_tokens=50_000), sinks[0])
    assert sinks[0].started.wait(TIMEOUT_S)
    client.submit(request("bad", [token_id], max_tokens=5), sinks[1])
    for sink in sinks:
        assert sink.reasons() == ["error"]
        assert sink.outputs[-1].engine_died
    wait_until(lambda: client.state == "ready" and f"status {status}" in caplog.text)
    assert serves(client)
    if token_id == RAISES:  # the engine's log comes here, tracebacks and all
        record = next(record for record in caplog.records if "loop has died" in record.message)
        assert record.levelno == logging.ERROR
        assert "RuntimeError: planted" in (record.exc_text or "")


def test_an_engine_that_gets_nowhere_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    client = light_client(hang_timeout_s=5.0)
    pid = client.pid
    time.sleep(7.0)
    assert serves(client)
    assert client.pid == pid, "an idle engine is left alone"
    sink = Sink()
    client.submit(request("bad", [HANGS], max_tokens=5), sink)
    assert sink.reasons() == ["error"]
    wait_until(lambda: client.state == "ready" and f"status {EXIT_STUCK}" in caplog.text)
    assert serves(client)
    client.close()


def test_an_embedding_that_the_reader_computed_is_progress() -> None:
    """Else an engine that computes one after the other, and nothing else, would seem to hang."""
    connection, peer = socket.socketpair()
    with connection, peer:
        server = ProcessServer(connection)
        server._client = Mock(embed=lambda *_: Future(), embed_here=lambda *_: np.zeros(1, np.float32))
        server._progress_s = 0.0
        call = Call(1, "embed", pooled=PoolingRequest([1, 2]))
        server._obey(call, is_last=False)
        assert server._progress_s == 0.0, "it waits for the engine's thread"
        server._obey(call, is_last=True)
        assert server._progress_s > 0.0


def test_an_engines_facts_are_known_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[str] = []
    plain = ProcessEngineClient.begin

    def begin(client: ProcessEngineClient, info: EngineInfo) -> None:
        states.append(client.state)
        plain(client, info)

    monkeypatch.setattr(ProcessEngineClient, "begin", begin)
    client = light_client()
    client.close()
    assert states == ["starting"]


def test_a_process_that_falls_silent_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    client = light_client(hang_timeout_s=4.0)
    sink = Sink()
    client.submit(request("x", [1], max_tokens=50_000), sink)
    os.kill(client.pid or 0, signal.SIGSTOP)
    assert sink.reasons() == ["error"]
    wait_until(lambda: client.state == "ready")
    assert "nothing was heard" in caplog.text
    assert serves(client)
    client.close()


def test_calls_end_with_the_process(client: ProcessEngineClient) -> None:
    embedding = client.embed(PoolingRequest([1, 2]))
    results: queue.Queue[object] = queue.Queue()

    def ask() -> None:
        try:
            results.put(client.logits([HANGS]))
        except EngineDeadError as error:
            results.put(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(client._calls) == 3)
    os.kill(client.pid or 0, signal.SIGKILL)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert all(isinstance(results.get_nowait(), EngineDeadError) for _ in threads)
    assert isinstance(embedding.exception(TIMEOUT_S), EngineDeadError)
    wait_until(lambda: client.state == "ready")
    cancelled = client.embed(PoolingRequest([1, 2]))
    assert cancelled.cancel()
    wait_until(lambda: client._calls == {})
    assert client.logits([3, 4]).tolist() == [[3.0], [4.0]]


def test_the_terminals_signals_are_not_for_the_engine(client: ProcessEngineClient) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(client.pid or 0, number)
    time.sleep(0.1)
    assert serves(client)


def test_watching_goes_on_after_a_new_start(client: ProcessEngineClient) -> None:
    """The light engine has no steps to show; whether it is watched is what its process was told."""
    stop = client.watch(lambda view: None)
    assert client._is_watched
    first = client.pid
    os.kill(first or 0, signal.SIGKILL)
    wait_until(lambda: client.pid not in (None, first) and client._is_watched)
    stop()
    assert not client._is_watched
    stop()


@pytest.mark.parametrize("drain", [True, False])
def test_close(drain: bool) -> None:
    client = light_client()
    process = psutil.Process(client.pid)
    sink = Sink(2)
    client.submit(request("x", [1], n=2, max_tokens=200 if drain else 50_000), sink)
    assert sink.started.wait(TIMEOUT_S)
    client.close(drain)
    assert sink.done.is_set()
    assert sink.reasons() == (["length"] * 2 if drain else ["abort"] * 2)
    assert not process.is_running()
    assert client.state == "closing"
    with pytest.raises(EngineDeadError) as caught:
        client.submit(request("late", [1]), Sink())
    assert caught.value.retry_after_s is None
    for call in (client.stats, lambda: client.embed(PoolingRequest([1])), lambda: client.logits([1])):
        with pytest.raises(EngineDeadError, match="closed"):
            call()
    client.cancel("x")
    client.close()


def test_a_drain_can_be_cut_short() -> None:
    client = light_client()
    sink, late = Sink(), Sink()
    client.submit(request("x", [1], max_tokens=90_000), sink)
    draining = threading.Thread(target=client.close, kwargs={"drain": True})
    draining.start()
    wait_until(lambda: client.state == "closing")
    with pytest.raises(EngineDeadError):
        client.submit(request("late", [1]), late)
    assert draining.is_alive()
    client.close()
    draining.join(TIMEOUT_S)
    assert sink.reasons() == ["abort"]


def test_a_process_that_does_not_close_is_killed() -> None:
    client = light_client(close_timeout_s=0.5)
    sink = Sink()
    client.submit(request("x", [1], max_tokens=50_000), sink)
    process = psutil.Process(client.pid)
    process.suspend()
    client.close()
    assert sink.reasons() == ["abort"]
    assert not process.is_running()


def test_close_while_it_is_down(tmp_path: Path) -> None:
    client = light_client(first_delay_s=1000.0, most_delay_s=1000.0)
    os.kill(client.pid or 0, signal.SIGKILL)
    wait_until(lambda: client.state == "down")
    client.close()
    assert not client._supervisor.thread.is_alive()


def test_close_from_a_sink() -> None:
    client = light_client()
    ended = Sink()

    def sink(output: EngineOutput) -> None:
        ended(output)
        client.close()

    client.submit(request("x", [1], max_tokens=50_000), sink)
    assert ended.reasons() == ["abort"]
    client._supervisor.thread.join(TIMEOUT_S)
    assert not client._supervisor.thread.is_alive()


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        (str(ROOT), ModelLoadError, f"{ROOT} is in the way"),
        ("needs memory", OutOfMemoryError, "no more memory"),
        ("breaks", XservError, "ZeroDivisionError in the engine; see the log"),
        ("exits", EngineDeadError, "ended with status 3"),
    ],
)
def test_what_keeps_the_engine_from_starting_is_raised(model: str, kind: type[Exception], words: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(XservError, match=words) as caught:
        light_client(model)
    assert type(caught.value) is kind
    assert set(threading.enumerate()) <= before


def test_settings_are_checked_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.engine.process.supervisor.EngineProcess", None)
    with pytest.raises(RequestError, match="max_num_seqs"):
        ProcessEngineClient(max_num_seqs=0)


def test_the_queue_is_bounded() -> None:
    client = light_client(max_waiting=3)
    process = psutil.Process(client.pid)
    process.suspend()
    sinks = [Sink(2) for _ in range(3)]
    for i, sink in enumerate(sinks):
        client.submit(request(f"r{i}", [i], n=2, max_tokens=2), sink)
    refused = Sink()
    with pytest.raises(QueueFullError, match="3 requests") as caught:
        client.submit(request("r3", [1]), refused)
    assert caught.value.retry_after_s > 0
    assert client.stats().num_waiting == 3
    client.cancel("r1")
    process.resume()
    for sink in sinks:
        sink.wait()
    assert sinks[1].reasons() == ["abort", "abort"] or len(sinks[1].outputs) == 4
    wait_until(lambda: client._queue.num_waiting == client._queue.num_waiting_tokens == 0)
    client.submit(request("r3", [1], max_tokens=2), refused)
    assert refused.token_ids() == [2, 3]
    wait_until(lambda: client.stats().num_running == client.stats().num_waiting == 0)
    assert client.stats().num_requests == 4
    client.close()


def test_a_request_that_only_the_engine_refuses(client: ProcessEngineClient) -> None:
    sink = Sink(2)
    client.submit(request("x", [REFUSED], n=2), sink)
    assert [(output.index, output.finish_reason, output.error) for output in sink.wait()] == [
        (0, "error", "refused"),
        (1, "error", "refused"),
    ]
    assert all(output.error_code == "unsatisfiable_request" and not output.engine_died for output in sink.outputs)
    assert serves(client)
    wait_until(lambda: client._queue.num_waiting == 0)


def test_an_id_in_use_and_a_sink_that_fails(client: ProcessEngineClient, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[EngineOutput] = []

    def bad(output: EngineOutput) -> None:
        calls.append(output)
        if len(calls) == 3:
            raise SystemExit

    good, long = Sink(), Sink()
    client.submit(request("bad", [1], max_tokens=50_000), bad)
    client.submit(request("good", [2], max_tokens=20), good)
    client.submit(request("long", [2], max_tokens=50_000), long)
    with pytest.raises(RequestError, match="in use"):
        client.submit(request("long", [2]), Sink())
    client.cancel("long")
    assert good.token_ids() == list(range(3, 23))
    assert long.reasons() == ["abort"]
    wait_until(lambda: len(client._delivery) == 0)
    assert len(calls) == 3
    assert "sink of request bad failed" in caplog.text
    assert serves(client)


def start_message() -> Start:
    return Start(
        model=None,
        config=EngineConfig(device="cpu"),
        log_level=logging.WARNING,
        hang_timeout_s=100.0,
    )


def received(process: EngineProcess) -> list[FromEngine]:
    messages = process.receive()
    assert messages is not None, "the engine's process has ended"
    return messages


def test_an_engine_that_nobody_reads_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of its tokens are drawn when somebody reads again: the socket holds a few."""
    monkeypatch.setattr(spawning, "SOCKET_BUFFER_BYTES", 8192)
    process = EngineProcess(start_message(), LIGHT)
    messages: list[object] = []
    while not any(isinstance(message, Started) for message in messages):
        messages += received(process)
    process.send(frame(request("x", [1], max_tokens=300, logprobs=20)))
    time.sleep(2.0)  # longer than its steps take
    begun_s = time.monotonic()
    outputs: list[EngineOutput] = []
    while not (outputs and outputs[-1].finish_reason):
        for message in received(process):
            if isinstance(message, Outputs):
                outputs += message.outputs
    assert [output.new_token_ids[0] for output in outputs] == list(range(2, 302))
    sampled_s = [output.times.last_token_s or 0.0 for output in outputs if output.times is not None]
    assert sum(moment > begun_s for moment in sampled_s) > 150
    assert process.end() == f"ended with status {EXIT_SERVER_GONE}"


PARENT = """
import sys, time
from runtime.engine.process.child import Supervision
from runtime.engine.process.process_client import ProcessEngineClient
if __name__ == "__main__":
    client = ProcessEngineClient(supervision=Supervision(command=tuple(sys.argv[1:])))
    print(client.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("is_suspended", [False, True])
def test_the_engine_dies_with_its_server(is_suspended: bool) -> None:
    """A process that runs sees the socket's end; one that cannot even do that is killed by the kernel."""
    arguments = [sys.executable, "-c", PARENT, *LIGHT]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            assert not is_gone(pid)
            if is_suspended:
                if sys.platform != "linux":
                    pytest.skip("only Linux kills the children of a dead thread")
                os.kill(pid, signal.SIGSTOP)
            parent.kill()
            parent.wait(TIMEOUT_S)
            wait_until(lambda: is_gone(pid))
        finally:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_nothing_is_left_behind() -> None:
    def is_nothing_new() -> bool:  # other tests' threads and processes may still be ending
        gc.collect()
        now = psutil.Process()
        return (
            now.num_fds() <= num_fds
            and set(threading.enumerate()) <= threads
            and set(now.children(recursive=True)) <= processes
        )

    light_client().close()  # what is made once
    gc.collect()
    this = psutil.Process()
    num_fds, threads, processes = this.num_fds(), set(threading.enumerate()), set(this.children(recursive=True))
    client = light_client()
    sink, second = Sink(), Sink()
    client.submit(request("x", [1], max_tokens=50_000), sink)
    assert sink.started.wait(TIMEOUT_S)
    os.kill(client.pid or 0, signal.SIGKILL)
    sink.wait()
    wait_until(lambda: client.state == "ready")
    client.submit(request("y", [1], max_tokens=50_000), second)
    assert second.started.wait(TIMEOUT_S)
    client.close()
    assert second.reasons() == ["abort"]
    assert is_nothing_new()
