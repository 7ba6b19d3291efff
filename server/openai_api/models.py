"""`GET /v1/models`, `/v1/models/{id}` and `/version`; `POST /tokenize` and `/detokenize`, in vLLM's shapes. Anthropic's
clients, recognised by their header, get Anthropic's shape of a model."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from runtime.engine.messages import AdapterRef
from runtime.engine.sampling_params import check_token_ids
from runtime.version import release
from server.errors import Dialect, dialect_of, engine_errors, invalid
from server.openai_api.schema import ChatCompletionRequest, DetokenizeRequest, TokenizeRequest
from server.requests.answering import answered
from server.requests.prompt import whole_conversation
from server.service import Service
from server.transport.body import Body, decode_body
from server.transport.json_answer import JsonAnswer
from tokenizer import Tokenizer

ModelStatus = Literal["unloaded", "loading", "loaded", "sleeping", "unloading"]
"""The state of one of several models, in llama-server's words; "sleeping": its engine keeps the weights in host memory;
"unloading": its last requests are being finished."""


class ModelState(msgspec.Struct, omit_defaults=True):
    """In llama-server's shape. failed: the latest loading did."""

    value: ModelStatus
    failed: bool = False


class Model(msgspec.Struct, kw_only=True):
    """`parent` and `root` as vLLM has them: of an adapter its model's name and its folder's, of a model its own.
    max_model_len: null before a model was loaded whose files do not tell it. status: in a server of several models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "xserv"
    max_model_len: int | None
    root: str
    parent: str | None = None
    status: ModelState | UnsetType = UNSET


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class MessagesModel(msgspec.Struct, tag_field="type", tag="model", kw_only=True):
    """The served model. max_tokens: of an answer, which the context bounds."""

    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class MessagesModelList(msgspec.Struct, kw_only=True):
    """One page holds them all."""

    data: list[MessagesModel]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class Tokenized(msgspec.Struct):
    """The answer of `/tokenize`, in vLLM's shape."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """The answer of `/detokenize`, in vLLM's shape."""

    prompt: str


class Version(msgspec.Struct):
    version: str


def listed_model(
    name: str, created: int, most: int | None, adapter: AdapterRef | None, model_name: str, dialect: Dialect,
    status: ModelState | UnsetType = UNSET,
) -> Model | MessagesModel:  # fmt: skip
    """A model or an adapter of it in the dialect's shape; `most`: tokens of prompt and answer."""
    if dialect != "anthropic":
        root, parent = (name, None) if adapter is None else (Path(adapter.path).name, model_name)
        return Model(id=name, created=created, max_model_len=most, root=root, parent=parent, status=status)
    created_at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return MessagesModel(id=name, display_name=name, created_at=created_at, max_input_tokens=most, max_tokens=most)


def model_list(data: Sequence[Any]) -> Response:
    """The answer with these models, which are all of one shape."""
    if isinstance(data[0], Model):
        return JsonAnswer(ModelList(data=list(data)))
    return JsonAnswer(MessagesModelList(data=list(data), first_id=data[0].id, last_id=data[-1].id))


def _model(request: Request, name: str) -> Model | MessagesModel:
    service: Service = request.app.state.service
    return listed_model(
        name, service.created, service.client.info.max_model_len, service.adapters.get(name), service.model_name,
        dialect_of(request.scope),
    )  # fmt: skip


async def list_models(request: Request) -> Response:
    return model_list([_model(request, name) for name in request.app.state.service.all_names])


async def get_model(request: Request) -> Response:
    """404 unless it is a name of the served model or an adapter. The id may hold slashes, as hub ids do."""
    name = request.path_params["model_id"]
    request.app.state.service.adapter_of(name)
    return JsonAnswer(_model(request, name))


async def get_version(request: Request) -> Response:
    """The server's version."""
    return JsonAnswer(Version(release()))


def _tokenize(service: Service, body: Body) -> Tokenized:
    """The ids of a prompt, or of messages, without a limit, since nothing is generated."""
    asked = decode_body(body, TokenizeRequest, service.config)
    tokenizer = _tokenizer(service, asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("prompt", "Send either prompt or messages.", "missing_required_parameter")
    if asked.messages is None:
        for field in _OF_MESSAGES:
            if getattr(asked, field) is not None:
                raise invalid(field, f"{field} is for messages, not for a prompt.")
        assert asked.prompt is not None
        ids = tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
    else:
        if asked.add_special_tokens:
            raise invalid("add_special_tokens", "The chat template writes the special tokens of messages itself.")
        chat = ChatCompletionRequest(
            model=service.model_name,
            messages=asked.messages,
            tools=asked.tools,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            chat_template_kwargs=asked.chat_template_kwargs,
        )
        prompt = whole_conversation(service, body.exchange.tenant, chat)
        ids = prompt.token_ids
        body.exchange.ignored += prompt.left_out
    texts = [tokenizer.id_to_token(i) or "" for i in ids] if asked.return_token_strs else None
    return Tokenized(len(ids), service.client.info.max_model_len, ids, texts)


_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


def _detokenize(service: Service, body: Body) -> Detokenized:
    """The text of ids, special tokens included."""
    asked = decode_body(body, DetokenizeRequest, service.config)
    tokenizer = _tokenizer(service, asked.model)
    with engine_errors():
        check_token_ids("tokens", asked.tokens, service.client.info.vocab_size)
    return Detokenized(tokenizer.decode(asked.tokens))


tokenize, detokenize = answered(_tokenize), answered(_detokenize)


def _tokenizer(service: Service, model: str | None) -> Tokenizer:
    if model is not None:
        service.adapter_of(model)
    if service.tokenizer is None:
        raise invalid(None, "This model has no tokenizer.", "unsupported_parameter")
    return service.tokenizer
