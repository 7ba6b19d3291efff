"""BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805), XLM-RoBERTa (https://arxiv.org/abs/1911.02116), ELECTRA.

    x = norm(word[ids] + position[positions] + type[types])
    for each layer:   x = norm(x + attention(x));   x = norm(x + down(gelu(up(x))))

RoBERTa's positions begin after the padding's id, and it has one type. ELECTRA's embeddings may be narrower than its
layers. A classifier reads the first token: BERT's through the pooler, the others' through a map of their own. A
classifier of tokens reads each by one map. So does a model that answers questions: its labels are an answer's start and
end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, cast

from models.base import Architecture
from models.classifier import CLASSIFYING, OF_SPANS, OF_TOKENS, read_labels
from models.configuration.config import (
    GELU_NAMES,
    SILU_NAMES,
    read_choice,
    read_dtype,
    read_token_ids,
    read_vocab_size,
)
from models.configuration.json_fields import Fields
from models.encoder import Encoder, EncoderConfig
from models.head import Dense
from models.layer_norm import LayerNorm
from models.makers.maker import Maker
from runtime import ops
from runtime.batch import Batch
from runtime.dtype import DType
from runtime.linear.linear import Linear
from runtime.pooling import SPAN_LABELS
from runtime.tensor.tensor import Tensor

ACTIVATIONS = {**GELU_NAMES, **SILU_NAMES}
"""The names of activations in config.json, by the names that `activated` takes."""

LabelHead = Literal["", "pooler", "dense", "distil", "electra", "tokens", "spans"]
"""A classifier's way to the first token: BERT's pooler, RoBERTa's own map, DistilBERT's, ELECTRA's; or to all tokens,
for labels or for the spans of answers; "" for a model without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(EncoderConfig):
    """`first_position`: the row of the first token in the table of `position_rows`. `embedding_size`: columns of the
    tables."""

    embedding_size: int
    first_position: int
    position_rows: int
    label_head: LabelHead = ""


class BertModel(Encoder):
    config: BertConfig
    prefix = "bert."
    harmless = re.compile(r".*\.embeddings\.position_ids|.*pooler\.dense\.(weight|bias)|cls\..*|lm_head\..*")
    renames = MappingProxyType({".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"})
    root = "bert"

    def __init__(self, config: BertConfig, maker: Maker) -> None:
        super().__init__(config, maker)
        inner, hidden, size = maker.under(self.root), config.hidden_size, config.embedding_size
        tables = inner.under("embeddings")
        self.words = tables.table("word_embeddings.weight", config.vocab_size, size)
        self.positions = tables.table("position_embeddings.weight", config.position_rows, size)
        self.types: Tensor | None = None
        if config.type_vocab_size:
            self.types = tables.table("token_type_embeddings.weight", config.type_vocab_size, size)
        self.norm = LayerNorm(replace(config, hidden_size=size), tables.under("LayerNorm"))
        self.widen: Linear | None = None
        if size != hidden:
            self.widen = inner.linear("embeddings_project", outputs=hidden, inputs=size, has_bias=True)
        self.layers = inner.under("encoder").layers(
            "layer", config.num_layers, lambda index, maker: BertLayer(config, index, maker)
        )
        if config.label_head in ("tokens", "spans"):
            name = "classifier" if config.label_head == "tokens" else "qa_outputs"
            self.classifier = (Dense.of(maker.under(name), len(config.labels), hidden),)
            return
        if config.label_head == "distil":
            dense, last = maker.under("pre_classifier"), maker.under("classifier")
        elif config.label_head == "pooler":
            dense, last = inner.under("pooler.dense"), maker.under("classifier")
        elif config.label_head:
            dense, last = maker.under("classifier.dense"), maker.under("classifier.out_proj")
        else:
            return
        self.classifier = (
            Dense.of(dense, hidden, hidden, _HEAD_ACTIVATIONS.get(config.label_head, "tanh")),
            Dense.of(last, len(config.labels), hidden),
        )

    def needs_pages(self, page_dtype: DType) -> bool:
        return ops.texts_need_pages(self.device, page_dtype, self.config.head_dim)

    def embed(self, batch: Batch) -> Tensor:
        assert batch.token_types is not None, "a pass of an encoder has them"
        x = ops.embedding(batch.token_ids, self.words)
        x = ops.add_embedding(x, batch.positions, self.positions[self.config.first_position :])
        if self.types is not None:
            x = ops.add_embedding(x, batch.token_types, self.types)
        x = self.norm(x)
        return x if self.widen is None else self.widen(x, batch)


_HEAD_ACTIVATIONS = {"distil": "relu", "electra": "erf"}
"""Between a classifier's maps, if not tanh."""


class ElectraModel(BertModel):
    """Clark et al. 2020, https://arxiv.org/abs/2003.10555."""

    prefix = "electra."
    root = "electra"
    harmless = re.compile(rf"{BertModel.harmless.pattern}|(discriminator|generator)_(predictions|lm_head)\..*")


class XlmRobertaModel(BertModel):
    prefix = "roberta."
    root = "roberta"


class DistilBertModel(BertModel):
    """Without types (Sanh et al. 2019, https://arxiv.org/abs/1910.01108)."""

    prefix = "distilbert."
    root = "distilbert"
    harmless = re.compile(r"vocab_(transform|layer_norm|projector)\..*|.*\.position_ids")
    renames = MappingProxyType({
        "transformer.": "distilbert.encoder.", "distilbert.transformer.": "distilbert.encoder.",
        "embeddings.": "distilbert.embeddings.", ".attention.q_lin.": ".attention.self.query.",
        ".attention.k_lin.": ".attention.self.key.", ".attention.v_lin.": ".attention.self.value.",
        ".attention.out_lin.": ".attention.output.dense.", ".sa_layer_norm.": ".attention.output.LayerNorm.",
        ".ffn.lin1.": ".intermediate.dense.", ".ffn.lin2.": ".output.dense.",
        ".output_layer_norm.": ".output.LayerNorm.",
    })  # fmt: skip


class BertLayer:
    """Attention, then the MLP, each added to its input and normalised."""

    def __init__(self, config: BertConfig, index: int, maker: Maker) -> None:
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.scale = config.attention_scales[index]
        self.activation = config.activation
        hidden, inner = config.hidden_size, config.shard("intermediate_size")
        heads = config.shard("num_heads").times(config.head_dim)
        linear = partial(maker.linear, has_bias=True)
        names = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
        self.qkv = linear(names, outputs=(heads, heads, heads), inputs=hidden, split="outputs")
        self.proj = linear("attention.output.dense", outputs=hidden, inputs=heads, split="inputs")
        self.norm = LayerNorm(config, maker.under("attention.output.LayerNorm"))
        self.up = linear("intermediate.dense", outputs=inner, inputs=hidden, split="outputs")
        self.down = linear("output.dense", outputs=hidden, inputs=inner, split="inputs")
        self.mlp_norm = LayerNorm(config, maker.under("output.LayerNorm"))

    def __call__(
        self, x: Tensor, batch: Batch, group: int, k_cache: Tensor, v_cache: Tensor, *scales: Tensor
    ) -> Tensor:
        attended = ops.text_attention(
            self.qkv(x, batch), k_cache, v_cache, batch, group, num_heads=self.num_heads, head_dim=self.head_dim,
            scale=self.scale, scales=scales, position_bias=batch.position_bias,
        )  # fmt: skip
        x = self.norm(self.proj(attended, batch, residual=x))
        inner = self.up(x, batch)
        return self.mlp_norm(self.down(activated(inner, self.activation, self.down), batch, residual=x))


def activated(x: Tensor, name: str, reader: Linear) -> Tensor:
    """One of `ACTIVATIONS`, in place, as exact as the map that reads it needs."""
    if name == "silu":
        return ops.silu(x, out=x)
    rough = name == "erf" and reader.weight.rounds_x
    return ops.gelu(x, cast(Literal["erf", "tanh", "sigmoid"], name), out=x, rough=rough)


def read_encoder(fields: Fields, *, eps_name: str, default_eps: float, activation_name: str) -> dict[str, Any]:
    """The fields of every encoder, as keyword arguments of its config, with the labels of a class that has them."""
    hidden = fields.integer("hidden_size", most=1 << 20)
    heads = fields.integer("num_attention_heads", most=1 << 16)
    num_layers = fields.integer("num_hidden_layers", most=1 << 14)
    fields.raw("tie_word_embeddings")  # of the head of masked tokens, which is not read
    if hidden % heads or hidden // heads % 2:
        raise fields.error("num_attention_heads", f"= {heads} must divide hidden_size = {hidden} into even heads")
    head_dim = hidden // heads
    return {
        "hidden_size": hidden,
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": fields.integer("intermediate_size", most=1 << 24),
        "vocab_size": read_vocab_size(fields),
        "norm_eps": fields.number(eps_name, default_eps, least=0.0, most=1.0),
        "activation": read_choice(fields, activation_name, "gelu", ACTIVATIONS),
        "tie_word_embeddings": True,  # nothing is stored of a head
        "layer_windows": (None,) * num_layers,
        "attention_scales": (head_dim**-0.5,) * num_layers,
        "dtype": read_dtype(fields),
        **read_token_ids(fields),
    }


def read_bert(
    fields: Fields, label_head: LabelHead, default_eps: float, *, has_types: bool = True, first_position: int = 0
) -> BertConfig:  # fmt: skip
    values = read_encoder(fields, eps_name="layer_norm_eps", default_eps=default_eps, activation_name="hidden_act")
    fields.expect("position_embedding_type", "absolute")
    fields.expect("is_decoder", False)
    fields.expect("add_cross_attention", False)
    rows, first = fields.integer("max_position_embeddings", 512), first_position
    if has_types and (label_head == "dense" or fields.string("model_type", "") not in ("bert", "electra")):
        first = fields.integer("pad_token_id", 1, least=0) + 1
    first = fields.integer("position_offset", first, least=0)  # of a GGUF file, whose table begins at the first token
    if rows <= first:
        raise fields.error("max_position_embeddings", f"= {rows} must exceed {first}, the row of the first token")
    labels = SPAN_LABELS if label_head == "spans" else read_labels(fields) if label_head else ()
    return BertConfig(
        **values, max_position_embeddings=rows - first, first_position=first, position_rows=rows,
        embedding_size=fields.integer("embedding_size", values["hidden_size"], most=1 << 20),
        type_vocab_size=fields.integer("type_vocab_size", 2, least=0, most=1 << 10) if has_types else 0,
        label_head=label_head, labels=labels, labels_tokens=label_head in ("tokens", "spans"),
    )  # fmt: skip


_DISTIL_NAMES = {
    "dim": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size", "activation": "hidden_act",
}  # fmt: skip


def _read_distil(fields: Fields, label_head: LabelHead) -> BertConfig:
    fields.default({ours: fields.raw(own) for own, ours in _DISTIL_NAMES.items() if fields.has(own)})
    for note in ("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "dropout", "tie_weights_"):
        fields.raw(note)  # the positions' table is stored
    return read_bert(fields, label_head, 1e-12, has_types=False)


def architectures(
    model_type: str, read: Callable[..., BertConfig], model_class: type[BertModel], label_head: LabelHead, *names: str
) -> tuple[Architecture, ...]:
    """A family's classes, by their names. The one that labels texts has this `label_head`."""
    heads: dict[str, LabelHead] = {CLASSIFYING: label_head, OF_TOKENS: "tokens", OF_SPANS: "spans"}

    def read_as(name: str) -> Callable[[Fields], BertConfig]:
        head = next((each for ending, each in heads.items() if name.endswith(ending)), "")
        return partial(read, label_head=head)

    return tuple(Architecture(name, model_type, read_as(name), model_class) for name in names)


_read_bert, _read_roberta = partial(read_bert, default_eps=1e-12), partial(read_bert, default_eps=1e-5)

ARCHITECTURES = (
    *architectures(
        "distilbert", _read_distil, DistilBertModel, "distil", "DistilBertModel", "DistilBertForMaskedLM",
        "DistilBertForSequenceClassification", "DistilBertForTokenClassification", "DistilBertForQuestionAnswering",
    ),
    *architectures(
        "bert", _read_bert, BertModel, "pooler", "BertModel", "BertForMaskedLM", "BertForPreTraining",
        "BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering",
    ),
    *architectures(
        "electra", _read_bert, ElectraModel, "electra", "ElectraModel", "ElectraForMaskedLM", "ElectraForPreTraining",
        "ElectraForSequenceClassification", "ElectraForTokenClassification", "ElectraForQuestionAnswering",
    ),
    *architectures(
        "xlm-roberta", _read_roberta, XlmRobertaModel, "dense", "XLMRobertaModel", "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification", "XLMRobertaForTokenClassification", "XLMRobertaForQuestionAnswering",
    ),
    *architectures(
        "roberta", _read_roberta, XlmRobertaModel, "dense", "RobertaModel", "RobertaForMaskedLM",
        "RobertaForSequenceClassification", "RobertaForTokenClassification", "RobertaForQuestionAnswering",
    ),
    *architectures(
        "camembert", _read_roberta, XlmRobertaModel, "dense", "CamembertModel", "CamembertForMaskedLM",
        "CamembertForSequenceClassification", "CamembertForTokenClassification", "CamembertForQuestionAnswering",
    ),
)  # fmt: skip
