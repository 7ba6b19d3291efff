"""A server that reads reasoning and tool calls, and Ollama's client for it."""

from __future__ import annotations

from collections.abc import Iterator

import ollama
import pytest

from tests.server.conftest import Served, as_new


@pytest.fixture
def served(thinking_server: Served) -> Iterator[Served]:
    yield from as_new(thinking_server)


@pytest.fixture
def client(served: Served) -> Iterator[ollama.Client]:
    with ollama.Client(served.url, trust_env=False) as client:
        yield client
