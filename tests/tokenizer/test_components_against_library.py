"""Every normalizer, pre-tokenizer, decoder, model option and added-token flag against the
`tokenizers` library.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tests.tokenizer.support import (
    added_token,
    bpe_model,
    build,
    byte_level_model,
    content_of,
    library,
    random_text,
)

_LETTERS = list("abcdeABCDE 0123.,!'▁\n\t#é_-sSſ") + ["<unk>", "<0x41>", "ab", "\u0301", "中"]
_MERGES = [
    "a b",
    "ab c",
    "b c",
    "a bc",
    "▁ a",
    "▁ ab",
    "c d",
    "d e",
    "▁a b",
    "b a",
    "A B",
    "a a",
    "aa a",
    "aa aa",
]
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = ("abc", "▁ab", " a", "ab", "<a>", "<ab>", " <a> ", "<a", "b>", "aab", "x<a>", "AB", "  ")


def _model(**options: Any) -> dict[str, Any]:
    return bpe_model(_LETTERS, _MERGES, **options)


def _texts(seed: int, count: int) -> list[str]:
    source = random.Random(seed)
    texts = ["", " ", "a", " a", "▁a", "abc abc", "  abcd  ", "ab\n\n ab", "12 345", "a.b,!c", "'s'ſ'LL"]
    return texts + [random_text(source, _WORDS) for _ in range(count)]


def _check_encoding(content: dict[str, Any], seed: int = 0, count: int = 60) -> None:
    ours, theirs = build(content), library(content)
    for text in _texts(seed, count):
        for add_special_tokens in (True, False):
            expected = theirs.encode(text, add_special_tokens=add_special_tokens).ids
            assert ours.encode(text, add_special_tokens) == expected, (content, text)
    theirs.encode_special_tokens = True
    for text in _texts(seed + 1, count // 2):
        expected = theirs.encode(text).ids
        assert ours.encode(text, split_special_tokens=True) == expected, (content, text)


_NORMALIZERS: list[dict[str, Any]] = [
    {"type": "NFC"},
    {"type": "NFD"},
    {"type": "NFKC"},
    {"type": "NFKD"},
    {"type": "Lowercase"},
    {"type": "StripAccents"},
    {"type": "Nmt"},
    {"type": "ByteLevel"},
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    {"type": "Replace", "pattern": {"String": "ab"}, "content": "$1"},
    {"type": "Replace", "pattern": {"Regex": " {2,}|^a"}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": r"\s"}, "content": "  "},
    *({"type": "Strip", "strip_left": left, "strip_right": right} for left in (False, True) for right in (False, True)),
]


@pytest.mark.parametrize("index", range(len(_NORMALIZERS)))
def test_normalizer(index: int) -> None:
    tokens = [added_token("<a>", 100, normalized=True), added_token("Ab", 101, special=True, normalized=True)]
    model = _model(unk_token="<unk>", fuse_unk=False)
    size = len(model["vocab"])
    for i, token in enumerate(tokens):
        token["id"] = size + i
    for after in (None, *_NORMALIZERS[::3]):
        parts = [_NORMALIZERS[index]] + ([after] if after else [])
        for scheme in ("first", "always"):
            metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}
            content = content_of(
                model,
                normalizer={"type": "Sequence", "normalizers": parts},
                pre_tokenizer=metaspace,
                added_tokens=tokens,
            )
            _check_encoding(content, seed=index, count=20)


def _split(pattern: dict[str, str], behavior: str, invert: bool) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}


_BEHAVIORS = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_PATTERNS = [{"Regex": r"\s+|\p{N}"}, {"String": "ab"}, {"Regex": _QWEN}, {"Regex": r"\p{Lu}?[\p{Ll}\p{M}]+"}]
_PRE_TOKENIZERS: list[dict[str, Any]] = [
    *(_split(*options) for options in itertools.product(_PATTERNS, _BEHAVIORS, (False, True))),
    *({"type": "Punctuation", "behavior": behavior} for behavior in _BEHAVIORS),
    *({"type": "Digits", "individual_digits": individual} for individual in (False, True)),
    {"type": "Whitespace"},
    {"type": "WhitespaceSplit"},
    {"type": "BertPreTokenizer"},
    {"type": "CharDelimiterSplit", "delimiter": "b"},
    {"type": "FixedLength", "length": 3},
    *(
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": is_split}
        for scheme in ("first", "always", "never")
        for is_split in (False, True)
    ),
    *(
        {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": is_regex}
        for prefix in (False, True)
        for is_regex in (False, True)
    ),
]


@pytest.mark.parametrize("index", range(len(_PRE_TOKENIZERS)))
def test_pre_tokenizer(index: int) -> None:
    part = _PRE_TOKENIZERS[index]
    is_byte_level = part["type"] == "ByteLevel"
    model = byte_level_model(["a b", "ab c", "Ġ a", "Ġa b"]) if is_byte_level else _model(unk_token="<unk>")
    tokens = [added_token("<a>", len(model["vocab"]), special=True)]
    _check_encoding(content_of(model, pre_tokenizer=part, added_tokens=tokens), seed=index, count=40)
    source = random.Random(index)
    for _ in range(3):
        others = source.sample(_PRE_TOKENIZERS, 2)
        sequence = {"type": "Sequence", "pretokenizers": [others[0], part, others[1]]}
        kinds = [step["type"] for step in sequence["pretokenizers"]]
        is_inserting = [kind in ("ByteLevel", "Metaspace") for kind in kinds]
        if any(kind == "Metaspace" and any(is_inserting[:i]) for i, kind in enumerate(kinds)):
            continue  # characters put in share the origin of the next one: not tracked across a second cut
        _check_encoding(content_of(model, pre_tokenizer=sequence, added_tokens=tokens), seed=index, count=15)


@pytest.mark.parametrize("index", range(32))
def test_added_token_flags(index: int) -> None:
    flags = [bool(index >> bit & 1) for bit in range(5)]
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    rules = dict(zip(names, flags))
    model = _model(unk_token="<unk>", fuse_unk=True)
    size = len(model["vocab"])
    tokens = [
        added_token("<a>", size, **rules),
        added_token("<a>b", size + 1, special=not rules["special"]),
        added_token("ab", model["vocab"]["ab"], **rules),
        added_token("  ", size + 2, normalized=rules["normalized"]),
        added_token("É", size + 3, **rules),
    ]
    for normalizer in (None, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "▁"}, {"type": "NFD"}):
        _check_encoding(content_of(model, normalizer=normalizer, added_tokens=tokens), seed=index, count=60)


@pytest.mark.parametrize("seed", range(40))
def test_added_tokens_that_share_white_space(seed: int) -> None:
    """A token that strips on its left begins where the one before ended, and is none if nothing is left of it."""
    source, model = random.Random(seed), _model(unk_token="<unk>")
    contents = source.sample(["  ", " ", "A", " A", "A ", "  A", "AB", "<", "> ", "A  B"], source.randint(2, 4))
    flags = ("single_word", "lstrip", "rstrip", "special")
    new = [text for text in contents if text not in model["vocab"]]
    ids = model["vocab"] | {text: number for number, text in enumerate(new, len(model["vocab"]))}
    tokens = [
        added_token(text, ids[text], normalized=False, **{flag: source.random() < 0.5 for flag in flags})
        for text in contents
    ]
    content = content_of(model, pre_tokenizer={"type": "WhitespaceSplit"}, added_tokens=tokens)
    ours, theirs = build(content), library(content)
    compared = 0
    for _ in range(40):
        text = "".join(source.choice("  AB<>x ") for _ in range(source.randint(0, 14)))
        try:
            expected = theirs.encode(text).ids
        except BaseException as error:  # the library panics where a token lies within white space that is taken
            if type(error).__name__ != "PanicException":
                raise
            continue
        assert ours.encode(text) == expected, (content["added_tokens"], text)
        compared += 1
    assert compared


@pytest.mark.parametrize("index", range(32))
def test_model_options(index: int) -> None:
    fuse_unk, byte_fallback, ignore_merges, has_unk, is_affixed = (bool(index >> bit & 1) for bit in range(5))
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(0 if index % 3 else 0xB0, 256)] if byte_fallback else []
    options: dict[str, Any] = {}
    alphabet = [*_LETTERS, *byte_tokens]
    merges = _MERGES
    if is_affixed:
        options = {"continuing_subword_prefix": "##", "end_of_word_suffix": "</w>"}
        alphabet += ["##" + letter for letter in "abcde"] + [letter + "</w>" for letter in "abc"]
        alphabet += ["##" + letter + "</w>" for letter in "abcde"]
        merges = ["a ##b", "##b ##c", "ab ##c", "##d ##e</w>", "a ##b</w>"]
    model = bpe_model(
        alphabet,
        merges,
        unk_token="<unk>" if has_unk else None,
        fuse_unk=fuse_unk,
        byte_fallback=byte_fallback,
        ignore_merges=ignore_merges,
        dropout=None,
        **options,
    )
    pre_tokenizer = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    for part in (None, pre_tokenizer, {"type": "WhitespaceSplit"}):
        _check_encoding(content_of(model, pre_tokenizer=part), seed=index)


def test_merges_as_pairs_and_as_strings_are_the_same() -> None:
    model = _model()
    pairs = {**model, "merges": [merge.split(" ") for merge in model["merges"]]}
    _check_encoding(content_of(pairs))
    for text in _texts(3, 20):
        assert build(content_of(pairs)).encode(text) == build(content_of(model)).encode(text)


def test_long_words_are_merged_alike() -> None:
    model = _model(unk_token="<unk>")
    ours, theirs = build(content_of(model)), library(content_of(model))
    source = random.Random(0)
    for length in (90, 96, 97, 98, 150, 1000, 5000):
        for letters in ("a", "ab", "abc", "abcde▁"):
            text = "".join(source.choice(letters) for _ in range(length))
            assert ours.encode(text) == theirs.encode(text).ids


@pytest.mark.parametrize(
    "post_processor",
    [
        {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "end", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                "<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
                "end": {"id": "end", "ids": [3, 4], "tokens": ["x", "y"]},
            },
        },
        {
            "type": "RobertaProcessing",
            "sep": ["b", 2],
            "cls": ["a", 1],
            "trim_offsets": True,
            "add_prefix_space": True,
        },
        {"type": "BertProcessing", "sep": ["b", 2], "cls": ["a", 1]},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
    ],
)
def test_post_processor(post_processor: dict[str, Any]) -> None:
    _check_encoding(content_of(_model(), post_processor=post_processor))
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    twice = {"type": "Sequence", "processors": [byte_level, post_processor]}
    _check_encoding(content_of(_model(), post_processor=twice))


_REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_DECODERS: list[Any] = [
    None,
    [_BYTE_LEVEL],
    [_REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, _STRIP],
    [_REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}],
    [{"type": "ByteFallback"}, _METASPACE],
    [_METASPACE],
    [{**_METASPACE, "prepend_scheme": "never"}],
    [{"type": "ByteFallback"}],
    [_STRIP],
    [{"type": "Fuse"}, {"type": "Strip", "content": "a", "start": 3, "stop": 0}],
    [{"type": "BPEDecoder", "suffix": "c"}],
    [{"type": "Fuse"}, {"type": "Replace", "pattern": {"Regex": "(ab)+|[0-9] "}, "content": "<>"}],
    [{"type": "Replace", "pattern": {"Regex": "[abc]"}, "content": ""}, _BYTE_LEVEL, _STRIP],
    [{"type": "Fuse"}, _BYTE_LEVEL],
]


@pytest.mark.parametrize("index", range(len(_DECODERS)))
def test_decoder(index: int) -> None:
    decoders = _DECODERS[index]
    decoder = {"type": "Sequence", "decoders": decoders} if decoders else None
    alphabet = [
        *_LETTERS,
        "Ġ",
        "Ã",
        "©",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "<0xe2>",
        "<0x1>",
    ]
    model = bpe_model(alphabet, _MERGES)
    size = len(model["vocab"])
    tokens = [
        added_token("<s>", model["vocab"]["<s>"], special=True),
        added_token("<｜▁a｜>", size, special=True),
        added_token("é ü", size + 1),
        added_token("É", size + 2, special=True, normalized=True),
    ]
    content = content_of(model, decoder=decoder, added_tokens=tokens, normalizer={"type": "Lowercase"})
    ours, theirs = build(content), library(content)
    source = random.Random(index)
    euro = [model["vocab"][f"<0x{byte:02X}>"] for byte in (0xE2, 0x82, 0xAC)]
    for _ in range(400):
        ids = [source.randrange(size + 5) for _ in range(source.randint(1, 12))]
        if source.random() < 0.5:
            ids += euro * source.randint(1, 2) + ids[:2]
        for skip_special_tokens in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip_special_tokens)
            assert ours.decode(ids, skip_special_tokens) == expected, ids


def test_merges_whose_tokens_hold_spaces() -> None:
    model = bpe_model(["a", "b", " ", "a ", "a  ", " b"], [])
    model["merges"] = [["a", " "], ["a ", " "], [" ", "b"]]
    content = content_of(model)
    ours, theirs = build(content), library(content)
    for text in ("a b", "a  b", "  b", "ab a  a b", "a   b"):
        assert ours.encode(text) == theirs.encode(text).ids
