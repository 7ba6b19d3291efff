"""Gemma 3 over text and pictures (arXiv 2503.19786): the text model after a SigLIP tower for pictures of one size.

    embeddings = rms_norm(average over squares of patches(norm(tower(patches)))) . W

A picture's tokens see each other, in layers with a window as far back as it reaches, so that one step computes them.
Embeddings of words are scaled, those of pictures are not.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from types import MappingProxyType

from models.architecture import Architecture
from models.configuration.class_defaults import add_class_defaults
from models.configuration.config import outer_fields
from models.configuration.json_fields import Fields
from models.families.gemma import GemmaConfig, GemmaModel, read_gemma3
from models.makers.maker import Maker
from models.picture_decoder import OLDER_NAMES, PictureDecoder
from models.towers.encoding import Pace, PatchRows, PictureTower, Pieces
from models.towers.plain_vit import PlainVit, PlainVitConfig, read_plain_vit
from runtime import ops
from runtime.dtype import float32
from runtime.images.patches import FixedRule
from runtime.tensor.tensor import Tensor

_PROJECTION = "model.multi_modal_projector.mm_input_projection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3VisionConfig(GemmaConfig):
    """`tokens_side`: of the square of tokens that a picture becomes. `frame`: the tokens around it."""

    tower: PlainVitConfig
    tokens_side: int
    image_token_id: int
    frame: tuple[int, int]


class Gemma3VisionModel(PictureDecoder, GemmaModel):
    config: Gemma3VisionConfig
    root = "model.language_model"
    harmless = re.compile(
        r"model\.(language_model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
        r"|vision_tower\.(head\.|embeddings\.position_ids).*)"
    )
    renames = MappingProxyType({
        "multi_modal_projector.mm_input_projection_weight": f"{_PROJECTION}.weight",
        "model.multi_modal_projector.mm_input_projection_weight": f"{_PROJECTION}.weight",
        **OLDER_NAMES,
    })  # fmt: skip

    def __init__(self, config: Gemma3VisionConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        tower = config.tower
        self.tower = maker.in_first(lambda: Gemma3Tower(config, maker))
        self.image_token_id, self.frame = config.image_token_id, config.frame
        self.whole_picture_tokens = config.tokens_side**2
        self.patch_rule = FixedRule(
            height=tower.image_size, width=tower.image_size, patch_size=tower.patch_size,
            num_tokens=config.tokens_side**2, resample="bilinear",
        )  # fmt: skip


class Gemma3Tower(PictureTower):
    """See `PictureTower`: the layers, their last norm, and the projector. The embeddings are
    `[num_tokens, hidden_size]`."""

    def __init__(self, config: Gemma3VisionConfig, maker: Maker) -> None:
        tower, norm = config.tower, maker.under("model.vision_tower.post_layernorm")
        self.dtype, self.device = maker.dtype, maker.options.device
        self.config, self.width = tower, tower.hidden_size
        self.tokens_side = config.tokens_side
        self.vit = PlainVit(tower, (tower.num_layers,), maker.under("model.vision_tower"))
        self.norm = norm.vector("weight", self.width), norm.vector("bias", self.width)
        self.soft_norm = maker.vector("model.multi_modal_projector.mm_soft_emb_norm.weight", self.width, add=1.0)
        self.projection = maker.unrounded().linear(
            _PROJECTION, outputs=config.hidden_size, inputs=self.width, is_transposed=True
        )

    def pieces(self, patches: PatchRows, grid: tuple[int, int], pace: Pace) -> Pieces:
        (x,) = yield from self.vit.kept_rows(self, patches, grid, pace)
        tokens, kernel = self.tokens_side, self.config.side // self.tokens_side
        made = self.buffer(tokens**2, self.projection.weight.shape[0])
        for lines in pace.slices(tokens, kernel * self.config.side):
            made[lines.start * tokens : lines.stop * tokens] = self.project(x, lines)
            yield (lines.stop - lines.start) * kernel * self.config.side
        return (made,)

    def project(self, x: Tensor, lines: slice) -> Tensor:
        """The last layer's result, `[side**2, width]` -> some lines of tokens, `[n * tokens_side, hidden_size]`."""
        side, tokens, width = self.config.side, self.tokens_side, self.width
        kernel, count = side // tokens, lines.stop - lines.start
        rows = x[lines.start * kernel * side : lines.stop * kernel * side]
        rows = ops.layer_norm(rows, *self.norm, self.config.norm_eps)
        kept = rows.view(count * kernel, side, width)[:, : tokens * kernel].to(float32).contiguous()
        squares = kept.view(count, kernel, tokens, kernel, width).transpose(1, 2).contiguous()
        pooled = squares.view(count * tokens, kernel**2, width).mean(axis=1).to(x.dtype)
        return self.projection(ops.rms_norm(pooled, self.soft_norm, self.config.norm_eps))


def read_gemma3_vision(fields: Fields) -> Gemma3VisionConfig:
    text = fields.object("text_config")
    add_class_defaults(text, "gemma3_text")
    text.expect("model_type", "gemma3_text")
    text.expect("final_logit_softcapping")  # which transformers leaves out here
    is_tied = fields.boolean("tie_word_embeddings", True)
    decoder = read_gemma3(text)
    vision = fields.object("vision_config")
    vision.default({"model_type": "siglip_vision_model"})
    vision.expect("model_type", "siglip_vision_model")
    tower = read_plain_vit(vision)
    count = fields.integer("mm_tokens_per_image", 256, most=1 << 16)
    tokens = math.isqrt(count)
    if tokens**2 != count or tokens > tower.side or tower.side // (tower.side // tokens) != tokens:
        raise fields.error(
            "mm_tokens_per_image",
            f"= {count} must be the square of a number into which {tower.side} patches are parted",
        )
    values = {each.name: getattr(decoder, each.name) for each in dataclass_fields(decoder)}
    values |= {"tie_word_embeddings": is_tied, **outer_fields(fields)}
    return Gemma3VisionConfig(
        **values,
        tower=tower,
        tokens_side=tokens,
        image_token_id=_token(fields, "image_token", 262_144, decoder.vocab_size),
        frame=(
            _token(fields, "boi_token", 255_999, decoder.vocab_size),
            _token(fields, "eoi_token", 256_000, decoder.vocab_size),
        ),
    )


def _token(fields: Fields, name: str, default: int, vocab_size: int) -> int:
    """A token's id, by either spelling."""
    older, newer = f"{name}_index", f"{name}_id"
    token = fields.integer(newer, None, least=0)
    token = fields.integer(older, default if token is None else token, least=0)
    if token >= vocab_size:
        raise fields.error(older, f"= {token} is not in the vocabulary of {vocab_size}")
    return int(token)


ARCHITECTURES = (Architecture("Gemma3ForConditionalGeneration", "gemma3", read_gemma3_vision, Gemma3VisionModel),)
