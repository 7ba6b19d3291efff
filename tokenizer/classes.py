"""The classes of transformers 5 that do not take `tokenizer.json` as it is stored.

A folder names its class, or has the one of its model's type (`AutoTokenizer`). LlamaTokenizer takes only vocabulary and
merges: its own pre-tokenizer turns blanks into "▁" and puts one in front, unless the text begins with one; the
normalizer of older files ("prepend, then replace") would make two of a leading blank. Classes that cut bytes put a
blank in front of a text by `add_prefix_space` of tokenizer_config.json alone, and GPTNeoXTokenizer drops the
post-processor. They are read like this to agree with transformers. The word splitting of such a class is taken from the
file, which the model was trained with.
"""

from __future__ import annotations

from typing import Any

from tokenizer.json_fields import Fields

LLAMA, GPT2, QWEN2, GPT_NEOX = "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer"
_COHERE, _QWEN3_5 = "CohereTokenizer", "Qwen3_5Tokenizer"
_HAS_OWN_PREFIX = (GPT2, QWEN2, GPT_NEOX, _COHERE, _QWEN3_5)

# Model types whose tokenizer.json transformers takes as it is, for any class that the folder names.
_TAKEN_AS_STORED = {
    "ernie4_5", "ernie4_5_moe", "flex_olmo", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe",
    "gpt_bigcode", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "internlm2", "internlm3", "jamba",
    "kimi_linear", "llava", "llava_next", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mistral3",
    "mixtral", "nemotron", "olmo2", "olmo3", "olmo_hybrid", "phi3", "phi3_v", "phimoe", "pixtral", "smolvlm",
    "stablelm", "vipllava", "voxtral",
}  # fmt: skip
_FORCED = {"qwen2": QWEN2, "qwen3_5": _QWEN3_5, "qwen3_5_moe": _QWEN3_5, "qwen3_5_moe_text": _QWEN3_5}
_OF_MODEL_TYPE = {  # if no class is named
    **dict.fromkeys(("codegen", "dbrx", "gpt2", "gpt_neo", "gptj", "jais2", "opt", "phi", "starcoder2"), GPT2),
    **dict.fromkeys(
        ("hunyuan_vl", "internvl", "ovis2", "qwen2_5_omni", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_moe",
         "qwen3_next", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe"), QWEN2,
    ),
    **dict.fromkeys(("falcon_mamba", "gpt_neox", "mamba", "mamba2", "mpt", "olmo", "olmoe", "rwkv"), GPT_NEOX),
    **dict.fromkeys(("aya_vision", "cohere", "cohere2"), _COHERE),
    "qwen3_5_text": _QWEN3_5,
}  # fmt: skip


_END = "<|endoftext|>"
_NAMED: dict[str, dict[str, str]] = {
    GPT2: {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    **{name: {"eos_token": _END, "unk_token": _END, "pad_token": _END} for name in (QWEN2, _QWEN3_5)},
    GPT_NEOX: {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": "<|padding|>"},
    _COHERE: {
        "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "unk_token": "<UNK>", "sep_token": "<SEP>",
        "pad_token": "<PAD>", "cls_token": "<CLS>", "mask_token": "<MASK_TOKEN>",
    },
}  # fmt: skip


def tokens_of_class(name: str) -> dict[str, str]:
    """The default special tokens of a class."""
    return _NAMED.get(name, {})


def class_of(config: Fields, model_config: Fields) -> str:
    """The class that transformers takes, by tokenizer_config.json and config.json; "" for one that takes tokenizer.json
    as it is stored."""
    kind = model_config.get("model_type")
    kind = kind if isinstance(kind, str) else ""
    if kind in _TAKEN_AS_STORED or kind in _FORCED:
        return _FORCED.get(kind, "")
    named = config.get("tokenizer_class") or model_config.get("tokenizer_class") or _OF_MODEL_TYPE.get(kind)
    return named.removesuffix("Fast") if isinstance(named, str) else ""


def as_class_has_it(content: Fields, name: str, config: Fields) -> Fields:
    """`tokenizer.json` as changed by the class of this name. Raises `TokenizerFileError`."""
    if name == LLAMA and _has_own_words(content):
        return _rebuilt(content, config)
    if name not in _HAS_OWN_PREFIX or not _has_byte_level(content.get("pre_tokenizer")):
        return content
    has_prefix = config.boolean("add_prefix_space", False)
    own = {"pre_tokenizer": _with_prefix(content.get("pre_tokenizer"), has_prefix)}
    return Fields({**content.values, **own, **({"post_processor": None} if name == GPT_NEOX else {})}, content.file)


def _has_own_words(content: Fields) -> bool:
    model = content.get("model")
    return (
        isinstance(model, dict)
        and model.get("type", "BPE") == "BPE"
        and not _has_byte_level(content.get("pre_tokenizer"))
        and not _has_byte_level(content.get("decoder"))
    )


def _rebuilt(content: Fields, config: Fields) -> Fields:
    """`tokenizer.json` rebuilt by the class's rules. Raises `TokenizerFileError`."""
    has_prefix = config.get("add_prefix_space") is None or config.boolean("add_prefix_space")
    is_legacy = config.get("legacy") is not None and config.boolean("legacy")
    model = content.object("model")
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    own = {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": ("always" if is_legacy else "first") if has_prefix else "never",
            "split": False,
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": model.get("vocab"),
            **{name: model.get(name) for name in ("merges", "ranks") if model.get(name) is not None},
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }
    return Fields({**content.values, **own}, content.file)


def _has_byte_level(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    parts = [*part.get("pretokenizers", ()), *part.get("decoders", ())]
    return part.get("type") == "ByteLevel" or any(_has_byte_level(one) for one in parts)


def _with_prefix(part: Any, has_prefix: bool) -> Any:
    if not isinstance(part, dict):
        return part
    if part.get("type") == "ByteLevel":
        return {**part, "add_prefix_space": has_prefix}
    parts = part.get("pretokenizers")
    return {**part, "pretokenizers": [_with_prefix(one, has_prefix) for one in parts]} if parts else part
