"""Renders a conversation to the prompt that the model was trained on, by the tokenizer's chat template.

Templates accept less than OpenAI's and Anthropic's APIs allow. Content, images and the arguments of calls get the form
that the template takes (`runtime.text.content`, `tokenizer.templates.template_forms`). If a template refuses a
conversation, or leaves out a system message, consecutive messages of one role are merged, and system messages that it
still leaves out become the user's. If it refuses them altogether, as Gemma 2's does, they are prepended to the user's
first text. Calls get short ids, or separate messages, if a template otherwise refuses them or leaves out some of them
or the text beside them; if it leaves out all, they become text in the model's notation. If it leaves out a tool's
answer, the conversation is refused, since the model would never see it. Other omissions are reported by name
(`chat_prompt`'s ``notes``).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from runtime.engine.errors import RequestError
from runtime.text.content import NO_PICTURES, PictureText, beside, has_pictures, plain_content, plain_data, shaped
from runtime.text.harmony.prompt import VARIABLES, harmony_prompt
from runtime.text.tools.past_calls import (
    has_calls,
    with_arguments,
    with_calls_alone,
    with_names,
    with_responses,
    with_short_ids,
    with_single_calls,
)
from runtime.text.tools.table import HERMES, Notation, notation_in
from runtime.text.tools.tool_prompt import told, with_calls_as_text
from tokenizer import ChatTemplateError, TemplateForms, Tokenizer

Messages = Sequence[Mapping[str, Any]]


class Place(NamedTuple):
    """A message's field: "content", "name", or one of its calls, "tool_calls[0]"."""

    message: int
    field: str

    @property
    def path(self) -> str:
        """Its path in messages for users."""
        return f"messages[{self.message}].{self.field}"


def left_out(render: Callable[..., Any], messages: Messages, places: Sequence[Place]) -> list[Place]:
    """The places that the template does not write; empty if this cannot be determined. A call is written if its
    arguments are."""
    if not places:
        return []
    marked = [dict(message) for message in messages]
    marks = {place: f"mark{number}end" for number, place in enumerate(places)}
    for place, mark in marks.items():
        message = marked[place.message]
        if place.field in ("content", "name"):
            message[place.field] = mark
            continue
        message["tool_calls"] = [
            _marked(call, mark) if place.field == f"tool_calls[{i}]" else call
            for i, call in enumerate(message["tool_calls"])
        ]
    try:
        text = render(marked, tokenize=False)
    except ChatTemplateError:
        return []  # it requires more of these fields than their type
    return [place for place, mark in marks.items() if mark not in text]


def call_places(messages: Messages) -> list[Place]:
    """The places of all calls."""
    return [
        Place(i, f"tool_calls[{j}]")
        for i, message in enumerate(messages)
        if has_calls(message)
        for j in range(len(message["tool_calls"]))
    ]


def _marked(call: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    arguments: Any = {mark: mark}
    if isinstance(call["function"]["arguments"], str):
        arguments = json.dumps(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


_READS_TOOL_ROLE = re.compile(r"""role['"]?\]? *[!=]= *['"]tool['"]""")
_SYSTEM = ("system", "developer")
"""The role of instructions, by its older and its newer name."""


def chat_prompt(
    tokenizer: Tokenizer | None,
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    special_tokens_in_content: Literal["parse", "text"] = "text",
    told_tools: Notation | None = None,
    harmony: bool = False,
    picture_text: PictureText = NO_PICTURES,
    notes: list[str] | None = None,
    **template_kwargs: Any,
) -> list[int]:
    """The prompt's token ids. ``template_kwargs`` are names that the template may read (``enable_thinking``).
    ``special_tokens_in_content`` chooses whether a special token's text in a message becomes the token, with which its
    writer could forge other turns, or stays text. With ``told_tools`` the template leaves tools out, and a message of
    our own describes them and this notation of calls. With ``harmony`` messages are rendered as harmony's, unless a
    template is given, or a variable that only a template reads. ``picture_text`` is the text of an image in the prompt.
    Image parts are in the prompt in their order. ``notes`` gets the names of omissions: a message's name, a text beside
    calls, an unused template variable.

    Raises ``RequestError`` if the model has no tokenizer or no chat template, or if the template refuses the
    conversation or leaves out a tool's answer.
    """
    if tokenizer is None:
        raise RequestError("the model has no tokenizer: it takes token ids, not messages", param="messages")
    if chat_template is None and not tokenizer.has_chat_template:
        raise RequestError("the model has no chat template: give a prompt, or chat_template", param="messages")
    messages = _plain(messages, reads_images=picture_text.token is not None)
    if harmony and chat_template is None and template_kwargs.keys() <= VARIABLES:
        if notes is not None:
            notes += [place.path for place in _names(messages)]
        return harmony_prompt(
            tokenizer,
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            parses_content=special_tokens_in_content == "parse",
            **template_kwargs,
        )
    try:
        forms = tokenizer.template_forms(chat_template, has_tools=tools is not None and told_tools is None)
    except ChatTemplateError as error:
        raise RequestError(str(error), param="messages") from error
    if any(each.get("role") == "developer" for each in messages) and not (
        "developer" in forms.template and forms.content("developer").is_known
    ):
        messages = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]
    if told_tools is not None:
        messages = with_arguments(messages, takes_objects=True, takes_text=told_tools.form.arguments == "json")
        messages, tools = told(forms, told_tools, messages, tools), None
    else:
        takes_objects, takes_text = forms.arguments
        messages = with_arguments(messages, takes_objects=takes_objects, takes_text=takes_text)
    apply: partial[Any] = partial(
        tokenizer.apply_chat_template,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=chat_template,
        **template_kwargs,
    )
    place = f"picture{secrets.token_hex(8)}"  # unknown to clients, and no special token begins within it
    if has_pictures(messages):
        written = forms.picture_text or f"{picture_text.token}\n"
        apply = partial(apply, replaced={place: written, **picture_text.replaced})
    if special_tokens_in_content == "text":
        apply = partial(apply, special_tokens_in_content="text")

    takes_responses = "tool_responses" in forms.template and not _READS_TOOL_ROLE.search(forms.template)

    def render(given: Messages, **options: Any) -> Any:
        made = shaped(given, forms, place)
        return apply(with_responses(made) if takes_responses else made, **options)

    refused: ChatTemplateError | None = None
    for attempt in _attempts(messages):
        try:
            taken, ids, lost = _completed(render, attempt, render(attempt), forms)
        except ChatTemplateError as error:
            refused = refused or error
        else:
            _check_tool_answers(render, taken, messages)
            _check_order_of_pictures(taken, messages)
            if notes is not None:
                beside_calls = _beside_calls(messages)
                notes += [beside_calls[number].path for number in lost]
                notes += [place.path for place in left_out(render, taken, _names(taken))]
                unread = [name for name in template_kwargs if name != "now" and name not in forms.reads]
                notes += [f"chat_template_kwargs.{name}" for name in unread]
            return ids
    assert refused is not None
    raise RequestError(str(refused), param="messages") from refused


def _plain(messages: Messages, *, reads_images: bool) -> list[Mapping[str, Any]]:
    """The messages with normalised content; image parts become bare placeholders."""
    plain: list[Mapping[str, Any]] = []
    for i, message in enumerate(plain_data(messages)):
        if isinstance(message, Mapping) and "content" in message:
            content = plain_content(
                message["content"],
                f"messages[{i}].content",
                is_result=message.get("role") == "tool",
                take_image=(lambda _: None) if reads_images else None,
            )
            message = {**message, "content": content}
        plain.append(message)
    return plain


def _completed(
    render: Callable[..., Any], messages: Messages, ids: list[int], forms: TemplateForms
) -> tuple[Messages, list[int], list[int]]:
    """The conversation and its prompt, rewritten if the template has left out a system message, calls, or a text beside
    them; and which of these texts, by index, are still left out. Raises ``ChatTemplateError``."""
    systems, texts, calls = _systems(messages), _beside_calls(messages), call_places(messages)
    is_usual = [place.message for place in systems] == [0] and messages[-1].get("role") == "user"
    if is_usual and forms.content(str(messages[0]["role"])).is_known:
        systems = []  # such a message is known to be written
    dropped = set(left_out(render, messages, [*systems, *texts, *calls]))
    if dropped.intersection(calls):
        messages, ids = _with_all_calls(render, messages, forms)
        texts = _beside_calls(messages)
        dropped = {*dropped.intersection(systems), *left_out(render, messages, texts)}
    lost: list[int] = []
    if dropped_texts := [place for place in texts if place in dropped]:
        try:
            alone = with_calls_alone(messages, {place.message for place in dropped_texts})
            messages, ids = alone, render(alone)
        except ChatTemplateError:  # it refuses consecutive messages of the assistant, and so texts beside calls
            lost = [texts.index(place) for place in dropped_texts]
    if dropped.intersection(systems):
        plainer = _plainer(messages)
        ids = render(plainer)
        if left_out(render, plainer, _systems(plainer)):
            plainer = _with_systems_as_users(messages)
            ids = render(plainer)
        messages = plainer
    return messages, ids, lost


def _with_all_calls(render: Callable[..., Any], messages: Messages, forms: TemplateForms) -> tuple[Messages, list[int]]:
    """The conversation rewritten for a template that leaves out some calls: each in a message of its own, or as text.
    Raises ``ChatTemplateError``."""
    single = with_single_calls(with_short_ids(messages))
    if len(single) > len(messages):
        try:
            ids = render(single)
        except ChatTemplateError:
            pass
        else:
            if not left_out(render, single, call_places(single)):
                return single, ids
    written = with_calls_as_text(messages, notation_in([forms.template]) or HERMES)
    return written, render(written)


def _systems(messages: Messages) -> list[Place]:
    return [Place(i, "content") for i, message in enumerate(messages) if message.get("role") in _SYSTEM]


def _beside_calls(messages: Messages) -> list[Place]:
    """The texts beside calls."""
    return [Place(i, "content") for i, each in enumerate(messages) if has_calls(each) and each.get("content")]


def _names(messages: Messages) -> list[Place]:
    """The names of the speakers; a tool's is its call's, too."""
    return [Place(i, "name") for i, each in enumerate(messages) if each.get("name") and each.get("role") != "tool"]


def _attempts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """The conversation, and its rewrites if the template refuses it: with its system messages kept, then as the
    user's."""
    yield from _attempts_as_sent(messages)
    if any(message.get("role") in _SYSTEM for message in messages):
        yield from _attempts_as_sent(_with_systems_as_users(messages))


def _attempts_as_sent(messages: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    yield messages
    is_plain = _plainer(messages) == list(messages)
    if not is_plain:
        yield _plainer(messages)
    if any(map(has_calls, messages)):
        short = with_short_ids(messages)
        for attempt in (with_names(messages), short, with_single_calls(short)):
            yield attempt
            if not is_plain:
                yield _plainer(attempt)


def _plainer(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages without later system messages, and without consecutive messages of one role."""
    return _joined(_with_late_systems_as_users(messages))


def _late_systems(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The indices of system messages after any other."""
    roles = [message.get("role") for message in messages]
    begin = next((i for i, role in enumerate(roles) if role not in _SYSTEM), len(roles))
    return [i for i in range(begin, len(roles)) if roles[i] in _SYSTEM]


def _with_late_systems_as_users(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    late = set(_late_systems(messages))
    return [{**message, "role": "user"} if i in late else message for i, message in enumerate(messages)]


def _with_systems_as_users(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return _joined([{**each, "role": "user"} if each.get("role") in _SYSTEM else each for each in messages])


def _joined(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merges consecutive messages of one role, with a blank line between. Only those that have content and nothing
    else, and no tool's."""
    joined: list[Mapping[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        roles = {"system" if each.get("role") in _SYSTEM else each.get("role") for each in (last, message)}
        if _is_plain(message) and _is_plain(last) and len(roles) == 1:
            joined[-1] = {**last, "content": beside(last["content"], message["content"])}
        else:
            joined.append(message)
    return joined


def _is_plain(message: Any) -> bool:
    return (
        isinstance(message, Mapping)
        and message.get("role") in (*_SYSTEM, "user", "assistant")
        and isinstance(message.get("content"), (str, list))
        and all(name in ("role", "content") or value is None for name, value in message.items())
    )


def _check_order_of_pictures(taken: Messages, sent: Messages) -> None:
    """Raises ``RequestError`` if the order of image parts has changed."""
    if not has_pictures(sent):
        return
    was, now = ([id(each) for each in _picture_parts(messages)] for messages in (sent, taken))
    if was != now:
        problem = "messages: send the results of tools in the order of their calls, since they have images"
        raise RequestError(problem, param="messages")


def _picture_parts(messages: Messages) -> Iterator[Any]:
    for message in messages:
        if isinstance(message.get("content"), list):
            yield from (part for part in message["content"] if part["type"] == "image")


def _check_tool_answers(
    render: Callable[..., Any], messages: Sequence[Mapping[str, Any]], sent: Sequence[Mapping[str, Any]]
) -> None:
    """Raises ``RequestError`` if the template leaves out a message of the role "tool"; ``sent`` gives its index."""
    taken = [i for i, message in enumerate(messages) if message.get("role") == "tool"]
    places = dict(zip(taken, (i for i, message in enumerate(sent) if message.get("role") == "tool"), strict=True))
    for place in left_out(render, messages, [Place(i, "content") for i in taken]):
        where = f"messages[{places[place.message]}]"
        raise RequestError(
            f'{where}: the model\'s chat template leaves out messages of the role "tool"; '
            "send the result in a message of the user",
            param=where,
        )
