"""The pre-tokenizers of `tokenizer.ggml.pre`: the normalizer, splits and model mode of the tokenizer.json that
llama.cpp's converter calls by that name.

An unknown name is refused: another way of splitting words gives other ids, and worse answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Objects of a tokenizer.json: steps before the model, and whether whole words of the vocabulary go unmerged."""

    steps: tuple[Json, ...]
    normalizer: Json | None = None
    ignores_merges: bool = False


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex: bool) -> Json:
    """The step from bytes to letters, and back."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _words(*patterns: str, **more: Any) -> PreTokenizer:
    """Splits by patterns, one after another."""
    return PreTokenizer((*map(_split, patterns), byte_level(False)), **more)


_NFC = {"type": "NFC"}
_DIGIT = {"type": "Digits", "individual_digits": True}

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
# Qwen2's with marks in words.
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words whose letters go from capitals to small ones.
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?"
_SLASHED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED}{_CAPITALS}*{_SMALL}+|{_CASED}{_CAPITALS}+{_SMALL}*|\p{{N}}|{_SLASHED_REST}"
_O200K = (
    rf"{_CASED}{_CAPITALS}*{_SMALL}+{_CONTRACTION}?|{_CASED}{_CAPITALS}+{_SMALL}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_SLASHED_REST}"
)
_KIMI_CAPITALS, _KIMI_SMALL = (rf"(?:(?!\p{{Han}}){letters})" for letters in (_CAPITALS, _SMALL))
_KIMI = (
    rf"[\p{{Han}}]+|{_CASED}{_KIMI_CAPITALS}*{_KIMI_SMALL}+{_CONTRACTION}?"
    rf"|{_CASED}{_KIMI_CAPITALS}+{_KIMI_SMALL}*{_CONTRACTION}?|\p{{N}}{{1,3}}|{_REST}"
)
_SEED = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    r"Ὗ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    r"𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)

_GPT2 = PreTokenizer((byte_level(True),))
_SINGLE_DIGITS = PreTokenizer((_DIGIT, byte_level(True)))
_LLAMA3 = _words(_CL100K, ignores_merges=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2", "glm4"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _words(_CL100K)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _words(_QWEN2, normalizer=_NFC)),
    "qwen35": _words(_QWEN35, normalizer=_NFC),
    **dict.fromkeys(("stablelm2", "hunyuan"), _words(_QWEN2)),
    "seed-coder": _words(_SEED),  # Seed-OSS, too
    "tiny_aya": _words(r"\d{1,3}(?=(?:\d{3})*\b)", _O200K),
    "kimi-k2": _words(_KIMI),
    **dict.fromkeys(("gpt-2", "phi-2", "jais", "trillion", "exaone4"), _GPT2),
    **dict.fromkeys(("olmo", "mpt"), PreTokenizer(_GPT2.steps, normalizer=_NFC)),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS),
    "modern-bert": PreTokenizer(_GPT2.steps, normalizer=_NFC),
    "roberta-bpe": _GPT2,
    "command-r": PreTokenizer(_SINGLE_DIGITS.steps, normalizer=_NFC),
    "tekken": _words(_TEKKEN, ignores_merges=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _words(_O200K)),
    "falcon": PreTokenizer(
        (
            {"type": "Punctuation", "behavior": "Contiguous"},
            byte_level(True),
            {"type": "Digits", "individual_digits": False},
            _split("[0-9][0-9][0-9]"),
        )
    ),
    "deepseek-llm": PreTokenizer(
        (
            *map(_split, (r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK)),
            _DIGIT,
            byte_level(False),
        )
    ),
    "deepseek-coder": PreTokenizer(
        (*map(_split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK)), _DIGIT, byte_level(False))
    ),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense"),
        _words(
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
        ),
    ),
}
"""By the name in the file."""
