"""Prediction layers as drafters: as transformers' layers compute them; and models that have none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from models.drafters.mtp import load_mtp
from models.errors import ModelLoadError
from models.registry import load_model
from runtime.dtype import bfloat16
from tests.models.drafters.mtp_cases import (
    CASES,
    FOLDER,
    NUM_STEPS,
    NUM_TOKENS,
    prediction_tensors,
    write_with_prediction,
)
from tests.models.drafters.one_drafter import Alone
from tests.models.folders import arrays_of, change_config, golden_tensors, load_golden, write_model
from tests.models.gguf.files import write_gguf

DEVICES = ["cpu", pytest.param("emulated:sm_80", marks=[pytest.mark.emulator, pytest.mark.exhaustive])]


def is_close(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
    return bool(np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.exhaustive_cases("glm4")
def test_logits_are_those_of_transformers_layers(case: str, device: str, tmp_path: Path) -> None:
    folder = write_with_prediction(tmp_path, case)
    target = load_model(folder, device=device, dtype="float32")
    drafter = load_mtp(folder, target, device=device, dtype="float32")
    target.state_dtype = bfloat16  # of the model's states alone: this layer has none
    declared = load_mtp(folder, target, device=device, dtype="float32", declares=True)
    assert sum(layer is not None for layer in declared.kv_cache_spec(16).layers) == 1
    assert declared.weight_bytes == drafter.weight_bytes
    expected = arrays_of(FOLDER / f"{case}.npz")
    for column in range(NUM_TOKENS) if device == "cpu" else (0, 5):
        found = Alone(drafter).chain(expected["token_ids"], [expected["states"]], column, NUM_STEPS)
        assert len(found) == min(NUM_STEPS, NUM_TOKENS - column)
        for step, logits in enumerate(found):
            assert is_close(logits, expected["logits"][step, column]), (column, step)


def test_latent_attention_in_files_of_llama_cpp(tmp_path: Path) -> None:
    """GLM-4.7-Flash's file with its 48th block: the same bits as the folder's."""
    case = "glm4_moe_lite_odd"
    config = json.loads((load_golden(case).folder / "config.json").read_text(encoding="utf-8"))
    config["num_nextn_predict_layers"] = 1
    tensors = golden_tensors(load_golden(case)) | prediction_tensors(case)
    file = write_gguf(
        tmp_path / "model.gguf", config, tensors, add_metadata=lambda writer: writer.add_nextn_predict_layers(1)
    )
    expected, found = arrays_of(FOLDER / f"{case}.npz"), []
    for path in (file, write_with_prediction(tmp_path / "folder", case)):
        drafter = load_mtp(path, load_model(path, dtype="float32"), dtype="float32")
        found.append(Alone(drafter).chain(expected["token_ids"], [expected["states"]], 5, NUM_STEPS))
    np.testing.assert_array_equal(*found)
    assert is_close(found[0][0], expected["logits"][0, 5])


def test_files_of_llama_cpp_have_it_after_the_models_layers(tmp_path: Path) -> None:
    case = "qwen3_5_odd"
    golden, own = load_golden(case), dict[str, NDArray[np.float32]]()
    config = json.loads((golden.folder / "config.json").read_text(encoding="utf-8")) | {"num_nextn_predict_layers": 1}
    number = config["num_hidden_layers"]
    parts = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    parts["norm"] = "shared_head.norm"
    for name, array in prediction_tensors(case).items():
        part = name.removeprefix("mtp.").removesuffix(".weight")
        own[f"model.layers.{number}.{parts.get(part, part.removeprefix('layers.0.'))}.weight"] = array
    file = write_gguf(
        tmp_path / "model.gguf", config, {**golden_tensors(golden), **own},
        add_metadata=lambda writer: writer.add_nextn_predict_layers(1),
    )  # fmt: skip
    target = load_model(file, device="cpu", dtype="float32")
    drafter = load_mtp(file, target, device="cpu", dtype="float32")
    expected = arrays_of(FOLDER / f"{case}.npz")
    found = Alone(drafter).chain(expected["token_ids"], [expected["states"]], 5, NUM_STEPS)
    assert len(found) == NUM_STEPS
    for step, logits in enumerate(found):
        assert is_close(logits, expected["logits"][step, 5]), step


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    case = CASES[1]
    folder = write_with_prediction(tmp_path / "short", case, eh_proj=np.zeros((46, 46), np.float32))
    target = load_model(folder, device="cpu")
    with pytest.raises(ModelLoadError, match=r"'model.layers.3.eh_proj.weight' is \[46, 46\].* asks for \[46, 92\]"):
        load_mtp(folder, target, device="cpu")
    without = write_model(tmp_path / "without", load_golden(case))
    with pytest.raises(ModelLoadError, match=r"tensor 'model.layers.3.enorm.weight' \[46\] is missing"):
        load_mtp(without, load_model(without, device="cpu"), device="cpu")


def test_models_without_a_prediction_layer(tmp_path: Path) -> None:
    dense = write_model(tmp_path / "dense", load_golden("llama_default"))
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM has no layer that predicts further tokens"):
        load_mtp(dense, load_model(dense, device="cpu"), device="cpu")
    none = change_config(write_model(tmp_path / "none", load_golden(CASES[1])), num_nextn_predict_layers=0)
    with pytest.raises(ModelLoadError, match="Glm4MoeForCausalLM has no layer that predicts further tokens"):
        load_mtp(none, load_model(none, device="cpu"), device="cpu")
    other = write_model(tmp_path / "other", load_golden("nemotron_h_odd"))
    change_config(other, num_nextn_predict_layers=1, mtp_layers_block_type=["moe", "full_attention"])
    with pytest.raises(ModelLoadError, match="NemotronHForCausalLM has no layer that predicts further tokens"):
        load_mtp(other, load_model(other, device="cpu"), device="cpu")


@pytest.mark.parametrize("case", ["deepseek_v3_odd", "nemotron_h_moe_latent"])
def test_dummy_weights(case: str, tmp_path: Path) -> None:
    folder = write_with_prediction(tmp_path / "dummy", case)
    stored = load_mtp(folder, load_model(folder, device="cpu"), device="cpu")
    change_config(folder, num_nextn_predict_layers=1)
    target = load_model(folder, device="cpu", load_format="dummy")
    drafter = load_mtp(folder, target, device="cpu", load_format="dummy", max_model_len=50)
    assert drafter.max_positions == 50
    assert drafter.weight_bytes == stored.weight_bytes
    states = np.ones((3, target.config.hidden_size), np.float32)
    assert np.isfinite(Alone(drafter).chain(np.arange(3, dtype=np.int32), [states], 2, 1)[0]).all()
