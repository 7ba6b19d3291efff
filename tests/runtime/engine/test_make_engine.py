"""From a model's folder to an engine."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from runtime.engine.admission import prepare
from runtime.engine.make_engine import build_engine
from runtime.engine.messages import EngineRequest
from runtime.engine.sampling_params import SamplingParams
from tests.models.folders import write_tiny_qwen3


def test_an_end_of_text_outside_of_the_vocabulary_is_said_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_qwen3(tmp_path, vocab_size=64, eos_token_id=50256, max_position_embeddings=64)
    with caplog.at_level(logging.WARNING, "xserv.engine"):
        engine = build_engine(tmp_path, device="cpu", load_format="dummy", num_blocks=8)
    assert engine.info.eos_token_ids == ()
    assert [record.getMessage() for record in caplog.records] == [
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
