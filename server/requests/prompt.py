"""Converts a request's prompt, or its messages, to token ids. Runs in a thread: encoding takes time.

Messages become plain dicts for `runtime.text.chat`. Their content has a single form (`runtime.text.content`), with the
pictures' sources beside it. Fields that templates do not use are left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from runtime.engine.admission import check_generates, prompt_of
from runtime.engine.errors import RequestError
from runtime.engine.messages import ImageItem
from runtime.engine.prompt_images import PreparedImage, image_places, place_images
from runtime.engine.sampling_params import last_tokens
from runtime.later import later
from runtime.text.chat import chat_prompt
from runtime.text.content import ImagePart, picture_text, plain_content, text_of
from runtime.text.fill_in import FillInTokens, fill_in_prompt
from runtime.text.formats import BLANKS, HARMONY_SPACING
from runtime.text.pooled_texts import check_cut, prompted
from server.errors import ApiError, engine_errors, from_engine, invalid, own_name
from server.openai_api.schema import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, Message, Prompt
from server.pictures.reader import PictureReader, PictureSource, picture_source
from server.requests.structured import callable_tools
from server.requests.thinking import effort_variables
from server.service import Service
from server.transport.typed import kinds_of

jinja2 = later("jinja2")


def template_messages(
    request: ChatCompletionRequest, pictures: PictureReader | None, spacing: tuple[str, str] = BLANKS
) -> tuple[list[dict[str, Any]], list[PictureSource]]:
    """The conversation in Hugging Face's form, and its pictures in order; `pictures` is None if the model reads none.
    `spacing`: the separators of items and of keys in arguments that were sent as an object.
    Raises `ApiError` 400 naming the message's field."""
    sources: list[PictureSource] = []
    messages = [
        _message(message, f"messages[{i}]", pictures, sources, spacing) for i, message in enumerate(request.messages)
    ]
    return messages, sources


def _spell(service: Service, tenant: str | None, messages: list[dict[str, Any]]) -> int:
    """Gives past calls' arguments their remembered spelling. Returns how many calls have it."""
    num_spelled = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            spelled = service.calls.spelled(tenant, call.get("id"), function["arguments"])
            if spelled is not None:
                function["arguments"] = spelled
                num_spelled += 1
    return num_spelled


def check_ending(request: ChatCompletionRequest) -> tuple[bool, bool]:
    """`add_generation_prompt` and `continue_final_message`, which exclude each other. Raises `ApiError`
    400."""
    continues = bool(request.continue_final_message)
    adds_prompt = request.add_generation_prompt if request.add_generation_prompt is not None else not continues
    if continues and adds_prompt:
        raise invalid(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other; set the latter to false.",
        )
    return adds_prompt, continues


def echoed_text(request: ChatCompletionRequest, messages: list[dict[str, Any]]) -> str:
    """With `echo`, the last message's text if it is the assistant's; else nothing."""
    last = messages[-1]
    return text_of(last["content"]) if request.echo and last["role"] == "assistant" else ""


def _message(
    message: Message,
    path: str,
    pictures: PictureReader | None,
    sources: list[PictureSource],
    spacing: tuple[str, str],
) -> dict[str, Any]:
    is_assistant = message.role == "assistant"
    if message.audio is not None:
        raise _unsupported(f"{path}.audio", "audio")
    if message.function_call is not None:
        raise _unsupported(f"{path}.function_call", "the older form of tool_calls; send tool_calls")
    if message.tool_calls and not is_assistant:
        raise invalid(f"{path}.tool_calls", f"{path}.tool_calls: only the assistant's messages have them.")
    if message.tool_call_id is not None and message.role != "tool":
        raise invalid(f"{path}.tool_call_id", f"{path}.tool_call_id: only a tool's messages have it.")
    content = message.content
    if message.refusal and is_assistant:
        refusal: dict[str, Any] = {"type": "refusal", "refusal": message.refusal}
        said = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        content = [*said, refusal] if content else message.refusal
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if content is None and not (is_assistant and (message.tool_calls or reasoning)):
        problem = f"{path}.content must be a string or an array of parts; it is missing, or null."
        raise invalid(f"{path}.content", problem, "invalid_type")
    # Missing content stays null: some templates detect an answer of tool calls alone by it.
    plain = _content(content, message.role, path, pictures, sources)
    result: dict[str, Any] = {"role": message.role, "content": plain}
    if message.name is not None:
        result["name"] = message.name
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "type": "function",
                **({"id": call.id} if call.id is not None else {}),
                "function": {"name": call.function.name, "arguments": _json_of(call.function.arguments, spacing)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    return result


def _json_of(arguments: str | dict[str, Any], spacing: tuple[str, str]) -> str:
    """A call's arguments as text."""
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps(arguments, ensure_ascii=False, separators=spacing)


def _content(
    content: str | list[dict[str, Any]] | None,
    role: str,
    path: str,
    pictures: PictureReader | None,
    sources: list[PictureSource],
) -> str | list[dict[str, Any]] | None:
    """Content in its single form; its pictures' sources are added to `sources`."""

    def take(image: ImagePart) -> None:
        assert pictures is not None
        if role == "assistant":
            raise _unsupported(f"{image.path}.type", "images are the user's, the system's or a tool's")
        if len(sources) == pictures.most:
            where = image.path
            raise invalid(where, f"{where}: a request has at most {pictures.most} images (--limit-images).")
        sources.append(picture_source(image))

    take_image = None if pictures is None else take
    with engine_errors():
        return plain_content(content, f"{path}.content", is_result=role == "tool", take_image=take_image)


def _unsupported(param: str, reason: str) -> ApiError:
    return invalid(param, f"Unsupported parameter: {param} ({reason}).", "unsupported_parameter")


def completion_prompts(service: Service, request: CompletionRequest) -> list[list[int]]:
    """The token ids of each prompt. Raises `ApiError` 400."""
    with engine_errors():
        check_generates(service.client.info)
    most, num_reserved = request.truncate_prompt_tokens, max(1, request.max_tokens or 1)
    adds = request.add_special_tokens is not False
    family = _fill_in_family(service, request)

    def encode(text: str) -> list[int]:
        assert service.tokenizer is not None
        if family is not None and request.suffix is not None:
            return fill_in_prompt(service.tokenizer, family, text, request.suffix, add_special_tokens=adds)
        return service.tokenizer.encode(text, add_special_tokens=adds)

    return [
        _cut(service, ids, most, num_reserved, place, has_answer=True)
        for place, ids in _given_ids(service, request.prompt, "prompt", encode, service.config.max_prompts)
    ]


def _fill_in_family(service: Service, request: CompletionRequest) -> FillInTokens | None:
    """The tokens for a request with a suffix. Raises `ApiError` 400 if the model has none, or for a prompt of ids."""
    if request.suffix is None:
        return None
    if service.fill_in is None:
        why = "Unsupported parameter: suffix (the model's vocabulary has no tokens for filling in)."
        raise invalid("suffix", why, "unsupported_parameter")
    given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if not all(isinstance(each, str) for each in given):
        raise invalid("suffix", "suffix is for prompts that are texts, not for token ids.")
    if request.echo or request.truncate_prompt_tokens is not None:
        name = "echo" if request.echo else "truncate_prompt_tokens"
        raise invalid(name, f"{name} and suffix exclude each other.")
    return service.fill_in


def infill_prompt(
    service: Service, before: str, after: str, files: Sequence[tuple[str | None, str]], field: str
) -> list[int]:
    """The ids of a prompt for the text between these two. Raises `ApiError` 400 that names the `field`."""
    if service.fill_in is None or service.tokenizer is None:
        why = "The model's vocabulary has no tokens for filling in."
        raise invalid(field, why, "unsupported_parameter")
    ids = fill_in_prompt(service.tokenizer, service.fill_in, before, after, files=files)
    return _cut(service, ids, None, 1, field, has_answer=True)


def are_texts(given: Any) -> bool:
    """Whether an input is a text, or a list of texts."""
    return isinstance(given, str) or all(isinstance(each, str) for each in given or ())


def embedding_inputs(service: Service, request: EmbeddingRequest) -> list[list[int]]:
    """The token ids of each input. Raises `ApiError` 400."""
    assert request.input is not None
    info, most = service.client.info, request.truncate_prompt_tokens
    if not info.pooling.generates and most is not None:  # an encoder's texts keep their beginning
        room = info.max_model_len if most == -1 else min(most, info.max_model_len)
        most = None
    else:
        room = None

    def encode(text: str) -> list[int]:
        assert service.tokenizer is not None
        adds = request.add_special_tokens is not False
        with engine_errors():
            text = prompted(text, info.pooling, request.prompt_name)
        if room is not None:
            ids = service.tokenizer.encode_first(text, room, adds)
            with engine_errors():
                check_cut(ids, request.truncate_prompt_tokens)
            return ids
        return service.tokenizer.encode(text, add_special_tokens=adds)

    if request.prompt_name and not are_texts(request.input):
        raise invalid("prompt_name", "prompt_name is for inputs that are texts, not for token ids.")
    given = _given_ids(service, request.input, "input", encode, service.config.max_inputs)
    return [_cut(service, ids[:room], most, 0, place, has_answer=False) for place, ids in given]


def embedding_conversation(service: Service, tenant: str | None, request: EmbeddingRequest) -> ConversationPrompt:
    """A conversation to be embedded, without a generation prompt. Raises `ApiError` 400."""
    assert request.messages is not None
    for field in ("add_special_tokens", "truncate_prompt_tokens", "prompt_name"):
        if getattr(request, field) is not None:
            raise invalid(field, f"{field} is for input, not for messages.")
    chat = ChatCompletionRequest(
        messages=request.messages, mm_processor_kwargs=request.mm_processor_kwargs, add_generation_prompt=False
    )
    prompt = whole_conversation(service, tenant, chat)
    return replace(prompt, token_ids=_cut(service, prompt.token_ids, None, 0, "messages", has_answer=False))


def entry_names(field: str, count: int) -> list[str]:
    """The names of a field's entries in messages: the field's own if it has one."""
    return [field] if count == 1 else [f"{field}[{number}]" for number in range(count)]


def _given_ids(
    service: Service, prompt: Prompt, field: str, encode: Callable[[str], list[int]], most: int
) -> Iterator[tuple[str, list[int]]]:
    """The name in `entry_names` and the ids of each of at most so many prompts, as given or encoded."""
    given: Sequence[str | list[int]]
    if isinstance(prompt, str) or _are_ids(prompt):
        given = [prompt]
    elif _are_prompts(prompt):
        given = prompt
    else:
        raise invalid(field, f"{field} must not mix strings, token ids and lists of them.", "invalid_type")
    if not given:
        raise invalid(field, f"{field} must have at least one entry.")
    if len(given) > most:
        raise invalid(field, f"{field} must have at most {most} entries, got {len(given)}.")
    for place, text_or_ids in zip(entry_names(field, len(given)), given, strict=True):
        if isinstance(text_or_ids, str):
            if service.tokenizer is None:
                raise invalid(field, f"This model has no tokenizer: {field} must be token ids.")
            yield place, encode(text_or_ids)
        else:
            yield place, text_or_ids


@dataclass(frozen=True, slots=True)
class ConversationPrompt:
    """A conversation's prompt, the text that `echo` puts before the answer, the names of the fields that the chat
    template leaves out, and how many past calls are spelled as the model wrote them."""

    token_ids: list[int]
    images: tuple[ImageItem, ...]
    echo: str
    left_out: list[str]
    num_replayed: int = 0


ReadPictures = dict[tuple[str | None, str | None, bool], PreparedImage]
"""Pictures that a request's other prompts have, too, by their source."""


def conversation_prompt(
    service: Service, tenant: str | None, request: ChatCompletionRequest, known: ReadPictures | None = None
) -> ConversationPrompt:
    """The conversation rendered by the model's template. Pictures that are not `known` are read, and added to them.
    Raises `ApiError` 400."""
    with engine_errors():
        check_generates(service.client.info)
    prompt = whole_conversation(service, tenant, request, known)
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    most, num_reserved = request.truncate_prompt_tokens, max(1, max_tokens or 1)
    ids = _cut(service, prompt.token_ids, most, num_reserved, "messages", has_answer=True)
    return replace(prompt, token_ids=ids)


def whole_conversation(
    service: Service, tenant: str | None, request: ChatCompletionRequest, known: ReadPictures | None = None
) -> ConversationPrompt:
    """The same without a limit of length. `tenant` owns its pictures. Raises `ApiError` 400."""
    pictures = service.pictures
    spacing = HARMONY_SPACING if service.answer_format.renders_harmony else BLANKS
    messages, sources = template_messages(request, pictures, spacing)
    num_replayed = _spell(service, tenant, messages)
    if sources and request.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens: a conversation with images is never cut.")
    if request.mm_processor_kwargs and pictures is None:
        why = "mm_processor_kwargs (the model reads text only)"
        raise invalid("mm_processor_kwargs", f"Unsupported parameter: {why}.", "unsupported_parameter")
    left_out = list[str]()
    ids = _rendered(service, request, messages, left_out)
    images: tuple[ImageItem, ...] = ()
    if pictures is not None:
        rule = pictures.rule(request.mm_processor_kwargs)
        owner = (tenant, request.cache_salt)
        with engine_errors({"images": "messages"}):
            image_places(ids, len(sources), pictures.support)  # checked before any is fetched
            known = {} if known is None else known
            keys = [(source.url, source.uuid, source.is_low) for source in sources]
            for key, source in zip(keys, sources, strict=True):
                if key not in known:
                    known[key] = pictures.read(source, rule, owner)
            ids, images = place_images(ids, [known[key] for key in keys], pictures.support)
    own_names = {"chat_template_kwargs.documents": "documents"}
    named = [own_name(name, own_names) for name in left_out]
    return ConversationPrompt(ids, images, echoed_text(request, messages), named, num_replayed)


def _rendered(
    service: Service, request: ChatCompletionRequest, messages: list[dict[str, Any]], left_out: list[str]
) -> list[int]:
    tokenizer, answer_format, pictures = service.tokenizer, service.answer_format, service.pictures
    tools = callable_tools(request)
    adds_generation_prompt, continues_final_message = check_ending(request)
    if tokenizer is not None:
        if not tokenizer.has_chat_template:
            raise invalid("messages", "This model has no chat template; use /v1/completions.")
        template = tokenizer.chat_template(has_tools=tools is not None)
    variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if reserved := sorted(_RESERVED.intersection(variables)):
        name = f"chat_template_kwargs.{reserved[0]}"
        raise invalid(name, f"{name}: send this as a field of the request.")
    if request.documents is not None:
        variables["documents"] = request.documents
    if tokenizer is not None:
        variables |= effort_variables(service, request, template)
    try:
        return chat_prompt(
            tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=adds_generation_prompt,
            continue_final_message=continues_final_message,
            special_tokens_in_content="parse" if service.config.special_tokens_in_content == "parse" else "text",
            told_tools=answer_format.tools if answer_format.tells_tools else None,
            harmony=answer_format.renders_harmony,
            picture_text=picture_text(tokenizer, None if pictures is None else pictures.support),
            notes=left_out,
            **variables,
        )
    except RequestError as error:
        # The template's own messages go to the user; its internal errors do not.
        cause = error.__cause__.__cause__ if error.__cause__ is not None else None
        if cause is None or isinstance(cause, jinja2.TemplateError):
            raise from_engine(error, {}) from None
        raise invalid("messages", "The chat template cannot render this conversation.") from None


_RESERVED = frozenset(
    {
        "self",
        "tokenizer",
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "chat_template",
        "special_tokens_in_content",
    }
)
"""Variables that a request cannot set through `chat_template_kwargs`."""


def _cut(
    service: Service, ids: list[int], most: int | None, num_reserved: int, field: str, *, has_answer: bool
) -> list[int]:
    """`last_tokens`, which leave room for so many tokens; checks what the engine would refuse, as it does, before
    further work for each id. Raises `ApiError` 400."""
    info = service.client.info
    with engine_errors():
        ids = last_tokens(ids, most, info.max_model_len - num_reserved)
        if not ids:
            raise invalid(field, f"{field} must come to at least one token.")
        prompt_of(field, ids, info.vocab_size, info.max_model_len, has_answer=has_answer)
    return ids


def _are_ids(prompt: list[str | int | list[int]]) -> TypeGuard[list[int]]:
    return bool(prompt) and kinds_of(prompt) == {int}


def _are_prompts(prompt: list[str | int | list[int]]) -> TypeGuard[list[str | list[int]]]:
    return kinds_of(prompt) in ({str}, {list}, set())
