"""ModernBERT (Warner et al. 2024, https://arxiv.org/abs/2412.13663).

    x = norm(word[ids])
    for each layer:   x = x + attention(norm(x));   x = x + down(gelu(input) * gate)      or SiLU, as in Granite's
    x = norm(x)

The first layer's attention reads x itself. Full layers and layers with a window, half of it on each side, have
rotations of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from models.base import Architecture
from models.classifier import read_labels
from models.configuration.config import GELU_NAMES, read_choice
from models.configuration.json_fields import Fields
from models.configuration.rope_config import RopeConfig, parse_rope
from models.encoder import Encoder, EncoderConfig
from models.families.encoders.bert import read_encoder
from models.head import Dense, RowNorm, Stage
from models.layer_norm import LayerNorm
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.pooling import SPAN_LABELS
from runtime.rope_table import RopeTable
from runtime.tensor.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertConfig(EncoderConfig):
    layer_ropes: tuple[RopeConfig, ...]
    has_bias: tuple[bool, bool, bool]  # of attention, the MLP, the norms
    head_bias: bool
    head_activation: str


class ModernBertModel(Encoder):
    config: ModernBertConfig
    prefix = "model."
    harmless = re.compile(r"(head|decoder|classifier)\..*")

    def __init__(self, config: ModernBertConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        inner, hidden, bias = maker.under("model"), config.hidden_size, config.has_bias[2]
        tables = inner.under("embeddings")
        self.words = tables.table("tok_embeddings.weight", config.vocab_size, hidden)
        self.norm = LayerNorm(config, tables.under("norm"), has_bias=bias)
        ropes = {rope: maker.rope(rope) for rope in dict.fromkeys(config.layer_ropes)}
        self.layers = inner.layers(
            "layers", config.num_layers,
            lambda index, maker: ModernBertLayer(config, index, maker, ropes[config.layer_ropes[index]]),
        )  # fmt: skip
        self.final_norm = LayerNorm(config, inner.under("final_norm"), has_bias=bias)
        if not config.labels:
            return
        self.classifier = (
            *prediction_head(config, maker.under("head")),
            Dense.of(maker.under("classifier"), len(config.labels), hidden),
        )

    def embed(self, batch: Batch) -> Tensor:
        return self.norm(ops.embedding(batch.token_ids, self.words))

    def finish(self, x: Tensor) -> Tensor:
        return self.final_norm(x)


def prediction_head(config: ModernBertConfig, maker: Maker) -> tuple[Stage, Stage]:
    """The stages between hidden states and a classifier's, or an output head's, last map."""
    hidden, norm = config.hidden_size, maker.under("norm")
    bias = norm.vector("bias", hidden) if config.has_bias[2] else None
    dense = Dense.of(maker.under("dense"), hidden, hidden, config.head_activation, has_bias=config.head_bias)
    return dense, RowNorm(norm.vector("weight", hidden), bias, config.norm_eps)


class ModernBertLayer:
    def __init__(self, config: ModernBertConfig, index: int, maker: Maker, rope: RopeTable) -> None:
        attention_bias, mlp_bias, norm_bias = config.has_bias
        self.num_heads, self.head_dim, self.rope = config.num_heads, config.head_dim, rope
        self.scale, self.window = config.attention_scales[index], config.layer_windows[index]
        name = config.activation
        self.gate = cast(ops.Gate, name if name == "silu" else f"gelu_{name}")
        hidden, inner = config.hidden_size, config.shard("intermediate_size")
        heads = config.shard("num_heads").times(config.head_dim)
        norm = partial(LayerNorm, config, has_bias=norm_bias)
        self.norm = norm(maker.under("attn_norm")) if index else None
        self.qkv = maker.linear(
            "attn.Wqkv", outputs=(heads, heads, heads), inputs=hidden, has_bias=attention_bias, split="outputs"
        )
        self.proj = maker.linear("attn.Wo", outputs=hidden, inputs=heads, has_bias=attention_bias, split="inputs")
        self.mlp_norm = norm(maker.under("mlp_norm"))
        self.up = maker.linear("mlp.Wi", outputs=(inner, inner), inputs=hidden, has_bias=mlp_bias, split="outputs")
        self.down = maker.linear("mlp.Wo", outputs=hidden, inputs=inner, has_bias=mlp_bias, split="inputs")

    def __call__(
        self, x: Tensor, batch: Batch, group: int, k_cache: Tensor, v_cache: Tensor, *scales: Tensor
    ) -> Tensor:
        h = x if self.norm is None else self.norm(x)
        q = ops.qkv_prepare(
            self.qkv(h, batch), batch.positions, num_q_heads=self.num_heads, num_kv_heads=self.num_heads,
            head_dim=self.head_dim, rope=self.rope, q_norm=None, k_norm=None, norm_eps=0.0, k_cache=k_cache,
            v_cache=v_cache, slot_mapping=batch.slot_mappings[group], scales=scales,
        )  # fmt: skip
        attended = ops.attention(q, k_cache, v_cache, batch, group, scale=self.scale, window=self.window, scales=scales)
        x = self.proj(attended, batch, residual=x)
        return self.down(ops.glu(self.up(self.mlp_norm(x), batch), self.gate), batch, residual=x)


LabelHead = Literal["", "text", "tokens", "spans"]
"""A classifier's labels are a text's, each token's, or answers' starts and ends; "" for none."""


def read_modernbert(fields: Fields, label_head: LabelHead) -> ModernBertConfig:
    values: dict[str, Any] = read_encoder(
        fields, eps_name="norm_eps", default_eps=1e-5, activation_name="hidden_activation"
    )
    positions = fields.integer("max_position_embeddings", 8192)
    head_dim, num_layers = values["head_dim"], values["num_layers"]
    half = fields.integer("local_attention", 128) // 2
    every = fields.integer("global_attn_every_n_layers", 3)
    kinds = fields.strings("layer_types") or tuple(
        "sliding_attention" if index % every else "full_attention" for index in range(num_layers)
    )
    if len(kinds) != num_layers or not {*kinds} <= {"full_attention", "sliding_attention"}:
        raise fields.error(
            "layer_types", f"{kinds!r:.80} must be full_attention or sliding_attention for each of {num_layers} layers"
        )
    full = parse_rope(
        fields, head_dim, positions, layer_type="full_attention", default_theta=160_000.0,
        theta_name="global_rope_theta",
    )  # fmt: skip
    sliding = parse_rope(
        fields, head_dim, positions, layer_type="sliding_attention", default_theta=10_000.0,
        theta_name="local_rope_theta",
    )  # fmt: skip
    for name in _NOTES:
        fields.raw(name)
    fields.expect("position_embedding_type", "absolute")  # older files' word for any that the code does not read
    bias = tuple(fields.boolean(name, False) for name in ("attention_bias", "mlp_bias", "norm_bias"))
    return ModernBertConfig(
        **{**values, "layer_windows": tuple(None if kind == "full_attention" else half + 1 for kind in kinds)},
        max_position_embeddings=positions,
        layer_ropes=tuple(full if kind == "full_attention" else sliding for kind in kinds),
        has_bias=(bias[0], bias[1], bias[2]),
        pooling=read_choice(fields, "classifier_pooling", "cls", {"cls": "cls", "mean": "mean"}),  # type: ignore[arg-type]
        labels=SPAN_LABELS if label_head == "spans" else read_labels(fields) if label_head else (),
        labels_tokens=label_head in ("tokens", "spans"),
        head_bias=fields.boolean("classifier_bias", False),
        head_activation=read_choice(fields, "classifier_activation", "gelu", _HEAD_ACTIVATIONS),
    )


_NOTES = (
    "decoder_bias", "sparse_prediction", "sparse_pred_ignore_index",  # of the head of masked tokens
    "layer_norm_eps", "repad_logits_with_grad", "reference_compile", "deterministic_flash_attn",
)  # fmt: skip
_GELUS = {"erf": "erf", "tanh": "gelu_tanh", "sigmoid": "gelu_sigmoid"}
_HEAD_ACTIVATIONS = {
    **{name: _GELUS[kind] for name, kind in GELU_NAMES.items()}, "silu": "silu", "relu": "relu", "tanh": "tanh",
}  # fmt: skip
"""Names of config.json by those of `models.head.ACTIVATIONS`."""

ARCHITECTURES = tuple(
    Architecture(name, "modernbert", partial(read_modernbert, label_head=cast(LabelHead, head)), ModernBertModel)
    for name, head in (
        ("ModernBertModel", ""), ("ModernBertForMaskedLM", ""), ("ModernBertForSequenceClassification", "text"),
        ("ModernBertForTokenClassification", "tokens"), ("ModernBertForQuestionAnswering", "spans"),
    )
)  # fmt: skip
