"""Cohere's Command R and Aya (one class of transformers, `Cohere`), and Command R7B and A (`Cohere2`).

Attention and MLP read one LayerNorm without bias, side by side; neighbouring elements of a head are rotated together,
and logits are scaled. Some of the first have LayerNorms over each head of queries and keys, with weights of each. In
the second, three of four layers have a sliding window, and the others no rotary positions.

    h = norm(x);   x = x + attention(h) + mlp(h)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.base import Architecture
from models.configuration.config import read_attention_bias, read_windows
from models.configuration.json_fields import Fields
from models.decoder import DecoderConfig, Layer, read_rotated
from models.layer_norm import LayerNormDecoder, LayerNormLayer
from models.makers.maker import Maker


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereConfig(DecoderConfig):
    logit_scale: float
    has_head_norms: bool = False


class CohereModel(LayerNormDecoder):
    config: CohereConfig
    norms_have_biases = False

    def __init__(self, config: CohereConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        self.logits_scale = config.logit_scale

    def make_layer(self, index: int, maker: Maker) -> Layer:
        attention = self.attention(index, maker, norm="centred" if self.config.has_head_norms else "none")
        norm = self.make_norm("input_layernorm", maker)
        return LayerNormLayer(attention, self.mlp(maker), norm, None, is_parallel=True)


def read_cohere(fields: Fields) -> CohereConfig:
    return CohereConfig(
        **_read_common(fields, default_theta=500_000.0), has_head_norms=fields.boolean("use_qk_norm", False)
    )


def read_cohere2(fields: Fields) -> CohereConfig:
    common = _read_common(fields, default_theta=10_000.0)
    num_layers, (rope, *_) = common["num_layers"], common["layer_ropes"]
    names = ("sliding_window_pattern", "_sliding_window_pattern")  # transformers writes it as its own, too
    pattern = next((fields.integer(name) for name in names if fields.has(name)), 4)
    fields.expect("_sliding_window_pattern", pattern)
    fields.expect("layer_switch", pattern)  # notes of Cohere's own that repeat fixed values
    fields.expect("order_of_interleaved_layers", "local_attn_first")
    fields.expect("position_embedding_type", "rope_gptj")
    fields.expect("rotary_pct", 1, 1.0)
    for name, value in (
        ("use_embedding_sharing", True), ("use_gated_activation", True), ("use_parallel_block", True),
        ("use_qk_norm", False),
    ):  # fmt: skip
        fields.expect(name, value)
    fields.raw("use_parallel_embedding")  # how its makers split the table over devices
    common["layer_windows"] = windows = read_windows(fields, num_layers, pattern)
    common["layer_ropes"] = tuple(None if window is None else rope for window in windows)
    return CohereConfig(**common)


def _read_common(fields: Fields, *, default_theta: float) -> dict[str, Any]:
    rotated = read_rotated(
        fields, {"default_theta": default_theta, "interleaved": True}, default_max_positions=8192,
        norm_eps_name="layer_norm_eps", default_norm_eps=1e-5, default_tie_word_embeddings=True,
    )  # fmt: skip
    scale = fields.number("logit_scale", 0.0625, least=1e-6, most=1e6)
    return {**rotated, **read_attention_bias(fields), "logit_scale": scale}


ARCHITECTURES = (
    Architecture("CohereForCausalLM", "cohere", read_cohere, CohereModel),
    Architecture("Cohere2ForCausalLM", "cohere2", read_cohere2, CohereModel),
)
