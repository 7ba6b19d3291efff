"""Answers with speculation are those without, to the bit of log probabilities (`tools/compare_speculation.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.base import Model
from models.decoder import Decoder
from models.eagle3 import load_eagle3
from runtime.engine.config import EngineConfig
from runtime.engine.make_engine import loaded_model
from tests.models.folders import load_golden, write_model
from tools.compare_speculation import Comparison, compare


def check(found: Comparison, *, has_eagle3: bool, is_trained: bool = True) -> None:
    assert found.differences == []
    names = {"ngram", "suffix", "guesses", "predictions", "draft"}
    assert set(found.tried) == (names | {"eagle3"} if has_eagle3 else names)
    for name, (tried, kept) in found.tried.items():
        least = 1 if name != "eagle3" or is_trained else 0
        assert least <= kept < tried, name


def test_on_the_bundled_model() -> None:
    folder = Path("models/demo").resolve()
    model = loaded_model(folder, EngineConfig(max_model_len=96, device="cpu"))
    drafter = load_eagle3(folder / "drafter", model, device="cpu")
    found = compare(model, folder, 300, 7, eagle3=drafter, takes_turns=True, device="cpu")
    check(found, has_eagle3=True)
    assert found.num_preemptions > 0
    assert set(found.ends) == {"length", "stop", "stop string"}


def untrained(folder: Path, model: Model) -> Path:
    """The config of a drafter for a model, which knows half of its tokens."""
    config = model.config
    folder.mkdir()
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "draft_vocab_size": config.vocab_size // 2, "eagle_aux_hidden_state_layer_ids": [0, config.num_layers],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    "name",
    ["qwen3_moe_odd", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("gemma3_odd", "gpt2_gelu_new"))],
)
def test_on_other_families(name: str, tmp_path: Path) -> None:
    """Windows in groups of pages, experts, absolute positions."""
    folder = write_model(tmp_path, load_golden(name))
    model = loaded_model(folder, EngineConfig(max_model_len=48, device="cpu", dtype="float32"))
    eagle3 = None
    if isinstance(model, Decoder):
        eagle3 = load_eagle3(untrained(tmp_path / "drafter", model), model, device="cpu", load_format="dummy")
    found = compare(model, folder, 25, 3, eagle3=eagle3, device="cpu", max_model_len=48)
    check(found, has_eagle3=eagle3 is not None, is_trained=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_on_an_emulated_gpu(arch: str) -> None:
    folder, settings = Path("models/demo").resolve(), {"device": f"emulated:{arch}", "exact": True}
    model = loaded_model(folder, EngineConfig(max_model_len=96, **settings))  # type: ignore[arg-type]
    drafter = load_eagle3(folder / "drafter", model, **settings)  # type: ignore[arg-type]
    check(compare(model, folder, 25, 11, eagle3=drafter, **settings), has_eagle3=True)
