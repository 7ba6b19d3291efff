"""From a model's folder to an engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from models.checkpoints.safetensors_file import SafetensorsFile
from runtime.engine.admission import prepare
from runtime.engine.config import EngineConfig
from runtime.engine.make_engine import build_engine, describe_engine
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from tests.models.folders import write_tiny_qwen3
from tests.runtime.engine.fakes import said_by_engine


def test_an_end_of_text_outside_of_the_vocabulary_is_said_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_qwen3(tmp_path, vocab_size=64, eos_token_id=50256, max_position_embeddings=64)
    with caplog.at_level(logging.WARNING, "xserv.engine"):
        engine = build_engine(tmp_path, device="cpu", load_format="dummy", num_blocks=8)
    assert engine.info.eos_token_ids == ()
    assert said_by_engine(caplog) == [
        f"eos_token_id [50256] of {tmp_path}: not in the vocabulary of 64 tokens, left out"
    ]
    request = EngineRequest(
        request_id="a",
        prompt_token_ids=[1, 2],
        params=SamplingParams(),
        eos_token_ids=engine.info.eos_token_ids,  # as the server and LLM give them
    )
    assert prepare(request, engine.info).eos_token_ids == ()


def test_position_tables_are_as_long_as_what_is_served(tmp_path: Path) -> None:
    write_tiny_qwen3(tmp_path, vocab_size=64, eos_token_id=1, max_position_embeddings=10**9)
    engine = build_engine(tmp_path, device="cpu", load_format="dummy", num_blocks=8)
    assert engine.info.max_model_len == 8 * engine.info.block_size


@pytest.mark.parametrize(
    "settings",
    [{"num_blocks": 64}, {"num_blocks": 64, "quantization": "int8", "max_model_len": 128},
     {"device": "emulated:sm_80", "kv_cache_bytes": 1 << 20, "dtype": "float16"}],
    ids=str,
)  # fmt: skip
def test_an_engine_is_described_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    settings = {"device": "cpu", **settings}
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsFile, "array", lambda self, name: pytest.fail(f"{name} was read"))
        described = describe_engine(None, EngineConfig(**settings))
    assert described == build_engine(**settings).info
