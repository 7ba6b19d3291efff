"""A server that reads reasoning and tool calls, and Anthropic's client for it."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.server.conftest import Served, as_new


@pytest.fixture
def served(thinking_server: Served) -> Iterator[Served]:
    yield from as_new(thinking_server)


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as client:
        yield client
