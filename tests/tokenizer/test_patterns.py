"""Oniguruma's syntax, translated: each pattern cuts texts as the `tokenizers` library cuts them."""

from __future__ import annotations

import random

import pytest

from tests.tokenizer.support import random_text
from tokenizer.patterns.compiled import compile_pattern, find_spans
from tokenizer.patterns.oniguruma import PatternError

_PATTERNS = [
    # The patterns of real tokenizers: GPT-2, Llama 3, o200k, DeepSeek, tiktoken's newest cl100k, BLOOM
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s",
    r" ?[^(\s|.,!?…。，、।۔،)]+",
    # The syntax, piece by piece
    "^a|b$",
    "^",
    "$",
    r"\A.|.\z",
    r".\Z",
    "a*",
    "a*?|b",
    "|a",
    "(a)(?:b)?",
    "(?<=a)b|(?<!a)c",
    "a(?=b)|a(?!c).",
    "(?>a+)b?",
    "a{2}|b{2,}|c{,2}d",
    "a{2}?b",
    "a{2,3}?",
    "a{1,2}+",
    "a{,}|a{x}",
    "[]a]|[^]b]",
    "[a-cé&&[b-z]]",
    "[a[bc]]+",
    "[a-]|[-b]",
    r"[\w-]+|\W",
    r"[[:alpha:][:digit:]]+",
    r"\bab?\b|\B.",
    r"\h+|\H",
    r"\R|\s",
    r"\x61|\x{4e2d}|\u00e9|\t|\0",
    "(?m:.)+",
    "(?x: a b # comment\n | c )",
    "a(?i)b|c",
    "(?i:a(?-i:b))",
    "(?#comment)a",
    r"\p{^L}+|\p{Alpha}",
    r"\.|\/|\-|\ ",
    "(?i:é|ſ|µ|å)+",
]
_REFUSED = [
    (r"(a)\1", "backreferences"),
    (r"(?<name>a)", r"group \(\?<"),
    (r"\k<name>", r"\\k is not supported"),
    (r"\Ga", r"\\G is not supported"),
    (r"a\Kb", r"\\K is not supported"),
    ("(?i:ss)", "also matches a single character"),
    (r"(?i:[\p{Lu}])", "case-insensitive class"),
    (r"(*FAIL)", "callouts"),
    (r"\p{Nope}", "pattern"),
    (r"\pL", "braces"),
    ("(" * 100_000, "nested too deeply"),
    ("(a", r"missing \)"),
    ("a)", r"unmatched \)"),
    ("[a", "unexpected end"),
    ("*a", "nothing to repeat"),
    ("[b-a]", "empty range"),
    (r"\y", "escape"),
    ("a\\", "unexpected end"),
    ("[a&&[^b]]", "negated or intersected"),
]


@pytest.mark.parametrize("pattern", _PATTERNS)
def test_cuts_as_the_library_does(pattern: str) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the tokenizers library")
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    source = random.Random(0)
    texts = [
        "a",
        "ab\nb\n",
        "aaaaa",
        "\n",
        "a\n\na",
        "Ab aB",
        "bbb ccd",
        "aab]-",
        "don't 'S'LL 1234 ...\n\n x",
        "ʕaʕ",
    ]
    letters = "abcAB \n1.]-é"
    texts += ["".join(source.choice(letters) for _ in range(source.randint(1, 12))) for _ in range(150)]
    texts += [random_text(source) for _ in range(150)]
    for text in texts:
        expected = [piece for piece, _ in split.pre_tokenize_str(text)]
        spans = find_spans(compile_pattern(pattern), text)
        assert [text[start:end] for start, end, _ in spans if start != end] == expected, text


def test_every_ascii_folding_of_one_character_is_known() -> None:
    foldings = {chr(code).casefold() for code in range(0x80, 0x20000)}
    several = [folding for folding in foldings if len(folding) > 1 and folding.isascii()]
    assert several
    for folding in several:
        with pytest.raises(PatternError, match="single character"):
            compile_pattern(f"(?i:{folding})")


@pytest.mark.parametrize(("pattern", "problem"), _REFUSED)
def test_refused_by_name(pattern: str, problem: str) -> None:
    with pytest.raises(PatternError, match=problem):
        compile_pattern(pattern)
