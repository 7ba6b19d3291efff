"""Limits and usage by key: the holder's arithmetic on a clock of its own, then every API over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from runtime.errors import XservError
from runtime.later import later
from server.config import ServerConfig, ServerConfigError
from server.transport.auth import ApiKeys
from server.transport.key_holders import KeyHolder, KeyLimitError, KeyTerms
from tests.server.conftest import Served, faked
from tests.server.transport.test_auth import HELLO, bearer
from tests.waiting import wait_until
from tokenizer import Tokenizer

anthropic = later("anthropic")  # takes a second to import

FILE = """
# name, weight and limits after a key; all of them may be left out
sk-free
sk-one name=team weight=2 max-requests=1
sk-new name=team weight=2 max-requests=1
sk-few name=few tokens-per-minute=600
"""


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def holder(clock: Clock | None = None, **terms: Any) -> KeyHolder:
    return KeyHolder("0123456789abcdef", KeyTerms(**terms), clock or Clock())


def test_open_requests_are_limited() -> None:
    limited = holder(max_requests=2)
    first, _ = limited.begin(5), limited.begin(5)
    with pytest.raises(KeyLimitError, match=r"2 requests are open, limit 2.* Ask again later"):
        limited.begin(5)
    first.end()
    first.end()
    limited.begin(5)
    assert (limited.num_open, limited.num_requests, limited.num_prompt_tokens) == (2, 3, 15)
    assert limited.refused == {"requests": 1, "tokens": 0}


def test_tokens_come_back_evenly() -> None:
    clock = Clock()
    limited = holder(clock, tokens_per_minute=600)
    use = limited.begin(400)
    use.drawn(100)
    with pytest.raises(KeyLimitError, match=r"prompt has 150 tokens and 100 are left of 600 a minute") as caught:
        limited.begin(150)
    assert caught.value.retry_after_s == pytest.approx(5.0)
    clock.now_s += 5.0
    limited.begin(150)
    use.drawn(1000)  # answers are not cut: what they take beyond the limit is waited for
    with pytest.raises(KeyLimitError) as caught:
        limited.begin(10)
    assert caught.value.retry_after_s == pytest.approx(101.0)
    clock.now_s += 1e6
    with pytest.raises(KeyLimitError):
        holder(tokens_per_minute=10).begin(10) and limited.begin(700) and limited.begin(1)


def test_a_prompt_above_the_limit_takes_a_full_minute() -> None:
    clock = Clock()
    limited = holder(clock, tokens_per_minute=60)
    limited.begin(90)
    with pytest.raises(KeyLimitError) as caught:
        limited.begin(90)
    assert caught.value.retry_after_s == pytest.approx(90.0)
    clock.now_s += 91
    limited.begin(90)


def test_other_terms_do_not_give_tokens_back() -> None:
    limited = holder(tokens_per_minute=600)
    limited.begin(500)
    limited.renew(KeyTerms(tokens_per_minute=1000))
    limited.begin(500)
    with pytest.raises(KeyLimitError):
        limited.begin(1)
    limited.renew(KeyTerms())
    limited.begin(10**9)


def test_a_new_limit_is_free_within_a_minute() -> None:
    """What a key took before it had a limit, or under a larger one, does not shut it out for longer."""
    clock = Clock()
    limited = holder(clock)
    limited.begin(10**6)
    limited.renew(KeyTerms(tokens_per_minute=600))
    limited.begin(600)
    limited.take(3000)
    limited.renew(KeyTerms(tokens_per_minute=600, weight=2.0))
    with pytest.raises(KeyLimitError) as caught:
        limited.begin(1)
    assert caught.value.retry_after_s == pytest.approx(3001 / 10)  # its own answers' debt stays
    limited.renew(KeyTerms(tokens_per_minute=60))
    with pytest.raises(KeyLimitError) as caught:
        limited.begin(60)
    assert caught.value.retry_after_s == pytest.approx(60.0)


def test_terms_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(FILE)
    keys = ApiKeys(("sk-option",), (str(file),), usual=KeyTerms(max_requests=7))
    one, new, free, few = (keys.holder_of(f"sk-{name}".encode()) for name in ("one", "new", "free", "few"))
    assert one is new
    assert one is not None
    assert free is not None
    assert few is not None
    assert one.terms == KeyTerms("team", 2.0, 1, None)
    assert few.terms == KeyTerms("few", 1.0, 7, 600)
    assert free.terms == KeyTerms(max_requests=7)
    assert free.name == free.tenant[:8]
    assert len(keys.holders) == 4
    use = one.begin(1)
    file.write_text(FILE.replace("max-requests=1", "max-requests=2"))
    keys.reload()
    assert keys.holder_of(b"sk-one") is one, "what is open and what was used stays"
    one.begin(1)
    file.write_text(FILE.replace("max-requests=1", "max-requests=no", 1))
    keys.reload()
    assert one.terms.max_requests == 2, "what cannot be read changes nothing"
    use.end()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sk-x nam=y", r":1: 'nam' is none of name=, weight=, max-requests=, tokens-per-minute="),
        ("sk-x name=y name=z", r":1: name= is given twice"),
        ("sk-x weight=nan", r":1: weight= must be a number from 0.01 to 100, got 'nan'"),
        ("sk-x weight=1e9", r":1: weight= must be a number"),
        ("sk-x max-requests=0", r":1: max-requests= must be a whole number, at least 1, got '0'"),
        ("sk-x max-requests=99999999999999999999", r":1: max-requests= must be a whole number"),
        ("sk-x tokens-per-minute=-5", r":1: tokens-per-minute= must be"),
        (f"sk-x name={'n' * 65}", r":1: name= has 65 characters, limit 64"),
        (
            "sk-x name=a\nsk-y name=a weight=2 max-requests=3",
            r"keys of name=a have other terms: weight=1 and weight=2 max-requests=3; they are one tenant",
        ),
        ("sk-x\nsk-x name=a", r"an API key is given twice, with other terms: weight=1 and name=a weight=1; keep one"),
        ("sk-x name=", r":1: name= is empty, must be a name of 1 to 64 characters"),
        ("sk-x\nname=team weight=2", r":2: begins with name=, must begin with a key"),
        ("sk-x\nsk-x name=a", r"an API key is given twice"),
    ],
)
def test_wrong_terms_are_told(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "keys"
    file.write_text(line)
    with pytest.raises(ServerConfigError, match=words) as caught:
        ApiKeys((), (str(file),))
    assert "sk-" not in str(caught.value), "no key in a message"


@dataclass
class Limited:
    """A running server with these keys."""

    served: Served
    keys: ApiKeys

    def holder(self, key: str) -> KeyHolder:
        found = self.keys.holder_of(key.encode())
        assert found is not None
        return found

    def post(self, route: str, body: dict[str, Any], key: str) -> httpx.Response:
        return self.served.http.post(route, json=body, headers=bearer(key))


@pytest.fixture
def limited(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Limited]:
    file = tmp_path / "keys"
    file.write_text(FILE)
    made: list[ApiKeys] = []
    of = ApiKeys.of

    def kept(config: ServerConfig, secret: bytes | None = None) -> ApiKeys:
        made.append(of(config, secret))
        return made[-1]

    monkeypatch.setattr(ApiKeys, "of", kept)
    config = ServerConfig(api_key_files=(str(file),), tokens_per_minute_per_key=100_000)
    with faked(tokenizer, config=config) as served:
        yield Limited(served, made[0])


CHAT_ROUTE = "/v1/chat/completions"
ASKED: dict[str, Any] = HELLO
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", HELLO),
    ("/v1/completions", {"model": "fake-model", "prompt": "Hello"}),
    ("/v1/responses", {"model": "fake-model", "input": "Hello"}),
    ("/v1/messages", {"model": "fake-model", **CHAT}),
    ("/api/chat", {"model": "fake-model", "messages": CHAT["messages"]}),
    ("/api/generate", {"model": "fake-model", "prompt": "Hello"}),
    ("/v1/embeddings", {"model": "fake-model", "input": "Hello"}),
    ("/pooling", {"model": "fake-model", "input": "Hello"}),
]


@pytest.mark.parametrize(("route", "body"), ROUTES, ids=[route for route, _ in ROUTES])
def test_every_api_is_limited(
    limited: Limited, route: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder whose one request is open, and one who has no tokens, are refused in the API's own shape."""

    def embed(*_: object) -> Future[NDArray[np.float32]]:
        vector: Future[NDArray[np.float32]] = Future()
        vector.set_result(np.ones(4, np.float32))
        return vector

    monkeypatch.setattr(limited.served.engine, "embed", embed, raising=False)
    team = limited.holder("sk-one")
    few = limited.holder("sk-few")
    use = team.begin(1)
    few.take(10_000)
    for key, words in (("sk-new", "1 requests are open, limit 1"), ("sk-few", "0 are left of 600 a minute")):
        answer = limited.post(route, body, key)
        assert answer.status_code == 429, (route, answer.text)
        assert int(answer.headers["retry-after"]) >= 1
        assert words in answer.text
        error = answer.json()["error"]
        if route == "/v1/messages":
            assert error["type"] == "rate_limit_error"
        elif not route.startswith("/api/"):
            assert error["code"] == "rate_limit_exceeded"
    use.end()
    answer = limited.post(route, body, "sk-new")
    assert answer.status_code == 200, answer.text
    assert team.num_open == 0
    assert team.num_prompt_tokens > 1


def test_official_clients_see_limits(limited: Limited) -> None:
    client = openai.OpenAI(base_url=f"{limited.served.url}/v1", api_key="sk-few", max_retries=0)
    raw = client.chat.completions.with_raw_response.create(**ASKED)
    left = int(raw.headers["x-ratelimit-remaining-tokens"])
    assert raw.headers["x-ratelimit-limit-tokens"] == "600"
    assert 0 < left < 600
    assert re.fullmatch(r"\d+\.\d{3}s", raw.headers["x-ratelimit-reset-tokens"])
    few = limited.holder("sk-few")
    few.take(10_000)
    with pytest.raises(openai.RateLimitError, match="0 are left of 600 a minute"):
        client.chat.completions.create(**ASKED)
    other = anthropic.Anthropic(base_url=limited.served.url, api_key="sk-few", max_retries=0)
    with pytest.raises(anthropic.RateLimitError, match="0 are left of 600 a minute") as caught:
        other.messages.create(model="fake-model", **CHAT)
    assert caught.value.response.headers["anthropic-ratelimit-tokens-limit"] == "600"
    free = limited.served.http.get("/v1/models", headers=bearer("sk-few"))
    assert free.status_code == 200, "what the engine does not compute is not limited"


def test_a_request_is_open_until_its_answer_is_over(limited: Limited) -> None:
    """A stream that its client leaves, and one that is read to its end, free the place."""
    team = limited.holder("sk-one")
    for reads in (1, 10_000):
        body = {**HELLO, "stream": True}
        with limited.served.http.stream("POST", "/v1/chat/completions", json=body, headers=bearer("sk-one")) as answer:
            assert answer.status_code == 200
            for number, _ in enumerate(answer.iter_lines()):
                if number + 1 == reads:
                    break
        wait_until(lambda: team.num_open == 0)
    assert team.num_output_tokens > 0


def test_usage_in_metrics(limited: Limited) -> None:
    for key in ("sk-one", "sk-new", "sk-free"):
        assert limited.post(CHAT_ROUTE, HELLO, key).status_code == 200
    text = limited.served.http.get("/metrics", headers=bearer("sk-free")).text
    rows = dict(re.findall(r"^(xserv:key_\w+\{.*\}) (\S+)$", text, re.MULTILINE))
    assert rows['xserv:key_requests_total{key="team"}'] == "2.0"
    assert float(rows['xserv:key_generation_tokens_total{key="team"}']) > 0
    assert len({row for row in rows if row.startswith("xserv:key_requests_total")}) == 3
    assert "sk-" not in text, "no key in a label"


def test_the_engine_is_told_whose_requests_they_are(limited: Limited) -> None:
    for key in ("sk-one", "sk-new", "sk-free"):
        limited.post(CHAT_ROUTE, {**HELLO, "cache_salt": key}, key)
    one, new, free = limited.served.engine.requests[-3:]
    assert one.tenant == new.tenant != free.tenant
    assert (one.tenant_weight, free.tenant_weight) == (2.0, 1.0)


def test_limits_are_typed_errors() -> None:
    assert issubclass(KeyLimitError, XservError)
