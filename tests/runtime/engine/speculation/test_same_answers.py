"""Answers with speculation are those without, to the bit of log probabilities (`tools/compare_speculation.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.engine.config import EngineConfig
from runtime.engine.make_engine import loaded_model
from tests.models.folders import load_golden, write_model
from tools.compare_speculation import Comparison, compare


def check(found: Comparison) -> None:
    assert found.differences == []
    assert set(found.tried) == {"ngram", "suffix", "guesses", "predictions", "draft"}
    for name, (tried, kept) in found.tried.items():
        assert 0 < kept < tried, name


def test_on_the_bundled_model() -> None:
    folder = Path("models/demo").resolve()
    model = loaded_model(folder, EngineConfig(max_model_len=96, device="cpu"))
    found = compare(model, folder, 300, 7, takes_turns=True, device="cpu")
    check(found)
    assert found.num_preemptions > 0
    assert set(found.ends) == {"length", "stop", "stop string"}


@pytest.mark.parametrize("name", ["gemma3_odd", "qwen3_moe_odd", "gpt2_gelu_new"])
def test_on_other_families(name: str, tmp_path: Path) -> None:
    """Windows in groups of pages, experts, absolute positions."""
    folder = write_model(tmp_path, load_golden(name))
    model = loaded_model(folder, EngineConfig(max_model_len=48, device="cpu", dtype="float32"))
    check(compare(model, folder, 25, 3, device="cpu", max_model_len=48))


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_on_an_emulated_gpu(arch: str) -> None:
    folder, settings = Path("models/demo").resolve(), {"device": f"emulated:{arch}", "exact": True}
    model = loaded_model(folder, EngineConfig(max_model_len=96, **settings))  # type: ignore[arg-type]
    check(compare(model, folder, 25, 11, **settings))
