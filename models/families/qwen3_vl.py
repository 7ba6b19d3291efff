"""Qwen3-VL (arXiv 2511.21631): Qwen3 over text and pictures.

The tower is `models.towers.qwen3_vl`. Its embeddings stand for a picture's tokens; what it merged from layers in its
midst is added behind the first layers. Tokens have positions in three axes (`models.mrope`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from models.architecture import Architecture
from models.families.llama import LlamaConfig, LlamaModel, read_decoder
from models.json_fields import Fields
from models.maker import Maker
from models.mrope import Array, interleaved_axes, rotations
from models.rope_config import rope_fields
from models.towers.qwen3_vl import Tower, TowerConfig, read_tower
from runtime import ops
from runtime.batch import Batch
from runtime.images.patches import PatchRule
from runtime.kv.cache import KVCache
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLConfig(LlamaConfig):
    """`sections`: pairs of a head that each axis turns. `image_token_id` stands where a picture's tokens go."""

    tower: TowerConfig
    sections: tuple[int, ...]
    image_token_id: int


class Qwen3VLModel(LlamaModel):
    """`patch_rule`: how pictures are cut, by default as the published models have it."""

    config: Qwen3VLConfig
    root = "model.language_model"

    def __init__(self, config: Qwen3VLConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        self.tower = Tower(config.tower, maker.under("model.visual"))
        self.patch_rule = PatchRule(
            patch_size=config.tower.patch_size, merge_size=config.tower.merge_size, num_frames=config.tower.num_frames,
            min_pixels=65536, max_pixels=16777216, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
        )  # fmt: skip

    @property
    def image_token_id(self) -> int:
        """The token that stands for a picture's tokens."""
        return self.config.image_token_id

    @property
    def bytes_per_picture_token(self) -> int:
        """Device memory of what the tower makes of a token."""
        itemsize = 4 if self.device.kind == "cpu" else self.dtype.itemsize
        return itemsize * self.config.hidden_size * (1 + len(self.config.tower.deepstack_layers))

    @cached_property
    def _axes(self) -> Array:
        return interleaved_axes(self.config.sections, self.config.head_dim // 2)

    def rotations(self, positions: Array) -> RopeTable:
        """A step's rotations, for `Batch.rope`: a row for each token of `positions [3, num_tokens]`."""
        rope = self.config.layer_ropes[0]
        assert rope is not None
        return rotations(rope, self._axes, positions, self.device)

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        x = ops.embedding(batch.token_ids, self.embed_tokens)
        for each in batch.encoded:
            x[each.first_token : each.first_token + each.rows[0].shape[0]] = each.rows[0]
        for index, layer in enumerate(self.layers):
            x = layer(x, batch, kv_cache)
            for each in batch.encoded:
                if index + 1 < len(each.rows):
                    rows = slice(each.first_token, each.first_token + each.rows[0].shape[0])
                    x[rows] = x[rows] + each.rows[index + 1]
                    x.row_squares = None  # were those of the rows before
        return ops.rms_norm(x, self.norm, self.config.norm_eps)


def read_qwen3_vl(fields: Fields) -> Qwen3VLConfig:
    text = fields.object("text_config")
    text.expect("use_qk_norm", True)
    has_bias = text.boolean("attention_bias", False)
    is_tied = fields.boolean("tie_word_embeddings", False)
    common = read_decoder(text, default_head_dim=128)
    rope = rope_fields(text)
    rope.expect("mrope_interleaved", True)
    sections = rope.integers("mrope_section") if rope.has("mrope_section") else (24, 20, 20)
    if len(sections) != 3 or sum(sections) != common["head_dim"] // 2:
        raise rope.error("mrope_section", f"{sections} must be three numbers, {common['head_dim'] // 2} in all")
    tower = read_tower(fields.object("vision_config"), common["hidden_size"])
    if len(tower.deepstack_layers) > common["num_layers"]:
        raise fields.error("vision_config", f"has more deepstack layers than the model's {common['num_layers']} layers")
    for name in ("video_token_id", "vision_start_token_id", "vision_end_token_id"):
        fields.raw(name)  # of templates
    common["tie_word_embeddings"] = is_tied
    return Qwen3VLConfig(
        **common,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        qk_norm=True,
        tower=tower,
        sections=sections,
        image_token_id=fields.integer("image_token_id", 151655, least=0),
    )


ARCHITECTURES = (Architecture("Qwen3VLForConditionalGeneration", "qwen3_vl", read_qwen3_vl, Qwen3VLModel),)
