"""Llama, Mistral, Qwen2 and Qwen3: one decoder family.

    x = embed(ids)
    for each layer:   x = x + attention(rms_norm(x));   x = x + mlp(rms_norm(x))
    logits = lm_head(rms_norm(x))

with `mlp(h) = down(silu(gate(h)) * up(h))` and causal grouped-query attention over rotated queries and
keys. What differs, and stands in the config: biases of the projections (Qwen2: query, key and value),
RMSNorm over each head of queries and keys (Qwen3), sliding windows (Mistral, some Qwen), the scaling of the
rotary frequencies (Llama 3).

Sources: Touvron et al. 2023 (arXiv 2302.13971), Jiang et al. 2023 (2310.06825), Qwen2 (2407.10671), Qwen3
(2505.09388).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from models.architecture import Architecture
from models.base import Model
from models.config import ModelConfig, agree_with_layer_types, read_common, read_layer_types
from models.json_fields import Fields
from models.maker import Maker
from models.rope_config import RopeConfig, parse_rope
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    rope: RopeConfig
    attention_bias: bool = False  # of the query, key and value projections
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of queries and keys


class LlamaModel(Model):
    """A decoder of the Llama family."""

    config: LlamaConfig
    prefix = "model."
    harmless = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

    def __init__(self, config: LlamaConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        self.rope = maker.rope(config.rope)
        self.embed_tokens, self.lm_head = maker.embedding(
            "model.embed_tokens",
            head="lm_head",
            rows=config.vocab_size,
            columns=config.hidden_size,
            is_tied=config.tie_word_embeddings,
        )
        self.layers = [
            DecoderLayer(config, index, maker.under(f"model.layers.{index}"), self.rope)
            for index in range(config.num_layers)
        ]
        self.norm = maker.vector("model.norm.weight", config.hidden_size)

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        # The residual stream, [num_tokens, hidden_size] throughout.
        x = ops.embedding(batch.token_ids, self.embed_tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, batch, *kv_cache.layer(index))
        return ops.rms_norm(x, self.norm, self.config.norm_eps)


class DecoderLayer:
    """Attention, then the gated MLP, each added to the residual stream."""

    def __init__(self, config: LlamaConfig, index: int, maker: Maker, rope: RopeTable) -> None:
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = head_dim
        self.norm_eps = config.norm_eps
        self.window, self.scale = config.layer_windows[index], config.attention_scales[index]
        self.rope = rope
        attention, mlp = maker.under("self_attn"), maker.under("mlp")
        self.input_norm = maker.vector("input_layernorm.weight", hidden)
        self.qkv_proj = attention.linear(
            ("q_proj", "k_proj", "v_proj"),
            outputs=(q_size, kv_size, kv_size),
            inputs=hidden,
            has_bias=config.attention_bias,
            split="outputs",
        )
        self.q_norm = attention.vector("q_norm.weight", head_dim) if config.qk_norm else None
        self.k_norm = attention.vector("k_norm.weight", head_dim) if config.qk_norm else None
        self.o_proj = attention.linear(
            "o_proj", outputs=hidden, inputs=q_size, has_bias=config.attention_output_bias, split="inputs"
        )
        self.mlp_norm = maker.vector("post_attention_layernorm.weight", hidden)
        self.gate_up_proj = mlp.linear(
            ("gate_proj", "up_proj"),
            outputs=(inner, inner),
            inputs=hidden,
            has_bias=config.mlp_bias,
            split="outputs",
        )
        self.down_proj = mlp.linear(
            "down_proj", outputs=hidden, inputs=inner, has_bias=config.mlp_bias, split="inputs"
        )

    def __call__(self, x: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """`x [num_tokens, hidden_size]` -> the same shape."""
        qkv = self.qkv_proj(ops.rms_norm(x, self.input_norm, self.norm_eps))
        q = ops.qkv_prepare(  # [num_tokens, num_heads, head_dim]
            qkv,
            batch.positions,
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope=self.rope,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            norm_eps=self.norm_eps,
            k_cache=k_cache,
            v_cache=v_cache,
            slot_mapping=batch.slot_mappings[0],
        )
        attended = ops.attention(q, k_cache, v_cache, batch, 0, scale=self.scale, window=self.window)
        x = self.o_proj(attended, residual=x)
        hidden = self.gate_up_proj.glu(ops.rms_norm(x, self.mlp_norm, self.norm_eps), "silu")
        return self.down_proj(hidden, residual=x)


def read_llama(fields: Fields) -> LlamaConfig:
    fields.expect("sliding_window")
    has_bias = fields.boolean("attention_bias", False)
    return _config(
        fields,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def read_mistral(fields: Fields) -> LlamaConfig:
    """A window in every layer, unless the file says null."""
    _expect_no_bias(fields, "attention_bias", "mlp_bias")
    fields.expect("use_sliding_window", True)
    window = fields.integer("sliding_window", None if "sliding_window" in fields else 4096)
    return _config(fields, windows=lambda layer: window)


def read_qwen2(fields: Fields) -> LlamaConfig:
    """Its query, key and value always have biases, its output never."""
    fields.expect("attention_bias", True)
    _expect_no_bias(fields, "mlp_bias")
    return _config(fields, attention_bias=True, windows=_windows_of_qwen(fields))


def read_qwen3(fields: Fields) -> LlamaConfig:
    _expect_no_bias(fields, "mlp_bias")
    fields.expect("use_qk_norm", True)
    has_bias = fields.boolean("attention_bias", False)
    return _config(
        fields,
        default_head_dim=128,
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        qk_norm=True,
        windows=_windows_of_qwen(fields),
    )


def _config(
    fields: Fields,
    *,
    windows: Callable[[int], int | None] = lambda layer: None,
    default_head_dim: int | None = None,
    **own: Any,
) -> LlamaConfig:
    common = read_common(fields, default_head_dim=default_head_dim)
    common["layer_windows"] = agree_with_layer_types(fields, tuple(map(windows, range(common["num_layers"]))))
    rope = parse_rope(fields, common["head_dim"], common["max_position_embeddings"])
    return LlamaConfig(**common, **own, rope=rope)


def _expect_no_bias(fields: Fields, *names: str) -> None:
    for name in names:
        fields.expect(name, False)


def _windows_of_qwen(fields: Fields) -> Callable[[int], int | None]:
    """The window of a layer: none unless `use_sliding_window`, then that of the layers that `layer_types` names, or of
    those from `max_window_layers` on."""
    is_used = fields.boolean("use_sliding_window", False)
    window = fields.integer("sliding_window", None if "sliding_window" in fields else 4096)
    first = fields.integer("max_window_layers", 28, least=0)
    if not is_used:
        return lambda layer: None
    if fields.has("layer_types"):
        kinds = read_layer_types(fields, fields.integer("num_hidden_layers")) or []
        return lambda layer: window if kinds[layer] == "sliding_attention" else None
    return lambda layer: window if layer >= first else None


ARCHITECTURES = (
    Architecture("LlamaForCausalLM", "llama", read_llama, LlamaModel),
    Architecture("MistralForCausalLM", "mistral", read_mistral, LlamaModel),
    Architecture("Qwen2ForCausalLM", "qwen2", read_qwen2, LlamaModel),
    Architecture("Qwen3ForCausalLM", "qwen3", read_qwen3, LlamaModel),
)
