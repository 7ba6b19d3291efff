"""Quantised checkpoints that their own libraries wrote: the same floats bit for bit, and the dequantised twin's logits.

`tools/references/make_quantized_models.py` makes the fixtures.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.checkpoints.model_files import open_model
from models.checkpoints.safetensors_file import SafetensorsFile
from models.registry import declare_model, load_model
from runtime.dtype import DType, float32
from runtime.linear.quantized import QuantizedLayout
from tests.models.driver import logits_of, relative_error
from tests.models.folders import change_config, write_safetensors

FIXTURES = Path(__file__).parent / "fixtures"
CASES = sorted(path.name for path in FIXTURES.iterdir() if (path / "config.json").exists())
RARELY = (
    "ct_mixed", "ct_int8_asymmetric", "gptq_w8_reordered", "ct_w4_channel", "ct_w8_group", "ct_fp8_channel",
)  # fmt: skip
"""Their kernels take seconds to compile."""
LAYER = "model.layers.0."
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]

KINDS = {
    "awq_w4": "int4, groups of 32, with zeros",
    "awq_w4_channel": "int4, a scale a row, with zeros",
    "ct_fp8_block": "fp8, blocks of 32 x 32",
    "ct_fp8_channel": "fp8, a scale a row",
    "ct_fp8_tensor": "fp8, a scale for all",
    "ct_int8_asymmetric": "int8, a scale a row, with zeros",
    "ct_int8_channel": "int8, a scale a row",
    "ct_mxfp4": "fp4, groups of 32",
    "ct_mxfp8": "fp8, groups of 32",
    "ct_nvfp4": "fp4, groups of 16",
    "ct_w4_asymmetric": "int4, groups of 32, with zeros",
    "ct_w4_channel": "int4, a scale a row",
    "ct_w4_group": "int4, groups of 32",
    "ct_w4_reordered": "int4, groups of 32, with an order",
    "ct_w8_group": "int8, groups of 32",
    "fp8_block": "fp8, blocks of 16 x 32",
    "fp8_block_exponents": "fp8, blocks of 16 x 16",
    "fp8_tensor_static": "fp8, a scale for all",
    "gptq_w4": "int4, groups of 32",
    "gptq_w4_channel": "int4, a scale a row",
    "gptq_w4_reordered": "int4, groups of 32, with zeros and an order",
    "gptq_w4_v2": "int4, groups of 32, with zeros",
    "gptq_w4_zeros": "int4, groups of 32, with zeros",
    "gptq_w8_reordered": "int8, groups of 32, with zeros and an order",
    "modelopt_fp8": "fp8, a scale for all",
    "modelopt_fp8_rows": "fp8, a scale a row",
    "modelopt_mxfp8": "fp8, groups of 32",
    "modelopt_nvfp4": "fp4, groups of 16",
}


def test_every_layout_has_a_fixture() -> None:
    assert set(CASES) == KINDS.keys() | {"ct_mixed", "gptq_dynamic", "modelopt_mixed"}


def copied(case: str, folder: Path) -> Path:
    """A fixture to be changed."""
    return Path(shutil.copytree(FIXTURES / case, folder / case))


def dequantised(case: str) -> dict[str, dict[str, str]]:
    """What the library said of its floats."""
    said: dict[str, dict[str, str]] = json.loads((FIXTURES / case / "dequantised.json").read_text())
    return said


@pytest.mark.parametrize("case", CASES)
def test_the_librarys_floats_bit_for_bit(case: str) -> None:
    checkpoint = open_model(FIXTURES / case).checkpoint()
    checkpoint.check_numbers()
    said = dequantised(case)
    assert {name for name in checkpoint.tensors if checkpoint[name].quantized} == said.keys()
    for name, expected in said.items():
        floats = checkpoint[name].matrix().dequantise(DType.parse(expected["dtype"]))
        assert hashlib.sha256(floats.tobytes()).hexdigest() == expected["sha256"], name
    if case in KINDS:
        assert names_of(case)["self_attn.q_proj.weight"] == KINDS[case]


def twin(case: str, folder: Path, dtype: DType) -> Path:
    """The same model in floats of this type."""
    checkpoint = open_model(FIXTURES / case).checkpoint()
    tensors = {}
    for name in checkpoint.tensors:
        is_quantised = checkpoint[name].quantized is not None
        tensors[name] = checkpoint[name].matrix().dequantise(dtype) if is_quantised else checkpoint[name].array()
    folder.mkdir()
    shutil.copy(FIXTURES / case / "config.json", folder / "config.json")
    write_safetensors(folder / "model.safetensors", tensors)
    return change_config(folder, quantization_config=...)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.exhaustive] * (case in RARELY)) for case in CASES]
)
@pytest.mark.exhaustive_cases("_channel", "_reordered", "gptq", "modelopt")
def test_logits_of_the_dequantised_twin(tmp_path: Path, case: str) -> None:
    folder = FIXTURES / case
    kept = load_model(folder)
    own, exact = twin(case, tmp_path / "own", kept.dtype), twin(case, tmp_path / "exact", float32)
    expected = logits_of(load_model(own), IDS)
    np.testing.assert_array_equal(logits_of(load_model(folder, dtype=kept.dtype), IDS), expected)
    expected = logits_of(load_model(exact, dtype="float32"), IDS)
    np.testing.assert_array_equal(logits_of(load_model(folder, dtype="float32"), IDS), expected)
    assert relative_error(logits_of(kept, IDS), expected) < 0.02  # activations are rounded where weights are kept
    assert declare_model(folder).weight_bytes == kept.weight_bytes


@pytest.mark.parametrize("case", ["gptq_w4", "awq_w4", "ct_int8_channel", "ct_nvfp4", "ct_fp8_channel"])
def test_float_activations_are_those_of_the_dequantised_twin(tmp_path: Path, case: str) -> None:
    """Bit for bit those of the same numbers in floats; FP8 has a product that leaves x alone, and stays as it is."""
    model = load_model(FIXTURES / case, activations="float")
    is_fp8 = "fp8" in case
    usual = FIXTURES / case if is_fp8 else twin(case, tmp_path / "own", model.dtype)
    np.testing.assert_array_equal(logits_of(model, IDS), logits_of(load_model(usual), IDS))
    declared = declare_model(FIXTURES / case, activations="float")
    assert (declared.weight_bytes, declared.rounded_activations) == (model.weight_bytes, {})
    said = {} if is_fp8 else {KINDS[case]: f"int8, {64 if 'channel' in case else 32} of a row by one scale"}
    assert declare_model(FIXTURES / case).rounded_activations.items() >= said.items()
    assert bool(declare_model(FIXTURES / case).rounded_activations) == bool(said)


KEPT = {
    "awq_w4": "int4_half_zeros", "awq_w4_channel": "int4_half_zeros", "ct_fp8_channel": "fp8", "ct_fp8_tensor": "fp8",
    "ct_int8_asymmetric": "int8_bfloat_zeros", "ct_int8_channel": "int8", "ct_mixed": "fp8", "ct_mxfp4": "MXFP4",
    "ct_nvfp4": "nvfp4", "ct_w4_asymmetric": "int4_half_zeros", "ct_w4_channel": "int4_bfloat",
    "ct_w4_group": "int4_bfloat", "ct_w8_group": "int8_bfloat", "fp8_tensor_static": "fp8", "gptq_dynamic": "Q4_0",
    "gptq_w4": "Q4_0", "gptq_w4_channel": "Q4_0", "gptq_w4_v2": "int4_half_zeros", "gptq_w4_zeros": "int4_half_zeros",
    "ct_w4_reordered": "int4_bfloat", "gptq_w4_reordered": "int4_half_zeros", "gptq_w8_reordered": "int8_half_zeros",
    "modelopt_fp8": "fp8", "modelopt_fp8_rows": "fp8", "modelopt_mixed": "fp8", "modelopt_nvfp4": "nvfp4",
}  # fmt: skip
"""By fixtures, of queries, keys and values; others become floats."""


@pytest.mark.parametrize("case", CASES)
def test_what_the_cpu_keeps_as_it_is_stored(case: str) -> None:
    model: Any = load_model(FIXTURES / case)
    assert model.layers[0].attention.qkv_proj.format.name == KEPT.get(case, model.dtype.name)


def layouts(case: str) -> dict[str, QuantizedLayout | None]:
    checkpoint = open_model(FIXTURES / case).checkpoint()
    return {name.removeprefix(LAYER): checkpoint[name].quantized for name in checkpoint.tensors}


def names_of(case: str) -> dict[str, str]:
    return {name: layout.name for name, layout in layouts(case).items() if layout}


def test_groups_by_name_pattern_and_class() -> None:
    found = names_of("ct_mixed")
    assert {name for name, kind in found.items() if kind == "fp8, a scale a row"} == {
        f"self_attn.{each}_proj.weight" for each in "qkvo"
    }
    assert found["mlp.down_proj.weight"] == "int8, groups of 32"
    assert found["mlp.gate_proj.weight"] == "int4, groups of 32"
    assert "mlp.up_proj.weight" not in found


def test_modelopts_algorithms_by_module() -> None:
    found = names_of("modelopt_mixed")
    assert {name for name, kind in found.items() if kind == "fp4, groups of 16"} == {
        f"mlp.{each}_proj.weight" for each in ("gate", "up", "down")
    }
    assert "self_attn.v_proj.weight" not in names_of("modelopt_nvfp4")  # excluded


def test_other_bits_by_pattern() -> None:
    found = names_of("gptq_dynamic")
    assert found["mlp.down_proj.weight"] == "int8, groups of 16"
    assert found["mlp.up_proj.weight"] == "int4, groups of 32"
    assert "self_attn.o_proj.weight" not in found


ACTIVATIONS: dict[str, Any] = {
    "ct_fp8_tensor": ("fp8", 0, True), "ct_fp8_channel": ("fp8", 0, False), "ct_fp8_block": ("fp8", 128, False),
    "ct_int8_channel": ("int8", 0, False), "ct_w4_group": None, "ct_nvfp4": ("fp4", 16, False), "ct_mxfp4": None,
    "fp8_block": ("fp8", 32, False), "fp8_tensor_static": ("fp8", 0, True), "gptq_w4": None,
    "modelopt_fp8": ("fp8", 0, True), "modelopt_fp8_rows": ("fp8", 0, False), "modelopt_nvfp4": ("fp4", 16, False),
    "modelopt_mxfp8": ("fp8", 32, False),
}  # fmt: skip


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_how_activations_are_rounded(case: str) -> None:
    layout = layouts(case)["self_attn.q_proj.weight"]
    assert layout is not None
    found = layout.activation
    assert (found and (found.kind, found.group, found.is_static)) == ACTIVATIONS[case]
    scale = {"ct_fp8_tensor": 0.030029296875, "fp8_tensor_static": np.float32(0.02), "ct_nvfp4": 20.0}.get(case)
    checkpoint = open_model(FIXTURES / case).checkpoint()
    if case in ("modelopt_fp8", "modelopt_nvfp4"):
        stored = SafetensorsFile(FIXTURES / case / "model.safetensors").array(f"{LAYER}self_attn.q_proj.input_scale")
        scale = stored if case == "modelopt_fp8" else np.reciprocal(stored)
    assert checkpoint[f"{LAYER}self_attn.q_proj.weight"].matrix().input_scale == scale


@pytest.mark.parametrize("case", ["gptq_w4_zeros", "ct_nvfp4", "ct_int8_channel"])
def test_dummy_weights_are_quantised_as_the_stored_ones(case: str) -> None:
    model = load_model(FIXTURES / case, load_format="dummy")
    assert np.isfinite(logits_of(model, IDS)).all()
    device = "emulated:sm_90a"
    declared = declare_model(FIXTURES / case, device=device, load_format="dummy")
    stored = declare_model(FIXTURES / case, device=device, dtype=model.dtype)
    assert declared.weight_bytes == stored.weight_bytes
    assert declared.layers[0].mlp.down_proj.format == stored.layers[0].mlp.down_proj.format
    assert declared.layers[0].mlp.down_proj.format.packing
