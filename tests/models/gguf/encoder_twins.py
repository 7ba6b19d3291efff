"""Encoders and rerankers as folders, and the GGUF files that llama.cpp's converter makes of them.

`tools/references/make_encoder_gguf.py` keeps the converter's metadata, which tensor of the folder each of its own is,
and llama.cpp's vectors in `tests/models/gguf/encoders`; weights are made again from seeds.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models.encoder_cases import CASES, SEED, TEXTS, TOKENIZER, dense_tensors, shapes_of
from tests.models.folders import write_safetensors
from tests.models.golden_weights import golden_tensor
from tokenizer.sentencepiece import read_pieces

Array = np.ndarray[Any, Any]

FOLDER = Path(__file__).parent / "encoders"
PIECES = Path(__file__).parents[2] / "tokenizer" / "fixtures" / "vocabularies" / "unigram" / "tokenizer.model"
"""A Unigram of SentencePiece, of 420 tokens."""
SCRIPTS = [
    *TEXTS, "naïve façade Ångström ½ ﬁ", "東京 に 行く", "Привет, мир!", "مرحبا بالعالم", "สวัสดี ครับ", "한국어 텍스트",
    " \u200b x\ty \n z ", "a <mask> [MASK] b", "yes no <|im_end|> q", "ÅÄÖ ß İı \u0301e e\u0301", "1234 56,78 - x_y",
]  # fmt: skip

_MODERN = {"layer_norm_eps": 1e-5, "norm_eps": 1e-5}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "id2label": None,
          "max_position_embeddings": 512}  # fmt: skip
_XLM = {"bos_token_id": 0, "eos_token_id": 2, "vocab_size": 430}

TWINS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("bert", {}, "mean"),
    "xlm_roberta": ("xlm_roberta", _XLM, ""),
    "xlm_roberta_pairs": ("xlm_roberta_pairs", _XLM, ""),
    "roberta_labels": ("roberta_labels", {"bos_token_id": 0, "eos_token_id": 2}, ""),
    "modernbert": ("modernbert", _MODERN, "cls"),
    "modernbert_labels": ("modernbert_labels", _MODERN, ""),
    "nomic_bert": ("nomic_bert", {"max_position_embeddings": 2048}, "mean"),
    "embedding_gemma": (
        "embedding_gemma",
        {"vocab_size": 400, "num_hidden_layers": 7, "rms_norm_eps": 1e-6, "bos_token_id": 2, "eos_token_id": 1,
         "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]},
        "mean",
    ),
    "qwen3_embedding": ("qwen3_pairs", _QWEN3, "lasttoken"),
    "qwen3_reranker": ("qwen3_pairs", _QWEN3, ""),
}  # fmt: skip
"""The case of `encoder_cases` that each is, the fields of config.json that differ, and its pooling."""


def write_twin(folder: Path, name: str) -> Path:
    """The folder of one of `TWINS`."""
    case, changed, pooling = TWINS[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in {**CASES[case], **changed}.items() if value is not None}
    _write(folder / "config.json", config)
    write_safetensors(folder / "model.safetensors", twin_tensors(name))
    _write(folder / "tokenizer_config.json", {"model_max_length": config["max_position_embeddings"], **_named(name)})
    if name.startswith("xlm"):
        shutil.copy(PIECES, folder / "sentencepiece.bpe.model")
    elif name == "embedding_gemma":
        shutil.copy(FOLDER / "gemma.model", folder / "tokenizer.model")
    else:
        source = TOKENIZER if name in ("bert", "nomic_bert") else FOLDER / f"tokenizer_{name.split('_')[0]}.json"
        shutil.copy(source, folder / "tokenizer.json")
    if pooling:
        modules = ["Transformer", "Pooling", *(["Dense", "Dense"] if name == "embedding_gemma" else []), "Normalize"]
        _write(folder / "modules.json", [
            {"idx": at, "name": str(at), "path": f"{at}_{kind}" if at else "",
             "type": f"sentence_transformers.models.{kind}"}
            for at, kind in enumerate(modules)
        ])  # fmt: skip
        mode = f"pooling_mode_{pooling}" + {"mean": "_tokens", "cls": "_token"}.get(pooling, "")
        _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 48, mode: True})
        for at, (inputs, outputs) in enumerate(((48, 96), (96, 48)), 2) if "Dense" in modules else ():
            _write(folder / f"{at}_Dense" / "config.json", {
                "in_features": inputs, "out_features": outputs, "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            })  # fmt: skip
            tensors = dense_tensors(inputs, outputs, has_bias=False)
            write_safetensors(folder / f"{at}_Dense" / "model.safetensors", tensors)
    return folder


def twin_tensors(name: str) -> dict[str, Array]:
    """The tensors of a twin, by their names in its folder."""
    case, changed, _ = TWINS[name]
    shapes = {key: list(shape) for key, shape in shapes_of()[case].items() if key != "score.weight"}
    for layer in range(changed.get("num_hidden_layers", 0)):
        shapes |= {
            key.replace("layers.0.", f"layers.{layer}."): shape for key, shape in shapes.items() if "layers.0." in key
        }
    for key, shape in shapes.items():
        if key.endswith(("word_embeddings.weight", "embed_tokens.weight", "tok_embeddings.weight")):
            shape[0] = changed.get("vocab_size", shape[0])
    return {key: golden_tensor(key, tuple(shape), SEED) for key, shape in shapes.items()}


CHAT = """{% for m in messages %}{% if m['role'] == 'system' %}<|im_start|>sys {{ m['content'] }}<|im_end|>
{% elif m['role'] == "query" %}<Q>: {{ m['content'] }}
{% elif m['role'] == "document" %}<D>: {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}
{% if add_generation_prompt %}<|im_start|>yes or no: {% endif %}"""


def write_logit_score(folder: Path) -> Path:
    """A reranker by sentence-transformers' LogitScore: a generator whose chat template knows a pair's roles."""
    write_twin(folder, "qwen3_reranker")
    kinds = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore"}
    _write(folder / "modules.json", [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.{kind}"}
        for at, (path, kind) in enumerate(kinds.items())
    ])  # fmt: skip
    ids = {"true_token_id": 3, "false_token_id": 4, "module_input_name": "causal_logits"}
    _write(folder / "1_LogitScore" / "config.json", ids)
    way = {"method": "forward", "method_output_name": "logits"}
    _write(folder / "sentence_bert_config.json", {
        "transformer_task": "text-generation", "module_output_name": "causal_logits",
        "modality_config": {"text": way, "message": {**way, "format": "flat"}},
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    })  # fmt: skip
    _write(folder / "config_sentence_transformers.json", {
        "model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity",
        "prompts": {"web": "Judge the passage."}, "default_prompt_name": "web",
    })  # fmt: skip
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    return folder


def _named(name: str) -> dict[str, Any]:
    bert = {
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "mask_token": "[MASK]",
    }
    if name.startswith("xlm"):
        return {"tokenizer_class": "XLMRobertaTokenizer"}
    if name.startswith("roberta"):
        return {
            "tokenizer_class": "RobertaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>",
            "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>",
        }  # fmt: skip
    if name == "embedding_gemma":
        named = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
        return {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": True, **named}
    if name.startswith("qwen3"):
        return {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return {"tokenizer_class": "PreTrainedTokenizerFast" if name.startswith("modern") else "BertTokenizer", **bert}


def write_twins_gguf(path: Path, name: str) -> Path:
    """The converter's file of one of `TWINS`."""
    kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, kept["architecture"])
    for key, (kind, value) in kept["metadata"].items():
        value = np.frombuffer(_charsmap(), np.uint8).tolist() if value == "charsmap" else value
        if isinstance(value, list):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType[kind])
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType[kind])
    tensors = behind(name)
    for own, (source, change) in kept["tensors"].items():
        writer.add_tensor(own, np.ascontiguousarray(changed(tensors, source, change), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def behind(name: str) -> dict[str, Array]:
    """A twin's tensors, with those of its Dense modules."""
    tensors = twin_tensors(name)
    if name == "embedding_gemma":
        for part, sizes in (("dense_2", (48, 96)), ("dense_3", (96, 48))):
            tensors[part] = dense_tensors(*sizes, has_bias=False)["linear.weight"]
    return tensors


def changed(tensors: dict[str, Array], source: str, change: str) -> Array:
    """What the converter makes of a tensor: "cut N" rows, "plus 1", the "yes, no" rows; "stack" of several."""
    if change == "stack":
        return np.concatenate([tensors[each] for each in source.split()])
    array, (word, _, numbers) = tensors[source], change.partition(" ")
    if word == "cut":
        return array[int(numbers) :]
    if word == "rows":
        return array[[int(each) for each in numbers.split()]]
    return array + np.float32(1) if word == "plus" else array


def _charsmap() -> bytes:
    return read_pieces(PIECES).charsmap


def vectors_of(name: str) -> dict[str, Array]:
    """llama.cpp's results: hidden states or pooled vectors of ids, and a reranker's logits."""
    with np.load(FOLDER / "vectors.npz") as stored:
        return {key.partition(" ")[2]: stored[key] for key in stored if key.partition(" ")[0] == name}


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
