"""A family for tests: layers see a window with narrow heads, and every second one all tokens with heads twice as wide,
as Gemma 4's do. Their pages have two forms, so that they lie in two pools."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from models.base import Architecture, Model
from models.configuration.config import ModelConfig, read_common
from models.configuration.json_fields import Fields
from models.configuration.rope_config import RopeConfig, parse_rope
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.dtype import DType
from runtime.kv.cache import KVCache, KVCacheSpec, LayerCache
from runtime.kv.forms import KeyValues
from runtime.kv.kinds import FULL, Window
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor

WINDOW = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoFormsConfig(ModelConfig):
    rope: RopeConfig


def window_at(index: int) -> int | None:
    return None if index % 2 else WINDOW


class TwoForms(Model):
    config: TwoFormsConfig
    prefix = "model."
    harmless = re.compile(r"model\.rotary_emb\.inv_freq")

    def __init__(self, config: TwoFormsConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        rope = maker.rope(config.rope)
        self.embed_tokens, self.lm_head = maker.embedding(
            "model.embed_tokens", head="lm_head", rows=config.vocab_size, columns=config.hidden_size, is_tied=True
        )
        self.layers = maker.layers(
            "model.layers", config.num_layers, lambda index, maker: Layer(config, index, maker, rope)
        )
        self.norm = maker.vector("model.norm.weight", config.hidden_size)

    def kv_cache_spec(self, block_size: int, dtype: DType | None = None) -> KVCacheSpec:
        spec, config = super().kv_cache_spec(block_size, dtype), self.config
        layers = [
            LayerCache(KeyValues(config.num_kv_heads, config.head_dim), Window(WINDOW))
            if window_at(index) is not None
            else LayerCache(KeyValues(config.num_kv_heads, 2 * config.head_dim), FULL)
            for index in range(config.num_layers)
        ]
        return replace(spec, layers=tuple(layers))

    def embed(self, batch: Batch) -> Tensor:
        return ops.embedding(batch.token_ids, self.embed_tokens)

    def run_layers(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        for index, layer in zip(self.own_layers, self.layers, strict=True):
            x = layer(x, batch, kv_cache, index)
        return x

    def finish(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.norm, self.config.norm_eps)


class Layer:
    def __init__(self, config: TwoFormsConfig, index: int, maker: Maker, rope: RopeTable) -> None:
        self.config, self.rope, self.window = config, rope, window_at(index)
        self.head_dim = config.head_dim * (2 if self.window is None else 1)
        q_size, kv_size = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.norm = maker.vector("norm.weight", config.hidden_size)
        self.qkv = maker.linear(
            ("q_proj", "k_proj", "v_proj"), outputs=(q_size, kv_size, kv_size), inputs=config.hidden_size
        )
        self.o_proj = maker.linear("o_proj", outputs=config.hidden_size, inputs=q_size)

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache, index: int) -> Tensor:
        config, group = self.config, kv_cache.group_of(index)
        k_cache, v_cache = kv_cache.layer(index)
        q = ops.qkv_prepare(
            self.qkv(ops.rms_norm(x, self.norm, config.norm_eps), batch), batch.positions,
            num_q_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=self.head_dim, rope=self.rope,
            q_norm=None, k_norm=None, norm_eps=config.norm_eps, k_cache=k_cache, v_cache=v_cache,
            slot_mapping=batch.slot_mappings[group],
        )  # fmt: skip
        attended = ops.attention(q, k_cache, v_cache, batch, group, scale=self.head_dim**-0.5, window=self.window)
        return self.o_proj(attended, batch, residual=x)


def read_config(fields: Fields) -> TwoFormsConfig:
    common = read_common(fields)
    return TwoFormsConfig(**common, rope=parse_rope(fields, common["head_dim"], common["max_position_embeddings"]))


ARCHITECTURES = (Architecture("TwoFormsForCausalLM", "two_forms", read_config, TwoForms),)
