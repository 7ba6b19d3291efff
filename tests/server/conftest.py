"""Fixtures: a server on the fake engine, whose tokens are bytes; OpenAI's client; a plain HTTP client."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from runtime.engine.messages import EngineRequest
from server.app import create_app
from server.config import ServerConfig
from tests.server.arrivals import arrived, shown, watch
from tests.server.byte_tokenizer import END_OF_TURN, TEMPLATE, make_byte_tokenizer, write_byte_tokenizer
from tests.server.fake_engine import FakeEngineClient, Script
from tests.server.real_server import write_tiny_model
from tests.server.running import running
from tests.waiting import TIMEOUT_S, wait_until
from tokenizer import Tokenizer

watch()

THINKING_TEMPLATE = (
    "{%- if enable_thinking is defined %}[thinking {{ enable_thinking }}]{% endif %}"
    "{%- if reasoning_effort %}[effort {{ reasoning_effort }}]{% endif %}"
) + TEMPLATE.replace(
    "{{ message.role }}:",
    "{{ message.role }}:{%- if message.reasoning_content %}THOUGHT{{ message.reasoning_content }}{% endif %}",
)
"""The bytes' template, which also shows what it is told of thinking."""

ANSWER = "Grüße, 世界! 😀 done."
"""What the fake engine says; characters of one to four bytes, so of as many tokens."""


def say(text: str) -> list[int]:
    return [*text.encode(), END_OF_TURN, *[32] * 1000]


@dataclass
class Served:
    """A running server and what stands behind it."""

    url: str
    engine: FakeEngineClient
    openai: openai.OpenAI
    http: httpx.Client


def answer_of(request: EngineRequest, index: int) -> list[int]:
    """Choice 0 says ANSWER, choice i the same with its number."""
    return say(ANSWER if index == 0 else f"{ANSWER} {index}")


@pytest.fixture(autouse=True)
def requests_have_seeds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that asks a real engine for draws of which nobody knows the seed."""
    arrived.clear()
    yield
    unknown = [params for params, is_known in arrived if not is_known]
    if unknown and request.node.get_closest_marker("unseeded") is None:
        pytest.fail(
            f"{len(unknown)} requests drew with a seed from the system, the first with {shown(unknown[0])}: send "
            "temperature 0 or a seed, or mark the test with pytest.mark.unseeded"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failing test shows what the real engines were asked, as it came to them."""
    report = yield
    if report.when == "call" and report.failed and arrived:
        report.sections.append(("requests that arrived", "\n".join(shown(params) for params, _ in arrived[-20:])))
    return report


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder for `load_format="dummy"`."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_byte_tokenizer(tmp_path_factory.mktemp("byte-tokenizer"))


@contextmanager
def serving(engine: FakeEngineClient, tokenizer: Tokenizer | None, **options: Any) -> Iterator[Served]:
    """A server of its own, for tests that need other settings; `options` are `create_app`'s."""
    with (
        running(create_app(engine, tokenizer, **options)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        httpx.Client(base_url=url, timeout=TIMEOUT_S) as http,
    ):
        yield Served(url, engine, client, http)


@contextmanager
def faked(
    tokenizer: Tokenizer | None, script: Script = answer_of, *, max_model_len: int = 256, **options: Any
) -> Iterator[Served]:
    """The same with a fake engine of its own."""
    engine = FakeEngineClient(script, max_model_len=max_model_len)
    with closing(engine), serving(engine, tokenizer, **options) as served:
        yield served


@pytest.fixture(scope="session")
def shared_server(tokenizer: Tokenizer) -> Iterator[Served]:
    with faked(tokenizer) as served:
        yield served


@pytest.fixture
def served(shared_server: Served) -> Iterator[Served]:
    """One server with the usual settings for all tests."""
    yield from as_new(shared_server)


def as_new(server: Served) -> Iterator[Served]:
    """A shared server for one test: its engine as new; no request may outlive the test."""
    server.engine.reset(answer_of)
    yield server
    wait_until(lambda: server.engine.num_open == 0)


@pytest.fixture
def fake_engine() -> Iterator[FakeEngineClient]:
    """An engine for a server of the test's own."""
    engine = FakeEngineClient(answer_of)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def thinking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that reads reasoning and tool calls, with `THINKING_TEMPLATE`."""
    folder = tmp_path_factory.mktemp("thinking")
    write_byte_tokenizer(folder, template=THINKING_TEMPLATE)
    config = ServerConfig(tool_call_parser="hermes", reasoning_parser="think")
    with faked(Tokenizer.from_pretrained(folder), max_model_len=4096, config=config) as served:
        yield served


def saying(served: Served, text: str) -> None:
    """Every choice says this from now on."""
    served.engine.script = lambda request, index: say(text)


def prompt_of(served: Served) -> str:
    """What the engine was last asked, with its special tokens as text."""
    names = {256: "<s>", 257: "<text>", 258: "</s>"}
    ids = served.engine.requests[-1].prompt_token_ids
    return b"".join(names[i].encode() if i > 255 else bytes([i]) for i in ids).decode()
