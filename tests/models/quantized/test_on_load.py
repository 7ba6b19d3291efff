"""`--quantization int4 | mxfp4 | fp8`: a model in floats is the one that a checkpoint of the rounded matrices gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from models.checkpoints.model_files import open_model
from models.errors import WeightsError
from models.quantized.on_load import HEAD, ROUNDINGS
from models.registry import declare_model, load_model
from runtime.dtype import bfloat16, float32
from runtime.errors import InvalidArgumentError
from runtime.linear.quantise import quantise
from tests.models.driver import logits_of, relative_error
from tests.models.folders import change_config, load_golden, write_model, write_safetensors
from tests.models.quantized.test_fixtures import FIXTURES, IDS, twin


def rounded_twin(source: Path, folder: Path, quantization: str) -> Path:
    """The model with its matrices rounded and dequantised again, in float32."""
    checkpoint, is_tied = open_model(source).checkpoint(), not json.loads((source / "config.json").read_text())
    assert not is_tied
    tensors = {}
    for name in checkpoint.tensors:
        array = checkpoint[name].array()
        if "_proj" in name:
            rounding = ROUNDINGS[quantization]
            if array.shape[1] % 32 == 0 or quantization == "fp8":
                array = quantise(array, rounding).dequantise(float32)
        elif name == "lm_head.weight":
            array = quantise(array, HEAD).dequantise(float32)
        tensors[name] = array.astype(np.float32)
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize(("quantization", "format"), [("int4", "Q4_0"), ("mxfp4", "MXFP4"), ("fp8", "fp8")])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_rounded_twin_on_the_cpu(tmp_path: Path, quantization: str, format: str, dtype: str) -> None:
    source = twin("ct_w4_group", tmp_path / "source", bfloat16)
    model: Any = load_model(source, quantization=quantization, dtype=dtype)
    assert model.quantization == quantization
    layer = model.layers[0]
    assert (layer.attention.qkv_proj.format.name, layer.mlp.down_proj.format.name) == (format, format)
    assert model.lm_head.format.name == "int8"
    assert layer.attention.o_proj.format.name == format  # K is 32, half of two blocks' words
    exact = load_model(rounded_twin(source, tmp_path / "twin", quantization))
    dense = load_model(source, dtype="float32")
    ours, theirs = logits_of(model, IDS), logits_of(exact, IDS)
    assert relative_error(ours, theirs) < 0.02  # activations are rounded
    assert relative_error(theirs, logits_of(dense, IDS)) < 0.3
    assert declare_model(source, quantization=quantization, dtype=dtype).weight_bytes == model.weight_bytes


def test_a_tied_table_is_rounded_to_int8(tmp_path: Path) -> None:
    source = write_model(tmp_path, load_golden("llama_tied_gqa4"))
    model: Any = load_model(source, quantization="int4")
    assert model.lm_head.format.name == "int8"
    assert model.embed_tokens is model.lm_head.weight


@pytest.mark.parametrize("quantization", ["int4", "mxfp4", "fp8"])
def test_gpus_keep_them_packed(tmp_path: Path, quantization: str) -> None:
    source = twin("ct_w4_group", tmp_path / "source", bfloat16)
    declared: Any = declare_model(source, quantization=quantization, device="emulated:sm_80")
    packings = {"int4": "u4_g32", "mxfp4": "e2m1_g32_exponents", "fp8": "e4m3"}
    assert declared.layers[0].mlp.down_proj.format.packing == packings[quantization]
    assert declared.lm_head.format.packing == "u8"


def test_what_is_refused(tmp_path: Path) -> None:
    source = twin("ct_w4_group", tmp_path / "source", bfloat16)
    for folder, settings, message in (
        (source, {"quantization": "int3"}, "quantization is 'int3', must be one of none, int8, int4, mxfp4, fp8"),
        (FIXTURES / "ct_w4_group", {"quantization": "int4"}, "the model is quantised already: leave it out"),
    ):
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            load_model(folder, **settings)  # type: ignore[arg-type]
        assert caught.value.param == "quantization"
    gpt2 = write_model(tmp_path / "gpt2", load_golden("gpt2_gelu_new"))
    with pytest.raises(InvalidArgumentError, match="GPT2LMHeadModel stores its maps inputs first, which is rounded"):
        load_model(gpt2, quantization="int4")
    checkpoint = open_model(source).checkpoint()
    tensors = {name: checkpoint[name].array().copy() for name in checkpoint.tensors}
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = ml_dtypes.bfloat16(np.nan)
    write_safetensors(source / "model.safetensors", tensors)
    with pytest.raises(WeightsError, match=r"up_proj.weight' has a number that is not finite, which cannot be rounded"):
        load_model(change_config(source), quantization="int4")


def test_float_activations_keep_what_was_rounded(tmp_path: Path) -> None:
    """--quantization says what becomes of weights, --activations of x."""
    source = twin("ct_w4_group", tmp_path / "source", bfloat16)
    model = load_model(source, quantization="int4", dtype="float32", activations="float")
    expected = load_model(rounded_twin(source, tmp_path / "twin", "int4"), dtype="float32")
    np.testing.assert_array_equal(logits_of(model, IDS), logits_of(expected, IDS))
    with pytest.raises(InvalidArgumentError, match="quantization is 'int8', whose products on the cpu round rows of x"):
        load_model(source, quantization="int8", activations="float")
    with pytest.raises(InvalidArgumentError, match="activations is 'exact', must be one of auto, float"):
        load_model(source, activations="exact")
