"""Qwen2.5-VL (arXiv 2502.13923) and Qwen2-VL (2409.12191): Qwen2 over text and pictures.

The tower is `models.towers.qwen_vl`. Tokens have positions in three axes, each of which turns a section of a head's
pairs (`models.rope`). In published files the language model's fields stand beside `vision_config`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from models.base import Architecture
from models.configuration.class_defaults import add_class_defaults
from models.configuration.config import agree_with_layer_types, outer_fields
from models.configuration.json_fields import Fields
from models.configuration.rope_config import rope_fields
from models.decoder import read_rotated
from models.families.llama import LlamaConfig, LlamaModel, windows_of_qwen
from models.makers.maker import Maker
from models.picture_decoder import AxesDecoder
from models.rope import parted_axes
from models.towers.qwen_vl import Tower, TowerConfig, read_second_tower, read_windowed_tower
from runtime.images.patches import PatchRule

_ROOT = "model.language_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25VLConfig(LlamaConfig):
    """`sections`: pairs of a head that each axis turns. `image_token_id` is the placeholder of a picture's tokens."""

    tower: TowerConfig
    sections: tuple[int, ...]
    image_token_id: int


class Qwen25VLModel(AxesDecoder, LlamaModel):
    """`patch_rule`: how pictures are cut, by default as in the published models."""

    config: Qwen25VLConfig
    root = _ROOT
    renames = MappingProxyType({
        "visual.": "model.visual.",
        "language_model.": f"{_ROOT}.",
        **{f"model.{each}.": f"{_ROOT}.{each}." for each in ("layers", "embed_tokens", "norm")},
    })  # fmt: skip

    def __init__(self, config: Qwen25VLConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        tower = config.tower
        self.image_token_id, self.axes = config.image_token_id, parted_axes(config.sections)
        self.tower = maker.in_first(lambda: Tower(tower, maker.under("model.visual")))
        self.patch_rule = PatchRule(
            patch_size=tower.patch_size, merge_size=tower.merge_size, num_frames=tower.num_frames,
            min_pixels=56 * 56, max_pixels=12_845_056,
        )  # fmt: skip


def read_qwen2_5_vl(fields: Fields) -> Qwen25VLConfig:
    return _read(fields, read_windowed_tower)


def read_qwen2_vl(fields: Fields) -> Qwen25VLConfig:
    return _read(fields, read_second_tower)


def _read(fields: Fields, read_tower: Callable[[Fields, int], TowerConfig]) -> Qwen25VLConfig:
    text = fields.object("text_config") if fields.has("text_config") else fields
    add_class_defaults(text, "qwen2_5_vl_text")
    is_tied = fields.boolean("tie_word_embeddings", False) or text.boolean("tie_word_embeddings", False)
    text.expect("attention_bias", True)
    common = read_rotated(text, {"default_theta": 1e6, "aliases": {"mrope": "default"}}, default_norm_eps=1e-5)
    if common["head_dim"] * common["num_heads"] != common["hidden_size"]:
        raise text.error("head_dim", f"= {common['head_dim']} must be hidden_size / num_attention_heads")
    windows = windows_of_qwen(text)
    common["layer_windows"] = agree_with_layer_types(text, tuple(map(windows, range(common["num_layers"]))))
    own = rope_fields(text)
    sections = own.integers("mrope_section") if own.has("mrope_section") else (16, 24, 24)
    if len(sections) != 3 or sum(sections) != common["head_dim"] // 2:
        raise own.error("mrope_section", f"{sections} must be three numbers, {common['head_dim'] // 2} in all")
    for name in ("video_token_id", "vision_token_id", "vision_start_token_id", "vision_end_token_id"):
        fields.raw(name)  # of templates
    common |= {"tie_word_embeddings": is_tied, **outer_fields(fields)}
    return Qwen25VLConfig(
        **common,
        attention_bias=True,
        tower=read_tower(fields.object("vision_config"), common["hidden_size"]),
        sections=sections,
        image_token_id=fields.integer("image_token_id", 151655, least=0),
    )


ARCHITECTURES = (
    Architecture("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", read_qwen2_5_vl, Qwen25VLModel),
    Architecture("Qwen2VLForConditionalGeneration", "qwen2_vl", read_qwen2_vl, Qwen25VLModel),
)
