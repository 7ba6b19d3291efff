"""The class LlamaTokenizer of transformers 5, which takes only vocabulary and merges from `tokenizer.json`.

Its own pre-tokenizer turns blanks into "▁" and puts one in front, unless the text begins with one; the normalizer of
older files ("prepend, then replace") would make two of a leading blank. Models whose tokenizer_config.json names the
class are read as that class does, since that is what a user of transformers gets.
"""

from __future__ import annotations

from typing import Any

from tokenizer.json_fields import Fields

_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")

# Model types whose tokenizer.json transformers takes as it is, whatever class the folder names.
_TAKEN_AS_STORED = {
    "glm", "glm4", "granite", "granitemoe", "granitemoehybrid", "ministral", "ministral3", "mistral", "mistral3",
    "mixtral", "nemotron", "olmo2", "olmo3", "phi3", "phimoe", "qwen2", "stablelm",
}  # fmt: skip


def is_rebuilt(content: Fields, config: Fields, model_config: Fields) -> bool:
    """True if transformers builds the class anew, by tokenizer.json, tokenizer_config.json and config.json."""
    named = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    model = content.get("model")
    return (
        named in _CLASSES
        and model_config.get("model_type") not in _TAKEN_AS_STORED
        and isinstance(model, dict)
        and model.get("type", "BPE") == "BPE"
        and not _has_byte_level(content.get("pre_tokenizer"))
        and not _has_byte_level(content.get("decoder"))
    )


def rebuild(content: Fields, config: Fields) -> Fields:
    """`tokenizer.json` as the class has it. Raises `TokenizerFileError`."""
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
            "merges": model.get("merges"),
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
