"""LLaVA (arXiv 2304.08485, 1.5: 2310.03744): Llama, Mistral or Qwen2 over text and pictures of one size.

    embeddings = linear_2(gelu(linear_1(what a layer of CLIP or SigLIP leaves)))

The class token, or the first patch, is left out under the strategy "default". A picture's tokens stand at their places,
as text does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, Literal, cast

from models.architecture import Architecture
from models.configuration.class_defaults import add_class_defaults
from models.configuration.config import GELU_NAMES, outer_fields, read_choice
from models.configuration.json_fields import Fields
from models.families.llama import LlamaConfig, LlamaModel, read_llama, read_mistral, read_qwen2
from models.makers.maker import Maker
from models.picture_decoder import OLDER_NAMES, PictureDecoder
from models.towers.encoding import Pace, PatchRows, PictureTower, Pieces
from models.towers.plain_vit import PlainVit, PlainVitConfig, read_plain_vit
from models.towers.shares import share_of_tower
from runtime import ops
from runtime.images.patches import FixedRule

_TEXT: Mapping[str, Callable[[Fields], LlamaConfig]] = {
    "llama": read_llama, "mistral": read_mistral, "qwen2": read_qwen2,
}  # fmt: skip

_TOWER = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14,
}  # fmt: skip
"""Of a file that has no `vision_config` at all."""

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALVES = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaConfig(LlamaConfig):
    """`kept`: the numbers of layers behind which the tower is read. `skips_first`: its first row is left out."""

    tower: PlainVitConfig
    kept: tuple[int, ...]
    skips_first: bool
    projector_activation: Literal["erf", "tanh", "sigmoid"]
    projector_bias: bool
    image_token_id: int

    @property
    def num_picture_tokens(self) -> int:
        return self.tower.num_rows - self.skips_first


class LlavaModel(PictureDecoder, LlamaModel):
    config: LlavaConfig
    root = "model.language_model"
    harmless = re.compile(
        r"model\.(language_model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
        r"|vision_tower\.(post_layernorm\.|head\.|embeddings\.position_ids|encoder\.layers\.).*)"
    )

    renames = OLDER_NAMES

    def __init__(self, config: LlavaConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        tower = config.tower
        self.image_token_id = config.image_token_id
        self.tower = maker.in_first(lambda: LlavaTower(config, maker))
        self.patch_rule = FixedRule(
            height=tower.image_size, width=tower.image_size, patch_size=tower.patch_size,
            num_tokens=config.num_picture_tokens, shortest_edge=tower.image_size if tower.has_class else None,
            mean=_CLIP_MEAN if tower.has_class else _HALVES, std=_CLIP_STD if tower.has_class else _HALVES,
        )  # fmt: skip


class LlavaTower(PictureTower):
    """See `PictureTower`: the layers, and the projector behind them. The embeddings are `[num_tokens, hidden_size]`."""

    def __init__(self, config: LlavaConfig, maker: Maker) -> None:
        self.dtype, self.device = maker.dtype, maker.options.device
        self.vit = PlainVit(config.tower, config.kept, maker.under("model.vision_tower"))
        self.skips_first, self.activation = config.skips_first, config.projector_activation
        inner = maker.under("model.multi_modal_projector")
        width, has_bias = config.hidden_size, config.projector_bias
        inputs = config.tower.hidden_size * len(config.kept)
        middle = share_of_tower(width, maker.options)
        self.up = inner.linear("linear_1", outputs=middle.share, inputs=inputs, has_bias=has_bias, split=middle.outputs)
        self.down = inner.linear("linear_2", outputs=width, inputs=middle.share, has_bias=has_bias, split=middle.inputs)

    def pieces(self, patches: PatchRows, grid: tuple[int, int], pace: Pace) -> Pieces:
        kept = yield from self.vit.kept_rows(self, patches, pace)
        first = int(self.skips_first)
        made = self.buffer(kept[0].shape[0] - first, self.down.weight.shape[0])
        for piece in pace.slices(made.shape[0]):
            rows = slice(first + piece.start, first + piece.stop)
            h = self.up(ops.join_columns([each[rows] for each in kept]))
            self.down(ops.gelu(h, self.activation, out=h), out=made[piece])
            yield piece.stop - piece.start
        return (made,)


def read_llava(fields: Fields) -> LlavaConfig:
    text = fields.object("text_config")
    kind = text.string("model_type", "llama")
    if kind not in _TEXT:
        raise text.error("model_type", f"{kind!r:.80} must be one of {', '.join(_TEXT)}")
    add_class_defaults(text, kind)
    is_tied = fields.boolean("tie_word_embeddings", False) or text.boolean("tie_word_embeddings", False)
    decoder = _TEXT[kind](text)
    fields.default({"vision_config": _TOWER})
    tower = read_plain_vit(fields.object("vision_config"))
    strategy = fields.string("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise fields.error("vision_feature_select_strategy", f"{strategy!r:.80} must be default or full")
    skips_first = strategy == "default"
    if tower.num_rows <= skips_first:
        raise fields.error("vision_feature_select_strategy", "leaves nothing of the tower's one patch")
    fields.raw("image_seq_length")  # of processors; the tower says it
    fields.raw("vocab_size")  # of older files; the text model says it
    values = {each.name: getattr(decoder, each.name) for each in dataclass_fields(decoder)}
    values |= {"tie_word_embeddings": is_tied, **outer_fields(fields)}
    token = fields.integer("image_token_index", None, least=0)
    if token is None:
        token = fields.integer("image_token_id", 32000, least=0)
    return LlavaConfig(
        **values,
        tower=tower,
        kept=_kept_layers(fields, tower.num_layers),
        skips_first=skips_first,
        projector_activation=cast(Any, read_choice(fields, "projector_hidden_act", "gelu", GELU_NAMES)),
        projector_bias=fields.boolean("multimodal_projector_bias", True),
        image_token_id=token,
    )


def _kept_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """How many layers stand before each place where the tower is read: -1 is behind the last."""
    given = fields.raw("vision_feature_layer")
    listed = [-2] if given is None else given if isinstance(given, list) else [given]
    if not listed or any(type(each) is not int or not -num_layers - 1 <= each <= num_layers for each in listed):
        limits = f"{-num_layers - 1} to {num_layers}"
        raise fields.error("vision_feature_layer", f"= {given!r:.80} must be an integer, or several, of {limits}")
    return tuple(each % (num_layers + 1) for each in listed)


ARCHITECTURES = (Architecture("LlavaForConditionalGeneration", "llava", read_llava, LlavaModel),)
