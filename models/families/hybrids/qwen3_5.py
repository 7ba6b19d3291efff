"""Qwen3.5, 3.6 and 3.8, dense or with experts, and Qwen3-Next: three of four layers keep a recurrent state.

    x = x + mixer(rms_norm(x));   x = x + mlp(rms_norm(x))

The mixer is a gated delta rule (`ops.delta_rule`, https://arxiv.org/abs/2412.06464) or, in each fourth layer, gated
attention (https://arxiv.org/abs/2505.06708), a quarter of whose heads is rotated. Weights of norms are stored less 1,
but for that of the delta rule's results. Files of llama.cpp (`models.gguf`) have the value heads of Qwen3.5 tiled:
head h uses key head h % num_key_heads. Their rows and columns stay where they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from models.base import Architecture
from models.configuration.class_defaults import add_class_defaults
from models.configuration.config import ModelConfig, outer_fields, read_attention_bias, read_choice
from models.configuration.json_fields import Fields
from models.decoder import Layer, Mixer, PreNormLayer, read_rotated
from models.experts import MoeConfig, MoeDecoder, PredictionNames, dense_layers, read_rule
from models.families.pictures.qwen3_vl import Qwen3VLDecoder, VisionConfig, read_vision
from models.makers.maker import Maker
from models.makers.shards import Shard
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.kv.forms import PageForm, Recurrent
from runtime.linear.norm import RmsNorm
from runtime.linear.recurrent import DeltaRule
from runtime.routing import RoutingRule
from runtime.tensor.tensor import Tensor

_LINEAR, _FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config(MoeConfig):
    """A dense model's layers are all in `dense_layers`.

    Attributes:
        layer_types: "linear_attention" or "full_attention" for each layer.
        num_key_heads, num_value_heads, key_dim, value_dim, taps: of the delta rule and its convolution.
        gate: the function of z.
        stored_as: how files have the projections of the delta rule: "split", q, k and v in one and z, b and a apart;
            "grouped", by key heads, as in Qwen3-Next; "llama.cpp", split but for b and a, with the decay itself; or
            "tiled", split, with the decay itself and tiled value heads.
    """

    recurrence = "delta_rule"
    layer_types: tuple[str, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    gate: Literal["silu", "sigmoid"] = "silu"
    stored_as: str = "split"

    def head_shards(self, rank: int, num_ranks: int) -> dict[str, Shard | None]:
        """Also a rank's value heads, and the key heads that they use, which other ranks may have, too."""
        keys, values = self.num_key_heads, self.num_value_heads
        count, ratio = values // num_ranks, values // keys
        mine: Shard | None = None
        if self.stored_as == "tiled":
            if count and (count % keys == 0 or keys % count == 0):
                mine = Shard(keys, rank * count % keys, min(count, keys))
        elif count and (count % ratio == 0 or ratio % count == 0):
            mine = Shard(keys, rank * count // ratio, max(1, count // ratio))
        own = {"num_value_heads": Shard(count * num_ranks, rank * count, count), "num_key_heads": mine}
        return {**super(Qwen35Config, self).head_shards(rank, num_ranks), **own}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35PictureConfig(Qwen35Config):
    vision: VisionConfig


class Qwen35Model(MoeDecoder):
    config: Qwen35Config
    norm_offset = 1.0
    predicts_apart = PredictionNames("mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", ("layers.0",), "norm")

    @classmethod
    def harmless_tensors(cls, config: ModelConfig) -> re.Pattern[str]:
        """Also those that predict further tokens, which a drafter reads."""
        return re.compile(rf"{super().harmless_tensors(config).pattern}|mtp\..*")

    @classmethod
    def contradiction(cls, config: ModelConfig, names: Collection[str]) -> str:
        """See `Model`: a layer's kind is that of its tensors."""
        assert isinstance(config, Qwen35Config)
        for name in names:
            found = re.fullmatch(r"(?!mtp\.).*\blayers\.(\d+)\.(self|linear)_attn\..*", name)
            if found is None or (index := int(found[1])) >= config.num_layers:
                continue
            kind = config.layer_types[index]
            if (found[2] == "linear") != (kind == _LINEAR):
                return (
                    f"layer_types[{index}] is {kind!r}, but the files have {name}: it must name the stored layer's kind"
                )
        return ""

    def own_order(self, module: str) -> tuple[NDArray[np.intp] | None, NDArray[np.intp] | None]:
        config, part = self.config, module.rpartition(".linear_attn.")[2]
        if config.stored_as != "tiled" or ".linear_attn." not in module:
            return None, None
        heads = np.arange(config.num_value_heads)
        heads = heads % config.num_key_heads * (len(heads) // config.num_key_heads) + heads // config.num_key_heads
        places = (heads[:, None] * config.value_dim + np.arange(config.value_dim)).reshape(-1)
        if part in ("in_proj_v", "in_proj_z"):
            return places, None
        if part in ("in_proj_b", "in_proj_a"):
            return heads, None
        return None, places if part == "out_proj" else None

    def prediction_config(self) -> MoeConfig:
        """See `MoeDecoder`. It has gated attention, and experts if the model's last layer has."""
        dense = {0} if self.config.num_layers - 1 in self.config.dense_layers else ()
        one = super().prediction_config()
        assert isinstance(one, Qwen35Config)
        return replace(one, layer_types=(_FULL,), dense_layers=frozenset(dense))

    def make_layer(self, index: int, maker: Maker) -> Layer:
        return PreNormLayer(self, index, maker)

    def mixer(self, index: int, maker: Maker, *, input_norm: str = "", **choices: Any) -> Mixer:
        if self.config.layer_types[index] == _LINEAR:
            norm = self.input_norm(maker, input_norm)
            return DeltaRuleMixer(self.config, index, maker.under("linear_attn"), norm)
        own: dict[str, Any] = {"norm": "head", "norm_offset": self.norm_offset, "has_gate": True}
        return self.attention(index, maker, input_norm=input_norm, **own)

    def state_form(self, index: int) -> PageForm | None:
        config = self.config
        if config.layer_types[index] != _LINEAR:
            return None
        channels = 2 * config.num_key_heads * config.key_dim + config.num_value_heads * config.value_dim
        return Recurrent(
            channels=channels, taps=config.taps, gates=2 * config.num_value_heads, heads=config.num_value_heads,
            rows=config.key_dim, columns=config.value_dim, activations=self.activations,
        )  # fmt: skip


class DeltaRuleMixer:
    """The delta rule between its projections, after a norm."""

    def __init__(self, config: Qwen35Config, index: int, maker: Maker, norm: RmsNorm | None) -> None:
        self.index, hidden = index, config.hidden_size
        keys, values = config.shard("num_key_heads"), config.shard("num_value_heads")
        k, v, ratio = keys.times(config.key_dim), values.times(config.value_dim), values.whole // keys.whole
        names, gates = tuple(f"in_proj_{each}" for each in "qkvz"), ("in_proj_b", "in_proj_a")
        if config.stored_as == "grouped":
            sizes = (config.key_dim, config.key_dim, ratio * config.value_dim, ratio * config.value_dim)
            maker.note_row_stack("in_proj_qkvz", names, sizes, hidden, groups=keys.whole)
        else:
            maker.note_row_stack("in_proj_qkv", names[:3], (k.whole, k.whole, v.whole), hidden)
        if config.stored_as in ("grouped", "llama.cpp"):
            maker.note_row_stack("in_proj_ba", gates, (ratio, ratio), hidden, groups=keys.whole)
        # A GPU's map has one format, and b and a may be floats beside quantised others.
        widths, is_one = ((k, k, v, v), (values, values)), maker.options.device.kind == "cpu"
        self.maps = [
            each.linear(of, outputs=width, inputs=hidden, split="outputs", norm=norm, floats=gates)
            for each, of, width in (
                [(maker, (*names, *gates), (*widths[0], *widths[1]))] if is_one
                else [(maker, names, widths[0]), (maker.unrounded(takes_addends=True), gates, widths[1])]
            )
        ]  # fmt: skip
        has_decay = config.stored_as in ("llama.cpp", "tiled")
        self.weights = DeltaRule(
            conv=maker.taps("conv1d", (k, k, v), config.taps),
            a=maker.exact_vector("a", values) if has_decay else maker.decay("A_log", values),
            dt_bias=maker.exact_vector("dt_bias", values),
            norm=maker.vector("norm.weight", config.value_dim),
            eps=config.norm_eps, num_key_heads=keys.count, num_value_heads=values.count, key_dim=config.key_dim,
            value_dim=config.value_dim, tiled=config.stored_as == "tiled", gate=config.gate,
        )  # fmt: skip
        self.out_proj = maker.linear("out_proj", outputs=hidden, inputs=v, split="inputs")

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache, *, residual: Tensor | None = None) -> Tensor:
        parts = [each(x, batch) for each in self.maps]
        joined = parts[0] if len(parts) == 1 else ops.join_columns(parts)
        mixed = ops.delta_rule(
            joined, self.weights, pages=kv_cache.layer(self.index), batch=batch, group=kv_cache.group_of(self.index)
        )
        return self.out_proj(mixed, batch, residual=residual)


class Qwen35PictureModel(Qwen3VLDecoder, Qwen35Model):
    """Qwen3-VL's tower, whose inner layers add nothing here."""

    config: Qwen35PictureConfig


def _read_decoder(fields: Fields, stored_as: str = "split") -> dict[str, Any]:
    """The fields of all of them, as keyword arguments."""
    common = read_rotated(fields, {"default_partial_rotary_factor": 0.25}, default_head_dim=256)
    fields.expect("attn_output_gate", True)
    fields.expect("mamba_ssm_dtype", "float32")
    fields.expect("use_sliding_window", False)
    gate = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
    read = {
        "num_key_heads": fields.integer("linear_num_key_heads", 16, most=1 << 16),
        "num_value_heads": fields.integer("linear_num_value_heads", 32, most=1 << 16),
        "key_dim": fields.integer("linear_key_head_dim", 128, most=1 << 10),
        "value_dim": fields.integer("linear_value_head_dim", 128, most=1 << 10),
        "taps": fields.integer("linear_conv_kernel_dim", 4, least=2, most=1 << 8),
        "gate": read_choice(fields, "output_gate_type", "silu", gate),
        "stored_as": read_choice(fields, "linear_attn_stored_as", stored_as, {each: each for each in _STORED}),
    }
    if read["num_value_heads"] % read["num_key_heads"]:
        raise fields.error(
            "linear_num_value_heads",
            f"= {read['num_value_heads']} must be a multiple of linear_num_key_heads = {read['num_key_heads']}",
        )
    return {**common, **read_attention_bias(fields), **read, "layer_types": _read_kinds(fields, common["num_layers"])}


_STORED = ("split", "grouped", "llama.cpp", "tiled")


def _read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """`layer_types`, or full attention in each `full_attention_interval`-th layer."""
    interval = fields.integer("full_attention_interval", 4)
    kinds = fields.strings("layer_types")
    if kinds is None:
        kinds = [_LINEAR if (index + 1) % interval else _FULL for index in range(num_layers)]
    if len(kinds) != num_layers:
        raise fields.error("layer_types", f"names {len(kinds)} layers, must name num_hidden_layers = {num_layers}")
    for layer, kind in enumerate(kinds):
        if kind not in (_LINEAR, _FULL):
            raise fields.error("layer_types", f"[{layer}] = {kind!r:.80} must be {_LINEAR!r} or {_FULL!r}")
    return tuple(kinds)


def _dense(fields: Fields) -> dict[str, Any]:
    """The fields of a model without experts."""
    layers = frozenset(range(fields.integer("num_hidden_layers")))
    fields.expect("mlp_only_layers", [])
    return {"expert_size": 0, "rule": RoutingRule(num_experts=1, top_k=1), "dense_layers": layers}


def _experts(fields: Fields, count: int, top_k: int) -> dict[str, Any]:
    return {
        "expert_size": fields.integer("moe_intermediate_size", 512, most=1 << 24),
        "shared_size": fields.integer("shared_expert_intermediate_size", 512, most=1 << 24),
        "rule": read_rule(fields, count=count, top_k=top_k, normalises=fields.boolean("norm_topk_prob", True)),
        "dense_layers": dense_layers(fields, fields.integer("num_hidden_layers")),
    }


def _all_experts(fields: Fields) -> dict[str, Any]:
    """The fields of Qwen3.5's experts, which all layers have, and whose weights are always normalised."""
    for name, value in (("norm_topk_prob", True), ("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        fields.expect(name, value)
    return _experts(fields, 256, 8)


def _read_further(fields: Fields) -> dict[str, Any]:
    """The layers that predict further tokens: a drafter reads them."""
    fields.expect("mtp_use_dedicated_embeddings", False)
    return {"num_prediction_layers": fields.integer("mtp_num_hidden_layers", 0, least=0, most=1 << 8)}


def read_text(fields: Fields) -> Qwen35Config:
    return Qwen35Config(**_read_decoder(fields), **_dense(fields), **_read_further(fields))


def read_moe_text(fields: Fields) -> Qwen35Config:
    return Qwen35Config(**_read_decoder(fields), **_all_experts(fields), **_read_further(fields))


def read_next(fields: Fields) -> Qwen35Config:
    return Qwen35Config(**_read_decoder(fields, "grouped"), **_experts(fields, 512, 10), **_read_further(fields))


def read_pictures(fields: Fields) -> Qwen35PictureConfig:
    return _with_pictures(fields, "qwen3_5_text", _dense)


def read_moe_pictures(fields: Fields) -> Qwen35PictureConfig:
    return _with_pictures(fields, "qwen3_5_moe_text", _all_experts)


def _with_pictures(fields: Fields, text_type: str, rest: Callable[[Fields], dict[str, Any]]) -> Qwen35PictureConfig:
    text = fields.object("text_config")
    add_class_defaults(text, text_type)
    common = {**_read_decoder(text), **rest(text), **_read_further(text)}
    common |= {"tie_word_embeddings": fields.boolean("tie_word_embeddings", False), **outer_fields(fields)}
    fields.object("vision_config").default({"deepstack_visual_indexes": []})
    vision = read_vision(fields, text, common, default_sections=(11, 11, 10), default_image_token=248056)
    return Qwen35PictureConfig(**common, vision=vision)


ARCHITECTURES = (
    Architecture("Qwen3_5ForCausalLM", "qwen3_5_text", read_text, Qwen35Model),
    Architecture("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", read_moe_text, Qwen35Model),
    Architecture("Qwen3_5ForConditionalGeneration", "qwen3_5", read_pictures, Qwen35PictureModel),
    Architecture("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", read_moe_pictures, Qwen35PictureModel),
    Architecture("Qwen3NextForCausalLM", "qwen3_next", read_next, Qwen35Model),
)
