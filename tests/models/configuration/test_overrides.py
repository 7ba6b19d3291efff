"""Fields of config.json that a user replaces (`--hf-overrides`)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.configuration.overrides import as_text, changes, overridden
from models.errors import ConfigError
from models.quantized.write import quantize_folder
from models.registry import load_config, load_model, parse_config
from runtime.engine.config import EngineConfig
from runtime.engine.errors import RequestError
from runtime.engine.make_engine import describe_engine
from tests.models.driver import logits_of
from tests.models.folders import change_config, load_golden, write_model

LLAMA = load_golden("llama_default")
IDS = [5, 1, 60, 2, 2, 33]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("file", "overrides", "result"),
    [
        ({"a": 1, "b": 2}, {"a": 3, "c": None}, {"a": 3, "b": 2, "c": None}),
        ({"text_config": {"a": 1, "b": 2}}, {"text_config": {"b": None}}, {"text_config": {"a": 1, "b": None}}),
        ({"a": 1}, {"text_config": {"b": 2}}, {"a": 1, "text_config": {"b": 2}}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling": YARN}, {"rope_scaling": YARN}),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            {"rope_scaling": {**YARN, "rope_theta": 1e6}},
            {"rope_scaling": {**YARN, "rope_theta": 1e6}},
        ),
        ({"rope_scaling": {"type": "x", "y": 2}}, {"rope_scaling": {"y": 3}}, {"rope_scaling": {"type": "x", "y": 3}}),
    ],
)  # fmt: skip
def test_what_takes_the_place_of_what(file: Any, overrides: Any, result: Any) -> None:
    assert overridden(file, as_text(overrides)) == result
    assert overridden(file, as_text(json.dumps(overrides))) == result


@pytest.mark.parametrize("wrong", ["{", "[1]", "3", '"x"', "null and", [1], 3, {"a": {1, 2}}, lambda config: config])
def test_what_is_no_object_is_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"^hf_overrides is .* must be a JSON object of fields of config") as error:
        EngineConfig(hf_overrides=wrong)
    assert error.value.param == "hf_overrides"


def test_the_lines_of_the_log() -> None:
    file = {"a": 1, "text_config": {"b": 2, "c": 3}, "d": 4}
    overrides = as_text({"a": None, "text_config": {"b": 5, "e": 6}, "d": 4, "f": None})
    assert changes(file, overrides) == ["a = 1 is passed over", "text_config.b is 5, not 2", "text_config.e is 6"]


def test_a_model_with_a_field_that_nothing_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The refusal says what to write, and that makes it load: as the model without the field."""
    plain = load_model(write_model(tmp_path / "plain", LLAMA))
    folder = write_model(tmp_path / "more", LLAMA)
    change_config(folder, a_field_of_tomorrow=True)
    with pytest.raises(ConfigError, match="a_field_of_tomorrow = True") as error:
        load_model(folder)
    text = str(error.value).partition("--hf-overrides '")[2].rstrip("'")
    caplog.set_level(logging.WARNING)
    model = load_model(folder, hf_overrides=as_text(text))
    assert [message.endswith("a_field_of_tomorrow = True is passed over") for message in caplog.messages] == [True]
    np.testing.assert_array_equal(logits_of(model, IDS), logits_of(plain, IDS))
    written = tmp_path / "written"
    quantize_folder(folder, written, "int8", overrides=as_text(text))
    assert load_config(written) == load_config(tmp_path / "plain")


def test_an_engine_takes_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA)
    config = EngineConfig(hf_overrides={"rope_scaling": YARN}, device="cpu", kv_cache_bytes=1 << 20)
    info = describe_engine(folder, config)
    assert info.max_model_len == 256
    assert describe_engine(folder, EngineConfig(device="cpu", kv_cache_bytes=1 << 20)).max_model_len == 128


def test_a_type_that_contradicts_the_architecture_can_be_passed_over() -> None:
    values = {"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"}
    with pytest.raises(ConfigError, match="contradicts the architecture LlamaForCausalLM") as error:
        parse_config(values)
    text = str(error.value).partition("--hf-overrides '")[2].rstrip("'")
    assert parse_config(overridden(values, as_text(text))).architecture == "LlamaForCausalLM"


def test_an_object_of_nulls_says_nothing() -> None:
    values = json.loads((LLAMA.folder / "config.json").read_text())
    assert parse_config({**values, "some_tool": {"a": None, "b": None}}) == parse_config(values)
    with pytest.raises(ConfigError, match="some_tool = "):
        parse_config({**values, "some_tool": {"a": None, "b": 1}})
