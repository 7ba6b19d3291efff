"""Qwen3-VL (arXiv 2511.21631): Qwen3, dense or with experts, over text and pictures.

The tower is `models.towers.qwen_vl`. Its embeddings stand for a picture's tokens; merged outputs of its inner layers
are added after the first layers. Tokens have positions in three axes (`models.rope`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.base import Architecture
from models.configuration.class_defaults import add_class_defaults
from models.configuration.config import outer_fields, read_attention_bias
from models.configuration.json_fields import Fields
from models.configuration.rope_config import rope_fields
from models.experts import MoeConfig, MoeDecoder, dense_layers, read_rule
from models.families.llama import LlamaConfig, LlamaModel, read_decoder
from models.makers.maker import Maker
from models.picture_decoder import AxesDecoder
from models.rope import interleaved_axes
from models.towers.qwen_vl import Tower, TowerConfig, read_third_tower
from runtime.images.patches import PatchRule


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """`sections`: pairs of a head that each axis turns. `image_token_id` is the placeholder of a picture's tokens."""

    tower: TowerConfig
    sections: tuple[int, ...]
    image_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLConfig(LlamaConfig):
    vision: VisionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLMoeConfig(MoeConfig):
    vision: VisionConfig


class Qwen3VLDecoder(AxesDecoder):
    """The tower and the axes, for any kind of layers.

    `patch_rule`: how pictures are cut, by default as in the published models.
    """

    config: Any  # of a decoder, with its `vision`
    root = "model.language_model"

    def __init__(self, config: Any, maker: Maker) -> None:
        super().__init__(config, maker)
        tower = config.vision.tower
        self.image_token_id, self.num_deep_rows = config.vision.image_token_id, len(tower.deepstack_layers)
        self.least_first_layers = max(1, self.num_deep_rows)
        self.axes = interleaved_axes(config.vision.sections, sum(config.vision.sections))
        self.tower = maker.in_first(lambda: Tower(tower, maker.under("model.visual")))
        self.patch_rule = PatchRule(
            patch_size=tower.patch_size, merge_size=tower.merge_size, num_frames=tower.num_frames,
            min_pixels=65536, max_pixels=16777216, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
        )  # fmt: skip


class Qwen3VLModel(Qwen3VLDecoder, LlamaModel):
    config: Qwen3VLConfig


class Qwen3VLMoeModel(Qwen3VLDecoder, MoeDecoder):
    """Checkpoints hold a layer's experts as one tensor, `[E, inputs, outputs]`, or apart."""

    config: Qwen3VLMoeConfig


def read_qwen3_vl(fields: Fields) -> Qwen3VLConfig:
    text = fields.object("text_config")
    add_class_defaults(text, "qwen3_vl_text")
    common = _read_text(fields, text, default_head_dim=128)
    return Qwen3VLConfig(**common, qk_norm=True, vision=read_vision(fields, text, common))


def read_qwen3_vl_moe(fields: Fields) -> Qwen3VLMoeConfig:
    text = fields.object("text_config")
    add_class_defaults(text, "qwen3_vl_moe_text")
    text.expect("norm_topk_prob", True)  # transformers does not read it, and divides by the chosen weights' sum
    common = _read_text(fields, text, default_head_dim=None)
    return Qwen3VLMoeConfig(
        **common,
        qk_norm="head",
        expert_size=text.integer("moe_intermediate_size", 1408, most=1 << 24),
        rule=read_rule(text, count=60, top_k=4, normalises=True),
        dense_layers=dense_layers(text, common["num_layers"]),
        vision=read_vision(fields, text, common),
    )


def _read_text(fields: Fields, text: Fields, *, default_head_dim: int | None) -> dict[str, Any]:
    """The decoder's fields, as keyword arguments."""
    text.expect("use_qk_norm", True)
    common = read_decoder(text, default_head_dim=default_head_dim, default_theta=5e5)
    common |= {"tie_word_embeddings": fields.boolean("tie_word_embeddings", False), **outer_fields(fields)}
    return {**common, **read_attention_bias(text)}


def read_vision(
    fields: Fields, text: Fields, common: dict[str, Any], *, default_sections: tuple[int, ...] = (24, 20, 20),
    default_image_token: int = 151655,
) -> VisionConfig:  # fmt: skip
    """The tower and the positions' axes, beside the decoder's `common` fields."""
    rope, pairs = rope_fields(text), common["layer_ropes"][0].rotary_dim // 2
    rope.expect("mrope_interleaved", True)
    sections = rope.integers("mrope_section") if rope.has("mrope_section") else default_sections
    if len(sections) != 3 or sum(sections) != pairs:
        raise rope.error("mrope_section", f"{sections} must be three numbers, {pairs} in all")
    tower = read_third_tower(fields.object("vision_config"), common["hidden_size"])
    if len(tower.deepstack_layers) > common["num_layers"]:
        raise fields.error("vision_config", f"has more deepstack layers than the model's {common['num_layers']} layers")
    for name in ("video_token_id", "vision_start_token_id", "vision_end_token_id"):
        fields.raw(name)  # of templates
    return VisionConfig(
        tower=tower, sections=sections, image_token_id=fields.integer("image_token_id", default_image_token, least=0)
    )


ARCHITECTURES = (
    Architecture("Qwen3VLForConditionalGeneration", "qwen3_vl", read_qwen3_vl, Qwen3VLModel),
    Architecture("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", read_qwen3_vl_moe, Qwen3VLMoeModel),
)
