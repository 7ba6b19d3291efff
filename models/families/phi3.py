"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama with one matrix for query, key and value, and one for gate and
up; part of each head rotated (Phi-4 mini), by longrope where the context is long.

Longrope has short factors for sequences within the original context, and long ones for longer sequences. As in
transformers' `generate`, a sequence starts with the factors for its prompt's length. If its answer outgrows the
original context, all of its keys are computed again by the long factors, once. So its tokens depend on its own length
alone, and equal transformers'. Prefixes are shared by sequences that have the same factors.

vLLM uses the long factors for all sequences if `max_model_len` exceeds the original context. That computes nothing
twice, but changes short sequences, which are most.

Phi-3.5-MoE (arXiv 2404.14219): Mixtral with LayerNorms, biases, Phi-3's longrope, and SparseMixer's choice of two
experts (2409.12136)."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from models.base import Architecture
from models.configuration.config import read_attention_bias, read_common, refuse_tied_bias
from models.configuration.json_fields import Fields
from models.configuration.rope_config import RopeConfig, parse_rope, rope_fields
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer, read_rotated
from models.experts import Experts, ExpertsForm, MoeConfig, read_rule
from models.layer_norm import LayerNormDecoder, LayerNormLayer
from models.makers.maker import Maker
from runtime.routing import RoutingRule


class Phi3Model(Decoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker, attention={"qkv": "qkv_proj"}, mlp={"gate_up": "gate_up_proj"})


def read_phi3(fields: Fields) -> DecoderConfig:
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    fields.raw("original_max_position_embeddings")  # a note but for longrope, which reads it
    rope = {
        "default_partial_rotary_factor": 1.0, "default_original_context": 4096, "kinds": ("default", "longrope"),
        "aliases": {"su": "longrope", "yarn": "longrope"},  # older files' names
    }  # fmt: skip
    common = read_rotated(fields, rope, default_max_positions=4096, default_norm_eps=1e-5)
    common["layer_windows"] = (fields.integer("sliding_window", None),) * common["num_layers"]
    return DecoderConfig(**common)


_FORM = ExpertsForm(under="block_sparse_moe", gate_up=("w1", "w3"), down="w2")


class PhimoeModel(LayerNormDecoder):
    config: MoeConfig
    renames = MappingProxyType({  # names of transformers 5
        ".mlp.router.": ".block_sparse_moe.gate.", ".mlp.experts.": ".block_sparse_moe.experts.",
    })  # fmt: skip

    def make_layer(self, index: int, maker: Maker) -> Layer:
        experts = Experts(self.config, maker.under(_FORM.under), _FORM, None)
        norms = (self.make_norm(name, maker) for name in ("input_layernorm", "post_attention_layernorm"))
        return LayerNormLayer(self.attention(index, maker), experts, *norms)


def read_phimoe(fields: Fields) -> MoeConfig:
    common = read_common(fields, default_max_positions=131_072, default_norm_eps=1e-5)
    num_layers = common["num_layers"]
    window = fields.integer("sliding_window", None)
    common["layer_windows"] = (window,) * num_layers
    head_bias = fields.boolean("lm_head_bias", False)
    refuse_tied_bias(fields, "lm_head_bias", common, head_bias)
    rule = read_rule(fields, count=16, top_k=2, normalises=False)
    fields.expect("num_experts_per_tok", 2)  # SparseMixer chooses two, whatever the file says
    fields.raw("input_jitter_noise")  # of training
    jitter = fields.number("router_jitter_noise", 0.01, least=0.0, most=1.0)
    return MoeConfig(
        **common,
        layer_ropes=(_read_rope(fields, common["head_dim"], common["max_position_embeddings"]),) * num_layers,
        **read_attention_bias(fields),
        head_bias=head_bias,
        expert_size=common["intermediate_size"],
        rule=RoutingRule(num_experts=rule.num_experts, top_k=2, scores="sparsemixer", threshold=2 * jitter),
    )


def _read_rope(fields: Fields, head_dim: int, positions: int) -> RopeConfig:
    """A longrope's cosines and sines are multiplied by numbers of the file's own, within the original context and
    beyond."""
    scaling = rope_fields(fields)
    rope = parse_rope(fields, head_dim, positions, default_theta=1_000_000.0, kinds=("default", "linear", "longrope"))
    if rope.kind != "longrope":
        return rope
    short, long = (scaling.number(f"{name}_mscale", least=1e-6, most=1e6) for name in ("short", "long"))
    return replace(rope, attention_factor=short, long_attention_factor=long)


ARCHITECTURES = (
    Architecture("Phi3ForCausalLM", "phi3", read_phi3, Phi3Model),
    Architecture("PhimoeForCausalLM", "phimoe", read_phimoe, PhimoeModel),
)
