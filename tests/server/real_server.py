"""A server on a real engine, and the tiny random model that it serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from runtime.engine.make_engine import build_engine
from runtime.engine.process.thread_client import ThreadEngineClient
from runtime.text.load import load_tokenizer
from server.app import create_app
from server.config import ServerConfig
from tests.models.folders import write_tiny_qwen3
from tests.server.byte_tokenizer import END_OF_TURN, write_byte_tokenizer
from tests.server.running import running
from tests.waiting import TIMEOUT_S


@dataclass
class Real:
    """A running server on a real engine."""

    url: str
    client: ThreadEngineClient
    openai: openai.OpenAI
    http: httpx.Client
    model: str

    @property
    def num_used_blocks(self) -> int:
        stats = self.client.stats()
        return stats.num_blocks - stats.num_free_blocks


def write_tiny_model(folder: Path) -> None:
    """A Qwen3 of two layers for `load_format="dummy"`, whose tokens are bytes."""
    write_tiny_qwen3(folder, vocab_size=259, eos_token_id=END_OF_TURN, max_position_embeddings=4096)
    write_byte_tokenizer(folder)


@contextmanager
def serving_real(folder: Path, *, config: ServerConfig | None = None, **options: Any) -> Iterator[Real]:
    client = ThreadEngineClient(build_engine(folder, **{"seed": 0, **options}))
    try:
        name = client.info.model_name
        with (
            running(create_app(client, load_tokenizer(folder), config=config)) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk,
            httpx.Client(base_url=url, timeout=TIMEOUT_S) as http,
        ):
            yield Real(url, client, sdk, http, name)
    finally:
        client.close()
