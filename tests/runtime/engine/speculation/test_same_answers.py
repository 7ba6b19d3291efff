"""Answers with speculation are those without, to the bit of log probabilities.

`tools/comparing/compare_speculation.py` compares many more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.decoder import Decoder
from models.drafters.dflash import load_dflash
from models.drafters.eagle3 import load_eagle3
from models.drafters.gemma4_assistant import load_assistant
from runtime.engine.config import EngineConfig
from runtime.engine.make_engine import loaded_model
from tests.models.drafters.assistant_cases import TARGETS as ASSISTANTS
from tests.models.drafters.assistant_cases import write_copies, write_wide
from tests.models.folders import load_golden, write_model
from tools.comparing.compare_speculation import (
    Comparison,
    StateReader,
    compare,
    write_untrained,
    write_untrained_dspark,
)


def check(found: Comparison, *states: str, is_trained: bool = True) -> None:
    """``states``: the names of the drafters that read hidden states."""
    assert found.differences == []
    names = {"ngram", "suffix", "guesses", "predictions", "draft"}
    assert set(found.tried) == names | set(states)
    for name, (tried, kept) in found.tried.items():
        least = 0 if name == "dspark" or (name == "eagle3" and not is_trained) else 1
        assert least <= kept < tried, name


@pytest.mark.parametrize("num_requests", [100, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_on_the_bundled_model(num_requests: int) -> None:
    folder = Path("models/demo").resolve()
    model = loaded_model(folder, EngineConfig(max_model_len=96, device="cpu"))
    drafter = load_eagle3(folder / "drafter", model, device="cpu")
    found = compare(
        model, folder, num_requests, 7, states=[drafter], takes_turns=True, round_size=num_requests // 6, device="cpu"
    )
    check(found, "eagle3")
    assert found.num_preemptions > 0
    assert set(found.ends) == {"length", "stop", "stop string"}


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe_odd",
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in ("gemma3_odd", "gemma4_inputs_odd", "gpt2_gelu_new", "qwen3_5_odd")
        ),
    ],
)
def test_on_other_families(name: str, tmp_path: Path) -> None:
    """Windows in groups of pages, experts, absolute positions, recurrent states."""
    folder = write_model(tmp_path, load_golden(name))
    named: dict[str, Any] = {"speculation": "suffix"}  # so that states have room for draft tokens
    model = loaded_model(folder, EngineConfig(max_model_len=48, device="cpu", dtype="float32", **named))
    states: list[StateReader] = []
    if isinstance(model, Decoder):
        own = write_untrained(tmp_path / "drafter", model)
        states.append(load_eagle3(own, model, device="cpu", load_format="dummy"))
        own = write_untrained_dspark(tmp_path / "dspark", model)
        states.append(load_dflash(own, model, device="cpu", load_format="dummy"))
    found = compare(model, folder, 25, 3, states=states, device="cpu", max_model_len=48, **named)
    check(found, *(each.kind for each in states), is_trained=False)


@pytest.mark.parametrize(
    ("case", "num_requests"),
    [("inputs", 30), *(pytest.param(case, 200, marks=pytest.mark.exhaustive) for case in ASSISTANTS)],
)
def test_with_an_assistant(case: str, num_requests: int, tmp_path: Path) -> None:
    """Which reads the model's pages."""
    folder, own = write_copies(tmp_path, case, share=1.5)
    model = loaded_model(folder, EngineConfig(max_model_len=48, device="cpu", dtype="float32"))
    drafter = load_assistant(own, model, device="cpu", dtype="float32")
    few: dict[str, Any] = {"drafters": {"assistant"}, "round_size": 10, "max_model_len": 48, "max_num_seqs": 6}
    found = compare(model, folder, num_requests, 5, states=[drafter], num_blocks=20, block_size=8, device="cpu", **few)
    assert found.differences == []
    tried, kept = found.tried["assistant"]
    assert tried // 10 < kept < tried
    assert found.num_preemptions > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [*ASSISTANTS, "wide", "wide bfloat16"])
def test_with_an_assistant_on_an_emulated_gpu(case: str, tmp_path: Path) -> None:
    folder, own = write_wide(tmp_path) if "wide" in case else write_copies(tmp_path, case, share=1.5)
    settings: dict[str, Any] = {
        "device": "emulated:sm_90a",
        "exact": True,
        "dtype": case.partition(" ")[2] or "float32",
    }
    settings |= {"load_format": "dummy"} if "wide" in case else {}
    model = loaded_model(folder, EngineConfig(max_model_len=48, **settings))
    drafter = load_assistant(own, model, **settings)
    few: dict[str, Any] = {"states": [drafter], "drafters": {"assistant"}, "most_output": 14, "max_model_len": 48}
    found = compare(model, folder, 6, 12, **few, **settings)
    assert found.differences == []
    tried, kept = found.tried["assistant"]
    assert (0 if "wide" in case else 1) <= kept < tried


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_on_an_emulated_gpu(arch: str) -> None:
    folder, settings = Path("models/demo").resolve(), {"device": f"emulated:{arch}", "exact": True}
    model = loaded_model(folder, EngineConfig(max_model_len=96, **settings))  # type: ignore[arg-type]
    drafter = load_eagle3(folder / "drafter", model, **settings)  # type: ignore[arg-type]
    small = {**settings, "max_model_len": 48}
    found = compare(model, folder, 6, 14, states=[drafter], most_output=14, **small)
    check(found, "eagle3")
