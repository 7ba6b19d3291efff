"""Mixtral (arXiv 2401.04088): Mistral with two of its experts for each token, whose weights add up to 1."""

from __future__ import annotations

from types import MappingProxyType

from models.base import Architecture
from models.configuration.json_fields import Fields
from models.experts import ExpertsForm, MoeConfig, MoeDecoder, read_rule
from models.families.llama import read_decoder


class MixtralModel(MoeDecoder):
    form = ExpertsForm(under="block_sparse_moe", gate_up=("w1", "w3"), down="w2")
    renames = MappingProxyType({".mlp.": ".block_sparse_moe."})  # of files with all experts in one


def read_mixtral(fields: Fields) -> MoeConfig:
    fields.expect("attention_bias", False)
    window = fields.integer("sliding_window", None)
    common = read_decoder(fields, windows=lambda layer: window, default_norm_eps=1e-5, default_theta=1e6)
    return MoeConfig(
        **common,
        expert_size=common["intermediate_size"],
        rule=read_rule(fields, count=8, top_k=2, normalises=True),
    )


ARCHITECTURES = (Architecture("MixtralForCausalLM", "mixtral", read_mixtral, MixtralModel),)
