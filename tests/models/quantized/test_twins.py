"""Quantised checkpoints of models with recurrent states and of Gemma 4, as quantisers write them, beside their
dequantised twins.

What makers leave in floats stays so: the small maps of gates, convolutions, decays, routers, tables, towers, and what a
list names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.checkpoints.safetensors_file import SafetensorsFile
from models.errors import ModelLoadError
from models.registry import load_model, parse_config, tensor_layout
from tests.models.driver import logits_of, mean_relative_error
from tests.models.folders import load_golden, write_safetensors
from tests.models.golden_weights import golden_tensor
from tests.models.quantized.quantisers import FORMATS

Array = np.ndarray[Any, Any]
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_odd": {
        "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "linear_key_head_dim": 16,
        "linear_value_head_dim": 32, "linear_num_value_heads": 4,
    },
    "qwen3_5_moe_odd": {
        "hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "head_dim": 16,
        "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    },
    "qwen3_next_odd": {
        "hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "head_dim": 16,
        "linear_key_head_dim": 16, "linear_value_head_dim": 32, "intermediate_size": 96,
    },
    "nemotron_h_moe_latent": {
        "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "moe_latent_size": 32,
        "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 32,
    },
    "granite_hybrid_moe_odd": {
        "hidden_size": 64, "intermediate_size": 32, "shared_intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8,
    },
    "granite_hybrid_odd": {
        "hidden_size": 64, "shared_intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8,
    },
    "lfm2_odd": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "block_multiple_of": 32},
    "lfm2_moe_odd": {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32},
    "gemma4_inputs_odd": {"hidden_size": 64, "intermediate_size": 96, "hidden_size_per_layer_input": 32},
    "gemma4_keys_odd": {"hidden_size": 64, "intermediate_size": 96},
    "gemma4_moe_odd": {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32},
    "mistral4_odd": {
        "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "q_lora_rank": 64,
        "kv_lora_rank": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 16,
        "qk_nope_head_dim": 8,
    },
    "glm4_moe_lite_odd": {
        "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "q_lora_rank": 64,
        "kv_lora_rank": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": None,
    },
}  # fmt: skip
VISION = {
    "depth": 1, "num_heads": 2, "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 96, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
PICTURES = {"qwen3_5_pictures": "qwen3_5_odd", "gemma4_pictures": "gemma4_inputs_odd"}
"""Cases with a tower, and those of their text."""
GEMMA4_TOWER = {
    "model_type": "gemma4_vision", "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": 8, "hidden_size": 8, "intermediate_size": 12, "patch_size": 2, "use_clipped_linears": True,
    "position_embedding_size": 3360,
}  # fmt: skip
FLOATS = (
    "embed", "visual", "vision_tower", "lm_head", "in_proj_a", "in_proj_b", "mlp.gate.", "shared_expert_gate", "router",
    "mixer.gate.", "feed_forward.gate.", "conv1d", "conv.conv",
)  # fmt: skip
"""Parts of names of the matrices that no maker quantises."""
JOINED = (
    "in_proj_qkv.weight", "in_proj_qkvz.weight", "in_proj_ba.weight", "self_attn.q_proj.weight", "input_linear.weight",
    "output_linear.weight",
)  # fmt: skip
"""Ends of names of tensors that are several maps."""
STACKED = ("experts.gate_up_proj", "experts.down_proj")
"""Ends of names of experts' tensors of "stacks", as transformers saves Gemma 4's, or Mistral 4's with a scale of
inputs each."""
STACKS = ("gemma4_moe_odd", "qwen3_5_moe_odd", "mistral4_odd", "glm4_moe_lite_odd")
OTHER_EXPERTS = {("glm4_moe_lite_odd", "modelopt"), ("glm4_moe_lite_odd", "static_stacks")}
"""With these weights the router is at a tie: the twin in bfloat16 chooses other experts as well."""
EACH_TIME = {
    ("qwen3_5_moe_odd", "gptq"), ("qwen3_5_odd", "packed"), ("qwen3_5_pictures", "rows"),
    ("nemotron_h_moe_latent", "modelopt"), ("nemotron_h_moe_latent", "blocks"), ("granite_hybrid_moe_odd", "rows"),
    ("lfm2_moe_odd", "awq"), ("gemma4_pictures", "packed"), ("gemma4_inputs_odd", "gptq"), ("gemma4_moe_odd", "rows"),
    ("gemma4_moe_odd", "stacks"), ("mistral4_odd", "static_stacks"), ("glm4_moe_lite_odd", "awq"),
}  # fmt: skip


def config_of(case: str) -> dict[str, Any]:
    """A golden's, of sizes that groups divide; some with a tower."""
    if case == "gemma4_pictures":
        return {
            "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "vision_config": GEMMA4_TOWER,
            "text_config": config_of(PICTURES[case]), "image_token_id": 52, "boi_token_id": 53, "eoi_token_id": 54,
            "audio_config": None,
        }  # fmt: skip
    if case == "qwen3_5_pictures":
        text = config_of("qwen3_5_odd")
        text["rope_parameters"] |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
            "vision_config": VISION, "image_token_id": 52, "tie_word_embeddings": False,
        }  # fmt: skip
    read: dict[str, Any] = json.loads((load_golden(case).folder / "config.json").read_text())
    return read | SIZES[case]


def shapes_of(config: dict[str, Any], form: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a published checkpoint: experts apart, but Granite's and those of "stacks"; maps joined where it
    joins them."""
    layout = tensor_layout(parse_config(config))
    shapes = dict(layout.shapes)
    for name, stack in layout.stacks.items():
        if not name.endswith((*JOINED, *STACKED * form.endswith("stacks"))) or stack.part_names[0] not in shapes:
            continue
        for part in stack.part_names:
            del shapes[part]
        shapes[name] = stack.turned_shape if name.endswith(STACKED) else stack.shape
    old = "backbone." if config["model_type"] == "nemotron_h" else "model."
    return {name.replace("model.", old, 1): shape for name, shape in shapes.items()}


def write_twins(folder: Path, case: str, form: str) -> tuple[Path, Path]:
    """The quantised folder, and the one of the floats that it means."""
    quantised, quantization_config = FORMATS[form]
    config = config_of(case)
    stored: dict[str, Array] = {}
    floats: dict[str, Array] = {}
    ignored: list[str] = []
    for name, shape in shapes_of(config, form).items():
        weight = golden_tensor(name, shape, 3)
        module = name.removesuffix(".weight")
        if name.endswith(STACKED):
            each = [quantised(expert) for expert in weight]
            stored[name] = np.stack([parts["weight"] for parts, _ in each])
            stored[f"{name}_scale_inv"] = np.stack([np.atleast_2d(parts["weight_scale_inv"]) for parts, _ in each])
            if form == "static_stacks":
                stored[f"{name}_activation_scale"] = np.stack([parts["activation_scale"] for parts, _ in each])
            floats[name] = np.stack([dequantised for _, dequantised in each])
            continue
        is_map = len(shape) == 2 or (len(shape) == 3 and "linear.weight" in name and form == "rows")
        if not is_map or any(part in name for part in FLOATS):
            if is_map:
                ignored.append(module)
            stored[name] = floats[name] = weight
            continue
        parts, dequantised = quantised(weight.reshape(-1, shape[-1]))
        stored |= {f"{module}.{part}": array for part, array in parts.items()}
        floats[name] = dequantised.reshape(shape)
        if len(shape) == 3:  # all experts, which llm-compressor saves so
            stored |= {f"{module}.{part}": array.reshape(*shape[:2], -1) for part, array in parts.items()}
    for name, tensors, extra in (
        ("quantised", stored, {"quantization_config": quantization_config(ignored)}), ("floats", floats, {})
    ):  # fmt: skip
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({**config, **extra}))
        write_safetensors(folder / name / "model.safetensors", tensors)
    return folder / "quantised", folder / "floats"


ALL = [
    pytest.param(case, form, marks=[pytest.mark.exhaustive] * ((case, form) not in EACH_TIME))
    for case in (*SIZES, *PICTURES)
    for form in FORMATS
    if (not form.endswith("stacks") or case in STACKS) and (case, form) not in OTHER_EXPERTS
]


@pytest.mark.parametrize(("case", "form"), ALL)
def test_beside_the_dequantised_twin(tmp_path: Path, case: str, form: str) -> None:
    quantised, floats = write_twins(tmp_path, case, form)
    twin = load_model(floats, dtype="float32")
    expected = logits_of(twin, IDS)
    np.testing.assert_array_equal(logits_of(load_model(quantised, dtype="float32"), IDS), expected)
    kept = load_model(quantised)
    assert kept.weight_bytes < 0.8 * twin.weight_bytes
    assert mean_relative_error(logits_of(kept, IDS), expected) < 0.1


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize(("case", "form"), sorted(EACH_TIME))
def test_on_an_emulated_gpu(tmp_path: Path, case: str, form: str) -> None:
    quantised, floats = write_twins(tmp_path, case, form)
    expected = logits_of(load_model(floats, dtype="float32"), IDS)
    on_device = load_model(quantised, device="emulated:sm_90a")
    assert mean_relative_error(logits_of(on_device, IDS), expected) < 0.1


WRONG_STACKS: list[tuple[str, dict[str, tuple[int, ...]], dict[str, Any], str]] = [
    (
        "gemma4_moe_odd",
        {"gate_up_proj_scale_inv": (7, 3, 1)},
        {},
        r"is \[7, 3, 1\], must be \[7, 1, 1\] or \[7, 2, 1\]",
    ),
    ("gemma4_moe_odd", {"gate_up_proj": (7, 66, 64)}, {}, r"is \[7, 66, 64\], but the config asks for \[7, 64, 64\]"),
    ("qwen3_5_moe_odd", {"down_proj": (5, 32, 64)}, {}, r"quantised along its outputs: it must be \[5, 64, 32\]"),
]


@pytest.mark.parametrize(("case", "shapes", "fields", "message"), WRONG_STACKS)
def test_a_stack_that_does_not_fit_is_refused(
    tmp_path: Path, case: str, shapes: dict[str, tuple[int, ...]], fields: dict[str, Any], message: str
) -> None:  # fmt: skip
    folder, _ = write_twins(tmp_path, case, "stacks")
    file = SafetensorsFile(folder / "model.safetensors")
    tensors = {name: file.array(name).copy() for name in file.tensors}
    for end, shape in shapes.items():
        name = next(name for name in tensors if name.endswith(f".experts.{end}"))
        tensors[name] = np.zeros(shape, tensors[name].dtype)
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder)
