"""Detects the notation of a model's answers from its chat template and its vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.errors import InvalidArgumentError
from runtime.text.harmony.message import HARMONY, SPECIAL_TOKENS, special_ids
from runtime.text.harmony.prompt import answer_end_ids, has_plain_template, speaks_harmony
from runtime.text.reasoning import THINK, ReasoningTags, vocabulary_tags
from runtime.text.response_template.parser import AnswerTemplate
from runtime.text.response_template.template import ResponseTemplateError
from runtime.text.tools.derive import shown_by
from runtime.text.tools.table import BY_NAME, HERMES, JSON, Notation, notation_in
from runtime.text.tools.tool_prompt import ignores_tools
from tokenizer import ChatTemplateError, Tokenizer
from tokenizer.templates.chat_template import compile_template
from tokenizer.warn import warn_once

BLANKS, HARMONY_SPACING = (", ", ": "), (",", ":")
"""The separators of items and of keys in the JSON of calls: Python's and most templates', and those of harmony for
arguments that were sent as an object."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The notations that a model may write beside content.

    reasoning     between tags
    tools         of tool calls; None if it writes none, or in an unknown notation
    forced_tools  of a forced call; None if calls cannot be forced
    tells_tools   its chat template leaves tools out, so that a message of our own describes them and their notation
    harmony       its answers are harmony's messages, which include reasoning and calls
    renders_harmony  conversations are rendered as harmony's messages, not by the chat template, which writes the same
    tags          those around reasoning
    template      the model's own declaration of its answers, by which they are read unless a call is forced
    origin        what this was taken from, and why, in words
    """

    reasoning: bool = False
    tools: Notation | None = None
    forced_tools: Notation | None = None
    tells_tools: bool = False
    harmony: bool = False
    renders_harmony: bool = False
    tags: ReasoningTags = THINK
    template: AnswerTemplate | None = None
    origin: str = field(default="nothing is read but content", compare=False)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer | None, *, reasoning_parser: str = "auto", tool_call_parser: str = "auto"
    ) -> AnswerFormat:
        """The value "auto" detects them in the tokenizer's chat templates and vocabulary. Without one nothing is text.

        Raises InvalidArgumentError for "harmony" if the vocabulary lacks its special tokens."""
        if tokenizer is None:
            return cls()
        _warn_of_broken_templates(tokenizer)
        is_asked = tool_call_parser in (HARMONY.name, *HARMONY.names)
        if is_asked and special_ids(tokenizer) is None:
            missing = " or ".join(SPECIAL_TOKENS)
            problem = f"tool_call_parser is {tool_call_parser!r}, and the model's vocabulary lacks {missing}"
            raise InvalidArgumentError(problem, param="tool_call_parser")
        may_be = reasoning_parser == "auto" and tool_call_parser in ("auto", "none")
        if is_asked or (may_be and speaks_harmony(tokenizer)):
            tools = None if tool_call_parser == "none" else HARMONY
            why = f"--tool-call-parser {tool_call_parser}" if is_asked else "harmony's tokens"
            return cls(
                True, tools, tools, harmony=True, renders_harmony=has_plain_template(tokenizer),
                origin=f"harmony's messages ({why})",
            )  # fmt: skip
        shown = shown_by(tokenizer)
        tags = vocabulary_tags(tokenizer)
        if reasoning_parser != "auto":
            reasoning, why = reasoning_parser == "think", f"--reasoning-parser {reasoning_parser}"
        elif shown.tags is not None:
            reasoning, tags, why = True, shown.tags, "as the chat template writes it"
        else:
            reasoning, why = _has_reasoning(tokenizer), "by tags in the vocabulary or in the chat template's text"
        told = f"reasoning: {f'{tags.opening} {tags.closing}' if reasoning else 'none'} ({why})"
        tags = tags if reasoning else THINK
        if tool_call_parser == "none":
            return cls(reasoning, tags=tags, origin=f"no tool calls (--tool-call-parser none); {told}")
        tells_tools = ignores_tools(tokenizer)
        if tool_call_parser != "auto":
            tools, why = BY_NAME.get(tool_call_parser), f"--tool-call-parser {tool_call_parser}"
        elif tells_tools:
            tools, why = HERMES, "the chat template leaves tools out, so the server tells them"
        elif shown.notation is not None:
            tools, why = shown.notation, f"as the chat template writes them: {shown.notation.form.example()}"
        else:
            tools = notation_in(tokenizer.chat_templates.values())
            why = f"by words of the chat template, since {shown.why}"
        template, refusal = None, ""
        if reasoning_parser == tool_call_parser == "auto":
            try:
                template = AnswerTemplate.of(tokenizer)
            except ResponseTemplateError as error:
                refusal = f"; response_template of tokenizer_config.json is not followed: {error}"
        told = f"tool calls: {'none' if tools is None else tools.name} ({why}); {told}{refusal}"
        forced_tools = tools or JSON
        if template is not None:
            told = f"response_template of tokenizer_config.json; for forced calls and budgets, {told}"
            reasoning = reasoning or template.tags is not None
            tags = template.tags or tags
            tools = forced_tools if template.has_calls else None
        return cls(reasoning, tools, forced_tools, tells_tools, tags=tags, template=template, origin=told)


def end_ids(
    answer_format: AnswerFormat, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...]
) -> tuple[int, ...]:
    """The ids that end an answer: the model's, and those of its format that its configuration leaves out."""
    if tokenizer is None:
        return eos_token_ids
    ends = answer_end_ids(tokenizer) if answer_format.harmony else ()
    if answer_format.tools is not None:
        ids = map(tokenizer.token_to_id, answer_format.tools.ends)
        ends += tuple(token_id for token_id in ids if token_id is not None)
    return tuple(dict.fromkeys((*eos_token_ids, *ends)))


def json_spacing(answer_format: AnswerFormat, tokenizer: Tokenizer | None) -> tuple[str, str] | None:
    """The separators of items and of keys in the JSON of past calls, as `TemplateForms.json_spacing` has them; None for
    harmony's, which are rendered as they were sent."""
    if answer_format.renders_harmony:
        return None
    if answer_format.tells_tools or tokenizer is None:
        return BLANKS
    try:
        return tokenizer.template_forms(has_tools=True).json_spacing
    except ChatTemplateError:
        return None


def _warn_of_broken_templates(tokenizer: Tokenizer) -> None:
    """Warn of a template that does not compile: the model serves all but chats, which are refused with the reason."""
    for name, template in tokenizer.chat_templates.items():
        try:
            compile_template(template)
        except ChatTemplateError as error:
            warn_once(f"{error}: chats by the template {name!r} are refused; --chat-template FILE gives another one")


def _has_reasoning(tokenizer: Tokenizer) -> bool:
    tags, templates = vocabulary_tags(tokenizer).tokens, tokenizer.chat_templates.values()
    return any(tokenizer.token_to_id(tag) is not None or any(tag in text for text in templates) for tag in tags)
