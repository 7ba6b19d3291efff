"""Apertus (arXiv 2509.14233): Llama with norms over each head of queries and keys, and an MLP without a gate, whose
activation, xIELU (2411.13010), each layer has learned."""

from __future__ import annotations

import math

from models.base import Architecture
from models.configuration.config import read_attention_bias, read_common
from models.configuration.json_fields import Fields
from models.configuration.rope_config import KINDS, RopeConfig, parse_rope, rope_fields
from models.decoder import Decoder, DecoderConfig, FeedForward, Layer, PreNormLayer
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.linear.norm import RmsNorm
from runtime.tensor.tensor import Tensor


class ApertusModel(Decoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        norms = ("attention_layernorm", "feedforward_layernorm")
        return PreNormLayer(self, index, maker, attention={"norm": "head"}, norms=norms)

    def feed_forward(self, index: int, maker: Maker, *, input_norm: str = "", **choices: object) -> FeedForward:
        return XieluMlp(self.config, maker.under("mlp"), self.input_norm(maker, input_norm))


class XieluMlp:
    """`down(xielu(up(x)))`, after a norm if it has one."""

    def __init__(self, config: DecoderConfig, maker: Maker, norm: RmsNorm | None) -> None:
        hidden, inner = config.hidden_size, config.shard("intermediate_size")
        self.up = maker.linear("up_proj", outputs=inner, inputs=hidden, split="outputs", norm=norm)
        self.down = maker.linear("down_proj", outputs=hidden, inputs=inner, split="inputs")
        shape = maker.under("act_fn")
        self.beta, self.eps = shape.number("beta"), shape.number("eps")
        self.positive = _softplus(shape.number("alpha_p", (1,)))
        self.negative = self.beta + _softplus(shape.number("alpha_n", (1,)))

    def __call__(self, x: Tensor, batch: Batch, *, residual: Tensor | None = None) -> Tensor:
        inner = self.up(x, batch)
        inner = ops.xielu(inner, self.positive, self.negative, self.beta, self.eps, out=inner)
        return self.down(inner, batch, residual=residual)


def _softplus(x: float) -> float:
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


def read_apertus(fields: Fields) -> DecoderConfig:
    common = read_common(
        fields, default_max_positions=65_536, default_norm_eps=1e-5, activations={"xielu": "xielu"},
        default_activation="xielu",
    )  # fmt: skip
    fields.expect("qk_norm", True)  # notes of the official files
    fields.expect("post_norm", False)
    fields.expect("mlp_bias", False)
    theta, head_dim = 12_000_000.0, common["head_dim"]
    kinds = (*KINDS, "longrope")  # used by GGUF files that store a factor for each pair
    rope = parse_rope(fields, head_dim, common["max_position_embeddings"], default_theta=theta, kinds=kinds)
    if not rope_fields(fields).names() and not fields.has("rope_theta"):  # the class's own
        rope = RopeConfig(
            theta, head_dim, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )  # fmt: skip
    return DecoderConfig(**common, layer_ropes=(rope,) * common["num_layers"], **read_attention_bias(fields))


ARCHITECTURES = (Architecture("ApertusForCausalLM", "apertus", read_apertus, ApertusModel),)
