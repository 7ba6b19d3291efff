"""Hunyuan dense: Llama with norms over each head of queries and keys after their rotation, by a base stretched by
`alpha`."""

from __future__ import annotations

from dataclasses import replace

from models.base import Architecture
from models.configuration.config import read_attention_bias, read_common
from models.configuration.json_fields import Fields
from models.configuration.rope_config import RopeConfig, parse_rope, rope_fields
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer
from models.makers.maker import Maker


class HunyuanModel(Decoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        attention = {"norm": "after", "norms": ("query_layernorm", "key_layernorm")}
        return PreNormLayer(self, index, maker, attention=attention)


def read_hunyuan(fields: Fields) -> DecoderConfig:
    common = read_common(fields, default_max_positions=2048, default_norm_eps=1e-5)
    fields.expect("attention_head_dim", common["head_dim"])  # notes of the official files
    for name, value in (
        ("use_qk_norm", True), ("use_rotary_pos_emb", True), ("use_cla", False), ("use_mla", False),
        ("norm_type", "rms"), ("mlp_bias", False),
    ):  # fmt: skip
        fields.expect(name, value)
    tokens = [f"{name}_id" for name in ("eod", "im_end", "im_newline", "im_start", "mask_init", "pad", "text_end")]
    for name in (
        *tokens,
        "text_start_id",
        "cla_share_factor",
        "class_num",
        "dense_list",
        "org_vocab_size",
        "pool_type",
    ):
        fields.raw(name)  # the template's tokens, other heads, and features that are switched off
    rope = _read_rope(fields, common["head_dim"], common["max_position_embeddings"])
    return DecoderConfig(**common, layer_ropes=(rope,) * common["num_layers"], **read_attention_bias(fields))


def _read_rope(fields: Fields, head_dim: int, positions: int) -> RopeConfig:
    """With `alpha`, "dynamic" means a fixed base; the file's other numbers are not read, as in transformers."""
    scaling = rope_fields(fields)
    rope = parse_rope(fields, head_dim, positions)
    alpha = scaling.number("alpha", None, least=1e-6, most=1e12)
    if not alpha or "dynamic" not in (scaling.raw("rope_type"), scaling.raw("type")):
        return rope
    for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        scaling.raw(name)
    if head_dim < 4:
        raise scaling.error("alpha", f"= {alpha:g} needs heads of at least 4 elements, not {head_dim}")
    return replace(rope, theta=rope.theta * alpha ** (head_dim / (head_dim - 2)))


ARCHITECTURES = (Architecture("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", read_hunyuan, HunyuanModel),)
