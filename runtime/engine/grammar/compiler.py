"""From a grammar to matchers that follow a choice's tokens, by llguidance.

    check_grammar(grammar, vocabulary)           # on the caller's thread: bounded, and typed errors
    compile_grammar(grammar, vocabulary, n)      # in the engine: a matcher for each of n choices

llguidance reads Lark's notation, with JSON schemas in it, and keeps to limits of its own: the size of the grammar, the
work for its lexer, the work for one mask. It recurses along chains of rules, hence the deep stack.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from runtime.engine.grammar.deep_stack import on_deep_stack
from runtime.engine.grammar.grammar import Grammar, grammar_error
from runtime.engine.grammar.lark import lark_of
from runtime.engine.grammar.limits import check_limits
from runtime.engine.grammar.matcher import GrammarMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

    from runtime.engine.grammar.vocabulary import LazyVocabulary, Vocabulary

NUM_REMEMBERED = 256
"""Grammars that were found good, of which a checker knows that they are."""
MAX_MESSAGE_LENGTH = 400
"""Characters of what llguidance says of a grammar that are handed on."""


def check_grammar(grammar: Grammar, vocabulary: Vocabulary) -> None:
    """Raises ``RequestError`` (param "grammar") where the grammar is too large, too deep, wrong, asks for what cannot
    be promised, or takes too much work to compile."""
    check_limits(grammar)
    _matcher(grammar, vocabulary)


class GrammarChecker:
    """Checks the grammars of a model's requests, each but once. Threads may share it."""

    def __init__(self, vocabulary: LazyVocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._good: dict[Grammar, None] = {}

    def is_known(self, grammar: Grammar | None) -> bool:
        """Whether ``check`` has nothing to do."""
        return grammar is None or grammar in self._good

    def check(self, grammar: Grammar | None) -> None:
        """Raises as ``check_grammar`` does, and where the model has no tokenizer."""
        if grammar is None or grammar in self._good:
            return
        check_grammar(grammar, self._vocabulary.get())
        with self._lock:
            if len(self._good) >= NUM_REMEMBERED:
                del self._good[next(iter(self._good))]
            self._good[grammar] = None


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary, count: int) -> list[GrammarMatcher]:
    """As many matchers, each at the beginning. Raises as ``check_grammar`` does."""
    check_limits(grammar)
    first = _matcher(grammar, vocabulary)
    matchers = [first, *(first.deep_copy() for _ in range(count - 1))]
    return [GrammarMatcher(matcher, vocabulary) for matcher in matchers]


def _matcher(grammar: Grammar, vocabulary: Vocabulary) -> LLMatcher:
    """With its first mask computed, which may be the one that is too much, and takes longest."""
    text = lark_of(grammar, is_canonical=vocabulary.is_canonical)
    matcher = on_deep_stack(partial(_compiled, text, vocabulary))
    if matcher.is_error():
        raise grammar_error(_readable(matcher.get_error()))
    warnings = matcher.get_grammar_warnings()
    if warnings:
        raise grammar_error(_readable(warnings[0]))
    return matcher


def _compiled(text: str, vocabulary: Vocabulary) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary.ll_tokenizer, text, log_level=0, limits=_limits())
    matcher.compute_bitmask()
    return matcher


def _limits() -> LLParserLimits:
    """The symbols of a grammar; the states of its lexer, of half a kilobyte and more each; the work for the lexer, for
    its part in one mask, and for the parser's part in it: a mask stays beneath some ten milliseconds."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=20_000,
        max_lexer_states=20_000,
        initial_lexer_fuel=300_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        verbose_errors=False,
    )


def _readable(message: str) -> str:
    """The first line of what llguidance says, without the place in a text that is not the user's."""
    first = message.split("\n", 1)[0].removeprefix("at 1(8): ")
    return first[:MAX_MESSAGE_LENGTH]
