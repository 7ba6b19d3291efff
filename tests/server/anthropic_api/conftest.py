"""A server that reads reasoning and tool calls, and Anthropic's client for it."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.server.conftest import Served, answer_of
from tests.waiting import wait_until


@pytest.fixture
def served(thinking_server: Served) -> Iterator[Served]:
    """Its engine as new; no request may outlive its test."""
    thinking_server.engine.reset(answer_of)
    yield thinking_server
    wait_until(lambda: thinking_server.engine.num_open == 0)


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as client:
        yield client
