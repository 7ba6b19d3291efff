"""SmolLM3: Llama in which some layers, every fourth if the file does not say, have no rotary positions."""

from __future__ import annotations

from models.base import Architecture
from models.configuration.config import read_attention_bias, read_layer_types
from models.configuration.json_fields import Fields
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer, read_rotated
from models.makers.maker import Maker


class SmolLM3Model(Decoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker)


def read_smollm3(fields: Fields) -> DecoderConfig:
    common = read_rotated(
        fields, {"default_theta": 2_000_000.0}, default_max_positions=32768, default_tie_word_embeddings=True
    )
    num_layers, (rope, *_) = common["num_layers"], common["layer_ropes"]
    is_rotated = _rotated_layers(fields, num_layers)
    window = fields.integer("sliding_window", None) if fields.boolean("use_sliding_window", False) else None
    for name in ("sliding_window", "max_window_layers"):
        fields.raw(name)  # notes, where no windows are used
    kinds = read_layer_types(fields, num_layers)
    is_sliding = [not rotated for rotated in is_rotated] if kinds is None else [k != "full_attention" for k in kinds]
    if window is None and kinds is not None and any(is_sliding):
        raise fields.error("layer_types", "has sliding_attention, but no sliding_window is used")
    common["layer_windows"] = tuple(window if sliding else None for sliding in is_sliding)
    common["layer_ropes"] = tuple(rope if rotated else None for rotated in is_rotated)
    return DecoderConfig(**common, **read_attention_bias(fields), mlp_bias=fields.boolean("mlp_bias", False))


def _rotated_layers(fields: Fields, num_layers: int) -> list[bool]:
    """`no_rope_layers` holds 1 for each layer with rotary positions, in spite of its name."""
    interval = fields.integer("no_rope_layer_interval", 4)
    given = fields.raw("no_rope_layers")
    if given is None:
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or any(value not in (0, 1) for value in given):
        raise fields.error("no_rope_layers", f"must be at least {num_layers} numbers 0 or 1, not {given!r:.80}")
    return [bool(value) for value in given[:num_layers]]


ARCHITECTURES = (Architecture("SmolLM3ForCausalLM", "smollm3", read_smollm3, SmolLM3Model),)
