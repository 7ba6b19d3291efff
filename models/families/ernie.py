"""Ernie 4.5: Llama whose heads are rotated by neighbouring elements, and its mixtures of experts, some of them shared.
The others are chosen by a softmax and a correction that is in no weight.
"""

from __future__ import annotations

import re
from types import MappingProxyType

from models.base import Architecture
from models.configuration.config import read_attention_bias, refuse_tied_bias
from models.configuration.json_fields import Fields
from models.decoder import read_rotated
from models.experts import ExpertsForm, MoeConfig, MoeDecoder
from models.families.llama import LlamaConfig, LlamaModel
from runtime.routing import RoutingRule

_ROPE = {"default_theta": 500_000.0, "interleaved": True}


def read_ernie(fields: Fields) -> LlamaConfig:
    common = read_rotated(
        fields, _ROPE, default_head_dim=None if "head_dim" in fields else 128, default_max_positions=131_072,
        default_norm_eps=1e-5, default_tie_word_embeddings=True,
    )  # fmt: skip
    fields.expect("compression_ratio", 1, 1.0)
    has_bias = fields.boolean("use_bias", False)
    return LlamaConfig(**common, **read_attention_bias(fields, "use_bias"), mlp_bias=has_bias)


class ErnieMoeModel(MoeDecoder):
    form = ExpertsForm(
        shared="shared_experts", has_shared_gate=False, correction="moe_statics.e_score_correction_bias",
        correction_rows=1,
    )  # fmt: skip
    renames = MappingProxyType({".mlp.gate.moe_statics.": ".mlp.moe_statics."})  # as transformers 5 has it
    harmless = re.compile(rf"{MoeDecoder.harmless.pattern}|model\.mtp_.*")  # of layers that predict further tokens


def read_ernie_moe(fields: Fields) -> MoeConfig:
    common = read_rotated(
        fields, _ROPE, default_max_positions=131_072, default_norm_eps=1e-5, default_tie_word_embeddings=True
    )
    num_layers = common["num_layers"]
    count, top_k = fields.integer("moe_num_experts", 64, most=1 << 16), fields.integer("moe_k", 6)
    if top_k > count:
        raise fields.error("moe_k", f"= {top_k} must be at most moe_num_experts = {count}")
    expert_size = fields.integer("moe_intermediate_size", 1536, most=1 << 24)
    num_shared = fields.integer("moe_num_shared_experts", 2, least=0, most=1 << 8)
    first = fields.integer("moe_layer_start_index", 1, least=0)
    last, step = fields.integer("moe_layer_end_index", -1, least=-1), fields.integer("moe_layer_interval", 1)
    sparse = range(first, num_layers if last == -1 else last + 1)
    fields.expect("moe_gate", "topk")  # notes of the official files
    fields.expect("moe_use_aux_free", True)
    fields.raw("moe_capacity")
    fields.raw("num_nextn_predict_layers")  # used by drafters
    # The sum of the best is at least 1 / count of a softmax, above any floor against division by zero.
    fields.number("moe_norm_min", 1e-12, least=0.0, most=1e-6)
    has_bias = fields.boolean("use_bias", False)
    refuse_tied_bias(fields, "use_bias", common, has_bias)
    return MoeConfig(
        **common,
        **read_attention_bias(fields, "use_bias"),
        mlp_bias=has_bias,
        head_bias=has_bias,
        expert_size=expert_size,
        rule=RoutingRule(num_experts=count, top_k=top_k, normalises=True),
        dense_layers=frozenset(index for index in range(num_layers) if index not in sparse or (index + 1) % step),
        shared_size=expert_size * num_shared,
    )


ARCHITECTURES = (
    Architecture("Ernie4_5ForCausalLM", "ernie4_5", read_ernie, LlamaModel),
    Architecture("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", read_ernie_moe, ErnieMoeModel),
)
