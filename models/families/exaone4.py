"""EXAONE 4 (arXiv 2507.11407): OLMo 2's norms after attention and MLP, and norms over each head of queries and keys.
Larger ones have a sliding window in three of four layers, and no rotary positions in the others.
"""

from __future__ import annotations

from models.base import Architecture
from models.configuration.config import read_layer_types, read_window
from models.configuration.json_fields import Fields
from models.configuration.rope_config import KINDS
from models.decoder import Decoder, DecoderConfig, Layer, read_rotated
from models.families.olmo import PostNormLayer
from models.makers.maker import Maker


class Exaone4Model(Decoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PostNormLayer(self.config, maker, self.attention(index, maker, norm="head"), self.mlp(maker))


def read_exaone4(fields: Fields) -> DecoderConfig:
    kinds = (*KINDS, "longrope")  # used by GGUF files that store a factor for each pair
    common = read_rotated(fields, {"kinds": kinds}, default_max_positions=2048, default_norm_eps=1e-5)
    window, (rope, *_) = read_window(fields), common["layer_ropes"]
    is_sliding = _sliding_layers(fields, common["num_layers"], has_windows=window is not None)
    common["layer_windows"] = tuple(window if sliding else None for sliding in is_sliding)
    # If no layer has a window, all are rotated.
    common["layer_ropes"] = tuple(rope if sliding or window is None else None for sliding in is_sliding)
    return DecoderConfig(**common)


def _sliding_layers(fields: Fields, num_layers: int, *, has_windows: bool) -> list[bool]:
    """By `layer_types`, or by `sliding_window_pattern`: a number n, every n-th layer has none; or a word such as
    "LLLG", L for a layer with a window, which repeats, but that the last layer has none."""
    pattern, kinds = fields.raw("sliding_window_pattern"), read_layer_types(fields, num_layers)
    if not has_windows:
        if kinds is not None and "sliding_attention" in kinds:
            raise fields.error("sliding_window", "is null, must be a number: layer_types has sliding_attention")
        return [False] * num_layers
    if kinds is not None:
        return [kind == "sliding_attention" for kind in kinds]
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        return [pattern[index % len(pattern)] == "L" and index != num_layers - 1 for index in range(num_layers)]
    step = fields.integer("sliding_window_pattern", 4)
    return [(index + 1) % step != 0 for index in range(num_layers)]


ARCHITECTURES = (Architecture("Exaone4ForCausalLM", "exaone4", read_exaone4, Exaone4Model),)
