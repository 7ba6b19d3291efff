"""Newer families' GGUF files as llama.cpp's converter writes them, beside llama.cpp's logits of them
(`tools/references/make_hybrid_gguf.py`)."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import pytest

from models.registry import load_model
from tests.models.driver import logits_of, relative_error

FOLDER = Path(__file__).with_name("hybrids")
NAMES = (
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "nemotron_h_moe",
    "granitehybrid",
    "lfm2",
    "lfm2moe",
    "gemma4",
    "gemma4_experts",
    "glm4_moe_lite",
    "mistral4",
)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_llama_cpps(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(lzma.decompress((FOLDER / f"{name}.gguf.xz").read_bytes()))
    with np.load(FOLDER / "logits.npz") as kept:
        ids, theirs = kept[f"{name} ids"].tolist(), kept[f"{name} logits"]
    assert relative_error(logits_of(load_model(path), ids), theirs) < 1e-3
