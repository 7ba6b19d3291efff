"""Small configs of every family, of sizes that ranks and stages can share, exact mode's segments included. The goldens'
sizes are odd on purpose; these models have random weights, and one device says what they give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.models.folders import load_golden

FAMILIES = {
    "gpt2": "gpt2_gelu_new", "llama": "llama_tied_gqa4", "mistral": "mistral_window",
    "ministral3": "ministral3_positions",
    "qwen2": "qwen2_llama3", "qwen3": "qwen3_layer_types", "gemma2": "gemma2_wide_heads", "gemma3": "gemma3_odd",
    "phi3": "phi3_longrope_short", "granite": "granite_multipliers", "olmo2": "olmo2_odd", "olmo3": "olmo3_windows",
    "smollm3": "smollm3_odd", "glm": "glm_odd", "glm4": "glm4_odd", "mixtral": "mixtral_odd",
    "qwen2_moe": "qwen2_moe_shared", "qwen3_moe": "qwen3_moe_odd", "olmoe": "olmoe_odd", "gpt_oss": "gpt_oss_odd",
    "glm4_moe": "glm4_moe_groups", "deepseek_v2": "deepseek_v2_groups", "deepseek_v3": "deepseek_v3_odd",
    "glm4_moe_lite": "glm4_moe_lite_odd", "mistral4": "mistral4_odd",
    "gemma": "gemma_odd", "cohere": "cohere_norms", "cohere2": "cohere2_windows", "starcoder2": "starcoder2_odd",
    "modernbert_decoder": "modernbert_decoder_odd",
    "gpt_neox": "gpt_neox_odd", "olmo": "olmo_clipped", "seed_oss": "seed_oss_odd", "exaone4": "exaone4_windows",
    "internlm2": "internlm2_grouped", "internlm3": "internlm3_odd", "ernie": "ernie_odd", "ernie_moe": "ernie_moe_odd",
    "hunyuan": "hunyuan_alpha", "apertus": "apertus_odd", "granite_moe": "granite_moe_square",
    "granite_moe_shared": "granite_moe_shared", "phimoe": "phimoe_odd",
    "qwen3_5": "qwen3_5_odd", "qwen3_5_moe": "qwen3_5_moe_odd", "qwen3_next": "qwen3_next_odd",
    "lfm2": "lfm2_odd", "lfm2_moe": "lfm2_moe_odd",
    "granite_hybrid": "granite_hybrid_odd", "granite_hybrid_moe": "granite_hybrid_moe_odd",
    "gemma4": "gemma4_keys_odd", "gemma4_moe": "gemma4_moe_odd", "gemma4_inputs": "gemma4_inputs_odd",
    "nemotron_h": "nemotron_h_odd", "nemotron_h_latent": "nemotron_h_moe_latent",
}  # fmt: skip
"""Each family's golden."""

WITHOUT_EXACT_RANKS = ["olmo2", "olmo3", "olmoe"]
"""Which have norms over all heads."""

WITHOUT_STAGES = ["gemma4_inputs"]
"""Whose last two layers use the pages of the first two: four layers have no cut."""

NUM_LAYERS, NUM_HEADS = 4, 8
_SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_attention_heads": NUM_HEADS, "num_key_value_heads": 4, "intermediate_size": 128,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "shared_intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS, "head_dim": 16, "n_embd": 128, "n_head": NUM_HEADS, "n_layer": NUM_LAYERS,
    "mamba_n_heads": 8, "mamba_n_groups": 4, "mamba_d_head": 32, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "n_groups": 4, "moe_shared_expert_intermediate_size": 128,
    "linear_num_key_heads": 4, "linear_num_value_heads": NUM_HEADS, "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
}  # fmt: skip
_LATENT = {"head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "qk_head_dim": 20, "v_head_dim": 16}
_WHOLE_HEADS = {"head_dim": 16, "qk_nope_head_dim": 8, "qk_head_dim": 16}  # Mistral 4's, half of which is rotated


def write_shared(folder: Path, family: str) -> Path:
    """A folder with the config alone: `load_format` is to be "dummy"."""
    fields: dict[str, Any] = json.loads(
        (load_golden(FAMILIES[family]).folder / "config.json").read_text(encoding="utf-8")
    )
    fields |= {name: value for name, value in _SIZES.items() if name in fields}
    fields["vocab_size"] = max(fields["vocab_size"], 60)
    if "kv_lora_rank" in fields:
        fields |= _LATENT | {"num_key_value_heads": NUM_HEADS} | (_WHOLE_HEADS if family == "mistral4" else {})
    if "mlp_layer_types" in fields:
        fields["mlp_layer_types"] = ["dense"] + ["sparse"] * (NUM_LAYERS - 1)
    if "layer_types" in fields:
        fields["layer_types"] = (fields["layer_types"] * NUM_LAYERS)[:NUM_LAYERS]
    if "per_layer_config" in fields:
        fields["layer_types"][-1], kv_heads = "full_attention", 1 if family == "gemma4" else 2
        fields["num_kv_shared_layers"] = min(2, fields["num_kv_shared_layers"])
        full = [str(layer) for layer, kind in enumerate(fields["layer_types"]) if kind == "full_attention"]
        fields["per_layer_config"] = {key: {"head_dim": 32, "num_key_value_heads": kv_heads} for key in full}
    if fields.get("moe_latent_size"):
        fields["moe_latent_size"] = 64
    if "block_auto_adjust_ff_dim" in fields:
        fields["block_auto_adjust_ff_dim"] = False
    if "no_rope_layers" in fields:
        fields["no_rope_layers"] = (fields["no_rope_layers"] * NUM_LAYERS)[:NUM_LAYERS]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder
