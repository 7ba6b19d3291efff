"""The encoders and classifiers of `tests/models/encoders`: their configs, their weights from a seed, their folders in
sentence-transformers' layout. `tools/references/make_encoder_goldens.py` gives the same to transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.folders import write_safetensors
from tests.models.golden_weights import golden_tensor

FOLDER = Path(__file__).parent / "encoders"
TOKENIZER = FOLDER / "tokenizer.json"
SEED = 7
IDS = [2, 77, 12, 200, 31, 9, 150, 44, 6, 250, 19, 8, 61, 140, 33, 3]
SECOND_FROM = 6
"""Of the pair that the same ids are."""
TEXTS = ["Hello world, how are you?", "A second text.", "café über naïve 中文 字", "x", "", "the quick brown fox " * 3]
QUERY = "Where is the fox?"

_COMMON = {"vocab_size": 300, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80}
_BERT = {**_COMMON, "model_type": "bert", "num_hidden_layers": 3, "max_position_embeddings": 64}
_ROBERTA = {
    **_COMMON, "num_hidden_layers": 2, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1,
    "layer_norm_eps": 1e-5,
}  # fmt: skip
_MODERN = {
    **_COMMON, "model_type": "modernbert", "num_hidden_layers": 4, "max_position_embeddings": 64, "local_attention": 8,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
}  # fmt: skip
_DECODER = {
    **_COMMON, "num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def _labels(count: int) -> dict[str, Any]:
    return {"id2label": {str(number): f"label {number}" for number in range(count)}}


CASES: dict[str, dict[str, Any]] = {
    "bert": {**_BERT, "architectures": ["BertModel"]},
    "bert_relu_free": {**_BERT, "architectures": ["BertModel"], "hidden_act": "gelu_new", "hidden_size": 40},
    "bert_pairs": {**_BERT, "architectures": ["BertForSequenceClassification"], **_labels(1)},
    "xlm_roberta": {**_ROBERTA, "model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]},
    "xlm_roberta_pairs": {
        **_ROBERTA, "model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"], **_labels(1),
    },
    "roberta_labels": {
        **_ROBERTA, "model_type": "roberta", "architectures": ["RobertaForSequenceClassification"], **_labels(3),
    },
    "electra_labels": {
        **_BERT, "model_type": "electra", "architectures": ["ElectraForSequenceClassification"], "embedding_size": 24,
        "num_hidden_layers": 2, **_labels(2),
    },
    "electra": {
        **_BERT, "model_type": "electra", "architectures": ["ElectraModel"], "embedding_size": 48,
        "num_hidden_layers": 2,
    },
    "mpnet": {
        **_COMMON, "model_type": "mpnet", "architectures": ["MPNetModel"], "num_hidden_layers": 2,
        "max_position_embeddings": 66, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
    },
    "mpnet_pairs": {
        **_COMMON, "model_type": "mpnet", "architectures": ["MPNetForSequenceClassification"], "num_hidden_layers": 2,
        "max_position_embeddings": 66, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, **_labels(1),
    },
    "modernbert": {**_MODERN, "architectures": ["ModernBertModel"]},
    "modernbert_labels": {
        **_MODERN, "architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": "mean",
        "global_attn_every_n_layers": 2, **_labels(3),
    },
    "nomic_bert": {
        **_COMMON, "model_type": "nomic_bert", "architectures": ["NomicBertModel"], "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    },
    "nomic_bert_labels": {
        **_COMMON, "model_type": "nomic_bert", "architectures": ["NomicBertForSequenceClassification"],
        "num_hidden_layers": 2, "max_position_embeddings": 64, **_labels(3),
    },
    "embedding_gemma": {
        **_DECODER, "model_type": "gemma3_text", "architectures": ["Gemma3TextModel"], "head_dim": 16,
        "num_hidden_layers": 3, "use_bidirectional_attention": True, "sliding_window": 8, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "vocab_size": 300,
    },
    "qwen3_pairs": {
        **_DECODER, "model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"], "head_dim": 16,
        **_labels(1),
    },
    "qwen2_both_ways": {
        **_DECODER, "model_type": "qwen2", "architectures": ["Qwen2Model"], "is_causal": False,
    },
    "llama_labels": {
        **_DECODER, "model_type": "llama", "architectures": ["LlamaForSequenceClassification"], **_labels(3),
    },
}  # fmt: skip
OF_TOKENS: dict[str, dict[str, Any]] = {
    "bert_tokens": {**_BERT, "architectures": ["BertForTokenClassification"], **_labels(3)},
    "roberta_spans": {**_ROBERTA, "model_type": "roberta", "architectures": ["RobertaForQuestionAnswering"]},
    "bert_spans": {**_BERT, "architectures": ["BertForQuestionAnswering"]},
    "distilbert_tokens": {
        "model_type": "distilbert", "architectures": ["DistilBertForTokenClassification"], "vocab_size": 300, "dim": 48,
        "n_heads": 4, "n_layers": 2, "hidden_dim": 80, "max_position_embeddings": 64, **_labels(5),
    },
    "electra_spans": {
        **_BERT, "model_type": "electra", "architectures": ["ElectraForQuestionAnswering"], "embedding_size": 24,
        "num_hidden_layers": 2,
    },
    "modernbert_tokens": {
        **_MODERN, "architectures": ["ModernBertForTokenClassification"], "global_attn_every_n_layers": 2, **_labels(3),
    },
    "nomic_bert_tokens": {
        **_COMMON, "model_type": "nomic_bert", "architectures": ["NomicBertForTokenClassification"],
        "num_hidden_layers": 2, "max_position_embeddings": 64, **_labels(2),
    },
    "llama_tokens": {
        **_DECODER, "model_type": "llama", "architectures": ["LlamaForTokenClassification"], **_labels(3),
    },
    "llama_spans": {**_DECODER, "model_type": "llama", "architectures": ["LlamaForQuestionAnswering"]},
    "mistral_spans": {
        **_DECODER, "model_type": "mistral", "architectures": ["MistralForQuestionAnswering"], "sliding_window": 8,
    },
    "gpt2_spans": {
        "model_type": "gpt2", "architectures": ["GPT2ForQuestionAnswering"], "vocab_size": 300, "n_embd": 48,
        "n_head": 4, "n_layer": 2, "n_positions": 64, "pad_token_id": 0,
    },
    "gpt2_tokens": {
        "model_type": "gpt2", "architectures": ["GPT2ForTokenClassification"], "vocab_size": 300, "n_embd": 48,
        "n_head": 4, "n_layer": 2, "n_positions": 64, "pad_token_id": 0, **_labels(4),
    },
}  # fmt: skip
"""Classifiers of each token, by their own classes alone: their hidden states are those of `CASES`."""
HEADS = [name for name, config in CASES.items() if "id2label" in config]

LAYOUTS: dict[str, dict[str, Any]] = {
    "mean": {"pooling": "mean", "normalize": True},
    "cls": {"pooling": "cls"},
    "dense": {
        "pooling": "weightedmean",
        "dense": [(48, 96, False, "Identity"), (96, 20, True, "Tanh")],
        "normalize": True,
    },
    "max": {"pooling": "max", "default_prompt": "query"},
    "last": {"pooling": "lasttoken", "normalize": True},
    "sqrt": {"pooling": "mean_sqrt_len_tokens"},
    "without_prompt": {
        "pooling": "max+cls+weightedmean+mean+mean_sqrt_len_tokens", "include_prompt": False, "normalize": True,
    },
    "unit_dense": {"pooling": "mean", "normalize_first": True, "dense": [(48, 20, True, "Tanh")]},
    "several": {
        "pooling": "max+cls+lasttoken",
        "dense": [(144, 48, True, "Tanh", True), (48, 48, False, "Tanh", True)],
    },
}  # fmt: skip
PROMPTS = {"query": "query: ", "document": "passage: "}


LONG = {"max_position_embeddings": 520}
"""The fields of a case's config that differ for texts of up to 512 tokens."""
LENGTHS = (1, 2, 15, 64, 65, 129, 257, 511, 512)


def long_ids(length: int) -> list[int]:
    """A text of so many tokens; no id is that of padding."""
    return [2, *(5 + (7919 * i + i * i) % 290 for i in range(1, length))]


def long_types(length: int) -> np.ndarray[Any, Any]:
    """The token types of such a text as a pair."""
    return (np.arange(length) >= length // 3).astype(np.int32)


def long_rows(hidden: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The rows of a long text's hidden states that are kept: the first, the last, and the mean."""
    return np.stack([hidden[0], hidden[-1], hidden.astype(np.float64).mean(axis=0)]).astype(np.float32)


def shapes_of() -> dict[str, dict[str, list[int]]]:
    """The tensors of each case, as transformers names them."""
    found: dict[str, dict[str, list[int]]] = json.loads((FOLDER / "shapes.json").read_text(encoding="utf-8"))
    return found


def tensors_of(shapes: dict[str, list[int]]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: golden_tensor(name, tuple(shape), SEED) for name, shape in shapes.items()}


def expected(name: str) -> np.ndarray[Any, Any]:
    with np.load(FOLDER / "outputs.npz") as stored:
        return np.array(stored[name])


def long_shapes(case: str) -> dict[str, list[int]]:
    """The shapes of a case with as many positions as `LONG` has."""
    few = CASES[case]["max_position_embeddings"]
    return {
        name: [LONG["max_position_embeddings"], *shape[1:]] if shape[0] == few and "position" in name else shape
        for name, shape in shapes_of()[case].items()
    }


def write_encoder(folder: Path, case: str, *, is_long: bool = False) -> Path:
    """A case's folder, with the tokenizer of all."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = (CASES | OF_TOKENS)[case] | (LONG if is_long else {})
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", tensors_of(long_shapes(case) if is_long else shapes_of()[case]))
    shutil.copy(TOKENIZER, folder / "tokenizer.json")
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "model_max_length": 64}), encoding="utf-8")
    return folder


def with_class(folder: Path, kind: str) -> Path:
    """Names the tokenizer's class, which decides whether tokens have types."""
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**fields, "tokenizer_class": kind}), encoding="utf-8")
    return folder


def write_layout(folder: Path, name: str, case: str = "bert") -> Path:
    """A case's folder with the modules of one of `LAYOUTS`."""
    write_encoder(folder, case)
    layout, prefix = LAYOUTS[name], "sentence_transformers.models."
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modes = layout["pooling"].split("+")
    own = {"include_prompt": layout["include_prompt"]} if "include_prompt" in layout else {}
    pooling = {
        "word_embedding_dimension": 48,
        **own,
        **{f"pooling_mode_{_OLDER.get(mode, mode)}": True for mode in modes},
    }
    _write(folder / "1_Pooling" / "config.json", pooling)
    if layout.get("normalize_first"):
        modules.append(("2_Normalize", "Normalize"))
    for place, (inputs, outputs, has_bias, activation, *residual) in enumerate(layout.get("dense", ()), len(modules)):
        modules.append((f"{place}_Dense", "Dense"))
        _write(folder / f"{place}_Dense" / "config.json", {
            "in_features": inputs, "out_features": outputs, "bias": has_bias,
            "activation_function": f"torch.nn.modules.{_PLACES[activation]}.{activation}",
            "use_residual": bool(residual),
        })  # fmt: skip
        tensors = dense_tensors(inputs, outputs, has_bias, has_residual=bool(residual) and inputs != outputs)
        write_safetensors(folder / f"{place}_Dense" / "model.safetensors", tensors)
    if layout.get("normalize"):
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    _write(folder / "modules.json", [
        {"idx": place, "name": str(place), "path": path, "type": prefix + kind}
        for place, (path, kind) in enumerate(modules)
    ])  # fmt: skip
    default = layout.get("default_prompt")
    _write(folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": default})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 40, "do_lower_case": False})
    return folder


_OLDER = {
    "cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "weightedmean": "weightedmean_tokens",
}  # fmt: skip
_PLACES = {"Identity": "linear", "Tanh": "activation"}


def dense_tensors(
    inputs: int, outputs: int, has_bias: bool, *, has_residual: bool = False
) -> dict[str, np.ndarray[Any, Any]]:  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (outputs, inputs)}
    if has_bias:
        shapes["linear.bias"] = (outputs,)
    if has_residual:
        shapes["residual.weight"] = (outputs, inputs)
    return {name: golden_tensor(name, shape, SEED + inputs) for name, shape in shapes.items()}


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
