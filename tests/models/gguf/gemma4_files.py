"""Gemma 4's files by the rules of llama.cpp's converter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]

_NAMES = {
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
"""Of a layer's tensors that the package's map lacks."""


def gemma4_tensors(config: dict[str, Any], tensors: dict[str, Array]) -> dict[str, Array]:
    """The tensors, some by the file's names already, and the factors of frequencies: ones, then 1e30."""
    found = {}
    for name, array in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        found[f"blk.{match[1]}.{_NAMES[match[2]]}" if match and match[2] in _NAMES else name] = array
    full_head_dim, _ = _full_heads(config)
    rotated = int(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * full_head_dim) // 2
    factors = [1.0] * rotated + [1e30] * (full_head_dim // 2 - rotated)
    return {**found, "rope_freqs.weight": np.array(factors, np.float32)}


def _full_heads(config: dict[str, Any]) -> tuple[int, int]:
    (own, *_) = config["per_layer_config"].values()
    return own["head_dim"], own.get("num_key_value_heads", config["num_key_value_heads"])


def add_gemma4_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """As `set_gguf_parameters` of the converter's class."""
    kinds, count, num_sharing = config["layer_types"], config["num_hidden_layers"], config["num_kv_shared_layers"]
    full_head_dim, full_kv_heads = _full_heads(config)
    ropes = config["rope_parameters"]
    writer.add_block_count(count)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    wide = 2 if config["use_double_wide_mlp"] else 1
    sizes = [config["intermediate_size"] * (wide if layer >= count - num_sharing else 1) for layer in range(count)]
    writer.add_feed_forward_length(sizes)
    writer.add_head_count(config["num_attention_heads"])
    kv_heads = [config["num_key_value_heads"] if kind == "sliding_attention" else full_kv_heads for kind in kinds]
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(full_head_dim)
    writer.add_value_length(full_head_dim)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(full_head_dim)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_shared_kv_layers(num_sharing)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    if cap := config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(cap)
    writer.add_vocab_size(config["vocab_size"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def write_assistant_gguf(path: Path, config: dict[str, Any], tensors: dict[str, Array]) -> Path:
    """An assistant's file of float32, without groups of tokens. The package knows the model's names of tensors, and not
    yet this architecture."""
    name = "gemma4-assistant"
    absent: dict[str, Any] = {"use_double_wide_mlp": False, "enable_moe_block": False}
    text = absent | {name: value for name, value in config["text_config"].items() if value is not None}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, text["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, name)
    add_gemma4_keys(writer, text)
    writer.add_nextn_predict_layers(text["num_hidden_layers"])
    writer.add_uint32(f"{name}.embedding_length_out", config["backbone_hidden_size"])
    for given, array in gemma4_tensors(text, tensors).items():
        if not given.startswith("masked_embedding"):
            own = f"nextn.{given}" if given.endswith("_projection.weight") else None
            writer.add_tensor(own or names.get_name(given, try_suffixes=(".weight",)) or given, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
