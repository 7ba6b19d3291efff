"""Extends an answer's grammar: by reasoning before it, or calls as an alternative."""

from __future__ import annotations

import json

from runtime.engine.grammar.grammar import Grammar, parse_json
from runtime.text.reasoning import CLOSE_TAG, OPEN_TAG, ReasoningStart


def after_reasoning(grammar: Grammar, start: ReasoningStart) -> Grammar:
    """The grammar with optional reasoning before it, if the prompt's end permits it.

    In Lark's notation the first line of the grammar is the rule `start`, which no other rule may use. Raises
    ``RequestError`` if the text is then too long.
    """
    if start == "closed":
        return grammar
    opening = "" if start == "open" else f"{json.dumps(OPEN_TAG)} "
    lines = [
        f"start: thinking{'?' if start == 'may_open' else ''} answer",
        f"thinking: {opening}thought line_ends",
        f"thought[suffix={json.dumps(CLOSE_TAG)}]: /(?s:.*)/",
        r"line_ends: /\n{0,2}/",
        f"answer: {rule_body(grammar)}",
    ]
    return Grammar(kind="lark", text="\n".join(lines))


def or_calls(grammar: Grammar, calls: str) -> Grammar:
    """A text of the grammar, or tool calls, whose grammar in Lark's notation begins with the rule `start`. Raises
    ``RequestError`` if both together are too long."""
    lines = ["start: content | calls", f"content: {rule_body(grammar)}", f"calls: {calls.removeprefix('start:')}"]
    return Grammar(kind="lark", text="\n".join(lines))


def rule_body(grammar: Grammar) -> str:
    """The body of the grammar's first rule, and its further rules."""
    if grammar.kind == "json_schema":
        return f"%json {grammar.text}"
    if grammar.kind == "json_object":
        return '%json {"type": "object"}'
    if grammar.kind == "choice":
        return " | ".join(json.dumps(text) for text in parse_json(grammar))
    if grammar.kind == "regex":
        from llguidance import regex_to_lark

        return f"/{regex_to_lark(grammar.text)}/"
    return grammar.text.removeprefix("start: ")
