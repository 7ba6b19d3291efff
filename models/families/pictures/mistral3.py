"""Ministral 3, and Mistral, Ministral 3 or Mistral 4 over text and pictures by Pixtral's tower: Mistral Small 3.1, 3.2
and 4, Magistral, Devstral.

Ministral 3 is Mistral whose context YaRN stretches, and whose queries grow with their position, as Llama 4's do: q is
multiplied by `1 + beta log(1 + floor(position / original context))`.

    embeddings = linear_2(gelu(linear_1(merge(rms_norm(a layer of the tower)))))

`merge` makes one row of 2 x 2 patches. Each line of a picture's tokens ends with a token of text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from models.base import Architecture
from models.configuration.config import outer_fields, read_common
from models.configuration.json_fields import Fields
from models.configuration.rope_config import parse_rope, rope_fields
from models.decoder import Decoder, DecoderConfig, Layer, PreNormLayer
from models.families.deepseek import DeepseekConfig, DeepseekV2Model, read_mistral4
from models.families.llama import LlamaModel, read_mistral
from models.families.pictures.llava import (
    LlavaConfig,
    LlavaDecoder,
    LlavaTower,
    PicturesConfig,
    kept_layers,
    read_projector,
    read_text,
)
from models.makers.maker import Maker
from models.picture_decoder import PictureDecoder
from models.towers.encoding import Pace
from models.towers.pixtral import read_pixtral
from runtime import ops
from runtime.tensor.tensor import Tensor


class Ministral3Model(Decoder):
    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker)


def read_ministral3(fields: Fields) -> DecoderConfig:
    common = read_common(fields, default_head_dim=128, default_max_positions=262_144, default_norm_eps=1e-5)
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    own = rope_fields(fields)
    rope = parse_rope(fields, common["head_dim"], common["max_position_embeddings"], kinds=("yarn",))
    rope = replace(rope, q_scaling_beta=own.number("llama_4_scaling_beta", least=0.0, most=1e6))
    num_layers = common["num_layers"]
    common["layer_windows"] = (fields.integer("sliding_window", None),) * num_layers
    return DecoderConfig(**common, layer_ropes=(rope,) * num_layers)


_TEXT: dict[str, Callable[[Fields], DecoderConfig]] = {
    "mistral": read_mistral, "ministral3": read_ministral3, "mistral4": read_mistral4,
}  # fmt: skip

_ABSENT = {
    "text_config": {
        "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32_768, "num_hidden_layers": 40,
        "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None, "vocab_size": 131_072,
    },
    "vision_config": {"patch_size": 14, "image_size": 1540},
}  # fmt: skip
"""Defaults of transformers' class for an object that a file leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistral4PicturesConfig(DeepseekConfig):
    pictures: PicturesConfig


class Mistral3Decoder(LlavaDecoder):
    def make_tower(self, maker: Maker) -> LlavaTower:
        return Mistral3Tower(self.config.pictures, maker, self)


class Mistral3Model(Mistral3Decoder, LlamaModel):
    config: LlavaConfig


class Mistral4PicturesModel(Mistral3Decoder, DeepseekV2Model):
    config: Mistral4PicturesConfig


class Mistral3Tower(LlavaTower):
    """See `LlavaTower`."""

    def __init__(self, config: PicturesConfig, maker: Maker, model: PictureDecoder) -> None:
        super().__init__(config, maker, model)
        width, inner = config.tower.hidden_size, maker.under("model.multi_modal_projector")
        self.norm, self.eps = inner.vector("norm.weight", width), model.config.norm_eps
        self.merger = inner.linear(
            "patch_merger.merging_layer", outputs=width, inputs=width * self.merge_size**2, has_bias=False
        )

    def merged(self, x: Tensor, pace: Pace) -> Tensor:
        width, unit = x.shape[1], self.merge_size**2
        by_channel = ops.rms_norm(x, self.norm, self.eps).view(-1, unit, width).transpose(1, 2).contiguous()
        tokens = by_channel.view(-1, width * unit)
        return self.merger(tokens, pace.of(tokens))


def read_mistral3(fields: Fields) -> LlavaConfig | Mistral4PicturesConfig:
    fields.default(_ABSENT)
    text, decoder = read_text(fields, _TEXT, "mistral")
    tower = read_pixtral(fields.object("vision_config"))
    merge_size = fields.integer("spatial_merge_size", 2, most=16)
    kept = kept_layers(fields, tower.num_layers, -1)
    if len(kept) != 1:
        raise fields.error("vision_feature_layer", f"names {len(kept)} layers, must name one, for the projector's norm")
    # Older files have it in the text config alone; transformers 5 writes and reads it here.
    is_tied = fields.boolean("tie_word_embeddings", text.boolean("tie_word_embeddings", False))
    pictures = PicturesConfig(
        tower=tower,
        kept=kept,
        skips_first=False,
        merge_size=merge_size,
        projector_bias=fields.boolean("multimodal_projector_bias", False),
        **read_projector(fields, default_token=10),
    )
    decoder |= {"tie_word_embeddings": is_tied, **outer_fields(fields)}
    config_class = Mistral4PicturesConfig if "latent" in decoder else LlavaConfig
    return config_class(**decoder, pictures=pictures)


ARCHITECTURES = (
    Architecture("Ministral3ForCausalLM", "ministral3", read_ministral3, Ministral3Model),
    Architecture(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        read_mistral3,
        Mistral3Model,
        others={Mistral4PicturesConfig: Mistral4PicturesModel},
    ),
)
