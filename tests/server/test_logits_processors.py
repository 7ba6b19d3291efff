"""Logits processors and `logprobs_mode` of a real server, whose engine is a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.runtime.engine.logits.cases import MODEL, NUM_TOKENS, PROMPTS, ByRequest
from tests.runtime.engine.logits.test_processors import ANSWERS
from tests.server.running import serving_process

NAME = f"{ByRequest.__module__}:ByRequest"
OPTIONS: dict[str, Any] = {"load_format": "auto", "device": "cpu", "dtype": "float32", "max_model_len": 128}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    options = {**OPTIONS, "logits_processors": [NAME], "logprobs_mode": "processed_logprobs"}
    with serving_process(MODEL, options) as (_, url), httpx.Client(base_url=url, timeout=60) as made:
        yield made


def completed(client: httpx.Client, prompt: list[int], **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    return client.post("/v1/completions", json={**body, **fields})


def test_a_request_names_its_processor(client: httpx.Client) -> None:
    for name, wanted in (("no_repeat_ngram", "no_repeat_ngram"), (None, "none")):
        args = {} if name is None else {"vllm_xargs": {"processor": name}}
        for prompt, ids in zip(PROMPTS, ANSWERS[wanted], strict=True):
            answer = completed(client, prompt, **args)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == ids


def test_failures(client: httpx.Client) -> None:
    """A processor that fails is the operator's fault, arguments that it refuses the request's."""
    failed = completed(client, PROMPTS[0], vllm_xargs={"processor": "fails_at_three"})
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "logits_processor_failed")
    message = f"The logits processor {NAME} failed: ValueError: three tokens are too many."
    assert failed.json()["error"]["message"] == message
    refused = completed(client, PROMPTS[0], vllm_xargs={"processor": "no_such"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "vllm_xargs")
    assert f"vllm_xargs: {NAME} refuses them: ValueError: processor must be one of" in refused.text
    wrong = completed(client, PROMPTS[0], vllm_xargs=["no_such"])
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "vllm_xargs")
    lines = completed(client, PROMPTS[0], vllm_xargs={"processor": "fails_at_three"}, stream=True).text
    assert message in lines
    assert completed(client, PROMPTS[0]).json()["choices"][0]["token_ids"] == ANSWERS["none"][0]


def test_processed_log_probabilities(client: httpx.Client) -> None:
    answer = completed(client, PROMPTS[0], vllm_xargs={"processor": "top_k"}, logprobs=8, max_tokens=1).json()
    top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    assert sum(value > -9999 for value in top.values()) == 5
    told = client.get("/server_info").json()
    assert NAME in str(told)


def test_a_server_without_processors() -> None:
    with serving_process(MODEL, OPTIONS) as (_, url), httpx.Client(base_url=url, timeout=60) as client:
        refused = completed(client, PROMPTS[0], vllm_xargs={"processor": "top_k"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "vllm_xargs")
        assert "start it with logits_processors" in refused.json()["error"]["message"]
