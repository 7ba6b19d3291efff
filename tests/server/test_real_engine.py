"""The server on the real engine: a tiny random model, made on the spot, and stories260K where it is."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.server.arrivals import arrived, shown
from tests.server.openapi import check_answer
from tests.server.real_server import Real, serving_real
from tests.waiting import TIMEOUT_S, wait_until

STORIES = Path(__file__).parents[3] / "shared" / "data" / "models"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tiny_server(tiny_folder: Path) -> Iterator[Real]:
    with serving_real(tiny_folder, load_format="dummy", seed=0, num_blocks=600, max_num_seqs=64) as real:
        yield real


@pytest.fixture
def tiny(tiny_server: Real) -> Iterator[Real]:
    """After each test every block is free again."""
    yield tiny_server
    wait_until(lambda: tiny_server.num_used_blocks == 0)


@pytest.fixture(scope="module")
def stories() -> Iterator[Real]:
    if not STORIES.is_dir():
        pytest.skip("../shared/data/models is not there")
    with serving_real(STORIES / "stories260K") as real:
        yield real


def test_a_trained_model_continues_as_it_should(stories: Real) -> None:
    cases = json.loads((STORIES / "expected.json").read_text(encoding="utf-8"))["stories260K"]["greedy"]
    for case in cases:
        asked: dict[str, Any] = {
            "model": stories.model,
            "prompt": case["prompt"],
            "temperature": 0,
            "max_tokens": len(case["output_ids"]),
        }
        body = {"return_token_ids": True}
        answer: Any = stories.openai.completions.create(**asked, extra_body=body)
        check_answer("CreateCompletionResponse", answer.model_dump(exclude_unset=True))
        assert answer.choices[0].prompt_token_ids == case["prompt_ids"]
        assert answer.choices[0].token_ids == case["output_ids"]
        assert case["prompt"] + answer.choices[0].text == case["text"]
        with stories.openai.completions.create(**asked, stream=True) as chunks:
            assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
        echoed = stories.openai.completions.create(**{**asked, "max_tokens": 3}, echo=True)
        assert case["text"].startswith(echoed.choices[0].text)


def test_a_stop_string_of_a_trained_model(stories: Real) -> None:
    answer = stories.openai.completions.create(
        model=stories.model, prompt="Once upon a time", temperature=0, max_tokens=100, stop=[" named Lily"]
    )
    assert answer.choices[0].text == ", there was a little girl"
    assert answer.choices[0].finish_reason == "stop"
    wait_until(lambda: stories.num_used_blocks == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_two_choices_of_one_seed_differ_and_come_again(tiny: Real, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": tiny.model,
        "messages": [{"role": "user", "content": "Hello"}],
        "n": 2,
        "seed": 7,
        "temperature": 1.0,
        "max_tokens": 20,
    }

    def texts() -> list[str]:
        if not stream:
            answer = tiny.openai.chat.completions.create(**asked)
            check_answer("CreateChatCompletionResponse", answer.model_dump(exclude_unset=True))
            return [choice.message.content or "" for choice in answer.choices]
        parts = ["", ""]
        with tiny.openai.chat.completions.create(**asked, stream=True) as chunks:
            for chunk in chunks:
                check_answer("CreateChatCompletionStreamResponse", chunk.model_dump(exclude_unset=True))
                parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        return parts

    first, second = texts()
    assert first != second
    assert texts() == [first, second]


def test_logprobs_are_those_of_a_distribution(tiny: Real) -> None:
    answer = tiny.openai.chat.completions.create(
        model=tiny.model,
        messages=[{"role": "user", "content": "Hello"}],
        temperature=0,
        max_tokens=4,
        logprobs=True,
        top_logprobs=20,
    )
    check_answer("CreateChatCompletionResponse", answer.model_dump(exclude_unset=True))
    assert answer.choices[0].logprobs is not None
    for entry in answer.choices[0].logprobs.content or []:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert all(value <= 0 for value in values)
        assert entry.logprob == values[0], "greedy draws the most probable"


def test_echoed_logprobs_agree_with_generated_ones(tiny: Real) -> None:
    """A text's log probabilities are the same whether it was drawn or given."""
    drawn: Any = tiny.openai.completions.create(
        model=tiny.model,
        prompt="Hello",
        temperature=0,
        max_tokens=8,
        logprobs=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    ids = [*b"Hello", *drawn.choices[0].token_ids]
    given = tiny.openai.completions.create(
        model=tiny.model, prompt=ids, max_tokens=0, echo=True, logprobs=0, temperature=0
    )
    assert given.choices[0].logprobs is not None
    values = given.choices[0].logprobs.token_logprobs or []
    assert values[5:] == pytest.approx(drawn.choices[0].logprobs.token_logprobs, abs=1e-4)


async def test_sixty_four_streams_get_what_they_would_get_alone(tiny: Real) -> None:
    def asked(number: int) -> dict[str, Any]:
        return {
            "model": tiny.model,
            "messages": [{"role": "user", "content": f"number {number} " * (1 + number % 3)}],
            "seed": number,
            "temperature": 0.0 if number % 2 else 0.8,
            "max_tokens": 8 + number % 8,
        }

    async with (
        httpx.AsyncClient(limits=httpx.Limits(max_connections=64), timeout=TIMEOUT_S) as http,
        openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", http_client=http) as client,
    ):

        async def stream(number: int) -> str:
            chunks = await client.chat.completions.create(**asked(number), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        together = await asyncio.gather(*(stream(number) for number in range(64)))
        alone = [await stream(number) for number in range(64)]
    assert together == alone


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(tiny: Real, stream: bool) -> None:
    body = {"model": tiny.model, "prompt": "x" * 100, "max_tokens": 3000, "n": 3, "ignore_eos": True}
    if stream:
        with tiny.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            assert tiny.num_used_blocks > 0
    else:
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}\r\n\r\n"
        address = urlsplit(tiny.url)
        with socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S) as connection:
            connection.sendall(head.encode() + content)
            wait_until(lambda: tiny.num_used_blocks > 0)
    num_tokens = tiny.client.stats().generation_tokens
    wait_until(lambda: tiny.num_used_blocks == 0)
    assert tiny.client.stats().generation_tokens - num_tokens < 3 * 1000, "it went on for nobody"


def test_one_choice_that_stops_frees_its_blocks(tiny: Real) -> None:
    """Every byte is a stop string but for one choice's draws: the request ends long before max_tokens."""
    stops = [chr(code) for code in range(32, 90)]
    answer = tiny.openai.completions.create(
        model=tiny.model, prompt="x", max_tokens=400, n=4, seed=3, temperature=1.0, stop=stops[:60]
    )
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 400


def test_the_usage_names_the_tokens_that_were_cached(tiny: Real) -> None:
    """Prompts of one token each, of the same salt and of another; chats and completions, streamed or not."""

    def cached(prompt: str, salt: str | None, **options: Any) -> int:
        extra: Any = {} if salt is None else {"extra_body": {"cache_salt": salt}}
        answer = tiny.openai.completions.create(model=tiny.model, prompt=prompt, max_tokens=2, **extra, **options)
        usage = [chunk.usage for chunk in answer][-1] if options.get("stream") else answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens is not None
        return int(usage.prompt_tokens_details.cached_tokens)

    prompt = "A prompt that nobody has sent before and that fills several blocks. " * 2
    length = len(prompt)
    assert cached(prompt, None) == 0
    assert cached(prompt, None) == length - 1, "all but the last, whose logits are wanted"
    assert cached(prompt, None, stream=True, stream_options={"include_usage": True}) == length - 1
    assert 100 <= cached(prompt[:100] + "another end", None) < length
    assert cached(prompt, "tenant") == 0
    assert cached(prompt, "tenant") == length - 1
    messages: Any = [{"role": "user", "content": prompt}]
    chats = [tiny.openai.chat.completions.create(model=tiny.model, messages=messages, max_tokens=2) for _ in range(2)]
    details = [chat.usage.prompt_tokens_details for chat in chats if chat.usage is not None]
    counts = [detail.cached_tokens for detail in details if detail is not None]
    assert counts[1] == chats[1].usage.prompt_tokens - 1 > counts[0]  # type: ignore[union-attr,operator]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ttft_target_s": 1.0}, "ttft_target_s"),  # the policy would ignore it
        ({"tpot_target_s": -1.0}, "tpot_target_s"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"priority": 1.5}, "priority"),
    ],
)
def test_scheduling_fields_are_checked(tiny: Real, fields: dict[str, Any], param: str) -> None:
    answer = tiny.http.post("/v1/completions", json={"model": tiny.model, "prompt": "x", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_bad_requests_change_nothing(tiny: Real) -> None:
    for fields in ({"n": 10**9}, {"temperature": -1}, {"logit_bias": {"259": 1}}, {"prompt": [259]}):
        body = {"model": tiny.model, "prompt": "x", **fields}
        assert tiny.http.post("/v1/completions", json=body).status_code == 400
    assert tiny.client.stats().num_running == 0


@pytest.mark.unseeded
def test_a_draw_that_nobody_can_repeat_is_noticed(tiny_folder: Path) -> None:
    """What fails a test that does not say that it wants one: `requests_have_seeds`."""
    with serving_real(tiny_folder, load_format="dummy", seed=None, num_blocks=64, max_num_seqs=2) as real:
        for fields in ({"temperature": 0}, {"seed": 5}, {}):
            real.openai.completions.create(model=real.model, prompt="a", max_tokens=1, extra_body=fields)
    assert [is_known for _, is_known in arrived] == [True, True, False]
    assert shown(arrived[-1][0]) == "temperature=1.0, seed=None, max_tokens=1"


async def test_a_full_queue(tiny_folder: Path) -> None:
    """One runs, one waits, the others are told to come again; nobody is forgotten."""
    options: Any = {"load_format": "dummy", "num_blocks": 40, "max_num_seqs": 1, "max_waiting": 1}
    with serving_real(tiny_folder, **options, max_num_batched_tokens=64) as real:
        body = {"model": real.model, "prompt": "x", "max_tokens": 500, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=real.url, timeout=TIMEOUT_S) as http:
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(12)))
        refused = [answer for answer in answers if answer.status_code == 429]
        served = [answer for answer in answers if answer.status_code == 200]
        assert len(refused) + len(served) == 12
        assert refused
        assert served  # two, or one where all have come before the engine took up the first
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert all(answer.json()["usage"]["completion_tokens"] == 500 for answer in served)
        assert real.num_used_blocks == 0
