"""Qwen2-MoE (arXiv 2407.10671), with a gated shared expert, and Qwen3-MoE (2505.09388), without one.

Layers are Qwen2's and Qwen3's; some may have an MLP instead of experts.
"""

from __future__ import annotations

from models.base import Architecture
from models.configuration.config import read_attention_bias, read_window
from models.configuration.json_fields import Fields
from models.experts import MoeConfig, MoeDecoder, dense_layers, read_rule
from models.families.llama import read_decoder, windows_of_qwen


def read_qwen2_moe(fields: Fields) -> MoeConfig:
    common = read_decoder(fields, windows=windows_of_qwen(fields))
    is_normalised = fields.boolean("norm_topk_prob", False)
    return MoeConfig(
        **common,
        attention_bias=fields.boolean("qkv_bias", True),
        expert_size=fields.integer("moe_intermediate_size", 1408, most=1 << 24),
        rule=read_rule(fields, count=60, top_k=4, normalises=is_normalised),
        dense_layers=dense_layers(fields, common["num_layers"]),
        shared_size=fields.integer("shared_expert_intermediate_size", 5632, most=1 << 24),
    )


def read_qwen3_moe(fields: Fields) -> MoeConfig:
    fields.expect("use_qk_norm", True)
    is_windowed = fields.boolean("use_sliding_window", False)  # in all layers: `max_window_layers` is not read
    window = read_window(fields, least=int(is_windowed))
    fields.raw("max_window_layers")
    common = read_decoder(fields, windows=lambda layer: window if is_windowed else None)
    is_normalised = fields.boolean("norm_topk_prob", False)
    return MoeConfig(
        **common,
        **read_attention_bias(fields),
        expert_size=fields.integer("moe_intermediate_size", 768, most=1 << 24),
        rule=read_rule(fields, count=128, top_k=8, normalises=is_normalised),
        dense_layers=dense_layers(fields, common["num_layers"]),
        qk_norm="head",
    )


ARCHITECTURES = (
    Architecture("Qwen2MoeForCausalLM", "qwen2_moe", read_qwen2_moe, MoeDecoder),
    Architecture("Qwen3MoeForCausalLM", "qwen3_moe", read_qwen3_moe, MoeDecoder),
)
