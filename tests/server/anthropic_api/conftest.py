"""A server on the fake engine that reads reasoning and tool calls, and Anthropic's client for it."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from server.config import ServerConfig
from tests.server.byte_tokenizer import TEMPLATE, write_byte_tokenizer
from tests.server.conftest import Served, answer_of, serving
from tests.server.fake_engine import FakeEngineClient
from tests.waiting import wait_until
from tokenizer import Tokenizer

THINKING = "{%- if enable_thinking is defined %}[thinking {{ enable_thinking }}]{% endif %}"
EFFORT = "{%- if reasoning_effort %}[effort {{ reasoning_effort }}]{% endif %}"
THOUGHTS = "{%- if message.reasoning_content %}THOUGHT{{ message.reasoning_content }}{% endif %}"


@pytest.fixture(scope="package")
def thinking_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The bytes', whose template shows what it is told of thinking."""
    template = THINKING + EFFORT + TEMPLATE.replace("{{ message.role }}:", "{{ message.role }}:" + THOUGHTS)
    folder = tmp_path_factory.mktemp("thinking")
    write_byte_tokenizer(folder, template=template)
    return Tokenizer.from_pretrained(folder)


@pytest.fixture(scope="package")
def engine() -> Iterator[FakeEngineClient]:
    engine = FakeEngineClient(answer_of, max_model_len=4096)
    yield engine
    engine.close()


@pytest.fixture(scope="package")
def messages_server(engine: FakeEngineClient, thinking_tokenizer: Tokenizer) -> Iterator[Served]:
    config = ServerConfig(tool_call_parser="hermes", reasoning_parser="think")
    with serving(engine, thinking_tokenizer, config=config) as served:
        yield served


@pytest.fixture
def served(messages_server: Served) -> Iterator[Served]:
    messages_server.engine.reset(answer_of)
    yield messages_server
    wait_until(lambda: messages_server.engine.num_open == 0)


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as client:
        yield client
