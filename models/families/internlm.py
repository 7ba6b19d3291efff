"""InternLM 2 (arXiv 2403.17297) and 3: Llama. The second has names of its own, and stores queries, keys and values
together, by heads of keys; the third has names of its own for biases alone."""

from __future__ import annotations

import re

from models.base import Architecture
from models.configuration.config import read_attention_bias
from models.configuration.json_fields import Fields
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer
from models.families.llama import LlamaConfig, LlamaModel, read_decoder
from models.makers.maker import Maker

_ATTENTION = {"under": "attention", "stack": "wqkv", "output": "wo"}
_MLP = {"under": "feed_forward", "gate_up": ("w1", "w3"), "down": "w2"}


class InternLM2Model(Decoder):
    table_name, head_name = "tok_embeddings", "output"
    harmless = re.compile(r"model\.layers\.\d+\.attention\.rotary_emb\.inv_freq")

    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker, attention=_ATTENTION, mlp=_MLP, norms=("attention_norm", "ffn_norm"))


def read_internlm2(fields: Fields) -> DecoderConfig:
    common = read_decoder(fields, default_max_positions=2048)
    return DecoderConfig(**common, **read_attention_bias(fields, "bias", True))


def read_internlm3(fields: Fields) -> LlamaConfig:
    """Biases by its own names, or by Llama's, as transformers saves it."""
    common = read_decoder(
        fields, default_head_dim=None if "head_dim" in fields else 128, default_max_positions=32_768,
        default_norm_eps=1e-5,
    )  # fmt: skip
    if fields.has("attention_bias") or fields.has("mlp_bias"):
        own = {**read_attention_bias(fields), "mlp_bias": fields.boolean("mlp_bias", False)}
        fields.expect("qkv_bias", own["attention_bias"])
        fields.expect("bias", own["mlp_bias"])
    else:
        has_bias = fields.boolean("bias", False)
        own = {"attention_bias": fields.boolean("qkv_bias", False)}
        own |= {"attention_output_bias": has_bias, "mlp_bias": has_bias}
    return LlamaConfig(**common, **own)


ARCHITECTURES = (
    Architecture("InternLM2ForCausalLM", "internlm2", read_internlm2, InternLM2Model),
    Architecture("InternLM3ForCausalLM", "internlm3", read_internlm3, LlamaModel, saved_as="LlamaForCausalLM"),
)
