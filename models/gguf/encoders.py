"""Encoders and rerankers in GGUF: names of tensors, and the fields of config.json from the metadata.

A file does not name the class: BERT, RoBERTa, XLM-R and DistilBERT are `bert`, with a table of positions that begins at
the first token. An MLP's GELU is that of the class; llama.cpp computes its approximation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from models.configuration.json_fields import Fields
from models.gguf.fields import Keys, read_gemma3, read_pattern
from runtime.pooling import Pooling

BERT = {
    "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
    "attn_qkv": "attention.self.qkv", "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm", "ffn_up": "intermediate.dense", "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}  # fmt: skip
BERT_NAMES = {
    "token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings", "token_embd_norm": "embeddings.LayerNorm",
    "blk": "encoder.layer", "cls": "classifier.dense", "cls.output": "classifier.out_proj",
}  # fmt: skip
MODERN_BERT = {
    "attn_norm": "attn_norm", "attn_qkv": "attn.Wqkv", "attn_output": "attn.Wo", "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi", "ffn_down": "mlp.Wo",
}  # fmt: skip
MODERN_BERT_NAMES = {
    "token_embd": "model.embeddings.tok_embeddings", "token_embd_norm": "model.embeddings.norm",
    "output_norm": "model.final_norm", "blk": "model.layers", "cls": "head.dense", "cls.norm": "head.norm",
    "cls.output": "classifier",
}  # fmt: skip
NOMIC_BERT = {
    "attn_qkv": "self_attn.Wqkv", "attn_output": "self_attn.o_proj", "attn_output_norm": "post_attention_layernorm",
    "ffn_up": "mlp.up_proj", "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj",
    "layer_output_norm": "post_mlp_layernorm",
}  # fmt: skip
NOMIC_BERT_NAMES = {
    **{name: f"nomic_bert.{BERT_NAMES[name]}" for name in ("token_embd", "token_types", "token_embd_norm")},
    "blk": "nomic_bert.layers",
}  # fmt: skip

_NOT_OF_BERT = (
    "num_key_value_heads", "head_dim", "rope_theta", "attention_bias", "mlp_bias", "partial_rotary_factor",
)  # fmt: skip
_POOLINGS: dict[int, Pooling | None] = {0: None, 1: "mean", 2: "cls", 3: "last", 4: None}
DENSE_PARTS = ("dense_2", "dense_3")
"""Maps that follow the pooling, in order."""


def read_bert(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Fields of BERT and its relatives, whose positions' first rows the converter cuts off. A classifier's head is
    RoBERTa's: BERT's own reads the pooler, which the converter leaves out."""
    keys.fields.expect(keys("attention.causal"), False)
    num_types, labels = _num_types(keys), read_labels(keys)
    found: dict[str, Any] = {
        **dict.fromkeys(_NOT_OF_BERT), "position_offset": 0, "type_vocab_size": num_types,
        "architectures": ["BertModel" if num_types > 1 else "XLMRobertaModel"],
    }  # fmt: skip
    if labels and "cls.weight" not in keys.tensors:
        raise keys.fields.error(
            keys("classifier.output_labels"),
            "names labels, but the file lacks the pooler before the classifier, which llama.cpp's converter leaves"
            " out, so that scores would mean nothing: take the model's safetensors",
        )
    if labels:
        found |= {"architectures": ["XLMRobertaForSequenceClassification"], "id2label": labels}
    return found


def read_modern_bert(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    window, num_layers = keys.integer("attention.sliding_window", 128), common["num_hidden_layers"]
    if isinstance(keys.fields.raw(keys("attention.sliding_window_pattern")), list):
        kinds = read_pattern(keys, common)["layer_types"]
    else:
        every = keys.integer("attention.sliding_window_pattern", 3)
        kinds = ["sliding_attention" if layer % every else "full_attention" for layer in range(num_layers)]
    keys.fields.expect(keys("attention.causal"), False)
    pooling = _POOLINGS[_one_of(keys, "classifier.pooling_type", (1, 2), 1)]
    labels = read_labels(keys)
    return {
        **dict.fromkeys(_NOT_OF_BERT), "attention_bias": common["attention_bias"],
        "mlp_bias": "blk.0.ffn_up.bias" in keys.tensors, "norm_bias": "output_norm.bias" in keys.tensors,
        "local_attention": window, "layer_types": kinds, "global_rope_theta": common["rope_theta"],
        "local_rope_theta": keys.number("rope.freq_base_swa", common["rope_theta"]),
        "hidden_activation": keys.fields.string(keys("hidden_activation"), "gelu"), "classifier_pooling": pooling,
        **({"architectures": ["ModernBertForSequenceClassification"], "id2label": labels} if labels else {}),
        "classifier_bias": "cls.bias" in keys.tensors,
    }  # fmt: skip


def read_nomic_bert(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    keys.fields.expect(keys("attention.causal"), False)
    return {
        **dict.fromkeys(_NOT_OF_BERT), "type_vocab_size": _num_types(keys), "hidden_act": "silu",
        "rotary_emb_base": common["rope_theta"],
    }  # fmt: skip


def read_gemma_embedding(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """EmbeddingGemma's fields. Its Dense modules are read with its pooling."""
    keys.fields.expect(keys("attention.causal"), False)
    for part in DENSE_PARTS:
        for side in ("in", "out"):
            keys.fields.raw(keys(f"{part}_feat_{side}"))
    return {**read_gemma3(keys, common), "model_type": "gemma3_text", "use_bidirectional_attention": True}


def read_qwen3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Qwen3, and its rerankers, whose head is the rows of "yes" and "no" alone: a classifier of their difference."""
    read_labels(keys)
    if "cls.output.weight" not in keys.tensors:
        return {}
    return {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "relevance"}}


def _num_types(keys: Keys) -> int:
    types = keys.tensors.get("token_types.weight")
    return 0 if types is None else types.shape[0]


def read_labels(keys: Keys) -> dict[str, str]:
    """The names of a classifier's labels by their numbers; none without a classifier."""
    names = keys.fields.strings(keys("classifier.output_labels"))
    head = keys.tensors.get("cls.output.weight")
    if head is None:
        return {}
    count = head.shape[0]
    if names is not None and len(names) != count:
        raise keys.fields.error(
            keys("classifier.output_labels"), f"has {len(names)} names, but cls.output.weight has {count} rows"
        )
    return {str(number): names[number] if names else f"LABEL_{number}" for number in range(count)}


def pooling_of(metadata: Mapping[str, Any], file: str) -> Pooling | None:
    """The pooling that a file names; None if it names none. Raises `ConfigError`."""
    name = str(metadata.get("general.architecture"))
    return _POOLINGS[_one_of(Keys(Fields(dict(metadata), file), name, {}), "pooling_type", tuple(_POOLINGS), 0)]


def _one_of(keys: Keys, key: str, known: Collection[int], default: int) -> int:
    value: int = keys.integer(key, default, least=0)
    if value not in known:
        raise keys.fields.error(keys(key), f"= {value} must be one of {', '.join(map(str, known))}")
    return value
