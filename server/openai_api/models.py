"""`GET /v1/models`, `/v1/models/{id}` and `/version`; `POST /tokenize` and `/detokenize`, in vLLM's shapes. Anthropic's
clients, recognised by their header, get Anthropic's shape of a model."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runtime.engine.sampling_params import check_token_ids
from runtime.version import release
from server.errors import dialect_of, engine_errors, invalid
from server.openai_api.schema import ChatCompletionRequest, DetokenizeRequest, TokenizeRequest
from server.requests.answering import answered
from server.requests.prompt import whole_conversation
from server.service import Service
from server.transport.body import Body, decode_body
from server.transport.json_answer import JsonAnswer
from tokenizer import Tokenizer


class Model(msgspec.Struct, kw_only=True):
    """`parent` and `root` as vLLM has them: of an adapter its model's name and its folder's, of a model its own."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "xserv"
    max_model_len: int
    root: str
    parent: str | None = None


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class MessagesModel(msgspec.Struct, tag_field="type", tag="model", kw_only=True):
    """The served model. max_tokens: of an answer, which the context bounds."""

    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


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


def _model(request: Request, name: str) -> Model | MessagesModel:
    service: Service = request.app.state.service
    most = service.client.info.max_model_len
    if dialect_of(request.scope) != "anthropic":
        adapter = service.adapters.get(name)
        root, parent = (name, None) if adapter is None else (Path(adapter.path).name, service.model_name)
        return Model(id=name, created=service.created, max_model_len=most, root=root, parent=parent)
    created_at = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    return MessagesModel(id=name, display_name=name, created_at=created_at, max_input_tokens=most, max_tokens=most)


async def list_models(request: Request) -> Response:
    names = request.app.state.service.all_names
    data: list[Any] = [_model(request, name) for name in names]
    if isinstance(data[0], Model):
        return JsonAnswer(ModelList(data=data))
    return JsonAnswer(MessagesModelList(data=data, first_id=names[0], last_id=names[-1]))


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
