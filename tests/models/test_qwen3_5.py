"""Qwen3.5's configs that are refused, its layers' kinds by tensors and config, and quantised projections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from models.errors import ConfigError
from models.registry import load_model, parse_config
from tests.models.driver import logits_of, relative_error
from tests.models.folders import change_config, load_golden, write_model, write_safetensors
from tests.models.golden_weights import golden_tensor

CASE = "qwen3_5_odd"


def fields_of(**changes: Any) -> dict[str, Any]:
    return {**json.loads((load_golden(CASE).folder / "config.json").read_text()), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 5}, "linear_num_value_heads = 5 must be a multiple of linear_num_key_heads = 2"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types names 3 layers, must name num_hidden_layers = 4"),
        ({"layer_types": ["mamba"] * 4}, r"layer_types \[0\] = 'mamba' must be 'linear_attention' or 'full_att"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ({"output_gate_type": "tanh"}, "output_gate_type 'tanh' is not supported; supported are silu, swish, sigmoid"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16' is not supported"),
        ({"linear_attn_stored_as": "sideways"}, "linear_attn_stored_as 'sideways' is not supported"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be from 2"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(fields_of(**changes))


def test_the_kinds_follow_from_the_interval() -> None:
    fields = fields_of(full_attention_interval=2)
    del fields["layer_types"]
    config: Any = parse_config(fields)
    assert config.layer_types == ("linear_attention", "full_attention") * 2


def test_layers_that_predict_further_tokens_are_counted() -> None:
    for case in (CASE, "qwen3_next_odd"):
        fields = json.loads((load_golden(case).folder / "config.json").read_text())
        config: Any = parse_config({**fields, "mtp_num_hidden_layers": 1})
        assert config.num_prediction_layers == 1, case


def test_kinds_that_contradict_the_tensors(tmp_path: Path) -> None:
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    folder = change_config(write_model(tmp_path, load_golden(CASE)), layer_types=kinds)
    with pytest.raises(ConfigError, match=r"layer_types\[\d\] is '\w+', but the files have model.layers.\d\.") as error:
        load_model(folder)
    assert "\n" not in str(error.value)


def test_the_gate_of_a_head_may_be_a_sigmoid(tmp_path: Path) -> None:
    """Instead of SiLU, which is the sigmoid times z: other logits."""
    golden = load_golden(CASE)
    folder = change_config(write_model(tmp_path, golden), output_gate_type="sigmoid")
    assert relative_error(logits_of(load_model(folder), golden.prompt_ids), golden.logits["float32"]) > 1e-2


SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
SHAPES = {
    "linear_attn.in_proj_qkv": (256, 128), "linear_attn.in_proj_z": (128, 128), "linear_attn.out_proj": (128, 128),
    "self_attn.q_proj": (256, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128), "mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128), "mlp.down_proj": (128, 256),
}  # fmt: skip
FLOATS = {
    "linear_attn.in_proj_b.weight": (4, 128), "linear_attn.in_proj_a.weight": (4, 128), "linear_attn.A_log": (4,),
    "linear_attn.dt_bias": (4,), "linear_attn.norm.weight": (32,), "linear_attn.conv1d.weight": (256, 1, 4),
    "self_attn.q_norm.weight": (64,), "self_attn.k_norm.weight": (64,), "input_layernorm.weight": (128,),
    "post_attention_layernorm.weight": (128,),
}  # fmt: skip


def write_fp8(folder: Path) -> tuple[Path, Path]:
    """A model with blocks of 128 x 128 and a scale each, but for b and a, and its twin in floats."""
    tensors: dict[str, Any] = {"model.norm.weight": golden_tensor("norm", (128,), 1)}
    tensors["model.embed_tokens.weight"] = golden_tensor("embed_tokens", (53, 128), 1)
    tensors["lm_head.weight"] = golden_tensor("lm_head.weight", (53, 128), 1)
    floats = dict(tensors)
    for layer, own in enumerate(("linear_attn", "self_attn")):
        under = f"model.layers.{layer}"
        for name, shape in FLOATS.items():
            if name.startswith(own) or not name.startswith(("linear", "self")):
                tensors[f"{under}.{name}"] = floats[f"{under}.{name}"] = golden_tensor(f"{under}.{name}", shape, 2)
        for name, shape in SHAPES.items():
            if name.startswith((own, "mlp")):
                values = golden_tensor(f"{under}.{name}.weight", shape, 3)
                scales = np.full((-(-shape[0] // 128), shape[1] // 128), 2.0**-9, np.float32)
                scales *= np.arange(1, scales.size + 1, dtype=np.float32).reshape(scales.shape)
                spread = np.repeat(np.repeat(scales, 128, 0)[: shape[0]], 128, 1)
                codes = (values / spread).astype(ml_dtypes.float8_e4m3fn)
                tensors[f"{under}.{name}.weight"] = codes
                tensors[f"{under}.{name}.weight_scale_inv"] = scales
                floats[f"{under}.{name}.weight"] = codes.astype(np.float32) * spread
    config = fields_of(**SIZES)
    scheme = {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head", "model.layers.0.linear_attn.in_proj_b"],
    }  # fmt: skip
    for name, stored, extra in (("fp8", tensors, {"quantization_config": scheme}), ("floats", floats, {})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({**config, **extra}))
        write_safetensors(folder / name / "model.safetensors", stored)
    return folder / "fp8", folder / "floats"


ON_A_GPU = pytest.param("emulated:sm_90a", marks=(pytest.mark.emulator, pytest.mark.exhaustive))


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
def test_fp8_blocks_beside_floats(tmp_path: Path, device: str) -> None:
    """Rows of queries and gates alternate within blocks of 128 rows; b and a are floats beside q, k, v and z."""
    quantised, floats = write_fp8(tmp_path)
    ids = list(range(3, 40))
    expected = logits_of(load_model(floats, dtype="float32", device=device), ids)
    if device == "cpu":
        np.testing.assert_array_equal(logits_of(load_model(quantised, dtype="float32"), ids), expected)
    kept = load_model(quantised, device=device)
    assert kept.weight_bytes < 0.6 * load_model(floats, dtype="float32", device=device).weight_bytes
    assert relative_error(logits_of(kept, ids), expected) < 0.1
