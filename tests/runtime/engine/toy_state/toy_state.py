"""A family for tests: every second layer keeps a recurrent state, in pages of the kind `State`; the others attend to
all tokens."""

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
from runtime.dtype import DType
from runtime.kv.cache import KVCache
from runtime.kv.forms import PageForm, Recurrent
from runtime.linear.recurrent import Mamba
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor

STATE_SIZE, TAPS = 8, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyStateConfig(ModelConfig):
    rope: RopeConfig
    only_states: bool
    recurrence = "mamba"

    def has_state(self, index: int) -> bool:
        return self.only_states or index % 2 == 0


class ToyState(Model):
    config: ToyStateConfig
    prefix = "model."
    harmless = re.compile(r"model\.rotary_emb\.inv_freq")

    def __init__(self, config: ToyStateConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        rope = maker.rope(config.rope)
        self.embed_tokens, self.lm_head = maker.embedding(
            "model.embed_tokens", head="lm_head", rows=config.vocab_size, columns=config.hidden_size, is_tied=True
        )
        self.layers = maker.layers(
            "model.layers", config.num_layers,
            lambda index, maker: StateLayer(config, maker) if config.has_state(index) else Layer(config, maker, rope),
        )  # fmt: skip
        self.norm = maker.vector("model.norm.weight", config.hidden_size)

    def state_form(self, index: int) -> PageForm | None:
        config = self.config
        return StateLayer.form(config, self.dtype) if config.has_state(index) else None

    def embed(self, batch: Batch) -> Tensor:
        return ops.embedding(batch.token_ids, self.embed_tokens)

    def run_layers(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        for index, layer in zip(self.own_layers, self.layers, strict=True):
            x = layer(x, batch, kv_cache, index)
        return x

    def finish(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.norm, self.config.norm_eps)


class StateLayer:
    """x + o_proj(mamba(in_proj(norm(x)))), with a head of the state for each of attention."""

    @staticmethod
    def form(config: ToyStateConfig, activations: DType) -> Recurrent:
        heads, head_dim = config.num_heads, config.head_dim
        return Recurrent(
            channels=heads * head_dim + 2 * STATE_SIZE, taps=TAPS, gates=heads, heads=heads, rows=STATE_SIZE,
            columns=head_dim, activations=activations,
        )  # fmt: skip

    def __init__(self, config: ToyStateConfig, maker: Maker) -> None:
        hidden, heads, inner = config.hidden_size, config.num_heads, config.num_heads * config.head_dim
        channels = inner + 2 * STATE_SIZE
        self.norm, self.norm_eps = maker.vector("norm.weight", hidden), config.norm_eps
        self.in_proj = maker.linear("in_proj", outputs=inner + channels + heads, inputs=hidden)
        self.o_proj = maker.linear("o_proj", outputs=hidden, inputs=inner)
        self.mamba = Mamba(
            conv=maker.taps("conv1d", channels, TAPS), a=maker.decay("A_log", heads),
            dt_bias=maker.exact_vector("dt_bias", heads), d=maker.exact_vector("D", heads),
            norm=maker.vector("mixer_norm.weight", inner), eps=config.norm_eps, num_heads=heads,
            head_dim=config.head_dim, num_groups=1, state_size=STATE_SIZE,
        )  # fmt: skip

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache, index: int) -> Tensor:
        pages, group = kv_cache.layer(index), kv_cache.group_of(index)
        h = self.in_proj(ops.rms_norm(x, self.norm, self.norm_eps), batch)
        return self.o_proj(ops.mamba(h, self.mamba, pages=pages, batch=batch, group=group), batch, residual=x)


class Layer:
    def __init__(self, config: ToyStateConfig, maker: Maker, rope: RopeTable) -> None:
        self.config, self.rope = config, rope
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
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
            num_q_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, rope=self.rope,
            q_norm=None, k_norm=None, norm_eps=config.norm_eps, k_cache=k_cache, v_cache=v_cache,
            slot_mapping=batch.slot_mappings[group],
        )  # fmt: skip
        attended = ops.attention(q, k_cache, v_cache, batch, group, scale=config.head_dim**-0.5)
        return self.o_proj(attended, batch, residual=x)


def read_config(fields: Fields) -> ToyStateConfig:
    common = read_common(fields)
    rope = parse_rope(fields, common["head_dim"], common["max_position_embeddings"])
    return ToyStateConfig(**common, rope=rope, only_states=fields.boolean("only_states", False))


ARCHITECTURES = (Architecture("ToyStateForCausalLM", "toy_state", read_config, ToyState),)
