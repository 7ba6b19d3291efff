"""GGUF files for tests: a Hugging Face model by the rules of llama.cpp's converter, written by the `gguf` package."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Ggml

from tests.models.gguf.gemma4_files import add_gemma4_keys, gemma4_tensors

Array = np.ndarray[Any, Any]

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "gemma4_text": "gemma4", "phi3": "phi3", "granite": "granite", "smollm3": "smollm3",
    "olmo2": "olmo2", "olmo3": "olmo2", "glm4": "glm4", "mixtral": "llama", "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2",
    "mistral4": "mistral4", "gemma": "gemma", "seed_oss": "seed_oss",
    "exaone4": "exaone4", "ernie4_5": "ernie4_5", "starcoder2": "starcoder2", "cohere": "command-r",
    "cohere2": "cohere2", "internlm2": "internlm2", "gpt_neox": "gptneox", "olmo": "olmo", "phimoe": "phimoe",
    "granitemoe": "granitemoe", "granitemoeshared": "granitemoe", "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_dense": "hunyuan-dense", "apertus": "apertus", "ministral3": "mistral3", "glm": "chatglm",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next",
    "gpt2": "gpt2", "qwen2_vl": "qwen2vl", "qwen3_vl": "qwen3vl", "qwen3_vl_moe": "qwen3vlmoe",
}  # fmt: skip
WITH_EXPERTS = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3",
    "phimoe", "granitemoe", "granitemoeshared", "ernie4_5_moe", "qwen3_5_moe_text", "qwen3_next", "glm4_moe_lite",
    "mistral4",
)  # fmt: skip
DELTA_RULE = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
PERMUTED = (
    "llama", "mistral", "granite", "smollm3", "mixtral", "internlm2", "olmo", "ministral3", "granitemoe",
    "granitemoeshared",
)  # fmt: skip


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, Array],
    *,
    type_of: Callable[[str], Ggml] = lambda name: Ggml.F32,
    add_metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    num_tensors_per_shard: int = 0,
    has_whole_maps: bool = False,
    is_fused: bool = False,
    drops_ones: bool = False,
) -> Path:
    """A file of float32 tensors by their names in safetensors. `type_of` gets GGUF's names; vectors stay float32.
    With `has_whole_maps` latent attention is written as it was until April 2025: heads' keys and values in one map.
    `drops_ones` writes a matrix of one row as a vector and a stack of one matrix as it, as llama.cpp's quantiser does.
    `is_fused` writes queries, keys and values as one, and experts' gate and up, as the converter does if asked to.

    Returns the file's path, or the first shard's.
    """
    kind, config = config["model_type"], _named_alike(config)
    num_layers = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[kind])
    names = gguf.get_tensor_name_map(arch, num_layers)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[kind], split_max_tensors=num_tensors_per_shard)
    if kind == "gemma4_text":
        add_gemma4_keys(writer, config)
    else:
        _add_keys(writer, config, has_whole_maps)
    add_metadata(writer)
    if kind in LATENT and not has_whole_maps:
        tensors = split_maps(config, tensors)
    tensors = gemma4_tensors(config, tensors) if kind == "gemma4_text" else stacked_experts(tensors)
    tensors = _in_two(tensors) if kind.startswith("granitemoe") else tensors
    if kind in DELTA_RULE:
        tensors = delta_rule_tensors(config, tensors)
    written: dict[str, Array] = {}
    for name, array in {**tensors, **_extra_tensors(config)}.items():
        if ".act_fn." in name:  # written once, as a list over layers
            if name.startswith("model.layers.0."):
                values = [float(tensors[name.replace(".0.", f".{layer}.", 1)].item()) for layer in range(num_layers)]
                writer.add_array(f"xielu.{name.rpartition('.')[2]}", values)
            continue
        name = name.replace("dt_bias", "dt_proj.bias")
        known = name.replace("e_score_correction_bias", "e_score_correction.bias")
        stored = names.get_name(known, try_suffixes=(".weight", ".bias")) or name
        stored += ".weight" * stored.endswith("sinks")
        written[stored] = _changed(name, array, config)
    for stored, array in (_fused(written) if is_fused else written).items():
        ggml = Ggml.F32 if array.ndim == 1 or ".ffn_gate_inp" in stored or stored.endswith("bias") else type_of(stored)
        if ggml in (Ggml.F32, Ggml.F16) and array.dtype != np.uint8:
            array = array.astype(np.float32 if ggml == Ggml.F32 else np.float16)
        elif array.dtype != np.uint8:  # else blocks already
            array = gguf.quantize(np.ascontiguousarray(array), ggml)
        while drops_ones and array.ndim > 1 and len(array) == 1:
            array = array[0]
        writer.add_tensor(stored, array, raw_dtype=ggml if array.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-*-of-*.gguf")) if num_tensors_per_shard else path


def stacked_experts(tensors: dict[str, Array]) -> dict[str, Array]:
    """Matrices of experts one over another; gpt-oss's, which are so already, in rows, and gate apart from up."""
    found: dict[str, Array] = {}
    stacks: dict[str, dict[int, Array]] = {}
    for name, array in tensors.items():
        if ".mlp.experts." in name and not re.search(r"\.\d+\.\w+\.(weight|bias)$", name):  # [E, K, N], biases [E, N]
            stem, part = name.rsplit(".", 1)
            kind = "bias" if part.endswith("_bias") else "weight"
            array = array if kind == "bias" else array.swapaxes(1, 2)
            if part.startswith("gate_up"):
                found |= {f"{stem}.{each}_proj.{kind}": array[:, turn::2] for turn, each in enumerate(("gate", "up"))}
            else:
                found[f"{stem}.down_proj.{kind}"] = array
        elif ".experts." in name:
            stem, _, rest = name.partition(".experts.")
            number, part = rest.split(".", 1)
            stacks.setdefault(f"{stem}.experts.{part}", {})[int(number)] = array
        else:
            found[name] = array
    for name, by_number in stacks.items():
        assert sorted(by_number) == list(range(len(by_number))), f"{name} lacks an expert"
        found[name] = np.stack([by_number[number] for number in range(len(by_number))])
    return found


def _fused(tensors: dict[str, Array]) -> dict[str, Array]:
    """The rows of queries, keys and values of each layer one after another, and those of an expert's gate and up; by
    the file's names."""
    found = dict(tensors)
    for first, others, whole in (
        ("attn_q.", ("attn_k.", "attn_v."), "attn_qkv."), ("ffn_gate_exps.", ("ffn_up_exps.",), "ffn_gate_up_exps."),
    ):  # fmt: skip
        for name in [name for name in tensors if first in name]:
            parts = [found.pop(name), *(found.pop(name.replace(first, other)) for other in others)]
            found[name.replace(first, whole)] = np.concatenate(parts, axis=1 if "exps" in whole else 0)
    return found


def _in_two(tensors: dict[str, Array]) -> dict[str, Array]:
    """GraniteMoE's maps of gate and up apart."""
    found: dict[str, Array] = {}
    for name, array in tensors.items():
        if "input_linear" not in name:
            found[name] = array
            continue
        form = "ffn_{}_exps" if "block_sparse_moe" in name else "ffn_{}_shexp"
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=array.ndim - 2), strict=True):
            found[f"blk.{name.split('.')[2]}.{form.format(part)}.weight"] = half
    return found


def _named_alike(config: dict[str, Any]) -> dict[str, Any]:
    """GPT-2's config, and defaults that files leave out, by the names of others."""
    names = {
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    }  # fmt: skip
    config = {**config, **{name: config[own] for own, name in names.items() if own in config}}
    if config["model_type"] == "gpt2":
        config["intermediate_size"] = config["n_inner"] or 4 * config["n_embd"]
    return {"num_key_value_heads": config["num_attention_heads"], "rope_parameters": {}, **config}


def split_maps(config: dict[str, Any], tensors: dict[str, Array]) -> dict[str, Array]:
    """Maps of latent rows to heads' keys, transposed, and values apart."""
    found = {}
    for name, array in tensors.items():
        if "kv_b_proj" in name:
            by_head = array.reshape(config["num_attention_heads"], -1, array.shape[-1])
            key_dim = config["qk_nope_head_dim"]
            found[name.replace("kv_b", "k_b")] = np.ascontiguousarray(by_head[:, :key_dim].swapaxes(1, 2))
            found[name.replace("kv_b", "v_b")] = np.ascontiguousarray(by_head[:, key_dim:])
        else:
            found[name] = array
    return found


def _changed(name: str, array: Array, config: dict[str, Any]) -> Array:
    """As `modify_tensors` of the converter's classes."""
    kind = config["model_type"]
    if "query_key_value" in name and kind == "gpt_neox":
        by_head = array.reshape(config["num_attention_heads"], 3, -1, *array.shape[1:])
        return by_head.swapaxes(0, 1).reshape(array.shape)
    if kind == "gpt2" and array.ndim == 2 and ".h." in name:
        return np.ascontiguousarray(array.T)
    if kind in PERMUTED and (".q_proj." in name or ".k_proj." in name):
        num_heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        halves = array.reshape(num_heads, 2, len(array) // num_heads // 2, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)
    is_offset = (kind.startswith("gemma") and kind != "gemma4_text") or (
        kind in DELTA_RULE and "linear_attn" not in name
    )
    if is_offset and name.endswith("norm.weight"):
        return array + np.float32(1)
    if name.endswith("A_log"):
        return -np.exp(array)
    if name.endswith("conv1d.weight"):
        return array[:, 0]
    if kind == "qwen2_moe" and name.endswith("shared_expert_gate.weight"):
        return array[0]  # as llama.cpp's quantiser leaves it; others as the converter
    return array


def delta_rule_tensors(config: dict[str, Any], tensors: dict[str, Array]) -> dict[str, Array]:
    """Qwen3-Next's grouped rows apart, and Qwen3.5's value heads tiled: head p is the (p % Hk) Hv / Hk + p // Hk-th."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim, found = config["linear_key_head_dim"], config["linear_value_head_dim"], dict(tensors)
    for name in [name for name in tensors if name.endswith("in_proj_qkvz.weight")]:
        rows = found.pop(name).reshape(keys, -1, config["hidden_size"])
        cuts = np.cumsum([key_dim, key_dim, values // keys * value_dim])
        q, k, v, z = (part.reshape(-1, config["hidden_size"]) for part in np.split(rows, cuts, axis=1))
        found[name.replace("qkvz", "qkv")], found[name.replace("qkvz", "z")] = np.concatenate([q, k, v]), z
    if config["model_type"] == "qwen3_next":
        return found
    order = np.array([head % keys * (values // keys) + head // keys for head in range(values)])
    of_rows = (order[:, None] * value_dim + np.arange(value_dim)).reshape(-1)
    behind_keys = np.concatenate([np.arange(2 * keys * key_dim), 2 * keys * key_dim + of_rows])
    for name, array in found.items():
        part = name.partition("linear_attn.")[2]
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            found[name] = array[behind_keys]
        elif part == "in_proj_z.weight":
            found[name] = array[of_rows]
        elif part in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
            found[name] = array[order]
        elif part == "out_proj.weight":
            found[name] = array[:, of_rows]
    return found


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope_of(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the layers without windows, and of the others."""
    rope = config["rope_parameters"]
    return rope.get("full_attention", rope), rope.get("sliding_attention", rope)


def _add_keys(writer: gguf.GGUFWriter, config: dict[str, Any], has_whole_maps: bool) -> None:
    """As `set_gguf_parameters` of the converter's classes."""
    kind, head_dim = config["model_type"], _head_dim(config)
    assert config.get("query_pre_attn_scalar", head_dim) == head_dim, "files have no query_pre_attn_scalar"
    rope, sliding = _rope_of(config)
    rotary_dim = config.get("qk_rope_head_dim") or int(head_dim * rope.get("partial_rotary_factor", 1))
    writer.add_block_count(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config.get("intermediate_size", 512))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1 if kind in LATENT and not has_whole_maps else config["num_key_value_heads"])
    if kind == "olmo":
        writer.add_layer_norm_eps(1e-5)
    elif "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(config["norm_epsilon" if kind == "starcoder2" else "layer_norm_eps"])
    if kind in ("cohere", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
    if kind not in ("gpt2", "gpt_neox"):
        alpha = rope.get("alpha")
        writer.add_rope_freq_base(rope["rope_theta"] * (alpha ** (head_dim / (head_dim - 2)) if alpha else 1))
    if kind not in ("phi3", "gemma2", "gemma3_text"):
        writer.add_vocab_size(config["vocab_size"])
    if kind not in ("gemma2", "gemma3_text"):
        writer.add_rope_dimension_count(rotary_dim)
    if kind in LATENT:
        _add_latent_keys(writer, config, has_whole_maps)
    elif config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "phi3":
        original = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        if "long_factor" in rope:
            scale = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if kind == "gemma3_text":
        writer.add_rope_freq_base_swa(sliding["rope_theta"])
        if config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if kind in DELTA_RULE:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        has_state = [layer == "linear_attention" for layer in config["layer_types"]]
        writer.add_array(f"{ARCHITECTURES[kind]}.attention.recurrent_layers", has_state)
    if kind in WITH_EXPERTS:
        names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        writer.add_expert_count(next(config[name] for name in names if name in config))
        writer.add_expert_used_count(config["moe_k" if kind == "ernie4_5_moe" else "num_experts_per_tok"])
    if kind in ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "glm4_moe", "ernie4_5_moe", *LATENT, *DELTA_RULE[1:]):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if kind in ("qwen2_moe", *DELTA_RULE[1:]):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if kind in ("glm4_moe", *LATENT):
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config.get("first_k_dense_replace", 1))
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        if config["n_group"]:
            writer.add_expert_group_count(config["n_group"])
            writer.add_expert_group_used_count(config["topk_group"])
    if kind in ("glm4_moe", "deepseek_v3", "glm4_moe_lite"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if kind == "glm4_moe":
        writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])
    if kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if kind in ("gemma2", "gemma3_text", "phi3", "mistral", "olmo3", "gpt_oss", "mixtral", "cohere2", "phimoe"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if kind == "olmo3":
        writer.add_rope_freq_base_swa(sliding["rope_theta"])
        writer.add_sliding_window_pattern([layer == "sliding_attention" for layer in config["layer_types"]])
    if kind == "ernie4_5_moe":
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    if kind == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if kind == "olmo" and config["clip_qkv"] is not None:
        writer.add_clamp_kqv(config["clip_qkv"])
    if kind == "gpt_neox":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if kind == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if kind in ("ministral3", "mistral4"):
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "mistral4":
        writer.add_attn_temperature_length(rope["original_max_position_embeddings"])
    if kind in ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe"):
        writer.add_rope_dimension_sections([2, 1, 1, 0])
    if kind in ("qwen3_vl", "qwen3_vl_moe"):
        writer.add_num_deepstack_layers(3)
    if kind.startswith("granite"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def _add_latent_keys(writer: gguf.GGUFWriter, config: dict[str, Any], has_whole_maps: bool) -> None:
    latent_dim, rope = config["kv_lora_rank"], config["rope_parameters"]
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent_dim)
    if has_whole_maps:
        writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        writer.add_value_length(config["v_head_dim"])
    else:
        writer.add_key_length(latent_dim + config["qk_rope_head_dim"])
        writer.add_value_length(latent_dim)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        writer.add_value_length_mla(config["v_head_dim"])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _extra_tensors(config: dict[str, Any]) -> dict[str, Array]:
    """As `generate_extra_tensors` of the converter's classes."""
    rope, _ = _rope_of(config)
    if config["model_type"] == "phi3" and "long_factor" in rope:
        factors = {length: np.array(rope[f"{length}_factor"], np.float32) for length in ("long", "short")}
        return {f"rope_factors_{length}.weight": array for length, array in factors.items()}
    if config["model_type"] in ("llama", "apertus") and rope.get("rope_type") == "llama3":
        return {"rope_freqs.weight": np.array(_llama3_factors(rope, _head_dim(config)), np.float32)}
    return {}


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> list[float]:
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    factors = []
    for pair in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (pair / head_dim)
        smooth = (context / wavelength - low) / (high - low)
        factors.append(1 / ((1 - smooth) / factor + smooth) if 0 <= smooth <= 1 else 1 if smooth > 1 else factor)
    return factors


def random_blocks(rng: np.random.Generator, ggml: Ggml, shape: tuple[int, ...], scale: float = 1.0) -> Array:
    """Bytes of a quantised tensor: any integers, with scales that are finite and about as large as `scale`."""
    block, size = gguf.GGML_QUANT_SIZES[ggml]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    fields = {
        Ggml.Q2_K: (80, 82), Ggml.Q3_K: (108,), Ggml.Q4_K: (0, 2), Ggml.Q5_K: (0, 2), Ggml.Q6_K: (208,),
        Ggml.Q4_1: (0, 2), Ggml.Q5_1: (0, 2), Ggml.MXFP4: (), Ggml.NVFP4: (), Ggml.IQ1_M: (), Ggml.TQ1_0: (52,),
        Ggml.TQ2_0: (64,),
    }.get(ggml, (0,))  # fmt: skip
    for field in fields:
        halves = (rng.uniform(-1, 1, raw.shape[:-1]) * scale).astype(np.float16)
        raw[..., field : field + 2] = halves[..., None].view(np.uint8)
    if ggml == Ggml.NVFP4:
        raw[..., :4] = rng.integers(1, 0x38, (*raw.shape[:-1], 4), np.uint8)
    if ggml == Ggml.IQ1_M:  # the scale's four nibbles lie above other bits
        bits = (rng.uniform(-1, 1, raw.shape[:-1]) * scale).astype(np.float16).view(np.uint16)
        nibbles = (bits[..., None] >> np.arange(0, 16, 4, dtype=np.uint16) & np.uint16(15)).astype(np.uint8)
        raw[..., 49:56:2] = raw[..., 49:56:2] & 15 | nibbles << 4
    if ggml == Ggml.MXFP4:
        raw[..., 0] = rng.integers(120, 126, raw.shape[:-1], np.uint8)
    return raw.reshape(*shape[:-1], -1)
