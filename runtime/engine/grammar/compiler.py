"""Compiles grammars, with llguidance, to matchers that follow a choice's tokens.

    check_grammar(grammar, vocabulary)           # on the caller's thread: bounded, and typed errors
    compile_grammar(grammar, vocabulary, n)      # in the engine: a matcher for each of n choices

llguidance reads Lark's notation, with JSON schemas in it, and has limits of its own: the size of the grammar, the
lexer's work, the work for one mask. It recurses along chains of rules, hence the deep stack.
"""

from __future__ import annotations

import json
import re
import threading
from functools import partial
from typing import TYPE_CHECKING

from runtime.engine.errors import RequestError
from runtime.engine.grammar.deep_stack import on_deep_stack
from runtime.engine.grammar.grammar import Grammar, grammar_error, parse_json
from runtime.engine.grammar.json_schema import prepared
from runtime.engine.grammar.lark import lark_of
from runtime.engine.grammar.limits import check_limits
from runtime.engine.grammar.matcher import GrammarMatcher
from runtime.engine.grammar.schema_places import place_in, schema_error
from runtime.engine.grammar.trial import fails

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

    from runtime.engine.grammar.vocabulary import LazyVocabulary, Vocabulary

NUM_REMEMBERED = 256
"""Accepted grammars that a checker remembers."""
ANSWER_MARGIN = 3
"""How many times a trial's limits the masks of an answer may take, so that an admitted grammar can finish."""
MAX_PLACES_TRIED = 256
"""Nested schemas that are tried alone, to find the faulty one."""
MAX_MESSAGE_LENGTH = 400
"""Characters of an llguidance error that are passed on."""


def check_grammar(grammar: Grammar, vocabulary: Vocabulary) -> None:
    """Raises ``RequestError`` (param "grammar") if the grammar is too large, too deep, wrong, not enforceable, or too
    expensive to compile."""
    check_limits(grammar)
    try:
        _matcher(grammar, vocabulary, is_trial=True)
    except RequestError as error:
        if grammar.kind != "json_schema" or error.param != "grammar":
            raise
        raise _placed(error, grammar, vocabulary) from None


def _placed(error: RequestError, grammar: Grammar, vocabulary: Vocabulary) -> RequestError:
    """The same error with the place of the innermost schema that causes it alone, if that is found in time."""
    schema = prepared(parse_json(grammar))
    definitions = schema.schema.get("$defs", {}) if isinstance(schema.schema, dict) else {}
    for place, node in schema.nodes[:MAX_PLACES_TRIED]:
        alone = Grammar(kind="json_schema", text=json.dumps({**node, "$defs": definitions}))
        try:
            _matcher(alone, vocabulary)
        except RequestError as inner:
            if str(inner) == str(error):
                keyword = next((name for name in ("pattern", "format") if name in node), "")
                reason = str(error).removeprefix("grammar: ")
                return schema_error(place_in(place, keyword) if keyword else place, reason)
    return error


class GrammarChecker:
    """Checks the grammars of a model's requests, each once. Thread-safe."""

    def __init__(self, vocabulary: LazyVocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._good: dict[Grammar, None] = {}

    def is_known(self, grammar: Grammar | None) -> bool:
        """Whether ``check`` would return at once."""
        return grammar is None or grammar in self._good

    def check(self, grammar: Grammar | None) -> None:
        """Raises as ``check_grammar`` does, and if the model has no tokenizer."""
        if grammar is None or grammar in self._good:
            return
        check_grammar(grammar, self._vocabulary.get())
        with self._lock:
            if len(self._good) >= NUM_REMEMBERED:
                del self._good[next(iter(self._good))]
            self._good[grammar] = None


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary, count: int) -> list[GrammarMatcher]:
    """``count`` matchers, each at the start. Raises as ``check_grammar`` does."""
    check_limits(grammar)
    first = _matcher(grammar, vocabulary)
    matchers = [first, *(first.deep_copy() for _ in range(count - 1))]
    return [GrammarMatcher(matcher, vocabulary) for matcher in matchers]


def _matcher(grammar: Grammar, vocabulary: Vocabulary, *, is_trial: bool = False) -> LLMatcher:
    """A matcher with its first mask computed, often the most expensive one. `is_trial` also draws texts of the grammar,
    under tighter limits than those of an answer."""
    text = lark_of(grammar, is_canonical=vocabulary.is_canonical)
    matcher, error = on_deep_stack(partial(_compiled, text, vocabulary, is_trial))
    if error is not None:
        raise grammar_error(readable(error))
    warnings = matcher.get_grammar_warnings()
    if warnings:
        raise grammar_error(readable(warnings[0]))
    return matcher


def _compiled(text: str, vocabulary: Vocabulary, is_trial: bool) -> tuple[LLMatcher, str | None]:
    """The matcher, and its error if there is one."""
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary.ll_tokenizer, text, log_level=0, limits=_limits(1 if is_trial else ANSWER_MARGIN))
    matcher.compute_bitmask()
    if matcher.is_error():
        return matcher, matcher.get_error()
    return matcher, fails(matcher, vocabulary) if is_trial else None


def _limits(margin: int) -> LLParserLimits:
    """Limits on the grammar's symbols; on the lexer's states, of half a kilobyte and more each; on the lexer's work in
    all and for one mask; on the parser's work for one mask. A trial's mask takes at most some thirty milliseconds."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=100_000,
        max_lexer_states=20_000 * margin,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000 * margin,
        step_max_items=20_000 * margin,
        max_items_in_row=4_000 * margin,
        verbose_errors=False,
    )


def readable(message: str) -> str:
    """llguidance's error in one line: the reason, without the position in a text that is not the user's."""
    lines = message.removeprefix("at 1(8): ").split("\n")
    kept = [line.strip() for line in lines if not _OF_PLACES.match(line)]
    text = " ".join(kept).removeprefix("failed to compile JSON schema: ").strip()
    return _UNTOLD.get(text, text)[:MAX_MESSAGE_LENGTH] or "no text matches it"


_OF_PLACES = re.compile(r"\s*(\d+ \||\^+\s*$)")
_UNTOLD = {"NoExtensionBias": "no text matches it"}
