"""Compiles grammars, with llguidance, to matchers that follow a choice's tokens.

    check_grammar(grammar, vocabulary)           # on the caller's thread: bounded, and typed errors
    compile_grammar(grammar, vocabulary, n)      # in the engine: a matcher for each of n choices

llguidance reads Lark's notation, with JSON schemas in it, and has limits of its own: the size of the grammar, the
lexer's work, the work for one mask. It recurses along chains of rules, hence the deep stack.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from runtime.engine.errors import RequestError
from runtime.engine.grammar.grammar import (
    MAX_CHOICES,
    MAX_GRAMMAR_DEPTH,
    Grammar,
    grammar_error,
    parse_json,
)
from runtime.engine.grammar.json_schema import prepared
from runtime.engine.grammar.lark import lark_of
from runtime.engine.grammar.matcher import GrammarMatcher, Vocabulary, readable
from runtime.engine.grammar.schema_places import place_in, schema_error

ANSWER_MARGIN = 3
"""How many times a trial's limits the masks of an answer may take, so that an admitted grammar can finish."""
MAX_PLACES_TRIED = 256
"""Nested schemas that are tried alone, to find the faulty one."""


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
    matcher = LLMatcher(vocabulary.ll_tokenizer, text, log_level=0, limits=_limits(1 if is_trial else ANSWER_MARGIN))
    matcher.compute_bitmask()
    if matcher.is_error():
        return matcher, matcher.get_error()
    return matcher, fails(matcher, vocabulary) if is_trial else None


def _limits(margin: int) -> LLParserLimits:
    """Limits on the grammar's symbols; on the lexer's states, of half a kilobyte and more each; on the lexer's work in
    all and for one mask; on the parser's work for one mask. A trial's mask takes at most some thirty milliseconds."""
    return LLParserLimits(
        max_grammar_size=100_000,
        max_lexer_states=20_000 * margin,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000 * margin,
        step_max_items=20_000 * margin,
        max_items_in_row=4_000 * margin,
        verbose_errors=False,
    )


NUM_TEXTS = 2
NUM_CHOICES = 24
"""Tokens of each trial text that are chosen among more than `MANY`; others are not counted."""
MANY = 16
MAX_TOKENS = 400
TIME_LIMIT_S = 0.3
"""Seconds after which a trial ends; the engine's own limits are wider."""
_SHORT = 100
"""The first ids of the vocabulary, which include the characters that end strings and objects."""


def fails(matcher: LLMatcher, vocabulary: Vocabulary) -> str | None:
    """llguidance's error if it cannot follow a text, None if it can. Deterministic for a grammar, unless time ran
    out."""
    deadline_s = time.monotonic() + TIME_LIMIT_S
    for seed in range(NUM_TEXTS):
        error = _text_fails(matcher.deep_copy(), vocabulary, random.Random(seed), deadline_s)
        if error is not None:
            return error
    return None


def _text_fails(matcher: LLMatcher, vocabulary: Vocabulary, draw: random.Random, deadline_s: float) -> str | None:
    num_choices = 0
    for _ in range(MAX_TOKENS):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return matcher.get_error()
        is_allowed = np.unpackbits(mask, count=vocabulary.vocab_size, bitorder="little").view(np.bool_)
        is_allowed[list(vocabulary.eos_token_ids)] = False
        allowed = np.flatnonzero(is_allowed)
        if not allowed.size or matcher.is_stopped():
            return None
        some = allowed[:_SHORT] if draw.random() < 0.5 else allowed
        if not matcher.consume_token(int(some[draw.randrange(some.size)])):
            return matcher.get_error() if matcher.is_error() else None
        num_choices += allowed.size > MANY
        if num_choices == NUM_CHOICES or time.monotonic() > deadline_s:
            return None
    return None


T = TypeVar("T")

STACK_BYTES = 512 << 20
"""Bytes of address space; only touched pages take memory."""

_starting = threading.Lock()


def _after_fork() -> None:
    global _starting
    _starting = threading.Lock()  # no thread of the child could release it


os.register_at_fork(after_in_child=_after_fork)


def on_deep_stack(function: Callable[[], T]) -> T:
    """Return or raise as ``function`` does, run in a thread with ``STACK_BYTES`` of stack."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="xserv-deep-stack", daemon=True)
    with _starting:  # the stack size applies to every thread that the process starts
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


_OPENING, _CLOSING = "([{", ")]}"
_IGNORED_ATTRIBUTE = re.compile(r"^[ \t]*[!?_a-z][\w-]*[ \t]*\[[^\]\n]*\b(temperature|stop)\b", re.MULTILINE)


def check_limits(grammar: Grammar) -> None:
    """Raises ``RequestError`` with the quantity, its value and its limit."""
    if grammar.kind == "choice":
        _check_choices(parse_json(grammar))
    elif grammar.kind == "regex":
        _check_brackets(grammar.text)
    elif grammar.kind == "lark":
        _check_lark(grammar.text)


def _unsupported(what: str) -> RequestError:
    return grammar_error(f"the {what} is not supported")


def _check_choices(choices: Any) -> None:
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise grammar_error("a choice must be a list of strings")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise grammar_error(f"a choice must have 1 to {MAX_CHOICES} strings, got {len(choices)}")
    if "" in choices:
        raise grammar_error("a choice must not hold an empty string")


def _check_lark(text: str) -> None:
    _check_brackets(text)
    if (found := _IGNORED_ATTRIBUTE.search(text)) is not None:
        raise _unsupported(f"attribute {found[1]}")


def _check_brackets(text: str) -> None:
    """Brackets in strings count too, which does no harm if they close."""
    depth = 0
    for character in text:
        if character in _OPENING:
            depth += 1
            if depth > MAX_GRAMMAR_DEPTH:
                raise grammar_error(f"brackets may be nested at most {MAX_GRAMMAR_DEPTH} levels deep, got more")
        elif character in _CLOSING:
            depth = max(0, depth - 1)
