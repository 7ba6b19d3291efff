"""NomicBERT (Nussbaum et al. 2024, https://arxiv.org/abs/2402.01613): BERT with rotary positions and a gated MLP.

    x = norm(word[ids] + type[types])
    for each layer:   x = norm(x + attention(x));   x = norm(x + down(silu(gate(x)) * up(x)))

Files have GPT-2's names in their config and one map for queries, keys and values; transformers 5 has names of its own,
and classifiers as BERT has them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from models.base import Architecture
from models.classifier import read_labels
from models.configuration.config import read_dtype, read_token_ids, read_vocab_size
from models.configuration.json_fields import Fields
from models.configuration.rope_config import RopeConfig, parse_rope
from models.encoder import Encoder, EncoderConfig
from models.head import Dense
from models.layer_norm import LayerNorm
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.rope_table import RopeTable
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class NomicBertConfig(EncoderConfig):
    rope: RopeConfig


class NomicBertModel(Encoder):
    config: NomicBertConfig
    prefix = "nomic_bert."
    harmless = re.compile(r".*\.inv_freq|.*pooler\.dense\.(weight|bias)|cls\..*")
    renames = MappingProxyType({
        **{
            f"{before}{old}": f"nomic_bert.{new}"
            for before in ("", "bert.", "nomic_bert.")
            for old, new in (
                ("encoder.layers.", "layers."), ("layers.", "layers."), ("emb_ln.", "embeddings.LayerNorm."),
                ("embeddings.", "embeddings."), ("pooler.", "pooler."),
            )
        },
        ".attn.Wqkv.": ".self_attn.Wqkv.", ".attn.out_proj.": ".self_attn.o_proj.", ".mlp.fc11.": ".mlp.up_proj.",
        ".mlp.fc12.": ".mlp.gate_proj.", ".mlp.fc2.": ".mlp.down_proj.", ".norm1.": ".post_attention_layernorm.",
        ".norm2.": ".post_mlp_layernorm.",
    })  # fmt: skip

    def __init__(self, config: NomicBertConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        inner, hidden = maker.under("nomic_bert"), config.hidden_size
        tables, rope = inner.under("embeddings"), maker.rope(config.rope)
        self.words = tables.table("word_embeddings.weight", config.vocab_size, hidden)
        self.types = tables.table("token_type_embeddings.weight", config.type_vocab_size, hidden)
        self.norm = LayerNorm(config, tables.under("LayerNorm"))
        self.layers = inner.layers(
            "layers", config.num_layers, lambda index, maker: NomicBertLayer(config, index, maker, rope)
        )
        if not config.labels:
            return
        last = Dense.of(maker.under("classifier"), len(config.labels), hidden)
        pooler = () if config.labels_tokens else (Dense.of(inner.under("pooler.dense"), hidden, hidden, "tanh"),)
        self.classifier = (*pooler, last)

    def embed(self, batch: Batch) -> Tensor:
        assert batch.token_types is not None, "a pass of an encoder has them"
        return self.norm(ops.add_embedding(ops.embedding(batch.token_ids, self.words), batch.token_types, self.types))


class NomicBertLayer:
    def __init__(self, config: NomicBertConfig, index: int, maker: Maker, rope: RopeTable) -> None:
        self.num_heads, self.head_dim, self.rope = config.num_heads, config.head_dim, rope
        self.scale = config.attention_scales[index]
        hidden, inner = config.hidden_size, config.shard("intermediate_size")
        heads = config.shard("num_heads").times(config.head_dim)
        attention, mlp = maker.under("self_attn"), maker.under("mlp")
        names = ("q_proj", "k_proj", "v_proj")
        attention.note_row_stack("Wqkv", names, (config.head_dim * config.shard("num_heads").whole,) * 3, hidden)
        self.qkv = attention.linear(names, outputs=(heads, heads, heads), inputs=hidden, split="outputs")
        self.proj = attention.linear("o_proj", outputs=hidden, inputs=heads, split="inputs")
        self.norm = LayerNorm(config, maker.under("post_attention_layernorm"))
        self.gate_up = mlp.linear(("gate_proj", "up_proj"), outputs=(inner, inner), inputs=hidden, split="outputs")
        self.down = mlp.linear("down_proj", outputs=hidden, inputs=inner, split="inputs")
        self.mlp_norm = LayerNorm(config, maker.under("post_mlp_layernorm"))

    def __call__(
        self, x: Tensor, batch: Batch, group: int, k_cache: Tensor, v_cache: Tensor, *scales: Tensor
    ) -> Tensor:
        q = ops.qkv_prepare(
            self.qkv(x, batch), batch.positions, num_q_heads=self.num_heads, num_kv_heads=self.num_heads,
            head_dim=self.head_dim, rope=self.rope, q_norm=None, k_norm=None, norm_eps=0.0, k_cache=k_cache,
            v_cache=v_cache, slot_mapping=batch.slot_mappings[group], scales=scales,
        )  # fmt: skip
        attended = ops.attention(q, k_cache, v_cache, batch, group, scale=self.scale, scales=scales)
        x = self.norm(self.proj(attended, batch, residual=x))
        return self.mlp_norm(self.down(self.gate_up.glu(x, "silu", batch), batch, residual=x))


_OLDER = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}  # fmt: skip
_FIXED: dict[str, tuple[Any, ...]] = {
    "prenorm": (False,), "use_rms_norm": (False,), "qkv_proj_bias": (False,), "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,), "rotary_emb_fraction": (1.0, 1), "rotary_emb_interleaved": (False,),
    "rotary_scaling_factor": (), "rotary_emb_scale_base": (), "parallel_block": (False,), "causal": (False,),
    "shared_kv": (False,), "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
    "num_experts": (0,), "use_xentropy": (False, True),
}  # fmt: skip
_NOTES = (
    "max_trained_positions", "pad_vocab_size_multiple", "reorder_and_upcast_attn", "parallel_block_tied_norm",
    "dense_seq_output", "last_layer_subset", "fused_bias_fc", "tie_word_embeddings", "add_cross_attention",
)  # fmt: skip


def read_nomic_bert(fields: Fields, *, labels_texts: bool, labels_tokens: bool) -> NomicBertConfig:
    def name(own: str) -> str:
        if fields.has(own) and fields.has(_OLDER[own]) and own != "hidden_act":  # a file saved by both codes
            fields.expect(_OLDER[own], fields.raw(own))
        return _OLDER[own] if fields.has(_OLDER[own]) and not fields.has(own) else own

    for own, values in _FIXED.items():
        fields.expect(own, *values)
    for own in _NOTES:
        fields.raw(own)
    hidden = fields.integer(name("hidden_size"), most=1 << 20)
    heads = fields.integer(name("num_attention_heads"), most=1 << 16)
    num_layers = fields.integer(name("num_hidden_layers"), most=1 << 14)
    if hidden % heads or hidden // heads % 2:
        raise fields.error(name("num_attention_heads"), f"= {heads} must divide {hidden} into even heads")
    head_dim = hidden // heads
    fields.expect("head_dim", head_dim)
    fields.expect(name("hidden_act"), "silu", "swiglu")
    positions = fields.integer(name("max_position_embeddings"), 2048)
    rope = parse_rope(fields, head_dim, positions, default_theta=1000.0, theta_name="rotary_emb_base")
    return NomicBertConfig(
        hidden_size=hidden, num_layers=num_layers, num_heads=heads, num_kv_heads=heads, head_dim=head_dim,
        intermediate_size=fields.integer(name("intermediate_size"), most=1 << 24), vocab_size=read_vocab_size(fields),
        max_position_embeddings=positions,
        norm_eps=fields.number(name("layer_norm_eps"), 1e-12, least=0.0, most=1.0), activation="silu",
        tie_word_embeddings=True, layer_windows=(None,) * num_layers, attention_scales=(head_dim**-0.5,) * num_layers,
        dtype=read_dtype(fields), **read_token_ids(fields),
        type_vocab_size=fields.integer("type_vocab_size", 2, most=1 << 10), rope=rope,
        pooling="cls" if labels_texts else "mean", labels_tokens=labels_tokens,
        labels=read_labels(fields) if labels_texts or labels_tokens else (),
    )  # fmt: skip


ARCHITECTURES = tuple(
    Architecture(
        name, "nomic_bert", partial(read_nomic_bert, labels_texts=texts, labels_tokens=tokens), NomicBertModel
    )
    for name, texts, tokens in (
        ("NomicBertModel", False, False),
        ("NomicBertForMaskedLM", False, False),
        ("NomicBertForSequenceClassification", True, False),
        ("NomicBertForTokenClassification", False, True),
    )
)  # fmt: skip
