"""OLMoE (arXiv 2409.02060): experts without renormalised weights, norms over all heads of queries and of keys."""

from __future__ import annotations

from models.architecture import Architecture
from models.configuration.json_fields import Fields
from models.experts import MoeConfig, MoeDecoder, read_rule
from models.families.llama import read_decoder


def read_olmoe(fields: Fields) -> MoeConfig:
    fields.expect("clip_qkv")
    has_bias = fields.boolean("attention_bias", False)
    common = read_decoder(fields, default_max_positions=4096, default_norm_eps=1e-5)
    is_normalised = fields.boolean("norm_topk_prob", False)
    return MoeConfig(
        **common,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        expert_size=common["intermediate_size"],
        rule=read_rule(fields, count=64, top_k=8, normalises=is_normalised),
        qk_norm="row",
    )


ARCHITECTURES = (Architecture("OlmoeForCausalLM", "olmoe", read_olmoe, MoeDecoder),)
