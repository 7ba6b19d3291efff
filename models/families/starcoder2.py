"""StarCoder 2 (arXiv 2402.19173): Mistral with GPT-2's LayerNorms, MLP and biases."""

from __future__ import annotations

from models.base import Architecture
from models.configuration.config import GELU_NAMES, read_attention_bias
from models.configuration.json_fields import Fields
from models.decoder import DecoderConfig, Layer
from models.families.llama import read_decoder
from models.layer_norm import LayerNormDecoder, LayerNormLayer, PlainMlp
from models.makers.maker import Maker


class Starcoder2Model(LayerNormDecoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        mlp = PlainMlp(self.config, maker.under("mlp"), up="c_fc", down="c_proj")
        norms = (self.make_norm(name, maker) for name in ("input_layernorm", "post_attention_layernorm"))
        return LayerNormLayer(self.attention(index, maker), mlp, *norms)


def read_starcoder2(fields: Fields) -> DecoderConfig:
    window = fields.integer("sliding_window", None)
    common = read_decoder(
        fields, windows=lambda layer: window, default_max_positions=4096, norm_eps_name="norm_epsilon",
        default_norm_eps=1e-5, activations=GELU_NAMES, default_activation="gelu_pytorch_tanh",
        default_tie_word_embeddings=True,
    )  # fmt: skip
    for name in ("activation_function", "layer_norm_epsilon"):
        fields.raw(name)  # notes of the official files; `hidden_act` and `norm_epsilon` count
    fields.expect("mlp_type", "default")
    fields.expect("norm_type", "layer_norm")
    fields.expect("scale_attn_weights", True)
    for name in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        fields.expect(name, True)
    has_bias = fields.boolean("use_bias", True)
    return DecoderConfig(**common, **read_attention_bias(fields, "use_bias", True), mlp_bias=has_bias)


ARCHITECTURES = (Architecture("Starcoder2ForCausalLM", "starcoder2", read_starcoder2, Starcoder2Model),)
