"""Tokenizer folders of each class that transformers builds anew or takes as stored, with every way to say whether BOS
and EOS are added; `tools.references.make_tokenizer_classes` asks transformers for their ids."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

EXPECTED = Path(__file__).parent / "fixtures" / "classes.json"
TEXTS = ("ab a", " a</s>a", "")
SWITCHES = (("", ""), ("true", ""), ("", "true"), ("false", "true"), ("true", "true"))  # BOS, EOS; "": it is absent

_SPECIAL = ["<unk>", "<s>", "</s>"]
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": _QWEN2_PATTERN}, "behavior": "Isolated", "invert": False},
        {**_BYTE_LEVEL, "use_regex": False},
    ],
}


def _template(*names: str) -> dict[str, Any]:
    single = [
        {"Sequence": {"id": name, "type_id": 0}} if name == "A" else {"SpecialToken": {"id": name, "type_id": 0}}
        for name in names
    ]
    special = {name: {"id": name, "ids": [_SPECIAL.index(name)], "tokens": [name]} for name in names if name != "A"}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


POSTS: dict[str, Any] = {
    "none": None,
    "bos": _template("<s>", "A"),
    "eos": _template("A", "</s>"),
    "level, then both": {"type": "Sequence", "processors": [_BYTE_LEVEL, _template("<s>", "A", "</s>")]},
}
KINDS = (  # model_type, tokenizer_class
    ("llama", "LlamaTokenizer"),
    ("gemma3_text", "GemmaTokenizerFast"),
    ("qwen3", "Qwen2Tokenizer"),
    ("qwen2", "Qwen2TokenizerFast"),
    ("gpt2", "GPT2Tokenizer"),
    ("gpt_neox", "GPTNeoXTokenizerFast"),
    ("llama", "PreTrainedTokenizerFast"),
)
PREFIXES: tuple[tuple[str, str | None, dict[str, Any], bool], ...] = tuple(  # and whether tokenizer.json has the prefix
    (model_type, named, config, is_stored)
    for (model_type, named), (config, is_stored) in itertools.product(
        (
            ("gpt2", "GPT2Tokenizer"), ("gpt2", None), ("qwen3", "Qwen2TokenizerFast"), ("qwen3", None),
            ("qwen2", "PreTrainedTokenizerFast"), ("gpt_neox", "GPTNeoXTokenizer"), ("cohere2", "CohereTokenizer"),
            ("llama", "PreTrainedTokenizerFast"), ("llama", "LlamaTokenizer"), ("granite", "GPT2Tokenizer"),
            ("olmo2", "GPTNeoXTokenizer"), ("falcon", None), ("phi3", "Qwen2Tokenizer"), ("qwen3", "TokenizersBackend"),
        ),
        (({}, False), ({}, True), ({"add_prefix_space": True}, False), ({"add_prefix_space": False}, True)),
    )
)  # fmt: skip


def is_byte_level(kind: tuple[str, str | None]) -> bool:
    """Whether a class's tokenizers cut bytes."""
    return kind not in (("llama", "LlamaTokenizer"), ("gemma3_text", "GemmaTokenizerFast"))


def files_of(
    model_type: str, named: str | None, post: Any, config: dict[str, Any], *, has_prefix: bool = False,
    has_json: bool = True, has_bytes: bool = True,
) -> dict[str, str]:  # fmt: skip
    """The files of a folder, by name."""
    space = "Ġ" if has_bytes else "▁"
    vocab = {token: i for i, token in enumerate([*_SPECIAL, space, "a", "b", f"{space}a", "ab"])}
    merges = [f"{space} a", "a b"]
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, token in enumerate(_SPECIAL)
    ]  # fmt: skip
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    pre = _QWEN2 if "qwen" in model_type else _BYTE_LEVEL
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None if has_bytes else spaces,
        "pre_tokenizer": _with_prefix(pre, has_prefix) if has_bytes else None,
        "post_processor": post,
        "decoder": _BYTE_LEVEL if has_bytes else {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None if has_bytes else "<unk>",
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": not has_bytes,
            "byte_fallback": not has_bytes, "vocab": vocab, "merges": merges,
        },
    }  # fmt: skip
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    own = {} if named is None else {"tokenizer_class": named}
    files = {
        "tokenizer_config.json": json.dumps({**names, **own, **config}),
        "config.json": json.dumps({"model_type": model_type}),
    }
    if has_json:
        return files | {"tokenizer.json": json.dumps(content)}
    return files | {"vocab.json": json.dumps(vocab), "merges.txt": "#version: 0.2\n" + "\n".join(merges) + "\n"}


def cases() -> dict[str, dict[str, str]]:
    """Every folder's files, by the name of its case."""
    found = {}
    for kind, (bos, eos) in itertools.product(KINDS, SWITCHES):
        config = {f"add_{name}_token": value == "true" for name, value in (("bos", bos), ("eos", eos)) if value}
        said = f"{'/'.join(kind)}: bos {bos}, eos {eos}"
        for name, post in POSTS.items():
            if is_byte_level(kind) or name in ("none", "bos", "eos"):
                found[f"{said}, {name}"] = files_of(*kind, post, config, has_bytes=is_byte_level(kind))
        if kind[1] in ("Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer"):
            found[f"{said}, vocabulary and merges"] = files_of(*kind, None, config, has_json=False)
    for model_type, named, config, is_stored in PREFIXES:
        name = f"{model_type}/{named}: add_prefix_space {config.get('add_prefix_space')}, stored {is_stored}"
        found[name] = files_of(model_type, named, None, config, has_prefix=is_stored)
    return found


def _with_prefix(pre: dict[str, Any], has_prefix: bool) -> dict[str, Any]:
    if pre["type"] == "Sequence":
        return {**pre, "pretokenizers": [_with_prefix(each, has_prefix) for each in pre["pretokenizers"]]}
    return {**pre, "add_prefix_space": has_prefix} if pre["type"] == "ByteLevel" else pre
