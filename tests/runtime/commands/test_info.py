"""The memory table of `xserv info` for layers that do not all see the same."""

from __future__ import annotations

import msgspec

from runtime.commands.info_report import as_text, memory
from runtime.engine.messages import CacheGroupInfo, EngineInfo

LAYER = 16 * 1024  # bytes of a page of one layer
GEMMA_3_1B = EngineInfo(
    model_name="gemma",
    model_path="gemma",
    architecture="Gemma3ForCausalLM",
    device="cpu",
    dtype="bfloat16",
    vocab_size=100,
    eos_token_ids=(),
    max_model_len=8192,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    max_waiting=8,
    block_size=16,
    num_blocks=7100,
    kv_cache_bytes=7100 * 4 * LAYER,
    weight_bytes=1,
    cache_groups=(CacheGroupInfo(None, 4, 0), *[CacheGroupInfo(512, 4, 0)] * 4, *[CacheGroupInfo(512, 3, 1)] * 2),
)


def test_a_sequence_holds_its_windows_and_while_it_is_computed_a_step_besides() -> None:
    report = memory(GEMMA_3_1B)
    full, windowed = report["cache_groups"]
    assert (full["window"], full["num_layers"], full["num_groups"], full["num_padding"]) == (None, 4, 1, 0)
    assert (windowed["window"], windowed["num_layers"], windowed["num_groups"]) == (512, 22, 6)
    assert windowed["num_padding"] == 2
    assert full["bytes_per_sequence"] == 512 * 4 * LAYER
    assert windowed["bytes_per_sequence"] == 6 * 33 * 4 * LAYER, "32 pages, and one of which a token is seen"
    assert report["bytes_per_sequence"] == (512 + 6 * 33) * 4 * LAYER
    assert report["prompt_bytes_per_sequence"] == (512 + 6 * (33 + 128)) * 4 * LAYER
    assert report["full_bytes_per_sequence"] == 512 * 26 * LAYER
    assert report["bytes_per_sequence"] < 0.35 * report["full_bytes_per_sequence"]
    assert report["num_full_length_sequences"] == 7100 // (512 + 6 * 33)
    text = as_text({"devices": [], "model": {"max_model_len": 8192}, "memory": report})
    assert "22 layers in 6 groups, room for 2 more" in text
    assert "21.3% of" in text


def test_layers_that_are_alike_are_as_ever() -> None:
    report = memory(msgspec.structs.replace(GEMMA_3_1B, cache_groups=(CacheGroupInfo(None, 4, 0),)))
    assert report["num_tokens"] == 7100 * 16
    assert report["kv_bytes_per_token"] * report["num_tokens"] == report["kv_cache_bytes"]
    assert report["bytes_per_sequence"] == report["prompt_bytes_per_sequence"] == report["full_bytes_per_sequence"]
    assert "windows" not in as_text({"devices": [], "model": {"max_model_len": 8192}, "memory": report})
