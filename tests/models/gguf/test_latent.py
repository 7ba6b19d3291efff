"""DeepSeek's latent attention in GGUF, in the layout of either age, beside its twin in safetensors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Ggml

from models.errors import ConfigError, ModelLoadError, WeightsError
from models.registry import declare_model, load_config, load_model
from runtime.linear.format import GGML_FORMATS
from tests.models.driver import logits_of, relative_error
from tests.models.folders import golden_tensors, load_golden, write_safetensors
from tests.models.gguf.files import Array, random_blocks, split_maps, write_gguf
from tests.models.gguf.test_experts import changing
from tests.models.gguf.test_model import comparable
from tests.models.products import check_products

TOLD: dict[str, dict[str, Any]] = {
    "deepseek_v2_odd": {"mscale": 0.9},  # a file tells one of both
    "deepseek_v2_groups": {},
    "deepseek_v3_odd": {},
    "glm4_moe_lite_odd": {},
    "mistral4_odd": {},
}


def twin_of(folder: Path, case: str) -> tuple[dict[str, Any], dict[str, Array], list[int]]:
    """A golden model as a file can tell it, without biases and further layers; written into the folder."""
    golden = load_golden(case)
    config = json.loads((golden.folder / "config.json").read_text())
    config |= {"attention_bias": False, "num_nextn_predict_layers": 0}
    config |= {"mlp_bias": False} if "mlp_bias" in config else {}
    config["rope_parameters"] |= TOLD[case]
    tensors = {
        name: array for name, array in golden_tensors(golden).items()
        if not name.endswith(".bias") and f"layers.{config['num_hidden_layers']}" not in name
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return config, tensors, golden.prompt_ids


@pytest.mark.parametrize("has_whole_maps", [False, True])
@pytest.mark.parametrize("case", TOLD)
def test_float32_is_the_twin(tmp_path: Path, case: str, has_whole_maps: bool) -> None:
    config, tensors, ids = twin_of(tmp_path / "twin", case)
    path = write_gguf(tmp_path / "model.gguf", config, tensors, has_whole_maps=has_whole_maps)
    told = dataclasses.replace(
        load_config(path), **({"architecture": "Glm4MoeLiteForCausalLM"} if "glm" in case else {})
    )
    assert comparable(told, False) == comparable(load_config(tmp_path / "twin"), False)
    loaded = load_model(path)
    assert declare_model(path).weight_bytes == loaded.weight_bytes
    np.testing.assert_array_equal(logits_of(loaded, ids), logits_of(load_model(tmp_path / "twin"), ids))


def test_sigmoids_that_a_file_does_not_tell(tmp_path: Path) -> None:
    """The converter writes the function if config.json does, which transformers' does not; the correction tells."""
    config, tensors, ids = twin_of(tmp_path / "twin", "deepseek_v3_odd")

    def forget(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["deepseek2.expert_gating_func"]

    path = write_gguf(tmp_path / "model.gguf", config, tensors, add_metadata=forget)
    logits, expected = logits_of(load_model(path), ids), logits_of(load_model(tmp_path / "twin"), ids)
    np.testing.assert_array_equal(logits, expected)


def test_mistral_in_the_older_class(tmp_path: Path) -> None:
    """Mistral Large 3's files are of deepseek2. A file of Mistral 4 by llama.cpp's converter tells of no growth of
    queries, which is then none."""
    config, tensors, ids = twin_of(tmp_path / "twin", "mistral4_odd")
    older = write_gguf(
        tmp_path / "older.gguf", {**config, "model_type": "deepseek_v2", "rope_interleave": True}, tensors
    )
    silent = changing({f"mistral4.attention.temperature_{name}": None for name in ("scale", "length")})
    path = write_gguf(tmp_path / "model.gguf", config, tensors, add_metadata=silent)
    found = [load_model(each) for each in (older, path)]
    assert [each.config.architecture for each in found] == ["Mistral4ForCausalLM"] * 2
    config["rope_parameters"]["llama_4_scaling_beta"] = 0.0
    (tmp_path / "twin" / "config.json").write_text(json.dumps(config))
    expected = logits_of(load_model(tmp_path / "twin"), ids)
    for each in found:
        np.testing.assert_array_equal(logits_of(each, ids), expected)


CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 256, "q_lora_rank": None,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "kv_lora_rank": 256, "head_dim": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
    "vocab_size": 96, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 256, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0, "norm_topk_prob": False, "topk_method": "greedy", "n_group": None,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip


def quantised_tensors(has_whole_maps: bool) -> tuple[dict[str, Array], dict[str, Array]]:
    """Blocks in Q4_0, and the floats that they stand for; the parts of split maps have their own blocks."""
    rng = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (96, 256), "lm_head": (96, 256)}
    floats: dict[str, Array] = {"model.norm.weight": np.ones(256, np.float32)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj": (4 * 96, 256), f"{at}.self_attn.kv_a_proj_with_mqa": (288, 256),
            f"{at}.self_attn.o_proj": (256, 4 * 64),
        }  # fmt: skip
        if has_whole_maps:
            shapes[f"{at}.self_attn.kv_b_proj"] = (4 * 128, 256)
        else:
            shapes |= {f"{at}.self_attn.k_b_proj": (4, 256, 64), f"{at}.self_attn.v_b_proj": (4, 64, 256)}
        inner = 256 if layer else 512
        under = [f"experts.{each}." for each in range(4)] + ["shared_experts."] if layer else [""]
        for part in under:
            shapes |= {f"{at}.mlp.{part}{name}_proj": (inner, 256) for name in ("gate", "up")}
            shapes[f"{at}.mlp.{part}down_proj"] = (256, inner)
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.kv_a_layernorm"):
            floats[f"{at}.{name}.weight"] = rng.uniform(0.5, 1.5, 256).astype(np.float32)
    floats["model.layers.1.mlp.gate.weight"] = rng.standard_normal((4, 256)).astype(np.float32)
    blocks = {f"{name}.weight": random_blocks(rng, Ggml.Q4_0, shape, 0.02) for name, shape in shapes.items()}
    decoded = {name: gguf.dequantize(array, Ggml.Q4_0) for name, array in blocks.items()}
    for layer in range(2 * (not has_whole_maps)):
        keys, values = (decoded.pop(f"model.layers.{layer}.self_attn.{part}_b_proj.weight") for part in "kv")
        whole = np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, 256)
        decoded[f"model.layers.{layer}.self_attn.kv_b_proj.weight"] = whole
    return {**floats, **blocks}, {**floats, **decoded}


@pytest.mark.parametrize("has_whole_maps", [False, True])
@pytest.mark.exhaustive
def test_quantised_is_its_dequantised_twin(tmp_path: Path, has_whole_maps: bool) -> None:
    blocks, floats = quantised_tensors(has_whole_maps)
    path = write_gguf(
        tmp_path / "model.gguf", CONFIG, blocks, type_of=lambda name: Ggml.Q4_0, has_whole_maps=has_whole_maps
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(tmp_path / "model.safetensors", floats)
    ids, twin = list(range(3, 24)), load_model(tmp_path)
    np.testing.assert_array_equal(logits_of(load_model(path, dtype="float32"), ids), logits_of(twin, ids))
    kept = load_model(path)
    assert declare_model(path).weight_bytes == kept.weight_bytes < twin.weight_bytes / 2
    for layer in kept.layers:
        keys, values = (maps.experts[0].format for maps in (layer.attention.maps.keys, layer.attention.maps.values))
        assert values is GGML_FORMATS["Q4_0"]
        assert (keys is values) != has_whole_maps
    check_products(kept, ids, logits_of(twin, ids))
    assert 0 < relative_error(logits_of(kept, ids), logits_of(twin, ids)) < 0.15  # activations are rounded


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"deepseek2.attention.kv_lora_rank": None}, "deepseek2.attention.kv_lora_rank is missing"),
    ({"deepseek2.attention.kv_lora_rank": 21}, "deepseek2.attention.key_length = 28 must be 27, a kept row's"),
    ({"deepseek2.attention.value_length": 13}, "deepseek2.attention.value_length = 13 must be 22, a kept row's"),
    ({"deepseek2.attention.key_length_mla": 6}, "deepseek2.attention.key_length = 6 must be above .* = 6"),
    ({"deepseek2.expert_gating_func": 3}, "deepseek2.expert_gating_func = 3 is not supported"),
    ({"deepseek2.expert_group_count": 2}, "n_group = 2 must divide n_routed_experts = 5"),
    ({"deepseek2.attention.temperature_scale": 0.1}, "deepseek2.attention.temperature_scale = 0.1 is not supported"),
    (
        {"mistral4.attention.temperature_length": 9},
        "temperature_length = 9 must be rope.scaling.original_context.* = 8",
    ),
    ({"mistral4.expert_weights_norm": False}, "mistral4.expert_weights_norm must be true"),
    ({"mistral4.rope.scaling.type": "none"}, "mistral4.rope.scaling.type must be 'yarn'"),
    ({"mistral4.expert_gating_func": 4}, "mistral4.expert_gating_func = 4 is not supported"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[case[1][:40] for case in WRONG])
def test_keys_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    name = "mistral4_odd" if next(iter(changes)).startswith("mistral4") else "deepseek_v2_odd"
    config, tensors, _ = twin_of(tmp_path / "twin", name)
    path = write_gguf(tmp_path / "model.gguf", config, tensors, add_metadata=changing(changes))
    with pytest.raises(ConfigError, match=message):
        declare_model(path)


def test_parts_of_a_map_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config, tensors, _ = twin_of(tmp_path / "twin", "deepseek_v2_odd")
    tensors = split_maps(config, tensors)
    name = "model.layers.1.self_attn.v_b_proj.weight"

    def refused(given: dict[str, Array]) -> str:
        path = write_gguf(tmp_path / "model.gguf", config, given)
        with pytest.raises(ModelLoadError) as caught:
            load_model(path)
        assert isinstance(caught.value, WeightsError)
        return str(caught.value)

    without = {each: array for each, array in tensors.items() if each != name}
    assert "tensor 'blk.1.attn_v_b.weight' is missing, but there is 'blk.1.attn_k_b.weight'" in refused(without)
    shorter = refused({**tensors, name: tensors[name][:2]})
    assert "'blk.1.attn_v_b.weight' [2, 13, 22] must be [heads, latent, keys] and [heads, values, latent]" in shorter
