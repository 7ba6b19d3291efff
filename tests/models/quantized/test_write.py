"""`xserv quantize`: the tensors and the config that the format's own library writes, and numbers near the model's.

That compressed_tensors reads the folders, and makes of them the floats that we do, was seen with
`tools/references/make_quantized_models.py read FOLDER ...`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from models.checkpoints.model_files import open_model
from models.checkpoints.safetensors_file import SafetensorsFile
from models.errors import ModelLoadError
from models.quantized.write import OUTPUT_FORMATS, quantize_folder
from models.registry import load_model
from runtime.cli import app
from runtime.dtype import bfloat16, float16, float32
from runtime.errors import InvalidArgumentError
from runtime.linear.quantise import Rounding, quantise
from tests.models.driver import logits_of, relative_error
from tests.models.folders import change_config, write_safetensors
from tests.models.quantized.test_fixtures import FIXTURES, IDS, twin

LIKE = {
    "fp8": "ct_fp8_channel", "fp8-block": "ct_fp8_block", "int8": "ct_int8_channel", "int4-g32": "ct_w4_group",
    "mxfp4": "ct_mxfp4",
}  # fmt: skip
"""Fixtures that the library wrote in the same format."""

ERRORS = {"fp8": 0.03, "fp8-block": 0.03, "int8": 0.008, "int4": 0.11, "int4-g32": 0.09, "mxfp4": 0.13}
"""Of a matrix of normal numbers: the root of the mean square of what is lost, over that of the matrix."""


@pytest.mark.parametrize("format", LIKE)
def test_tensors_and_config_are_the_librarys(tmp_path: Path, format: str) -> None:
    dtype = float16 if format == "int8" else bfloat16
    source, target = twin(LIKE[format], tmp_path / "source", dtype), tmp_path / "target"
    steps: list[tuple[int, int]] = []
    written = quantize_folder(source, target, format, lambda done, total: steps.append((done, total)))
    assert (written.num_quantised, written.num_kept) == (7, 0)
    assert steps == [(step, 12) for step in range(13)]
    ours = SafetensorsFile(target / "model.safetensors").tensors
    theirs = SafetensorsFile(FIXTURES / LIKE[format] / "model.safetensors").tensors
    theirs = {name: entry for name, entry in theirs.items() if not name.endswith(("k_scale", "v_scale"))}
    assert ours.keys() == theirs.keys()
    is_block = format == "fp8-block"  # the fixture's are smaller than 128
    for name, entry in theirs.items():
        assert ours[name].dtype == entry.dtype, name
        assert ours[name].shape == entry.shape or (is_block and name.endswith("scale")), name
    said = json.loads((FIXTURES / LIKE[format] / "config.json").read_text())["quantization_config"]
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert (config["format"], config["ignore"]) == (said["format"], ["lm_head"])
    (group,), (their_group,) = config["config_groups"].values(), said["config_groups"].values()
    for name in ("weights", "input_activations"):
        if group[name] is not None:
            fields = {key: their_group[name].get(key) for key in group[name]}
            wanted = {**fields, "block_structure": [128, 128]} if is_block and name == "weights" else fields
            assert group[name] == wanted
    assert written.bytes_after == sum(entry.end - entry.begin for entry in ours.values())
    dense, quantised = load_model(source, dtype="float32"), load_model(target, dtype="float32")
    assert relative_error(logits_of(quantised, IDS), logits_of(dense, IDS)) < 0.1


@pytest.mark.parametrize("format", OUTPUT_FORMATS)
def test_how_much_is_lost(format: str) -> None:
    weight = np.random.default_rng(3).normal(0, 0.02, (256, 384)).astype(ml_dtypes.bfloat16)
    matrix = quantise(weight, OUTPUT_FORMATS[format].rounding(bfloat16))
    lost = matrix.dequantise(float32) - weight.astype(np.float32)
    error = float(np.sqrt(np.square(lost).mean() / np.square(weight.astype(np.float32)).mean()))
    assert ERRORS[format] / 2 < error < ERRORS[format]


def test_fitted_scales_lose_less_than_the_largest_magnitude() -> None:
    weight = np.random.default_rng(4).normal(0, 1, (64, 1024)).astype(np.float32)
    matrix = quantise(weight, Rounding("int4", (1, 32), np.dtype(np.float32)))
    groups = weight.reshape(64, -1, 32)
    scales = np.abs(groups).max(2, keepdims=True) / 7
    plain = (np.clip(np.rint(groups / scales), -8, 7) * scales).reshape(weight.shape)
    fitted = matrix.dequantise(float32)
    assert np.square(fitted - weight).sum() < 0.88 * np.square(plain - weight).sum()


def test_what_is_represented_stays() -> None:
    """Numbers that a format has come back as they were; rows of zeros, too."""
    rng = np.random.default_rng(5)
    values: dict[str, Any] = {
        "int8": rng.integers(-127, 128, (8, 64)), "int4": rng.integers(-8, 8, (8, 64)),
        "fp4": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[rng.integers(0, 8, (8, 64))],
        "fp8": rng.integers(-15, 16, (8, 64)) * 16.0,
    }  # fmt: skip
    largest = {"int8": 127, "int4": -8, "fp4": 6, "fp8": 448}
    for kind, weight in values.items():
        weight = weight.astype(np.float32)
        weight[:, ::32] = largest[kind]
        weight[3] = 0
        e8m0 = np.dtype(ml_dtypes.float8_e8m0fnu)
        rounding = Rounding(kind, (1, 32), e8m0 if kind == "fp4" else np.dtype(np.float32))  # type: ignore[arg-type]
        np.testing.assert_allclose(quantise(weight, rounding).dequantise(float32), weight, rtol=1e-6, err_msg=kind)


def test_rows_that_are_no_whole_groups_stay_floats(tmp_path: Path) -> None:
    source = twin("ct_w4_group", tmp_path / "source", bfloat16)
    written = quantize_folder(source, tmp_path / "target", "int4")
    assert (written.num_quantised, written.num_kept) == (0, 7)
    config = json.loads((tmp_path / "target" / "config.json").read_text())["quantization_config"]
    assert len(config["ignore"]) == 8
    np.testing.assert_array_equal(logits_of(load_model(tmp_path / "target"), IDS), logits_of(load_model(source), IDS))


def test_what_cannot_be_quantised(tmp_path: Path) -> None:
    source = twin("ct_w4_group", tmp_path / "source", bfloat16)
    with pytest.raises(InvalidArgumentError, match="format is 'int3', must be one of fp8, fp8-block, int8, int4"):
        quantize_folder(source, tmp_path / "target", "int3")
    with pytest.raises(InvalidArgumentError, match=r"source exists: give a folder that does not"):
        quantize_folder(source, source, "int4")
    with pytest.raises(ModelLoadError, match=r"config.json: has a quantization_config: give the model that it was"):
        quantize_folder(FIXTURES / "ct_w4_group", tmp_path / "target", "int4")
    with pytest.raises(ModelLoadError, match=r"model.gguf is no folder: a GGUF file is quantised by llama.cpp's tools"):
        quantize_folder(tmp_path / "model.gguf", tmp_path / "target", "int4")
    checkpoint = open_model(source).checkpoint()
    tensors = {name: checkpoint[name].array() for name in checkpoint.tensors}
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 4] = np.inf
    write_safetensors(source / "model.safetensors", tensors)
    with pytest.raises(ModelLoadError, match=f"model.safetensors: tensor '{name}' has a number that is not finite"):
        quantize_folder(source, tmp_path / "target", "int8")
    assert not [path for path in tmp_path.iterdir() if "target" in path.name]
    change_config(source, num_hidden_layers=2)
    with pytest.raises(ModelLoadError, match="9 tensors do not fit the config"):
        quantize_folder(source, tmp_path / "target", "int8")


def test_the_command(tmp_path: Path) -> None:
    source = twin("ct_w4_group", tmp_path / "source", bfloat16)
    (source / "tokenizer_config.json").write_text("{}")
    done = CliRunner().invoke(app, ["quantize", str(source), str(tmp_path / "out"), "--format", "int8"])
    assert done.exit_code == 0, done.output
    assert "out: 7 matrices in int8; " in done.output
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"
    assert load_model(tmp_path / "out").layers[0].mlp.down_proj.format.name == "int8"  # type: ignore[attr-defined]
