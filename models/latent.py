"""Latent attention (MLA, DeepSeek-V2, https://arxiv.org/abs/2405.04434): one row is kept of each token, and all heads
make their keys and values from it.

    row[j] = [rotated k | norm(c)]      by one map of x
    q[h]   = [rotated part | K_h^T q_h]      K_h: the map from c to the head's keys
    out[h] = V_h sum_j softmax_j(scale q[h] . row[j]) c[j]      V_h: the map from c to the head's values

So K_h and V_h are absorbed into the neighbouring maps (`Maker.latent_maps`), and attention is that of many query
heads with one key head, whose values are parts of its keys. Ranks share out the query heads; each has all latent rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.decoder import DecoderConfig
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.kv.cache import KVCache
from runtime.linear.norm import RmsNorm
from runtime.ops import RopeTable
from runtime.tensor.tensor import Tensor

_INNER_EPS = 1e-6  # of the norms between maps, whatever `rms_norm_eps` is


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentForm:
    """Sizes of latent attention.

    Attributes:
        query_rank: columns between the two maps of queries; 0 if there is one map.
        latent_dim: the part of a row that keys and values are made from.
        rotary_dim: the rotated part of a row, and of each query.
        key_dim, value_dim: of a head, without the rotated part.
    """

    query_rank: int
    latent_dim: int
    rotary_dim: int
    key_dim: int
    value_dim: int

    @property
    def row_dim(self) -> int:
        """Numbers of a row in the pages."""
        return self.rotary_dim + self.latent_dim


class LatentAttention:
    """Causal latent attention between its projections, after a norm."""

    def __init__(
        self, config: DecoderConfig, form: LatentForm, index: int, maker: Maker, rope: RopeTable, input_norm: RmsNorm
    ) -> None:
        hidden, heads, has_bias = config.hidden_size, config.shard("num_heads"), config.attention_bias
        self.index, self.rope, self.form, self.num_heads = index, rope, form, heads.count
        self.scale, self.input_norm = config.attention_scales[index], input_norm
        query_size = heads.times(form.key_dim + form.rotary_dim)
        self.q_a_proj = None
        if form.query_rank:
            self.q_a_proj = maker.linear("q_a_proj", outputs=form.query_rank, inputs=hidden, has_bias=has_bias)
            norm = maker.rms_norm("q_a_layernorm.weight", form.query_rank, _INNER_EPS)
            self.q_proj = maker.linear(
                "q_b_proj", outputs=query_size, inputs=form.query_rank, split="outputs", norm=norm
            )
        else:
            self.q_proj = maker.linear("q_proj", outputs=query_size, inputs=hidden, split="outputs")
        self.kv_a_proj = maker.linear(
            "kv_a_proj_with_mqa", outputs=form.latent_dim + form.rotary_dim, inputs=hidden, has_bias=has_bias
        )
        self.latent_norm = maker.rms_norm("kv_a_layernorm.weight", form.latent_dim, _INNER_EPS)
        self.key_maps, self.value_maps = maker.latent_maps(
            "kv_b_proj", heads=heads, key_dim=form.key_dim, value_dim=form.value_dim, rotary_dim=form.rotary_dim,
            latent_dim=form.latent_dim,
        )  # fmt: skip
        self.o_proj = maker.linear(
            "o_proj", outputs=hidden, inputs=heads.times(form.value_dim), has_bias=has_bias, split="inputs"
        )
        self.routing = maker.head_routing(heads.count)

    def __call__(self, x: Tensor, batch: Batch, kv_cache: KVCache, *, residual: Tensor | None = None) -> Tensor:
        form, tokens = self.form, x.shape[0]
        group = kv_cache.group_of(self.index)
        (pages,) = kv_cache.layer(self.index)
        by_head = self.routing.of(tokens)
        x = ops.rms_norm(x, self.input_norm.weight, self.input_norm.eps)
        q = self.q_proj(
            x if self.q_a_proj is None else self.q_a_proj(x, batch), batch
        )  # [num_tokens, heads * (key + rotary)]
        q = ops.expert_linear(q.view(tokens * self.num_heads, -1), by_head, self.key_maps)
        q = ops.latent_prepare(
            q.view(tokens, self.num_heads, form.row_dim), self.kv_a_proj(x, batch), batch.positions, rope=self.rope,
            norm=self.latent_norm, pages=pages, slot_mapping=batch.slot_mappings[group],
        )  # fmt: skip
        attended = ops.latent_attention(q, pages, batch, group, scale=self.scale, value_dim=form.latent_dim)
        values = ops.expert_linear(attended.view(tokens * self.num_heads, -1), by_head, self.value_maps)
        return self.o_proj(values.view(tokens, -1), batch, residual=residual)
