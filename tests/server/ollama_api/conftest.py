"""A server that reads reasoning and tool calls, and Ollama's client for it."""

from __future__ import annotations

from collections.abc import Iterator

import ollama
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
def client(served: Served) -> Iterator[ollama.Client]:
    with ollama.Client(served.url, trust_env=False) as client:
        yield client
