"""A server on a real engine, and the tiny random model that it serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from runtime.engine.build import build_engine
from runtime.engine.client import ThreadEngineClient
from runtime.text.load import load_tokenizer
from server.app import create_app
from server.config import ServerConfig
from tests.server.byte_tokenizer import END_OF_TURN, write_byte_tokenizer
from tests.server.running import running


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
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 259,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": END_OF_TURN,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(folder)


@contextmanager
def serving_real(folder: Path, *, config: ServerConfig | None = None, **options: Any) -> Iterator[Real]:
    client = ThreadEngineClient(build_engine(folder, **options))
    try:
        name = client.info.model_name
        with (
            running(create_app(client, load_tokenizer(folder), config=config)) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk,
            httpx.Client(base_url=url, timeout=60) as http,
        ):
            yield Real(url, client, sdk, http, name)
    finally:
        client.close()
