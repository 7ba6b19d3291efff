"""Seed-OSS: Llama with biases of query, key and value, and perhaps of the output."""

from __future__ import annotations

from models.architecture import Architecture
from models.configuration.json_fields import Fields
from models.families.llama import LlamaConfig, LlamaModel, read_decoder


def read_seed_oss(fields: Fields) -> LlamaConfig:
    return LlamaConfig(
        **read_decoder(fields, default_head_dim=None if "head_dim" in fields else 128, default_max_positions=524_288),
        attention_bias=fields.boolean("attention_bias", True),
        attention_output_bias=fields.boolean("attention_out_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )


ARCHITECTURES = (Architecture("SeedOssForCausalLM", "seed_oss", read_seed_oss, LlamaModel),)
