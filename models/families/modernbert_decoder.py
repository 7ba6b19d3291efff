"""ModernBERT's decoder (Ettin, https://arxiv.org/abs/2507.11412): ModernBERT's layers over earlier tokens alone, and a
head of a map, an activation and a norm before the token table.

    x = norm(word[ids]);  x = x + attention(norm(x));  x = x + down(gelu(input) * gate)
    logits = table norm(gelu(dense(norm(x)))) + bias

The first layer's attention reads x itself. Layers with a window have rotations of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

from models.base import Architecture
from models.configuration.config import GELU_NAMES, SILU_NAMES, read_choice, read_common, read_windows
from models.configuration.json_fields import Fields
from models.configuration.rope_config import parse_rope
from models.decoder import DecoderConfig, Layer
from models.layer_norm import LayerNormDecoder, LayerNormLayer
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import AdaptedRows, Batch
from runtime.errors import InvalidArgumentError
from runtime.tensor.tensor import Tensor

_ACTIVATIONS = {**GELU_NAMES, **SILU_NAMES}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertDecoderConfig(DecoderConfig):
    """`norm_bias`, `dense_bias`: whether norms and the head's map have biases."""

    norm_bias: bool
    dense_bias: bool
    dense_activation: str


class ModernBertDecoder(LayerNormDecoder):
    config: ModernBertDecoderConfig
    table_name, norm_name, head_name = "embeddings.tok_embeddings", "final_norm", "decoder"

    def __init__(self, config: ModernBertDecoderConfig, maker: Maker) -> None:
        self.norms_have_biases = config.norm_bias
        super().__init__(config, maker)
        if maker.is_first:
            self.embedding_norm = self.make_norm("embeddings.norm", maker.under(self.root))
        if maker.is_last and self.generates:
            head, hidden = maker.under("lm_head"), config.hidden_size
            self.dense = head.linear("dense", outputs=hidden, inputs=hidden, has_bias=config.dense_bias)
            self.dense_norm = self.make_norm("norm", head)

    def make_layer(self, index: int, maker: Maker) -> Layer:
        attention = self.attention(index, maker, under="attn", output="Wo")
        norm = self.make_norm("attn_norm", maker) if index else None
        return LayerNormLayer(
            attention, ModernBertMlp(self.config, maker.under("mlp")), norm, self.make_norm("mlp_norm", maker)
        )

    def embed(self, batch: Batch) -> Tensor:
        x = self.embedding_norm(self.look_up(batch, self.embed_tokens))
        batch.keep(0, x)
        return x

    def compute_logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        x = self.dense(hidden, AdaptedRows(adapters))
        name = self.config.dense_activation
        x = ops.silu(x, out=x) if name == "silu" else ops.gelu(x, cast(Literal["erf", "tanh", "sigmoid"], name), out=x)
        return super().compute_logits(self.dense_norm(x), adapters)


class HeadlessModernBertDecoder(ModernBertDecoder):
    """Hidden states alone: the token table by itself would be no head."""

    generates = False

    def compute_logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Tensor:
        raise InvalidArgumentError(f"{self.config.architecture} has no logits of tokens")


class ModernBertMlp:
    def __init__(self, config: DecoderConfig, maker: Maker) -> None:
        hidden, inner, has_bias = config.hidden_size, config.shard("intermediate_size"), config.mlp_bias
        self.gate = cast(ops.Gate, config.activation if config.activation == "silu" else f"gelu_{config.activation}")
        self.up = maker.linear("Wi", outputs=(inner, inner), inputs=hidden, has_bias=has_bias, split="outputs")
        self.down = maker.linear("Wo", outputs=hidden, inputs=inner, has_bias=has_bias, split="inputs")

    def __call__(self, x: Tensor, batch: Batch, *, residual: Tensor | None = None) -> Tensor:
        return self.down(ops.glu(self.up(x, batch), self.gate), batch, residual=residual)


def read_modernbert_decoder(fields: Fields) -> ModernBertDecoderConfig:
    common = read_common(
        fields, default_max_positions=8192, norm_eps_name="norm_eps", default_norm_eps=1e-5,
        activation_name="hidden_activation", activations=_ACTIVATIONS, default_activation="gelu",
        default_tie_word_embeddings=True,
    )  # fmt: skip
    fields.expect("num_key_value_heads", common["num_heads"])
    fields.expect("head_dim", common["hidden_size"] // common["num_heads"])
    local = fields.integer("local_attention", 128)
    fields.default({"sliding_window": local // 2})
    every = fields.integer("global_attn_every_n_layers", 3)
    kinds = ["sliding_attention" if index % every else "full_attention" for index in range(common["num_layers"])]
    fields.default({"layer_types": kinds})
    common["layer_windows"] = windows = read_windows(fields, common["num_layers"], every)
    full, sliding = (
        parse_rope(
            fields, common["head_dim"], common["max_position_embeddings"], layer_type=f"{kind}_attention",
            default_theta=theta, theta_name=name,
        )
        for kind, theta, name in (
            ("full", 160_000.0, "global_rope_theta"), ("sliding", 10_000.0, "local_rope_theta"),
        )
    )  # fmt: skip
    for note in ("position_embedding_type", "cls_token_id", "sep_token_id"):
        fields.raw(note)
    bias = fields.boolean("attention_bias", False)
    return ModernBertDecoderConfig(
        **common, layer_ropes=tuple(full if window is None else sliding for window in windows),
        attention_bias=bias, attention_output_bias=bias, mlp_bias=fields.boolean("mlp_bias", False),
        head_bias=fields.boolean("decoder_bias", True), norm_bias=fields.boolean("norm_bias", False),
        dense_bias=fields.boolean("classifier_bias", False),
        dense_activation=read_choice(fields, "classifier_activation", "gelu", _ACTIVATIONS),
    )  # fmt: skip


def _read_headless(fields: Fields) -> ModernBertDecoderConfig:
    return replace(read_modernbert_decoder(fields), tie_word_embeddings=True, head_bias=False)


ARCHITECTURES = (
    Architecture("ModernBertDecoderForCausalLM", "modernbert-decoder", read_modernbert_decoder, ModernBertDecoder),
    Architecture("ModernBertDecoderModel", "modernbert-decoder", _read_headless, HeadlessModernBertDecoder),
)
