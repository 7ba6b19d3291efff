"""Grammars for answers in harmony: a forced call, or a constrained answer in the final channel, with optional analysis
before it."""

from __future__ import annotations

from runtime.engine.grammar.grammar import Grammar
from runtime.text.harmony.message import CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, SPECIAL_TOKENS, START, SpecialIds
from runtime.text.reasoning_grammar import rule_body
from runtime.text.tools.notation import CallForm, Notation

HARMONY = Notation(
    "harmony",
    None,
    CallForm(f"{CHANNEL}commentary to={FUNCTIONS}.NAME {CONSTRAIN}json{MESSAGE}", "", between=f"{END}{START}assistant"),
    markers=SPECIAL_TOKENS,
    names=("openai",),
)
"""The notation of a forced call: gpt-oss's own."""


def in_final_channel(grammar: Grammar, ids: SpecialIds) -> Grammar:
    """A message on the final channel whose content is the grammar's. Raises ``RequestError`` if that is too long."""
    lines = [f'start: <[{ids.channel}]> "final" <[{ids.message}]> final_text', f"final_text: {rule_body(grammar)}"]
    return Grammar(kind="lark", text="\n".join(lines))


def after_analysis(grammar: Grammar, ids: SpecialIds) -> Grammar:
    """Messages on the analysis channel, then one of the grammar's. Raises ``RequestError`` if that is too long."""
    lines = [
        "start: analysis* message",
        f'analysis: <[{ids.channel}]> "analysis" <[{ids.message}]> thought <[{ids.end}]> <[{ids.start}]> "assistant"',
        "thought: /(?s:.*)/",
        f"message: {rule_body(grammar)}",
    ]
    return Grammar(kind="lark", text="\n".join(lines))
