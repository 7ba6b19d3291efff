"""A decoder whose attention and MLP read the same norm: x = x + attention(h) + mlp(h), h = rms_norm(x)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from models.base import Architecture, Model
from models.configuration.config import ModelConfig, read_common
from models.configuration.json_fields import Fields
from models.configuration.rope_config import RopeConfig, parse_rope
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyConfig(ModelConfig):
    rope: RopeConfig
    residual_scale: float


class ToyModel(Model):
    config: ToyConfig
    prefix = "model."
    harmless = re.compile(r"model\.rotary_emb\.inv_freq")

    def __init__(self, config: ToyConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        rope = maker.rope(config.rope)
        self.embed_tokens, self.lm_head = maker.embedding(
            "model.embed_tokens", head="lm_head", rows=config.vocab_size, columns=config.hidden_size,
            is_tied=config.tie_word_embeddings,
        )  # fmt: skip
        self.layers = maker.layers(  # of this stage, where several ranks have the layers among them
            "model.layers", config.num_layers, lambda index, maker: ToyLayer(config, index, maker, rope)
        )
        if maker.is_last:
            self.norm = maker.vector("model.norm.weight", config.hidden_size)

    def embed(self, batch: Batch) -> Tensor:
        return ops.embedding(batch.token_ids, self.embed_tokens)  # [num_tokens, hidden_size]

    def run_layers(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        for index, layer in zip(self.own_layers, self.layers, strict=True):
            x = layer(x, batch, kv_cache, index)
        return x

    def finish(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.norm, self.config.norm_eps)


class ToyLayer:
    def __init__(self, config: ToyConfig, index: int, maker: Maker, rope: RopeTable) -> None:
        hidden, inner, head_dim = config.hidden_size, config.shard("intermediate_size"), config.head_dim
        q_size, kv_size = config.shard("num_heads").times(head_dim), config.shard("num_kv_heads").times(head_dim)
        self.config, self.rope, self.scale = config, rope, config.attention_scales[index]
        self.norm = maker.vector("norm.weight", hidden)
        qkv, gate_up = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
        self.qkv = maker.linear(qkv, outputs=(q_size, kv_size, kv_size), inputs=hidden, split="outputs")
        self.o_proj = maker.linear("o_proj", outputs=hidden, inputs=q_size, split="inputs")
        self.gate_up = maker.linear(gate_up, outputs=(inner, inner), inputs=hidden, split="outputs")
        self.down = maker.linear("down_proj", outputs=hidden, inputs=inner, split="inputs")

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache, index: int) -> Tensor:
        config, group = self.config, kv_cache.group_of(index)  # layers of one kind share a block table
        k_cache, v_cache = kv_cache.layer(index)
        h = ops.rms_norm(x, self.norm, config.norm_eps)
        q = ops.qkv_prepare(
            self.qkv(h, batch), batch.positions, num_q_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim, rope=self.rope, q_norm=None, k_norm=None, norm_eps=config.norm_eps,
            k_cache=k_cache, v_cache=v_cache, slot_mapping=batch.slot_mappings[group],
        )  # fmt: skip
        attended = ops.attention(q, k_cache, v_cache, batch, group, scale=self.scale * config.residual_scale)
        x = self.o_proj(attended, batch, residual=x)
        return self.down(self.gate_up.glu(h, "silu", batch), batch, residual=x)


def read_toy(fields: Fields) -> ToyConfig:
    common = read_common(fields)
    fields.expect("attention_bias", False)
    return ToyConfig(
        **common,
        rope=parse_rope(fields, common["head_dim"], common["max_position_embeddings"]),
        residual_scale=fields.number("residual_scale", 1.0, above=0.0),
    )


ARCHITECTURES = (Architecture("ToyForCausalLM", "toy", read_toy, ToyModel),)
