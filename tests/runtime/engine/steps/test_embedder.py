"""Embeddings beside running requests: what they are, how they are cut, and that nobody waits for more than one pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.batch import Batch
from runtime.engine.errors import EngineDeadError, QueueFullError, RequestError
from runtime.engine.messages import PoolingRequest
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.steps.embedder import EmbeddingError
from tests.runtime.engine.fakes import FakeModel, each_loop, greedy, make_engine, prefix_hashes, request
from tests.runtime.engine.process.test_client import Gate, Sink
from tests.waiting import TIMEOUT_S, wait_until

__all__ = ["each_loop"]

pytestmark = pytest.mark.usefixtures("each_loop")

BUDGET = 32
"""Tokens of one pass, as `make_engine` has it."""


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def client(model: FakeModel) -> Iterator[ThreadEngineClient]:
    client = ThreadEngineClient(make_engine(model=model, max_waiting=8))
    yield client
    client.close()


def prompt_of(length: int, first: int = 5) -> list[int]:
    return [(first + 7 * i) % 90 for i in range(length)]


@pytest.mark.parametrize("length", [1, 2, 8, 31, 32, 33, 64, 100, 128])
def test_the_last_and_the_mean_hidden_state(client: ThreadEngineClient, length: int) -> None:
    prompt = prompt_of(length)
    hashes = prefix_hashes(np.array(prompt))
    last, mean = client.embed(PoolingRequest(prompt)), client.embed(PoolingRequest(prompt, "mean"))
    assert last.result(TIMEOUT_S).tolist() == [hashes[-1]]
    assert mean.result(TIMEOUT_S).tolist() == [np.float32(np.mean(np.array(hashes, np.float32), dtype=np.float64))]
    assert last.result().dtype == mean.result().dtype == np.float32


def test_short_prompts_share_a_pass(client: ThreadEngineClient, model: FakeModel) -> None:
    gate, shapes = Gate(model), []
    blocker = client.embed(PoolingRequest([1]))
    assert gate.entered.wait(TIMEOUT_S)
    prompts = [prompt_of(n, n) for n in (3, 9, 20, 30, 2, 40, 1)]
    futures = [client.embed(PoolingRequest(prompt, "mean" if i % 2 else "last")) for i, prompt in enumerate(prompts)]

    def note(batch: Batch) -> None:
        shapes.append((batch.num_seqs, batch.num_tokens))

    model.before_forward = note
    gate.opened.set()
    blocker.result(TIMEOUT_S)
    for i, (prompt, future) in enumerate(zip(prompts, futures, strict=True)):
        hashes = np.array(prefix_hashes(np.array(prompt)), np.float32)
        expected = np.float32(hashes.mean(dtype=np.float64)) if i % 2 else hashes[-1]
        assert future.result(TIMEOUT_S).tolist() == [expected]
    assert shapes == [(3, 32), (2, 32), (1, 32), (1, 8), (1, 1)]


def test_between_two_passes_comes_a_step(client: ThreadEngineClient, model: FakeModel) -> None:
    passes: list[str] = []
    kinds = {1: "step"}  # the one running request decodes a token at a time
    model.before_forward = lambda batch: passes.append(kinds.get(batch.num_tokens, "pass"))
    sink = Sink()
    client.submit(request("x", [1], max_tokens=100), sink)
    while not passes:
        assert not sink.done.wait(0.001)
    futures = [client.embed(PoolingRequest(prompt_of(128), "mean")) for _ in range(3)]
    for future in futures:
        future.result(TIMEOUT_S)
    assert sink.wait().token_ids() == greedy([1], 100)
    assert passes.count("pass") == 3 * 128 // BUDGET
    running = passes[: len(passes) - 1 - passes[::-1].index("step")]
    assert not any(a == b == "pass" for a, b in pairwise(running))


def test_a_cancelled_one_costs_no_further_pass(client: ThreadEngineClient, model: FakeModel) -> None:
    gate = Gate(model)
    running, waiting = client.embed(PoolingRequest(prompt_of(128))), client.embed(PoolingRequest(prompt_of(128)))
    assert gate.entered.wait(TIMEOUT_S)
    assert running.cancel()
    assert waiting.cancel()
    gate.opened.set()
    assert client.embed(PoolingRequest([3])).result(TIMEOUT_S).tolist() == [prefix_hashes(np.array([3]))[-1]]
    assert model.num_computed_tokens == BUDGET + 1


@pytest.mark.parametrize(
    ("token_ids", "pooling", "param"),
    [
        ([], "last", "token_ids"),
        ([97], "last", "token_ids"),
        ([-1], "last", "token_ids"),
        ([True], "last", "token_ids"),
        ([1] * 129, "last", "token_ids"),
        ([1], "median", "pooling"),
    ],
)
def test_a_wrong_one_is_refused(client: ThreadEngineClient, token_ids: list[int], pooling: str, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        client.embed(PoolingRequest(token_ids, pooling))
    assert raised.value.param == param


def test_a_failure_is_told_to_its_prompts_alone(client: ThreadEngineClient, model: FakeModel) -> None:
    def fail(batch: Batch) -> None:
        raise RuntimeError("broken")

    model.before_forward = fail
    with pytest.raises(EmbeddingError):
        client.embed(PoolingRequest(prompt_of(100))).result(TIMEOUT_S)
    model.before_forward = lambda batch: None
    model.nan_after = 4
    with pytest.raises(EmbeddingError, match="finite"):
        client.embed(PoolingRequest([1, 4])).result(TIMEOUT_S)
    assert client.embed(PoolingRequest([1, 5], "mean")).result(TIMEOUT_S).shape == (1,)
    sink = Sink()
    client.submit(request("x", [1, 2], max_tokens=5), sink)
    assert sink.wait().token_ids() == greedy([1, 2], 5)


def test_the_queue_has_an_end(client: ThreadEngineClient, model: FakeModel) -> None:
    gate = Gate(model)
    futures = [client.embed(PoolingRequest([1, 2])) for _ in range(8)]
    with pytest.raises(QueueFullError):
        client.embed(PoolingRequest([1, 2]))
    gate.opened.set()
    for future in futures:
        future.result(TIMEOUT_S)
    client.embed(PoolingRequest([1, 2])).result(TIMEOUT_S)


def test_what_waits_at_the_end_is_told(model: FakeModel) -> None:
    client = ThreadEngineClient(make_engine(model=model))
    gate = Gate(model)
    futures = [client.embed(PoolingRequest(prompt_of(128))) for _ in range(3)]
    assert gate.entered.wait(TIMEOUT_S)
    closing = threading.Thread(target=client.close)
    closing.start()
    gate.opened.set()
    for future in futures:
        with pytest.raises(EngineDeadError):
            future.result(TIMEOUT_S)
    closing.join(TIMEOUT_S)
    with pytest.raises(EngineDeadError):
        client.embed(PoolingRequest([1]))


def test_a_drained_engine_has_computed_them(model: FakeModel) -> None:
    client = ThreadEngineClient(make_engine(model=model))
    futures = [client.embed(PoolingRequest(prompt_of(128))) for _ in range(3)]
    client.close(drain=True)
    assert all(future.result(0).shape == (1,) for future in futures)


def expected_last(prompt: list[int]) -> list[float]:
    return [prefix_hashes(np.array(prompt))[-1]]


def embedded(client: ThreadEngineClient, prompt: list[int]) -> NDArray[np.float32]:
    """By this thread if the engine is idle."""
    asked = PoolingRequest(prompt)
    here = client.embed_here(asked)
    return client.embed(asked).result(TIMEOUT_S) if here is None else here


def test_an_idle_engine_computes_one_on_the_callers_thread(client: ThreadEngineClient, model: FakeModel) -> None:
    threads: list[str] = []
    model.before_forward = lambda batch: threads.append(threading.current_thread().name)
    mine = threading.current_thread().name
    wait_until(lambda: client._is_idle)
    for length in (1, BUDGET, BUDGET + 1):
        prompt = prompt_of(length)
        assert embedded(client, prompt).tolist() == expected_last(prompt)
        wait_until(lambda: client._is_idle)
    assert threads == [mine, mine, "xserv-engine", "xserv-engine"]  # two passes: others come between them
    sink = Sink()
    client.submit(request("x", [1], max_tokens=50), sink)
    assert embedded(client, [3]).tolist() == expected_last([3])
    assert sink.wait().token_ids() == greedy([1], 50)
    assert client.embed(PoolingRequest([4])).result(TIMEOUT_S).tolist() == expected_last([4])


def test_what_comes_meanwhile_is_computed_afterwards(client: ThreadEngineClient, model: FakeModel) -> None:
    wait_until(lambda: client._is_idle)
    gate, found = Gate(model), []
    borrowing = threading.Thread(target=lambda: found.append(embedded(client, [1, 2])))
    borrowing.start()
    assert gate.entered.wait(TIMEOUT_S)
    sink, other, logits = Sink(), client.embed(PoolingRequest([3])), client.start_logits([1, 2])
    client.submit(request("x", [1, 2], max_tokens=5), sink)
    assert not other.done()
    gate.opened.set()
    borrowing.join(TIMEOUT_S)
    assert found[0].tolist() == expected_last([1, 2])
    assert other.result(TIMEOUT_S).tolist() == expected_last([3])
    assert logits.result(TIMEOUT_S).shape[0] == 2
    assert sink.wait().token_ids() == greedy([1, 2], 5)


def test_what_comes_without_a_command_is_computed_afterwards(client: ThreadEngineClient, model: FakeModel) -> None:
    """As pages do, of a request that waits for them."""
    wait_until(lambda: client._is_idle)
    gate, sink = Gate(model), Sink()
    borrowing = threading.Thread(target=lambda: embedded(client, [1, 2]))
    borrowing.start()
    assert gate.entered.wait(TIMEOUT_S)
    asked = request("x", [1, 2], max_tokens=5)
    client._delivery.open(asked, sink)
    client._engine.add(asked)
    client._wake()
    wait_until(lambda: client._is_idle)
    gate.opened.set()
    borrowing.join(TIMEOUT_S)
    assert sink.wait().token_ids() == greedy([1, 2], 5)


def test_an_interrupted_pass_leaves_the_engine_as_it_was(client: ThreadEngineClient, model: FakeModel) -> None:
    def interrupt(batch: Batch) -> None:
        raise KeyboardInterrupt

    wait_until(lambda: client._is_idle)
    model.before_forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        client.embed_here(PoolingRequest([1, 2]))
    model.before_forward = lambda batch: None
    assert not client.has_work
    for _ in range(3):
        assert embedded(client, [1, 2]).tolist() == expected_last([1, 2])
        assert client.embed(PoolingRequest([2, 1])).result(TIMEOUT_S).tolist() == expected_last([2, 1])
    model.nan_after = 4
    with pytest.raises(EmbeddingError, match="finite"):
        embedded(client, [1, 4])


@pytest.mark.parametrize("drain", [False, True])
def test_closing_waits_for_the_borrowed_pass(model: FakeModel, drain: bool) -> None:
    client = ThreadEngineClient(make_engine(model=model))
    wait_until(lambda: client._is_idle)
    gate, found = Gate(model), []
    borrowing = threading.Thread(target=lambda: found.append(embedded(client, [1, 2])))
    borrowing.start()
    assert gate.entered.wait(TIMEOUT_S)
    closing = threading.Thread(target=client.close, args=(drain,))
    closing.start()
    wait_until(lambda: client.state == "closing")
    with pytest.raises(EngineDeadError):
        client.embed_here(PoolingRequest([1]))
    assert closing.is_alive()
    gate.opened.set()
    borrowing.join(TIMEOUT_S)
    closing.join(TIMEOUT_S)
    assert found[0].tolist() == expected_last([1, 2])
    assert not client._thread.is_alive()


def test_many_threads_borrow_submit_and_wait_at_once(model: FakeModel) -> None:
    client = ThreadEngineClient(make_engine(model=model))
    wrong: list[object] = []

    def ask(number: int) -> None:
        for turn in range(60):
            prompt = prompt_of(1 + (turn * 7 + number) % 40, number)
            if (turn + number) % 5 == 0:
                sink = Sink()
                client.submit(request(f"{number}-{turn}", prompt[:20], max_tokens=3), sink)
                if sink.wait().token_ids() != greedy(prompt[:20], 3):
                    wrong.append((number, turn))
            elif embedded(client, prompt).tolist() != expected_last(prompt):
                wrong.append((number, turn))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert not wrong
    client.close()


def test_a_signal_handler_closes_during_its_threads_pass(model: FakeModel) -> None:
    """It cannot wait for the pass that it has interrupted."""
    client = ThreadEngineClient(make_engine(model=model))
    wait_until(lambda: client._is_idle)
    model.before_forward = lambda batch: client.close()
    found: list[NDArray[np.float32]] = []
    asking = threading.Thread(target=lambda: found.append(embedded(client, [1, 2])), daemon=True)
    asking.start()
    asking.join(TIMEOUT_S)
    assert found[0].tolist() == expected_last([1, 2])
    client._thread.join(TIMEOUT_S)
    assert not client._thread.is_alive()
