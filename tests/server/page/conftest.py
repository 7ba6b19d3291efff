"""Fixtures: Chromium, and a server on the fake engine for it; one of each for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.server.conftest import Served, faked, say
from tests.server.page.browser import chromium
from tests.waiting import wait_until
from tokenizer import Tokenizer


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="package")
def shared(tokenizer: Tokenizer) -> Iterator[Served]:
    with faked(tokenizer, lambda request, index: say("Hello."), max_model_len=8192) as served:
        yield served


@pytest.fixture
def fake(shared: Served) -> Iterator[Served]:
    shared.engine.reset(lambda request, index: say("Hello."))
    yield shared
    wait_until(lambda: shared.engine.num_open == 0)
