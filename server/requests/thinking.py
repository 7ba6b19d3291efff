"""Converts a request's thinking options to variables of the model's chat template.

Templates have other levels of effort than clients: the nearest one is used, and the answer's header names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, get_args

from runtime.text.harmony.conversation import EFFORTS
from server.errors import invalid, json_text
from server.openai_api.schema import ChatCompletionRequest, ReasoningEffort
from server.service import Service
from tokenizer import ChatTemplateError, Tokenizer

LEVELS: tuple[ReasoningEffort, ...] = get_args(ReasoningEffort)
"""From the least to the most."""


def thinking_variables(service: Service, is_enabled: bool | None, *, has_tools: bool) -> dict[str, Any]:
    """`enable_thinking`, if the request sets it and the template has it."""
    if is_enabled is None or not has_variable(service, "enable_thinking", has_tools=has_tools):
        return {}
    return {"enable_thinking": is_enabled}


def has_variable(service: Service, name: str, *, has_tools: bool) -> bool:
    """Whether the model's chat template names this variable."""
    template = _template(service, has_tools=has_tools)
    return template is not None and name in template


def _template(service: Service, *, has_tools: bool) -> str | None:
    if service.tokenizer is None or not service.tokenizer.has_chat_template:
        return None
    return service.tokenizer.chat_template(has_tools=has_tools)


def nearest_effort(
    service: Service,
    effort: ReasoningEffort | None,
    name: str,
    ignored: list[str],
    *,
    has_tools: bool,
    is_off: bool = False,
) -> ReasoningEffort | None:
    """The template's nearest level, or None if it has no levels. If that is not the requested level, `ignored` gets the
    field's `name` and the used level: "reasoning_effort=high". `is_off`: the switch `enable_thinking` is off, so that a
    template with only this switch gets no level."""
    template = _template(service, has_tools=has_tools)
    if effort is None or template is None:
        return effort
    has_switch = "enable_thinking" in template
    if service.answer_format.renders_harmony or "reasoning_effort" in template:
        known = _known_levels(service, template)
        if effort in known or (effort == "none" and has_switch):
            return effort
        nearest = min(
            [level for level in known if level != "none"] or known,
            key=lambda level: abs(LEVELS.index(level) - LEVELS.index(effort)),
        )
        ignored.append(f"{name}={nearest}")
        return nearest
    if has_switch:
        if effort != "none" and (is_off or effort_budget(service, effort, has_tools=has_tools) is None):
            ignored.append(f"{name}={'off' if is_off else 'on'}")
        return effort
    ignored.append(name)
    return None


EFFORT_BUDGETS: dict[ReasoningEffort, int] = {"minimal": 512, "low": 1024, "medium": 8192}
"""Tokens of reasoning by the effort, for a template that has a switch instead of levels. Higher efforts are free."""


def effort_budget(service: Service, effort: ReasoningEffort | None, *, has_tools: bool) -> int | None:
    """Most tokens of reasoning by the effort; None if the effort is the template's matter, or has no bound."""
    if (
        effort is None
        or service.reasoning_end is None
        or has_variable(service, "reasoning_effort", has_tools=has_tools)
    ):
        return None
    return EFFORT_BUDGETS.get(effort)


def check_agreement(effort: ReasoningEffort | None, variables: Mapping[str, Any]) -> None:
    """Raises `ApiError` 400 if a request's `chat_template_kwargs` contradict its effort."""
    for name, is_contrary in (
        ("reasoning_effort", variables.get("reasoning_effort", effort) not in (None, effort)),
        ("enable_thinking", effort == "none" and variables.get("enable_thinking") is True),
    ):
        if effort is not None and is_contrary:
            other = f"chat_template_kwargs.{name} ({json_text(variables[name])})"
            both = f"reasoning_effort ({json_text(effort)}) and {other}"
            raise invalid("reasoning_effort", f"{both} contradict each other; send one.")


def settle_thinking(
    service: Service, asked: ChatCompletionRequest, ignored: list[str], names: Mapping[str, str]
) -> None:
    """Replaces a chat's effort by the template's nearest; `names` maps fields to their sent names, if different. If the
    template has no switch `enable_thinking`, off becomes the least effort, or is reported as ignored. Raises `ApiError`
    400 for an effort and a variable that contradict each other."""
    has_tools = bool(asked.tools) and asked.tool_choice != "none"
    given = dict(asked.chat_template_kwargs or {})
    name = names.get("reasoning_effort", "reasoning_effort")
    switch = names.get("chat_template_kwargs.enable_thinking", "enable_thinking")
    check_agreement(asked.reasoning_effort, given)
    template = _template(service, has_tools=has_tools)
    if "enable_thinking" in given and template is not None and "enable_thinking" not in template:
        is_enabled = given.pop("enable_thinking")
        asked.chat_template_kwargs = given or None
        if is_enabled is False and asked.reasoning_effort is None:
            name, asked.reasoning_effort = switch, "none"
        elif not (is_enabled and service.answer_format.reasoning):
            ignored.append(switch)
    is_off = given.get("enable_thinking") is False
    asked.reasoning_effort = nearest_effort(
        service, asked.reasoning_effort, name, ignored, has_tools=has_tools, is_off=is_off
    )


def effort_variables(service: Service, request: ChatCompletionRequest, template: str) -> dict[str, Any]:
    """`reasoning_effort` as the template's variable, or as the switch of thinking if it has only that."""
    effort, given = request.reasoning_effort, request.chat_template_kwargs or {}
    if effort is None:
        return {}
    has_effort = service.answer_format.renders_harmony or "reasoning_effort" in template
    if has_effort and effort in _known_levels(service, template):
        return {"reasoning_effort": effort}
    if "enable_thinking" not in template:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"enable_thinking": given.get("enable_thinking", True)}


def _known_levels(service: Service, template: str) -> tuple[ReasoningEffort, ...]:
    if service.answer_format.harmony:
        return tuple(level for level in LEVELS if level in EFFORTS)
    assert service.tokenizer is not None
    return _rendered_levels(service.tokenizer, template)


@lru_cache(maxsize=16)
def _rendered_levels(tokenizer: Tokenizer, template: str) -> tuple[ReasoningEffort, ...]:
    """The levels that change a conversation's text compared with an unknown word, which gives the medium effort. If no
    level changes this text, all levels are returned, since they may change another one."""

    def written(level: str) -> str | None:
        try:
            return tokenizer.apply_chat_template(
                [{"role": "user", "content": "Hi"}], None, True, tokenize=False, chat_template=template,
                now=datetime(2026, 1, 2), reasoning_effort=level,
            )  # fmt: skip
        except ChatTemplateError:
            return None

    texts = {level: text for level in LEVELS if (text := written(level)) is not None}
    other = written("no level")
    known = tuple(level for level, text in texts.items() if text != other or level == "medium")
    return known if set(known) - {"medium"} else LEVELS
