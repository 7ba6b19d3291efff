"""Gemma 4: layers of two kinds, which differ in the size and number of their heads.

    a = norm(attention(norm(x))) + x;   m = norm(mlp(norm(a)))  [+ experts];   x = (a + m [+ input]) * scalar

Queries, keys and values are normalised by head, values without weights; scores have no scale. Layers with a window
rotate whole heads, full ones, whose heads are longer, a quarter of their frequencies, and may take the projection of
keys for their values, too. The last layers may use the pages of the last earlier layer of their kind. The larger ones
have experts beside the MLP, which are chosen by the residual stream itself:

    m = norm(norm(mlp(norm(a))) + norm(experts(norm(a))))

The smaller ones give each layer an input of its own, of a row a token, out of a table that is as large as the model:

    inputs = (norm(map(x0)) + row) / sqrt(2);    input = norm(out(gelu(gate(x)) * inputs[layer]))
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import numpy as np

from models.base import Architecture
from models.configuration.config import ModelConfig, read_attention_bias, read_common, read_layer_types
from models.configuration.json_fields import Fields
from models.configuration.rope_config import KINDS, parse_rope
from models.decoder import Decoder, Layer, SandwichLayer
from models.errors import ModelLoadError
from models.experts import Experts, ExpertsForm, MoeConfig
from models.makers.maker import Maker
from models.makers.shards import Shard, shard_of_heads
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.routing import RoutingRule
from runtime.tensor.tensor import Tensor

_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_EXPERTS = ExpertsForm(router="router.proj", activation="gelu_tanh", stack_order="outputs_first")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config(MoeConfig):
    """Gemma 4's config. `head_dim` and `num_kv_heads` are those of layers with a window; without experts `expert_size`
    is 0.

    Attributes:
        full_head_dim, full_kv_heads: of layers without a window.
        keys_are_values: whether their values are made of keys.
        num_sharing_layers: the last layers, which use other layers' pages.
        sharing_size: columns of their MLP.
        input_size: of each layer's input; 0 if there are none.
        input_rows: of their table.
        logits_softcap: bound of logits.
    """

    full_head_dim: int
    full_kv_heads: int
    keys_are_values: bool
    num_sharing_layers: int
    sharing_size: int
    input_size: int
    input_rows: int
    logits_softcap: float | None

    @property
    def split_widths(self) -> tuple[str, ...]:
        """See `ModelConfig`."""
        return "intermediate_size", "expert_size", *(("sharing_size",) if self.num_sharing_layers else ())

    def head_shards(self, rank: int, num_ranks: int) -> dict[str, Shard | None]:
        """See `ModelConfig`."""
        own = shard_of_heads(self.full_kv_heads, rank, num_ranks)
        return {**MoeConfig.head_shards(self, rank, num_ranks), "full_kv_heads": own}

    def of_layer(self, index: int) -> Self:
        """See `ModelConfig`."""
        if self.layer_windows[index] is not None:
            return self
        shards = dict(self.shards)
        if "full_kv_heads" in shards:
            shards["num_kv_heads"] = shards["full_kv_heads"]
        return replace(self, head_dim=self.full_head_dim, num_kv_heads=self.full_kv_heads, shards=tuple(shards.items()))

    @property
    def first_sharing(self) -> int:
        """The first layer that uses another's pages."""
        return self.num_layers - self.num_sharing_layers

    def source_of(self, index: int) -> int:
        """The layer whose pages a layer uses."""
        return self.last_source(self.layer_windows[index], index + 1)

    def last_source(self, window: int | None, end: int | None = None) -> int:
        """The last layer before `end` with pages of its own and this window."""
        end = self.first_sharing if end is None else min(end, self.first_sharing)
        return max(layer for layer in range(end) if self.layer_windows[layer] == window)


class Gemma4Model(Decoder):
    config: Gemma4Config

    def __init__(self, config: Gemma4Config, maker: Maker) -> None:
        super().__init__(config, maker)
        self.embedding_scale = float(np.array(math.sqrt(config.hidden_size), self.dtype.numpy))
        self.logits_softcap, self.gives_last_rows = config.logits_softcap, config.num_sharing_layers > 0
        if config.num_sharing_layers:
            shared = {config.source_of(layer) for layer in range(config.first_sharing, config.num_layers)}
            self.least_last_layers = config.num_layers - min(shared)
        for layer in self.own_layers:
            if (source := config.source_of(layer)) not in self.own_layers:
                raise ModelLoadError(
                    f"{config.architecture}: layer {layer} uses the keys and values of layer {source}, which another "
                    f"stage has: the last {self.least_last_layers} layers must be in one"
                )
        self.carried_columns = config.num_layers * config.input_size
        if config.input_size:
            self.layer_inputs = maker.in_first(lambda: LayerInputs(config, maker.under(self.root)))

    @classmethod
    def harmless_tensors(cls, config: ModelConfig) -> re.Pattern[str]:
        """Also the keys and values of layers that use another's."""
        own = cast(Gemma4Config, config)
        numbers = "|".join(map(str, range(own.first_sharing, own.num_layers))) or "none"
        unused = rf"{re.escape(cls.root)}\.layers\.({numbers})\.self_attn\.([kv]_proj|[kv]_norm)\..*"
        return re.compile(f"{cls.harmless.pattern}|{unused}")

    def make_layer(self, index: int, maker: Maker) -> Layer:
        return Gemma4Layer(self, index, maker)

    def source_of(self, index: int) -> int:
        return self.config.source_of(index)

    def carry(self, x: Tensor, batch: Batch) -> Tensor | None:
        """The inputs of all layers, if they have any."""
        return self.layer_inputs(x, batch.token_ids, batch) if self.config.input_size else None

    def full_batch(self, batch: Batch) -> Batch:
        """The batch as layers without a window see it."""
        return batch

    def run_layers(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        inputs, full, windows = batch.carried, self.full_batch(batch), self.config.layer_windows
        for index, layer in zip(self.own_layers, self.layers, strict=True):
            if index == self.config.first_sharing and batch.is_last_wanted:  # nothing reads what others would get
                assert batch.last_tokens is not None, "a step has them"
                last = batch.last_tokens
                x, batch = ops.gather_rows(x, last), batch.of_last_tokens()
                full = self.full_batch(batch)
                inputs = None if inputs is None else ops.gather_rows(inputs, last)
            x = cast(Gemma4Layer, layer)(x, full if windows[index] is None else batch, kv_cache, inputs)
            batch.keep(index + 1, x)
        return x


class LayerInputs:
    """The inputs of all layers, of the embeddings and a table's rows."""

    def __init__(self, config: Gemma4Config, maker: Maker) -> None:
        size, total = config.input_size, config.num_layers * config.input_size
        self.size, self.eps = size, config.norm_eps * config.hidden_size  # the map's outputs are not scaled
        self.scale = float(np.array(math.sqrt(size), maker.dtype.numpy))
        self.table = maker.mapped_table("embed_tokens_per_layer.weight", config.input_rows, total)
        self.projection = maker.unrounded(takes_addends=True).linear(
            "per_layer_model_projection", outputs=total, inputs=config.hidden_size
        )
        self.norm = maker.vector("per_layer_projection_norm.weight", size)

    def __call__(self, x: Tensor, token_ids: Tensor, batch: Batch) -> Tensor:
        """``x [T, H]``, the embeddings -> ``[T, num_layers * size]``; the table's rows are those of ``token_ids``."""
        rows = ops.embedding(token_ids, self.table, scale=self.scale).view(-1, self.size)
        made = self.projection(x, batch).view(-1, self.size)
        mixed = ops.rms_norm(made, self.norm, self.eps, residual=rows, factor=2**-0.5)
        return mixed.view(x.shape[0], -1)


class Gemma4Layer(SandwichLayer):
    def __init__(self, model: Gemma4Model, index: int, maker: Maker) -> None:
        config, self.index = model.config, index
        has_pages, is_full = index < config.first_sharing, config.layer_windows[index] is None
        attention = model.attention(
            index, maker, norm="head", values="keys" if is_full and config.keys_are_values else "normed",
            has_pages=has_pages,
        )  # fmt: skip
        width = "intermediate_size" if has_pages else "sharing_size"
        mlp = model.mlp(maker, activation="gelu_tanh", width=width)
        super().__init__(config, maker, attention, mlp, norms=_NORMS)
        self.experts = Gemma4Experts(config, maker) if config.expert_size else None
        self.scalar = maker.number("layer_scalar", (1,))
        self.input_size = config.input_size
        if self.input_size:
            maps = maker.unrounded(takes_addends=True)
            self.gate = maps.linear("per_layer_input_gate", outputs=self.input_size, inputs=config.hidden_size)
            self.projection = maps.linear("per_layer_projection", outputs=config.hidden_size, inputs=self.input_size)
            self.behind_input = maker.vector("post_per_layer_input_norm.weight", config.hidden_size)

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache, inputs: Tensor | None = None) -> Tensor:
        attended = self.attention(ops.rms_norm(x, self.before_attention, self.eps), batch, kv_cache)
        x = ops.rms_norm(attended, self.behind_attention, self.eps, residual=x)
        made = self.mlp(ops.rms_norm(x, self.before_mlp, self.eps), batch)
        if self.experts is not None:
            made = self.experts.add_to(made, x, batch)
        factor = self.scalar if inputs is None else 1.0
        x = ops.rms_norm(made, self.behind_mlp, self.eps, residual=x, factor=factor)
        if inputs is None:
            return x
        gated = ops.gelu_gate(self.gate(x, batch), inputs, self.index * self.input_size)
        return ops.rms_norm(self.projection(gated, batch), self.behind_input, self.eps, residual=x, factor=self.scalar)


class Gemma4Experts(Experts):
    """Experts beside an MLP. The router's weights are those of the experts' choice times a factor of each expert."""

    def __init__(self, config: Gemma4Config, maker: Maker) -> None:
        super().__init__(config, maker, _EXPERTS, None)
        hidden, self.eps = config.hidden_size, config.norm_eps
        self.scale, self.logits_scale = maker.vector("router.scale", hidden), hidden**-0.5
        self.factors = maker.exact_vector("router.per_expert_scale", config.rule.num_experts)
        self.behind_mlp, self.before, self.behind = (
            maker.vector(f"{name}.weight", hidden)
            for name in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
        )

    def add_to(self, made: Tensor, x: Tensor, batch: Batch) -> Tensor:
        """The MLP's result and the experts', each normalised; ``x`` is the residual stream."""
        normed = ops.rms_norm(x, self.scale, self.eps)
        logits = self.router.logits(normed, scale=self.logits_scale, adapters=batch.adapters)
        routing = ops.route(logits, self.rule, factors=self.factors)
        chosen = self._sum(ops.rms_norm(x, self.before, self.eps), routing, batch)
        return ops.rms_norm(chosen, self.behind, self.eps, residual=ops.rms_norm(made, self.behind_mlp, self.eps))


def read_gemma4(fields: Fields, *, is_drafter: bool = False) -> Gemma4Config:
    """The fields of a decoder. All layers of a drafter use pages of another model's."""
    common = read_common(
        fields, default_head_dim=256, default_max_positions=131_072, activation_name="hidden_activation",
        activations={"gelu_pytorch_tanh": "tanh"}, default_activation="gelu_pytorch_tanh",
        default_tie_word_embeddings=True,
    )  # fmt: skip
    count, positions = common["num_layers"], common["max_position_embeddings"]
    kinds = read_layer_types(fields, count)
    kinds = kinds or ["full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(count)]
    kinds = [*kinds[:-1], "full_attention"]  # the last layer sees all tokens, whatever the file says
    window = fields.integer("sliding_window", 512)
    fields.expect("use_bidirectional_attention", "vision")
    is_equal = fields.boolean("attention_k_eq_v", False)
    full_head_dim, full_kv_heads = _read_full_heads(fields, kinds, common, is_equal)
    full, sliding = (
        parse_rope(
            fields,
            size,
            positions,
            layer_type=kind,
            default_theta=1e4,
            kinds=(*KINDS, "proportional"),
            default_partial_rotary_factor=1.0,
        )
        for kind, size in (("full_attention", full_head_dim), ("sliding_attention", common["head_dim"]))
    )
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    num_sharing = fields.integer("num_kv_shared_layers", count if is_drafter else 0, least=0)
    if not is_drafter:
        _check_sharing(fields, kinds, num_sharing)
    elif num_sharing != count:
        raise fields.error("num_kv_shared_layers", f"= {num_sharing} must be all {count} layers of a drafter")
    wide = fields.boolean("use_double_wide_mlp", False)
    input_size = fields.integer("hidden_size_per_layer_input", 256, least=0, most=1 << 16)
    least = common["vocab_size"] if input_size else 0
    input_rows = fields.integer("vocab_size_per_layer_input", 262_144, least=least, most=1 << 24)
    return Gemma4Config(
        **common | read_attention_bias(fields) | {
            "layer_windows": windows, "attention_scales": (1.0,) * count,
            "layer_ropes": tuple(full if each is None else sliding for each in windows),
        },
        **_read_experts(fields),
        full_head_dim=full_head_dim, full_kv_heads=full_kv_heads, keys_are_values=is_equal,
        num_sharing_layers=num_sharing, sharing_size=common["intermediate_size"] * (2 if wide else 1),
        input_size=input_size,
        input_rows=input_rows if input_size else 0,
        logits_softcap=fields.number("final_logit_softcapping", None, least=1e-3, most=1e6),
    )  # fmt: skip


def _read_full_heads(
    fields: Fields, kinds: Sequence[str], common: dict[str, Any], is_equal: bool
) -> tuple[int, int]:  # fmt: skip
    """The size and number of heads of keys in layers without a window: of two fields, or an object that names layers
    that differ from the others."""
    head_dim = fields.integer("global_head_dim", 512, most=1 << 16)
    kv_heads = fields.integer("num_global_key_value_heads", None, most=1 << 16) if is_equal else None
    fields.raw("num_global_key_value_heads")  # which counts with attention_k_eq_v alone
    found = {head_dim}, {kv_heads or common["num_kv_heads"]}
    if fields.has("per_layer_config"):
        layers = fields.object("per_layer_config")
        found = set(), set()
        for index, kind in enumerate(kinds):
            own = layers.object(str(index))
            sizes = (
                own.integer("head_dim", common["head_dim"], most=1 << 16),
                own.integer("num_key_value_heads", common["num_kv_heads"], most=1 << 16),
            )
            if kind == "full_attention":
                for each, size in zip(found, sizes, strict=True):
                    each.add(size)
            elif sizes != (common["head_dim"], common["num_kv_heads"]):
                raise layers.error(str(index), "must be absent: it is a layer of sliding_attention")
        if any(len(each) > 1 for each in found):
            raise fields.error("per_layer_config", "must be the same for all layers of full_attention")
    (head_dim,), (kv_heads,) = found
    if head_dim % 2 or common["num_heads"] % kv_heads:
        raise fields.error(
            "per_layer_config" if fields.has("per_layer_config") else "global_head_dim",
            f"gives {kv_heads} heads of keys of {head_dim}: the size must be even, and the number divide "
            f"num_attention_heads = {common['num_heads']}",
        )
    return head_dim, kv_heads


def _check_sharing(fields: Fields, kinds: Sequence[str], count: int) -> None:
    """Raises ConfigError unless each of the last `count` layers has an earlier one of its kind."""
    if count and (count >= len(kinds) or not {*kinds[-count:]} <= {*kinds[:-count]}):
        raise fields.error(
            "num_kv_shared_layers", f"= {count} of {len(kinds)} layers: each of them needs an earlier layer of its kind"
        )


def _read_experts(fields: Fields) -> dict[str, Any]:
    if not fields.boolean("enable_moe_block", False):
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            fields.raw(name)
        return {"expert_size": 0, "rule": RoutingRule(num_experts=1, top_k=1)}
    count, chosen = fields.integer("num_experts", most=1 << 16), fields.integer("top_k_experts")
    if chosen > count:
        raise fields.error("top_k_experts", f"= {chosen} must be at most num_experts = {count}")
    return {
        "expert_size": fields.integer("moe_intermediate_size", most=1 << 24),
        "rule": RoutingRule(num_experts=count, top_k=chosen, normalises=True),
    }


ARCHITECTURES = (Architecture("Gemma4ForCausalLM", "gemma4_text", read_gemma4, Gemma4Model),)
