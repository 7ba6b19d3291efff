"""GPT-2 (Radford et al. 2019).

    x = wte[ids] + wpe[positions]
    for each layer:   x = x + attention(layer_norm(x));   x = x + mlp(layer_norm(x))
    logits = lm_head(layer_norm(x))

with `mlp(h) = proj(gelu(fc(h)))`, biases everywhere, causal multi-head attention, and an output head that
is usually the embedding itself. Its checkpoints store matrices as `[inputs, outputs]` (the "Conv1D" of the
original code).
"""

from __future__ import annotations

import re
from typing import Literal, cast

from models.base import Architecture, Model
from models.configuration.config import (
    GELU_NAMES,
    ModelConfig,
    read_choice,
    read_dtype,
    read_token_ids,
    read_vocab_size,
)
from models.configuration.json_fields import REQUIRED, Fields
from models.layer_norm import LayerNorm
from models.makers.declaration import Width
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.linear.linear import Linear
from runtime.linear.options import Split
from runtime.tensor.tensor import Tensor


class GPT2Model(Model):
    """GPT-2 with any of its three GELUs."""

    prefix = "transformer."
    harmless = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")  # the causal mask

    def __init__(self, config: ModelConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        self.wte, self.lm_head = maker.embedding(
            "transformer.wte",
            head="lm_head",
            rows=config.vocab_size,
            columns=config.hidden_size,
            is_tied=config.tie_word_embeddings,
        )
        inner = maker.under("transformer")
        if maker.is_first:
            self.wpe = inner.table("wpe.weight", config.max_position_embeddings, config.hidden_size)
        self.layers = inner.layers("h", config.num_layers, lambda index, maker: Block(config, index, maker))
        if maker.is_last:
            self.ln_f = LayerNorm(config, inner.under("ln_f"))

    def embed(self, batch: Batch) -> Tensor:
        x = self.look_up(batch, self.wte)
        return ops.add_embedding(x, batch.positions, self.wpe)

    def run_layers(self, x: Tensor, batch: Batch, kv_cache: KVCache) -> Tensor:
        for index, layer in zip(self.own_layers, self.layers, strict=True):
            x = layer(x, batch, *kv_cache.layer(index))
        return x

    def finish(self, x: Tensor) -> Tensor:
        return self.ln_f(x)


class Block:
    """Attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, maker: Maker) -> None:
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.scale = config.attention_scales[index]
        self.gelu_kind = cast(Literal["erf", "tanh", "sigmoid"], config.activation)

        def conv1d(name: str, outputs: tuple[Width, ...], inputs: Width, split: Split) -> Linear:
            return maker.linear(name, outputs=outputs, inputs=inputs, has_bias=True, is_transposed=True, split=split)

        hidden, inner = config.hidden_size, config.shard("intermediate_size")
        heads = config.shard("num_heads").times(config.head_dim)
        self.ln_1 = LayerNorm(config, maker.under("ln_1"))
        self.c_attn = conv1d("attn.c_attn", (heads, heads, heads), hidden, "outputs")
        self.attn_proj = conv1d("attn.c_proj", (hidden,), heads, "inputs")
        self.ln_2 = LayerNorm(config, maker.under("ln_2"))
        self.c_fc = conv1d("mlp.c_fc", (inner,), hidden, "outputs")
        self.mlp_proj = conv1d("mlp.c_proj", (hidden,), inner, "inputs")

    def __call__(self, x: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor, *scales: Tensor) -> Tensor:
        """`x [num_tokens, hidden_size]` -> the same shape."""
        q = ops.qkv_prepare(  # [num_tokens, num_heads, head_dim]
            self.c_attn(self.ln_1(x), batch),
            batch.positions,
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            rope=None,
            q_norm=None,
            k_norm=None,
            norm_eps=0.0,
            k_cache=k_cache,
            v_cache=v_cache,
            slot_mapping=batch.slot_mappings[0],
            scales=scales,
        )
        attended = ops.attention(q, k_cache, v_cache, batch, 0, scale=self.scale, scales=scales)
        x = self.attn_proj(attended, batch, residual=x)
        inner = self.c_fc(self.ln_2(x), batch)
        return self.mlp_proj(ops.gelu(inner, self.gelu_kind, out=inner), batch, residual=x)


def read_gpt2(fields: Fields) -> ModelConfig:
    hidden_size = _either(fields, "n_embd", "hidden_size", most=1 << 20)
    num_heads = _either(fields, "n_head", "num_attention_heads", most=1 << 16)
    num_layers = _either(fields, "n_layer", "num_hidden_layers", most=1 << 14)
    if hidden_size % num_heads:
        raise fields.error("n_head", f"= {num_heads} must divide n_embd = {hidden_size}")
    head_dim = hidden_size // num_heads
    scale = head_dim**-0.5 if fields.boolean("scale_attn_weights", True) else 1.0
    is_by_layer = fields.boolean("scale_attn_by_inverse_layer_idx", False)
    return ModelConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("n_inner", 4 * hidden_size, most=1 << 24),
        vocab_size=read_vocab_size(fields),
        max_position_embeddings=_either(fields, "n_positions", "max_position_embeddings"),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5, least=0.0, most=1.0),
        activation=read_choice(fields, "activation_function", "gelu_new", GELU_NAMES),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", True),
        layer_windows=(None,) * num_layers,
        attention_scales=tuple(scale / (layer + 1) if is_by_layer else scale for layer in range(num_layers)),
        dtype=read_dtype(fields),
        **read_token_ids(fields),
    )


def _either(fields: Fields, name: str, other: str, *, most: int = 1 << 30) -> int:
    """A field that GPT-2's configs spell in either of two ways."""
    value = fields.integer(name, None, most=most)
    other_value = fields.integer(other, None, most=most)
    if value is None and other_value is None:
        return int(fields.integer(name, REQUIRED))
    if value is not None and other_value is not None and value != other_value:
        raise fields.error(name, f"is {value}, but {other} is {other_value}")
    return int(value if value is not None else other_value)


ARCHITECTURES = (Architecture("GPT2LMHeadModel", "gpt2", read_gpt2, GPT2Model),)
