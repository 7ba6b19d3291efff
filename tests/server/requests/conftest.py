"""The bundled model, loaded once for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.engine.make_engine import build_engine
from runtime.engine.process.thread_client import ThreadEngineClient


@pytest.fixture(scope="package")
def engine() -> Iterator[ThreadEngineClient]:
    client = ThreadEngineClient(build_engine(None, max_num_seqs=8, num_blocks=1024, seed=0))
    yield client
    client.close()
