"""The bundled model in a process of its own answers as it does in this one."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.engine.errors import ContextLengthExceededError, RequestError
from runtime.engine.make_client import start_client
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineOutput, EngineRequest, PoolingRequest, StepView
from runtime.engine.process.client import EngineClient
from runtime.engine.process.process_client import ProcessEngineClient
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.engine.sampling_params import SamplingParams
from runtime.errors import XservError
from tests.waiting import TIMEOUT_S

SETTINGS: dict[str, Any] = {"device": "cpu", "num_blocks": 128, "max_model_len": 256, "max_num_seqs": 8, "seed": 0}

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "choices": SamplingParams(n=3, seed=7, max_tokens=12, temperature=1.2),
    "log probabilities": SamplingParams(seed=1, logprobs=3, prompt_logprobs=2, max_tokens=6),
    "penalties and bias": SamplingParams(
        seed=2, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={70: 5.0, 80: -100.0}, max_tokens=10
    ),
    "ids": SamplingParams(seed=3, allowed_token_ids=[66, 67, 68], stop_token_ids=[68], min_tokens=3, max_tokens=30),
    "the whole context": SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True),
}


@pytest.fixture(scope="module")
def in_process() -> Iterator[ThreadEngineClient]:
    client = ThreadEngineClient(build_engine(**SETTINGS))
    yield client
    client.close()


@pytest.fixture(scope="module")
def client() -> Iterator[ProcessEngineClient]:
    client = ProcessEngineClient(**SETTINGS)
    yield client
    client.close()


def run(client: EngineClient, requests: list[EngineRequest]) -> dict[str, list[EngineOutput]]:
    """All outputs by request, without what depends on time."""
    outputs: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
    num_open = sum(request.params.n for request in requests)
    done = threading.Semaphore(0)

    def sink(output: EngineOutput) -> None:
        outputs[output.request_id].append(msgspec.structs.replace(output, times=None, num_cached_tokens=None))
        if output.finish_reason is not None:
            assert output.times is not None
            assert output.times.last_token_s is not None
            assert output.times.arrival_s < output.times.last_token_s
            done.release()

    for request in requests:
        client.submit(request, sink)
    for _ in range(num_open):
        assert done.acquire(timeout=TIMEOUT_S)
    return {
        name: sorted(found, key=lambda output: output.index) for name, found in outputs.items()
    }  # how the choices' outputs mix depends on arrivals


def test_the_same_outputs_as_in_this_process(client: ProcessEngineClient, in_process: ThreadEngineClient) -> None:
    requests = [
        EngineRequest(request_id=name, prompt_token_ids=list(range(60 + i, 80)), params=params, eos_token_ids=(1,))
        for i, (name, params) in enumerate(PARAMS.items())
    ]
    expected = run(in_process, requests)
    assert run(client, requests) == expected
    assert len(expected["the whole context"]) == 256 - 15
    assert client.info == in_process.info


def test_prompts_in_numpy_arrays(client: ProcessEngineClient, in_process: ThreadEngineClient) -> None:
    prompt: Any = np.arange(60, 70, dtype=np.int64)
    request = EngineRequest(request_id="x", prompt_token_ids=prompt, params=SamplingParams(seed=np.int64(4)))
    assert run(client, [request]) == run(in_process, [request])


def test_logits_and_embeddings(client: ProcessEngineClient, in_process: ThreadEngineClient) -> None:
    ids = [65, 66, 67]
    found = client.logits(ids)
    assert found.dtype == np.float32
    assert np.array_equal(found, in_process.logits(ids))
    for pooling in ("last", "mean"):
        embedding = client.embed(PoolingRequest(ids, pooling)).result(TIMEOUT_S)
        assert np.array_equal(embedding, in_process.embed(PoolingRequest(ids, pooling)).result(TIMEOUT_S))
    for each in (client, in_process):
        dropped, held = each.reset_prefix_cache().result(TIMEOUT_S)
        assert dropped >= 0
        assert held == 0
    found *= 2.0  # the caller's own


def error_of(call: Callable[[], object]) -> Exception:
    with pytest.raises(XservError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ([65] * 256, {}),
        ([], {}),
        ([10**6], {}),
        ([65], {"params": SamplingParams(allowed_token_ids=[10**6])}),
        ([65], {"request_id": ""}),
        ([65], {"ttft_target_s": 1.0}),
        ([65], {"cache_salt": ""}),
    ],
)
def test_requests_are_refused_alike(
    client: ProcessEngineClient, in_process: ThreadEngineClient, prompt: list[int], fields: dict[str, Any]
) -> None:
    request = EngineRequest(**{"request_id": "x", "prompt_token_ids": prompt, "params": SamplingParams(), **fields})
    errors = [error_of(lambda each=each: each.submit(request, print)) for each in (client, in_process)]
    assert type(errors[0]) is type(errors[1])
    assert isinstance(errors[0], RequestError)
    assert str(errors[0]) == str(errors[1])
    assert vars(errors[0]) == vars(errors[1])


@pytest.mark.parametrize("name", ["logits", "embed"])
def test_calls_are_refused_alike(client: ProcessEngineClient, in_process: ThreadEngineClient, name: str) -> None:
    def failure(each: Any, *arguments: Any) -> Exception:
        def call() -> None:
            answer = getattr(each, name)(*arguments) if name == "logits" else each.embed(PoolingRequest(*arguments))
            if name == "embed":
                answer.result(TIMEOUT_S)

        return error_of(call)

    cases: list[tuple[Any, ...]] = [([],), ([-1],), ([65] * 257,), (["a"],)]
    if name == "embed":
        cases += [([65], "first"), ([65], ["last"]), ([65], None, (), 5)]
    for arguments in cases:
        ours, theirs = failure(client, *arguments), failure(in_process, *arguments)
        assert isinstance(ours, RequestError)
        assert (type(ours), str(ours), vars(ours)) == (type(theirs), str(theirs), vars(theirs))


@pytest.mark.parametrize("settings", [{"model": "/nowhere/at/all"}, {"num_blocks": 10**10}])
def test_what_cannot_be_started_is_said_alike(settings: dict[str, Any]) -> None:
    settings = {"device": "cpu", **settings}
    ours, theirs = error_of(lambda: ProcessEngineClient(**settings)), error_of(lambda: build_engine(**settings))
    messages = [re.sub(r"only [\d,]+ are free", "", str(error)) for error in (ours, theirs)]  # which changes meanwhile
    assert (type(ours), messages[0]) == (type(theirs), messages[1])


def test_steps_can_be_watched(client: ProcessEngineClient) -> None:
    views: list[StepView] = []
    stop = client.watch(views.append)
    request = EngineRequest(
        request_id="seen", prompt_token_ids=[90] * 20, params=SamplingParams(max_tokens=5, ignore_eos=True)
    )
    run(client, [request])
    client.logits([1])  # what was sent before has come
    stop()
    chunks = [(view.chunks[0].start, view.chunks[0].count, view.chunks[0].num_prompt_tokens) for view in views]
    assert chunks == [(0, 20, 20), (20, 1, 20), (21, 1, 20), (22, 1, 20), (23, 1, 20)]
    assert {chunk.request_id for view in views for chunk in view.chunks} == {"seen"}
    assert [view.step for view in views] == sorted({view.step for view in views})
    assert all(view.duration_s > 0.0 and view.num_blocks == 128 for view in views)
    assert views[0].block_map is not None
    run(client, [msgspec.structs.replace(request, request_id="unseen")])
    client.logits([1])
    assert len(views) == 5


def test_the_server_needs_no_numba() -> None:
    program = "import sys, runtime.engine.make_client; print(sorted({'numba', 'models.families'} & set(sys.modules)))"
    root = Path(__file__).parents[4]
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    )
    assert output.stdout == "[]\n"


def test_a_context_that_is_too_long(client: ProcessEngineClient) -> None:
    request = EngineRequest(request_id="x", prompt_token_ids=[65] * 300, params=SamplingParams())
    with pytest.raises(ContextLengthExceededError):
        client.submit(request, print)


def test_a_client_is_chosen() -> None:
    client = start_client(in_process=True, **SETTINGS)
    assert isinstance(client, ThreadEngineClient)
    client.close()
    with pytest.raises(RequestError, match="a process of its own"):
        start_client(in_process=True, hang_timeout_s=1.0)
    for seconds in (0.0, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="hang_timeout_s must be a positive number"):
            start_client(hang_timeout_s=seconds)
