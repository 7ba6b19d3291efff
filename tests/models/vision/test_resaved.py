"""Configs of models that read pictures as transformers saves them again say what those they were made of say.

Made by `tools/references/make_vision_goldens.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from models.configuration.config import ModelConfig
from models.registry import parse_config
from tests.models.vision import cases, gemma3_cases, llava_cases, pixtral_cases

CASES: dict[str, dict[str, Any]] = {
    **cases.CASES, **llava_cases.CASES, **pixtral_cases.CASES, **gemma3_cases.CASES,
}  # fmt: skip
RESAVED: dict[str, dict[str, Any]] = json.loads((cases.FOLDER / "resaved_configs.json").read_text(encoding="utf-8"))


def without_notes(config: ModelConfig) -> ModelConfig:
    """Without what transformers fills in: the type, and tokens of its classes."""
    return replace(config, dtype=None, bos_token_id=None, eos_token_ids=(), pad_token_id=None)


@pytest.mark.parametrize("case", CASES)
def test_a_config_saved_again_says_the_same(case: str) -> None:
    said = parse_config(RESAVED[case])
    assert said.dtype is not None
    assert said.dtype.name == "bfloat16"
    assert without_notes(said) == without_notes(parse_config(CASES[case]))
