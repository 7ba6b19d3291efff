"""The fields of OpenAI's, vLLM's, Anthropic's and Ollama's requests that are accepted without effect or refused. (Other
servers' fields in any request: `server.openai_api.extensions`.)

All other fields are in `server.openai_api.schema`, and supported; unlisted ones are refused as unknown. The tables are
the documentation: only accepted fields are ignored, and an answer's header `X-Xserv-Ignored` names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from server.errors import invalid
from server.openai_api.extensions import EXTENSIONS, rewrite
from server.transport.typed import converted


@dataclass(frozen=True, slots=True)
class Accepted:
    """A field of OpenAI clients that cannot change an answer here: only its type is checked."""

    type: Any
    reason: str


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """A field refused by name, unless its value has no effect."""

    reason: str
    harmless: tuple[Any, ...] = ()
    """Values that ask for what happens anyway; null always is one."""
    code: str = "unsupported_parameter"
    """The error's, by which a client may know what to do without."""


ACCEPTED_WITHOUT_EFFECT: dict[str, Accepted] = {
    "user": Accepted(str, "a name for the end user, for OpenAI's abuse monitoring"),
    "safety_identifier": Accepted(str, "the same under its newer name"),
    "store": Accepted(bool, "nothing is stored, whatever is asked"),
    "metadata": Accepted(dict[str, str], "labels of stored completions"),
    "service_tier": Accepted(str, "there is one tier"),
    "prompt_cache_key": Accepted(str, "a routing hint; there is one engine"),
    "prompt_cache_retention": Accepted(str, "a hint about how long to keep a prompt's cache"),
    "prompt_cache_options": Accepted(dict[str, Any], "the same, newer"),
}

_BEAM_SEARCH = "beam search is not built"
_OTHER_GRAMMAR = "another notation than Lark's; send structured_outputs.grammar"

NOT_BUILT: dict[str, NotBuilt] = {
    # OpenAI's
    "functions": NotBuilt("the older form of tools; send tools"),
    "function_call": NotBuilt("the older form of tool_choice", ("none",)),
    "suffix": NotBuilt("a field of /v1/completions"),
    "best_of": NotBuilt("choosing the best of several candidates is not built", (1,)),
    "modalities": NotBuilt("only text is made", (["text"],)),
    "audio": NotBuilt("only text is made"),
    "web_search_options": NotBuilt("there is no web search"),
    "moderation": NotBuilt("there is no moderation"),
    "verbosity": NotBuilt("not built", ("medium",)),
    # vLLM's
    "chat_template": NotBuilt("a template comes with the model, never with a request"),
    "use_beam_search": NotBuilt(_BEAM_SEARCH, (False,)),
    "length_penalty": NotBuilt(_BEAM_SEARCH, (1, 1.0)),
    "early_stopping": NotBuilt(_BEAM_SEARCH, (False,)),
    "include_reasoning": NotBuilt("reasoning is always sent", (True,)),
    "spaces_between_special_tokens": NotBuilt("special tokens have no spaces between them", (True,)),
    "prompt_embeds": NotBuilt("a prompt is text or token ids"),
    "mm_processor_kwargs": NotBuilt("images are read in chats alone"),
    "logits_processors": NotBuilt("no code comes with a request; those of the server get vllm_xargs", ([],)),
    # of llama.cpp's server and SGLang: ignoring them would change the answer
    "grammar": NotBuilt(_OTHER_GRAMMAR, ("",)),
    "ebnf": NotBuilt(_OTHER_GRAMMAR),
    "stop_regex": NotBuilt("send stop, or structured_outputs.regex", ([],)),
    "custom_logit_processor": NotBuilt("no code comes with a request"),
}


_ACCEPTED_IN_RESPONSES = (
    "user",
    "safety_identifier",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
)

NOT_BUILT_IN_RESPONSES: dict[str, NotBuilt] = {
    "background": NotBuilt("a response is made while its client waits", (False,)),
    "conversation": NotBuilt("send previous_response_id"),
    "prompt": NotBuilt("there are no stored prompts"),
    "truncation": NotBuilt("a conversation is never cut", ("disabled",)),
    "max_tool_calls": NotBuilt("there are no tools of the server's own"),
    "context_management": NotBuilt("a conversation is never cut"),
    "moderation": NotBuilt("there is no moderation"),
}

NOT_BUILT_IN_TOKENIZE: dict[str, NotBuilt] = {
    "chat_template": NOT_BUILT["chat_template"],
    "mm_processor_kwargs": NOT_BUILT["mm_processor_kwargs"],
}

ACCEPTED_IN_MESSAGES: dict[str, Accepted] = {
    "metadata": Accepted(dict[str, Any], "a name for the end user, for Anthropic's abuse monitoring"),
    "cache_control": Accepted(dict[str, Any], "prefixes are cached without being asked for"),
    "context_management": Accepted(dict[str, Any], "a conversation is never cut"),
    "diagnostics": Accepted(dict[str, Any], "there is none of the prefix cache"),
    "service_tier": ACCEPTED_WITHOUT_EFFECT["service_tier"],
    "speed": Accepted(str, "there is one speed"),
}

ACCEPTED_IN_COUNTS: dict[str, Accepted] = {
    name: Accepted(kind, "it changes no prompt")
    for name, kind in (
        ("max_tokens", int), ("stop_sequences", list), ("stream", bool), ("temperature", float), ("top_p", float),
        ("top_k", int),
    )
}  # fmt: skip
"""Fields of a message: Open WebUI has a whole one counted."""

NOT_BUILT_IN_MESSAGES: dict[str, NotBuilt] = {
    "thread": NotBuilt("send the whole conversation", code="thread_unsupported_request"),  # as the SDK then does
    "compaction": NotBuilt("a conversation is never cut"),
    "container": NotBuilt("there are no containers"),
    "mcp_servers": NotBuilt("the server calls no tools", ([],)),
    "output_format": NotBuilt("the older form; send output_config.format"),
    "inference_geo": NotBuilt("there is one place"),
}

NOT_BUILT_IN_OLLAMA_CHAT: dict[str, NotBuilt] = {
    "truncate": NotBuilt("a conversation is never cut", (False,)),
    "shift": NotBuilt("a conversation is never cut", (False,)),
}

NOT_BUILT_IN_GENERATE: dict[str, NotBuilt] = {
    **NOT_BUILT_IN_OLLAMA_CHAT,
    "suffix": NotBuilt("send it to /v1/completions or /infill", ("",)),
    "template": NotBuilt("a template comes with the model, never with a request", ("",)),
    "context": NotBuilt("send the conversation to /api/chat", ([],)),
    "width": NotBuilt("no images are made"),
    "height": NotBuilt("no images are made"),
    "steps": NotBuilt("no images are made"),
}

_OF_POOLING = {"user": ACCEPTED_WITHOUT_EFFECT["user"], "priority": Accepted(int, "embeddings have no order")}

Tables = tuple[dict[str, Accepted], dict[str, NotBuilt]]

_TABLES: dict[str, Tables] = {
    "ChatCompletionRequest": (
        ACCEPTED_WITHOUT_EFFECT,
        {name: reason for name, reason in NOT_BUILT.items() if name != "mm_processor_kwargs"},
    ),
    "ResponsesRequest": (
        {name: ACCEPTED_WITHOUT_EFFECT[name] for name in _ACCEPTED_IN_RESPONSES}
        | {"client_metadata": Accepted(dict[str, Any], "what Codex tells about its sessions")},
        NOT_BUILT_IN_RESPONSES,
    ),
    "MessagesRequest": (ACCEPTED_IN_MESSAGES, NOT_BUILT_IN_MESSAGES),
    "CountTokensRequest": (ACCEPTED_IN_MESSAGES | ACCEPTED_IN_COUNTS, NOT_BUILT_IN_MESSAGES),
    "OllamaChatRequest": ({}, NOT_BUILT_IN_OLLAMA_CHAT),
    "OllamaGenerateRequest": ({}, NOT_BUILT_IN_GENERATE),
    "CompletionRequest": (
        ACCEPTED_WITHOUT_EFFECT,
        {name: reason for name, reason in NOT_BUILT.items() if name != "suffix"},
    ),
    "OllamaOptions": ({}, {}),
    "OllamaEmbedRequest": ({}, {}),
    "OllamaEmbeddingsRequest": ({}, {}),
    "OllamaShowRequest": ({"verbose": Accepted(bool, "all there is to show is shown")}, {}),
    "EmbeddingRequest": ({"user": ACCEPTED_WITHOUT_EFFECT["user"]}, {}),
    "PoolingRequest": (_OF_POOLING, {}),
    "ScoreRequest": (_OF_POOLING, {}),
    "RerankRequest": (_OF_POOLING | {"max_tokens_per_doc": Accepted(int, "documents are read whole")}, {}),
    "TokenizeRequest": ({}, NOT_BUILT_IN_TOKENIZE),
    "DetokenizeRequest": ({}, {}),
}
"""By the names of the requests' types."""


def tables_of(schema: type[msgspec.Struct]) -> Tables:
    """The fields of a request that are accepted without effect, and those that are refused by name."""
    return _TABLES.get(schema.__name__, (ACCEPTED_WITHOUT_EFFECT, NOT_BUILT))


def take_table_fields(
    request: dict[str, Any],
    schema: type[msgspec.Struct],
    ignored: list[str] | None = None,
    sent: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The request without the fields of its tables, which are checked here, and of `EXTENSIONS`; `ignored` gets the
    names of fields without effect. Other servers' names are replaced; `sent` maps the new ones to them.

    A field that is in the second table and in the schema, too, is checked and stays. Raises `ApiError` 400: a wrong
    type, or an unsupported field with an effect."""
    accepted_fields, refused_fields = tables_of(schema)
    fields = schema.__struct_fields__
    ignored = [] if ignored is None else ignored
    kept = {}
    for name, value in rewrite(request, fields, ignored, {} if sent is None else sent).items():
        if (not_built := refused_fields.get(name)) is not None:
            if value is not None and not _is_among(value, not_built.harmless):
                raise invalid(name, f"Unsupported parameter: {name} ({not_built.reason}).", not_built.code)
            if name in fields:
                kept[name] = value
        elif (accepted := accepted_fields.get(name)) is not None:
            converted(value, accepted.type | None, name)
            if value is not None:
                ignored.append(name)
        elif name in EXTENSIONS and name not in fields:
            if value is not None:
                ignored.append(name)
        else:
            kept[name] = value
    return kept


def _is_among(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Membership that distinguishes True from 1, as JSON does."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless)
