"""Gemma 4 with pictures: E2B, E4B, 26B-A4B and 31B have a tower, 12B maps a token's pixels at once.

Embeddings of words are scaled, those of pictures are not. In the larger ones a picture's tokens see each other in the
layers with a window, as far back as that reaches, so that one step computes them; layers without are causal, as are all
of the smaller ones, whose table of the layers' inputs has the padding token's row for a picture's. Audio is not read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from types import MappingProxyType

from models.base import Architecture
from models.configuration.class_defaults import add_class_defaults
from models.configuration.config import outer_fields
from models.configuration.json_fields import Fields
from models.families.gemma4 import Gemma4Config, Gemma4Model, read_gemma4
from models.makers.maker import Maker
from models.picture_decoder import PictureDecoder
from models.towers.gemma4 import (
    Gemma4Tower,
    Gemma4TowerConfig,
    PixelMap,
    PixelMapConfig,
    read_gemma4_tower,
    read_pixel_map,
)
from runtime.batch import Batch
from runtime.images.patches import TokenRule
from runtime.kv.cache import KVCache
from runtime.tensor.tensor import Tensor

_PICTURE_TOKENS = 280
"""The most of a picture, unless the processor's file gives another number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4PictureConfig(Gemma4Config):
    """`frame`: the tokens around a picture. `are_whole`: its tokens see each other in layers with a window. `padding`:
    the token whose row in the table of layers' inputs a picture's tokens have."""

    tower: Gemma4TowerConfig | PixelMapConfig
    image_token_id: int
    frame: tuple[int, int]
    are_whole: bool
    padding: int


class Gemma4PictureModel(PictureDecoder, Gemma4Model):
    config: Gemma4PictureConfig
    root = "model.language_model"
    harmless = re.compile(
        r"model\.(language_model\.rotary_emb\..*|vision_tower\.encoder\.rotary_emb\..*|(audio_tower|embed_audio)\..*)"
    )
    renames = MappingProxyType({  # of 12B as transformers 5 has it, and may save it
        ".embed_vision.patch_": ".vision_embedder.patch_", ".embed_vision.pos_": ".vision_embedder.pos_",
        ".embed_vision.multimodal_embedder.": ".embed_vision.",
    })  # fmt: skip
    frame_sign = "picture"

    def __init__(self, config: Gemma4PictureConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        tower = config.tower
        self.image_token_id, self.frame = config.image_token_id, config.frame
        self.tower: Gemma4Tower | PixelMap
        if isinstance(tower, Gemma4TowerConfig):
            self.tower = maker.in_first(lambda: Gemma4Tower(tower, config.hidden_size, maker))
            self.patch_rule = TokenRule(
                max_tokens=_PICTURE_TOKENS, patch_size=tower.patch_size, merge_size=tower.merge_size
            )
        else:
            self.tower = maker.in_first(lambda: PixelMap(tower, config.hidden_size, maker))
            self.patch_rule = TokenRule(
                max_tokens=_PICTURE_TOKENS, patch_size=tower.patch_size * tower.merge_size, merge_size=1,
                mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0),
            )  # fmt: skip

    @property
    def whole_picture_tokens(self) -> int | None:
        return self.patch_rule.max_tokens if self.config.are_whole else None

    def run_layers(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        return Gemma4Model.run_layers(self, x, batch, kv_cache)

    def full_batch(self, batch: Batch) -> Batch:
        if batch.bidirectional_until is None:
            return batch
        return replace(batch, bidirectional_until=None, plans={})

    def carry(self, x: Tensor, batch: Batch) -> Tensor | None:
        if not self.config.input_size or not batch.encoded:
            return super().carry(x, batch)
        ids = batch.token_ids.clone()
        for each in batch.encoded:
            ids[each.first_token : each.first_token + each.rows[0].shape[0]] = self.config.padding
        return self.layer_inputs(x, ids, batch)


def read_gemma4_pictures(fields: Fields) -> Gemma4PictureConfig:
    text, vision = fields.object("text_config"), fields.object("vision_config")
    text.expect("model_type", "gemma4_text")
    vision.default({"model_type": "gemma4_vision"})
    return _read(fields, text, read_gemma4_tower(vision))


def read_gemma4_unified(fields: Fields) -> Gemma4PictureConfig:
    """The fields of 12B; the defaults are transformers'."""
    text, vision = fields.object("text_config"), fields.object("vision_config")
    text.expect("model_type", "gemma4_unified_text")
    text.default({
        "hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262_144,
        "use_bidirectional_attention": "vision",
    })  # fmt: skip
    vision.default({"model_type": "gemma4_unified_vision"})
    return _read(fields, text, read_pixel_map(vision))


def _read(fields: Fields, text: Fields, tower: Gemma4TowerConfig | PixelMapConfig) -> Gemma4PictureConfig:
    add_class_defaults(text, "gemma4_text")
    are_whole = text.raw("use_bidirectional_attention") == "vision"
    decoder = read_gemma4(text)
    padding = text.integer("pad_token_id", 0, least=0, most=decoder.vocab_size - 1)
    for name in ("audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "video_token_id"):
        fields.raw(name)
    fields.raw("vision_soft_tokens_per_image")
    ids = {
        name: fields.integer(f"{name}_token_id", usual, least=0)
        for name, usual in (("image", 258_880), ("boi", 255_999), ("eoi", 258_882))
    }
    for name, token in ids.items():
        if token >= decoder.vocab_size:
            raise fields.error(f"{name}_token_id", f"= {token} is not in the vocabulary of {decoder.vocab_size}")
    values = {each.name: getattr(decoder, each.name) for each in dataclass_fields(decoder)}
    values |= {"tie_word_embeddings": fields.boolean("tie_word_embeddings", True), **outer_fields(fields)}
    return Gemma4PictureConfig(
        **values, tower=tower, image_token_id=ids["image"], frame=(ids["boi"], ids["eoi"]), are_whole=are_whole,
        padding=padding,
    )  # fmt: skip


ARCHITECTURES = (
    Architecture("Gemma4ForConditionalGeneration", "gemma4", read_gemma4_pictures, Gemma4PictureModel),
    Architecture("Gemma4UnifiedForConditionalGeneration", "gemma4_unified", read_gemma4_unified, Gemma4PictureModel),
)
