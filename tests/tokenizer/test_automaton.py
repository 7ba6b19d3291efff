"""Split patterns as tables: classes of every character, and words, against the `regex` module that defines both."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizer.support import random_text
from tokenizer.patterns.automaton import NUM_CHARACTERS, Automaton, classify, compile_automaton
from tokenizer.patterns.oniguruma import MOVED_LETTER, translate
from tokenizer.patterns.tree import NotTabularError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "gpt2": GPT2,
    "qwen": LLAMA3.replace("{1,3}", ""),
    "llama3": LLAMA3,
    "o200k": O200K,
    "marks": LLAMA3.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),
    "ideographs": r"[一-龥぀-ゟ゠-ヿ]+|\p{Lu}\p{Ll}*|a{2,4}b?|(?:ab){2,}|x(?=y)|\d{3}|[\s\S]",
    "whole": r"[\s\S]+",
}


@cache
def _automaton(name: str) -> Automaton:
    return compile_automaton(translate(PATTERNS[name], is_exact=False))


@cache
def _pattern(name: str) -> regex.Pattern[str]:
    return regex.compile(translate(PATTERNS[name], is_exact=True), flags=regex.VERSION0)


def cut(automaton: Automaton, text: str) -> tuple[list[str], int]:
    """The words of `text`, by the tables alone, and how many entries were read."""
    width = automaton.num_classes + 1
    classes = [*automaton.classes[np.array([ord(character) for character in text], np.int64)].tolist(), width - 1]
    words = []
    start = steps = 0
    while start < len(text):
        state, end = automaton.start, start
        for position in range(start, len(text) + 1):
            steps += 1
            entry = int(automaton.transitions[state + classes[position]])
            if entry & 1:
                end = position
            state = entry >> 1
            if state == 0:
                break
        words.append(text[start:end])
        start = end
    return words, steps


def test_every_character_is_of_its_class() -> None:
    atoms = [r"\s", "[^\\s\\p{L}\\p{N}]", "(?i:s)", "(?i:k)", "[\\U00004E00-\\U00009FA5]", "[\\p{Lu}\\p{Lt}\\p{M}]"]
    classified = classify(atoms)
    everything = np.arange(NUM_CHARACTERS, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    for number, atom in enumerate(atoms):
        of_class = np.array([number in members for members in classified.members])
        found = np.zeros(NUM_CHARACTERS, bool)
        for run in regex.compile(f"(?:{atom})+", flags=regex.VERSION0).finditer(everything):
            found[run.start() : run.end()] = True
        found[ord(MOVED_LETTER)] = of_class[classified.classes[ord("a")]]  # which the reference has among Ll
        assert np.array_equal(of_class[classified.classes], found), atom


ALPHABET = "  \t\n\r\u3000\x85\u00a0'sSſKtTlLrReEvVmMdD019٣½²aAzZbéÉĄǅʰª中ア\u0301\u200d.,!/<|>_-xy\x00\ufffd🙂ʕ"


@pytest.mark.parametrize("name", PATTERNS)
@given(st.text(st.one_of(st.sampled_from(ALPHABET), st.characters(codec="utf-8")), max_size=40))
@settings(max_examples=60, deadline=None)
def test_cuts_where_regex_cuts(name: str, text: str) -> None:
    assert cut(_automaton(name), text)[0] == _pattern(name).findall(text)


@pytest.mark.parametrize("name", PATTERNS)
def test_cuts_random_texts(name: str) -> None:
    source = random.Random(7)
    for _ in range(100):
        text = random_text(source)
        assert cut(_automaton(name), text)[0] == _pattern(name).findall(text), text


def test_each_character_of_a_long_run_is_read_a_few_times() -> None:
    """Steps of the table a character, for texts on which a matcher might go back again and again."""
    for name in ("gpt2", "qwen", "llama3", "o200k"):
        automaton = _automaton(name)
        for text in ("a" * 5000, " " * 5000, "\n" * 5000, "\n" + " " * 5000 + "x", "A" * 5000, "'" * 5000, "中" * 5000,
                     "1" * 5000, (" " * 99 + "\n") * 50, "Aa" * 2500, "\u0301" * 5000):  # fmt: skip
            _, steps = cut(automaton, text)
            assert steps <= 3 * len(text), (name, text[:8])


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        (r"a|b", "does not match every character"),
        (r"a*|[\s\S]", "empty text"),
        (r"\s+?|[\s\S]", "lazy"),
        (r"[\s\S]++", "lazy, possessive"),
        (r"\p{Han}|[\s\S]", "property 'Han'"),
        (r"\w+|[\s\S]", "is not supported"),
        (r"(?<=a)b|[\s\S]", "is not supported"),
        (r"(?>a)|[\s\S]", "is not supported"),
        (r"^a|[\s\S]", "is not supported"),
        (r"ʕ|[\s\S]", "is not supported"),
        (r"(?:a*)*|[\s\S]", "may be empty"),
        (r"(?:[\s\S]{60}){60}[\s\S]*", "too"),
    ],
)
def test_what_no_table_expresses_is_refused(pattern: str, problem: str) -> None:
    with pytest.raises(NotTabularError, match=problem):
        compile_automaton(translate(pattern, is_exact=False))
