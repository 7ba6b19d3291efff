"""LLaVA (arXiv 2304.08485, 1.5: 2310.03744) and Pixtral (2410.07073): Llama, Mistral or Qwen2 over text and pictures.

    embeddings = linear_2(gelu(linear_1(a layer of the tower)))

With CLIP or SigLIP all pictures have one size; the class token, or the first patch, is left out under the strategy
"default". Pixtral's keep their shape, and each line of their tokens ends with a token of text. A picture's tokens stand
at their places, as text does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, Literal

import numpy as np

from models.base import Architecture
from models.configuration.class_defaults import add_class_defaults
from models.configuration.config import GELU_NAMES, outer_fields, read_choice
from models.configuration.json_fields import Fields
from models.decoder import DecoderConfig
from models.families.llama import LlamaConfig, LlamaModel, read_llama, read_mistral, read_qwen2
from models.makers.maker import Maker
from models.picture_decoder import OLDER_NAMES, PictureDecoder
from models.towers.encoding import Pace, PatchRows, PictureTower, Pieces
from models.towers.layers import TowerMlp
from models.towers.pixtral import KIND as PIXTRAL
from models.towers.pixtral import PixtralConfig, PixtralVit, read_pixtral
from models.towers.plain_vit import PlainVit, PlainVitConfig, read_plain_vit
from runtime import ops
from runtime.images.patches import FixedRule, Rule, SideRule
from runtime.tensor.tensor import Tensor

_TEXT: Mapping[str, Callable[[Fields], LlamaConfig]] = {
    "llama": read_llama, "mistral": read_mistral, "qwen2": read_qwen2,
}  # fmt: skip

_TOWER = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14,
}  # fmt: skip
"""The `vision_config` of a file that has none at all."""

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALVES = (0.5, 0.5, 0.5)

_LINE_ENDS = (12, 13)
"""[IMG_BREAK] and [IMG_END] of Mistral's tokenizers, where a folder has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturesConfig:
    """The tower and its projector.

    `kept`: the numbers of layers after which the tower is read. `skips_first`: the first row is left out.
    `merge_size`: patches of a token's side."""

    tower: PlainVitConfig | PixtralConfig
    kept: tuple[int, ...]
    skips_first: bool
    projector_activation: Literal["erf", "tanh", "sigmoid"]
    projector_bias: bool
    image_token_id: int
    merge_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaConfig(LlamaConfig):
    pictures: PicturesConfig


class LlavaDecoder(PictureDecoder):
    """The tower and the projector, for any kind of layers."""

    config: Any  # of a decoder, with its `pictures`
    root = "model.language_model"
    harmless = re.compile(
        r"model\.(language_model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
        r"|vision_tower\.(post_layernorm\.|head\.|embeddings\.position_ids|(encoder|transformer)\.layers\."
        r"|patch_positional_embedding\.).*)"
    )

    renames = OLDER_NAMES

    def __init__(self, config: Any, maker: Maker) -> None:
        super().__init__(config, maker)
        pictures = config.pictures
        tower = pictures.tower
        self.image_token_id = pictures.image_token_id
        self.tower = maker.in_first(lambda: self.make_tower(maker))
        self.patch_rule: Rule
        if isinstance(tower, PixtralConfig):
            self.line_ends = _LINE_ENDS
            self.patch_rule = SideRule(
                most_height=tower.image_size, most_width=tower.image_size, patch_size=tower.patch_size,
                merge_size=pictures.merge_size,
            )  # fmt: skip
            return
        self.patch_rule = FixedRule(
            height=tower.image_size, width=tower.image_size, patch_size=tower.patch_size,
            num_tokens=tower.num_rows - pictures.skips_first,
            shortest_edge=tower.image_size if tower.has_class else None,
            mean=_CLIP_MEAN if tower.has_class else _HALVES, std=_CLIP_STD if tower.has_class else _HALVES,
        )  # fmt: skip

    def make_tower(self, maker: Maker) -> LlavaTower:
        """The tower with its projector."""
        return LlavaTower(self.config.pictures, maker, self)


class LlavaModel(LlavaDecoder, LlamaModel):
    config: LlavaConfig


class LlavaTower(PictureTower):
    """See `PictureTower`: the layers, and the projector after them. The embeddings are `[num_tokens, hidden_size]`;
    those of tokens that end lines are the text's."""

    def __init__(self, config: PicturesConfig, maker: Maker, model: PictureDecoder) -> None:
        self.dtype, self.device = maker.dtype, maker.options.device
        self.model, self.merge_size = model, config.merge_size
        under, tower = maker.under("model.vision_tower"), config.tower
        self.vit = (
            PixtralVit(tower, config.kept, config.merge_size, under)
            if isinstance(tower, PixtralConfig)
            else PlainVit(tower, config.kept, under)
        )
        self.skips_first = config.skips_first
        inner = maker.under("model.multi_modal_projector")
        width, has_bias = model.config.hidden_size, config.projector_bias
        inputs = tower.hidden_size * len(config.kept)
        self.projector = TowerMlp(
            ("linear_1",), "linear_2", (inputs, width, width), config.projector_activation, inner, has_bias=has_bias
        )

    def pieces(self, patches: PatchRows, grid: tuple[int, int], pace: Pace) -> Pieces:
        kept = yield from self.vit.kept_rows(self, patches, grid, pace)
        first, unit = int(self.skips_first), self.merge_size**2
        made = self.buffer((kept[0].shape[0] - first) // unit, self.projector.down.weight.shape[0])
        for piece in pace.slices(made.shape[0], unit):
            rows = slice(first + piece.start * unit, first + piece.stop * unit)
            merged = self.merged(ops.join_columns([each[rows] for each in kept]), pace)
            self.projector(merged, made[piece], pace.of(merged))
            yield (piece.stop - piece.start) * unit
        return (made if self.model.line_ends is None else self._with_line_ends(made, grid[1] // self.merge_size),)

    def merged(self, x: Tensor, pace: Pace) -> Tensor:
        """The projector's input: the tower's rows of whole tokens, `[n * merge_size**2, width]`."""
        return x

    def _with_line_ends(self, made: Tensor, across: int) -> Tensor:
        """A picture's rows, `across` a line, and after each line the row of the token that ends it."""
        ends, table, count = self.model.line_ends, self.model.embed_tokens, made.shape[0]
        places = np.full((count // across, across + 1), count, np.int32)
        places[:, :-1] = np.arange(count).reshape(-1, across)
        places[-1, -1] = count + 1
        ids, order = ops.place([np.array(ends, np.int32), places.ravel()], self.device)
        rows = self.buffer(count + 2, made.shape[1])
        rows[:count], rows[count:] = made, ops.embedding(ids, table)
        return ops.gather_rows(rows, order)


def read_llava(fields: Fields) -> LlavaConfig:
    text, decoder = read_text(fields, _TEXT, "llama")
    is_tied = fields.boolean("tie_word_embeddings", False) or text.boolean("tie_word_embeddings", False)
    fields.default({"vision_config": _TOWER})
    vision = fields.object("vision_config")
    tower = read_pixtral(vision) if vision.string("model_type", "") == PIXTRAL else read_plain_vit(vision)
    strategy = fields.string("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise fields.error("vision_feature_select_strategy", f"{strategy!r:.80} must be default or full")
    skips_first = strategy == "default"
    if isinstance(tower, PixtralConfig):
        if skips_first:
            raise fields.error("vision_feature_select_strategy", "= 'default' must be full: Pixtral has no class token")
    elif tower.num_rows <= skips_first:
        raise fields.error("vision_feature_select_strategy", "leaves nothing of the tower's one patch")
    fields.raw("image_seq_length")  # of processors; the tower has it
    fields.raw("vocab_size")  # of older files; the text model has it
    return LlavaConfig(
        **{**decoder, "tie_word_embeddings": is_tied, **outer_fields(fields)},
        pictures=PicturesConfig(
            tower=tower,
            kept=kept_layers(fields, tower.num_layers, -2),
            skips_first=skips_first,
            projector_bias=fields.boolean("multimodal_projector_bias", True),
            **read_projector(fields, default_token=32_000),
        ),
    )


def read_text(
    fields: Fields, kinds: Mapping[str, Callable[[Fields], DecoderConfig]], default: str
) -> tuple[Fields, dict[str, Any]]:
    """`text_config` and its keyword arguments by the reader of its `model_type`, without those that the file may give
    beside it."""
    text = fields.object("text_config")
    kind = text.string("model_type", default)
    if kind not in kinds:
        raise text.error("model_type", f"= {kind!r:.80} must be one of {', '.join(kinds)}")
    add_class_defaults(text, kind)
    decoder = kinds[kind](text)
    values = {each.name: getattr(decoder, each.name) for each in dataclass_fields(decoder)}
    return text, values


def read_projector(fields: Fields, *, default_token: int) -> dict[str, Any]:
    """The picture's token and the projector's activation, as keyword arguments."""
    token = fields.integer("image_token_index", None, least=0)
    if token is None:
        token = fields.integer("image_token_id", default_token, least=0)
    fields.raw("image_token_id")
    activation = read_choice(fields, "projector_hidden_act", "gelu", GELU_NAMES)
    return {"image_token_id": token, "projector_activation": activation}


def kept_layers(fields: Fields, num_layers: int, default: int) -> tuple[int, ...]:
    """The number of layers before each place where the tower is read: -1 is after the last."""
    given = fields.raw("vision_feature_layer")
    listed = [default] if given is None else given if isinstance(given, list) else [given]
    if not listed or any(type(each) is not int or not -num_layers - 1 <= each <= num_layers for each in listed):
        limits = f"{-num_layers - 1} to {num_layers}"
        raise fields.error("vision_feature_layer", f"= {given!r:.80} must be an integer, or several, of {limits}")
    return tuple(each % (num_layers + 1) for each in listed)


ARCHITECTURES = (Architecture("LlavaForConditionalGeneration", "llava", read_llava, LlavaModel),)
