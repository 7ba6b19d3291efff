"""Gemma 4's assistants in the engine: they propose the same however a sequence was computed, and change no token.

Their arithmetic is held in `tests/models/drafters/test_assistant.py`, their answers in the schedules of
`tests/runtime/engine/test_hybrids.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.drafters.gemma4_assistant import load_assistant
from models.errors import ModelLoadError
from models.registry import load_model
from runtime.engine.config import EngineConfig
from runtime.engine.errors import RequestError
from runtime.engine.make_engine import build_engine, describe_engine
from tests.models.drafters.assistant_cases import TARGETS, write_assistant, write_copies
from tests.models.drafters.test_assistant import Alone
from tests.models.folders import load_golden, write_model
from tests.runtime.engine.speculation.test_mtp import ask, check_all_right, new_engine, prompts


def both_of(folder: Path, case: str) -> tuple[Path, str]:
    """The model's folder, and the option that names the drafter's."""
    model = write_model(folder / "model", load_golden(TARGETS[case]))
    return model, f"mtp:{write_assistant(folder / 'drafter', case)}"


@pytest.mark.parametrize("case", TARGETS)
def test_all_proposals_are_right_where_the_last_token_says_the_next(case: str, tmp_path: Path) -> None:
    model, drafter = write_copies(tmp_path, case)
    check_all_right(model, f"mtp:{drafter}")


@pytest.mark.parametrize("case", TARGETS)
@pytest.mark.exhaustive_cases("inputs")
def test_it_says_the_same_however_the_sequence_was_computed(case: str, tmp_path: Path) -> None:
    """And what it says when it is alone with the model."""
    model, drafter = both_of(tmp_path, case)
    plain = ask(new_engine(model, speculation="off")[0], temperature=0.0)
    target: Any = load_model(model, device="cpu", dtype="float32")
    alone = load_assistant(tmp_path / "drafter", target, device="cpu", dtype="float32")
    for settings in (
        {}, {"max_num_batched_tokens": 7}, {"decode_graphs": "off"}, {"overlap": "on"}, {"block_size": 8},
        {"num_blocks": 9, "block_size": 8}, {"enable_prefix_caching": False},
    ):  # fmt: skip
        num_compared = 0
        engine, said = new_engine(model, speculation=drafter, **settings)
        assert ask(engine, temperature=0.0) == plain
        assert engine.speculator is not None
        assert engine.speculator.is_on
        assert len(said) > 20 or "overlap" in settings  # steps that overlap are seldom followed
        for (name, count), proposed in list(said.items())[:: 1 if not settings else 5]:
            known = prompts(61)[int(name)] + plain[name][:count]
            if proposed and len(known) <= 30:
                found = Alone(alone).propose(np.array(known, np.int32), len(proposed))
                assert [int(each.argmax()) for each in found] == proposed, (settings, known)
                num_compared += 1
        assert num_compared > (0 if "overlap" in settings else 4)


def test_its_weights_are_counted_and_it_has_no_pages(tmp_path: Path) -> None:
    model, drafter = both_of(tmp_path, "keys")
    settings: dict[str, Any] = {"max_model_len": 96, "device": "cpu", "kv_cache_bytes": 1 << 20}
    alone = describe_engine(model, EngineConfig(**settings))
    both = describe_engine(model, EngineConfig(**settings, speculation=drafter))
    assert both.num_blocks == alone.num_blocks
    assert both.weight_bytes > alone.weight_bytes


def test_what_does_not_go_is_refused(tmp_path: Path) -> None:
    model, drafter = both_of(tmp_path, "keys")
    for ranks in ("tensor_parallel_size", "pipeline_parallel_size"):
        with pytest.raises(RequestError, match="split over 2 ranks"):
            EngineConfig(speculation=drafter, **{ranks: 2})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="mtp: need a folder"):
        EngineConfig(speculation="mtp:")
    dense = write_model(tmp_path / "dense", load_golden("llama_default"))
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM is another model"):
        build_engine(dense, device="cpu", speculation=drafter)
    for place, option in ((drafter[4:], "off"), (model, f"draft:{drafter[4:]}")):
        with pytest.raises(ModelLoadError, match="It is a drafter: give its model, and --speculation mtp:FOLDER"):
            build_engine(place, device="cpu", speculation=option)
    with pytest.raises(ModelLoadError, match="'Gemma4ForCausalLM' is no drafter apart"):
        build_engine(model, device="cpu", speculation=f"mtp:{model}")
