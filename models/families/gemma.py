"""Gemma (arXiv 2403.08295), Gemma 2 (2408.00118) and Gemma 3 (2503.19786), which also reads pictures.

The weights of norms are stored less 1, and the MLP's gate is a GELU. Embeddings are multiplied by sqrt(hidden_size),
rounded to the weights' type as in training. Gemma is Llama otherwise. Later ones have norms after attention and MLP,
too. Gemma 2 caps scores and logits, and every other layer has a sliding window. Gemma 3 normalises each head of queries
and keys instead, five of six layers have a window, and those rotate by another base.

Pictures, all of one size, go through a SigLIP tower; embeddings of words are scaled, those of pictures are not:

    embeddings = rms_norm(average over squares of patches(norm(tower(patches)))) . W

A picture's tokens see each other, in layers with a window as far back as it reaches, so that one step computes them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from types import MappingProxyType
from typing import Any

import numpy as np

from models.base import Architecture
from models.configuration.class_defaults import add_class_defaults
from models.configuration.config import (
    GELU_NAMES,
    outer_fields,
    read_attention_bias,
    read_common,
    read_window,
    read_windows,
)
from models.configuration.json_fields import Fields
from models.configuration.rope_config import RopeConfig, parse_rope
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer, SandwichLayer, read_rotated
from models.encoder import DecoderBothWays
from models.makers.maker import Maker
from models.picture_decoder import OLDER_NAMES, PictureDecoder
from models.towers.encoding import Pace, PatchRows, PictureTower, Pieces
from models.towers.plain_vit import PlainVit, PlainVitConfig, read_plain_vit
from runtime import ops
from runtime.dtype import float32
from runtime.images.patches import FixedRule
from runtime.tensor.tensor import Tensor

_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    has_head_norms: bool
    attention_softcap: float | None
    logits_softcap: float | None


class FirstGemmaModel(Decoder):
    norm_offset = 1.0

    def __init__(self, config: DecoderConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        self.embedding_scale = float(np.array(math.sqrt(config.hidden_size), self.dtype.numpy))

    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker, mlp={"activation": "gelu_tanh"})


class GemmaModel(FirstGemmaModel):
    config: GemmaConfig

    def __init__(self, config: GemmaConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        self.logits_softcap = config.logits_softcap

    def make_layer(self, index: int, maker: Maker) -> Layer:
        config = self.config
        attention = self.attention(
            index,
            maker,
            norm="head" if config.has_head_norms else "none",
            norm_offset=1.0,
            softcap=config.attention_softcap,
        )
        mlp = self.mlp(maker, activation="gelu_tanh")
        return SandwichLayer(config, maker, attention, mlp, norms=_NORMS, norm_offset=1.0)


def read_gemma(fields: Fields) -> DecoderConfig:
    """`hidden_act` "gelu" means the tanh approximation: the official files say so, and `hidden_activation` beside it
    in newer ones."""
    tanh = {"gelu": "tanh"} | {name: kind for name, kind in GELU_NAMES.items() if kind == "tanh"}
    common = read_rotated(
        fields, default_head_dim=256, default_max_positions=8192, activations=tanh,
        default_activation="gelu_pytorch_tanh", default_tie_word_embeddings=True,
    )  # fmt: skip
    fields.expect("hidden_activation", *tanh)
    fields.expect("use_bidirectional_attention", False)
    return DecoderConfig(**common, **read_attention_bias(fields))


def read_gemma2(fields: Fields) -> GemmaConfig:
    common = _read_common(fields, default_max_positions=8192, pattern=2)
    rope = parse_rope(fields, common["head_dim"], common["max_position_embeddings"])
    return GemmaConfig(
        **common,
        layer_ropes=(rope,) * common["num_layers"],
        has_head_norms=False,
        attention_softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        logits_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
    )


def read_gemma3(fields: Fields, *, both_ways: tuple[bool, ...] = ()) -> GemmaConfig:
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    pattern = next((value for name in names if (value := fields.integer(name, None)) is not None), 6)
    fields.raw(names[1])  # files have both, beside `layer_types`, which count
    common = _read_common(fields, default_max_positions=131_072, pattern=pattern, both_ways=both_ways)
    head_dim, positions = common["head_dim"], common["max_position_embeddings"]
    full = parse_rope(fields, head_dim, positions, layer_type="full_attention", default_theta=1e6)
    if isinstance(fields.object("rope_parameters").raw("sliding_attention"), dict):
        sliding = parse_rope(
            fields, head_dim, positions, layer_type="sliding_attention", theta_name="rope_local_base_freq"
        )
    else:  # a lone entry's scaling is meant for the other layers
        sliding = RopeConfig(fields.number("rope_local_base_freq", 1e4, least=1.0, most=1e12), head_dim)
    fields.expect("attn_logit_softcapping")  # transformers reads it, but leaves scores as they are
    return GemmaConfig(
        **common,
        layer_ropes=tuple(full if window is None else sliding for window in common["layer_windows"]),
        has_head_norms=True,
        attention_softcap=None,
        logits_softcap=_softcap(fields, "final_logit_softcapping", None),
    )


class Gemma3Encoder(DecoderBothWays, GemmaModel):
    """Gemma 3's text model as EmbeddingGemma has it (https://arxiv.org/abs/2509.20354)."""


def read_gemma3_encoder(fields: Fields) -> GemmaConfig:
    """Half of a window is on each side of a token, as in transformers."""
    config = read_gemma3(fields, both_ways=(True,))
    windows = tuple(None if window is None else window // 2 + 1 for window in config.layer_windows)
    return replace(config, layer_windows=windows, tie_word_embeddings=True)


def _softcap(fields: Fields, name: str, default: float | None) -> float | None:
    # A null says that there is none.
    cap: float | None = fields.number(name, None if name in fields else default, least=1e-3, most=1e6)
    return cap


def _read_common(
    fields: Fields, *, default_max_positions: int, pattern: int, both_ways: tuple[bool, ...] = ()
) -> dict[str, Any]:  # fmt: skip
    """The fields that Gemma 2 and 3 share; every `pattern`th layer has no window, unless `layer_types` overrides it."""
    common = read_common(
        fields,
        default_head_dim=256,
        default_max_positions=default_max_positions,
        activation_name="hidden_activation",
        activations={"gelu_pytorch_tanh": "tanh"},
        default_activation="gelu_pytorch_tanh",
        default_tie_word_embeddings=True,
    )
    fields.raw("hidden_act")  # older files have it, too; `hidden_activation` is what counts
    fields.expect("use_bidirectional_attention", False, *both_ways)
    num_layers = common["num_layers"]
    common |= read_attention_bias(fields)
    scalar = fields.number("query_pre_attn_scalar", 256.0, least=1e-3, most=1e6)
    common["attention_scales"] = (scalar**-0.5,) * num_layers
    common["layer_windows"] = read_windows(fields, num_layers, pattern)
    fields.expect("sliding_window_size", read_window(fields))  # Gemma 2 says it twice
    return common


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
        self.patch_rule = FixedRule(
            height=tower.image_size, width=tower.image_size, patch_size=tower.patch_size,
            num_tokens=config.tokens_side**2, resample="bilinear",
        )  # fmt: skip

    @property
    def whole_picture_tokens(self) -> int | None:
        return self.patch_rule.num_tokens


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


ARCHITECTURES = (
    Architecture("GemmaForCausalLM", "gemma", read_gemma, FirstGemmaModel),
    Architecture("Gemma2ForCausalLM", "gemma2", read_gemma2, GemmaModel),
    Architecture("Gemma3ForCausalLM", "gemma3_text", read_gemma3, GemmaModel),
    Architecture(
        "Gemma3TextModel", "gemma3_text", read_gemma3_encoder, Gemma3Encoder, chosen_by="use_bidirectional_attention"
    ),
    Architecture("Gemma3ForConditionalGeneration", "gemma3", read_gemma3_vision, Gemma3VisionModel),
)
