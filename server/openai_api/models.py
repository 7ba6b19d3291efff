"""`GET /v1/models`, `/v1/models/{id}` and `/version`; `POST /tokenize` and `/detokenize`, in vLLM's shapes. Anthropic's
clients, recognised by their header, get Anthropic's shape of a model."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runtime.engine.errors import RequestError
from runtime.engine.sampling_params import check_token_ids
from runtime.version import release
from server.anthropic_api.objects import MessagesModel, MessagesModelList
from server.errors import dialect_of, from_engine, invalid
from server.openai_api.answers import Detokenized, Model, ModelList, Tokenized, Version
from server.openai_api.schema import ChatCompletionRequest, DetokenizeRequest, TokenizeRequest
from server.requests.prompt import whole_conversation
from server.service import Service
from server.transport.body import Body, decode_body, read_body
from server.transport.exchange import Exchange
from server.transport.json_answer import JsonAnswer
from tokenizer import Tokenizer


def listed_model(service: Service, name: str) -> MessagesModel:
    info = service.client.info
    return MessagesModel(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=info.max_model_len,
        max_tokens=info.max_model_len,
    )


def listed_models(service: Service) -> MessagesModelList:
    names = service.model_names
    return MessagesModelList(data=[listed_model(service, name) for name in names], first_id=names[0], last_id=names[-1])


def _model(service: Service, name: str) -> Model:
    return Model(
        id=name,
        created=service.created,
        max_model_len=service.client.info.max_model_len,
    )


async def list_models(request: Request) -> Response:
    service: Service = request.app.state.service
    is_anthropic = dialect_of(request.scope) == "anthropic"
    models = (
        listed_models(service)
        if is_anthropic
        else ModelList(data=[_model(service, name) for name in service.model_names])
    )
    return Response(msgspec.json.encode(models), media_type="application/json")


async def get_model(request: Request) -> Response:
    """404 unless it is a name of the served model. The id may hold slashes, as hub ids do."""
    service: Service = request.app.state.service
    name = request.path_params["model_id"]
    service.check_model(name)
    model = listed_model(service, name) if dialect_of(request.scope) == "anthropic" else _model(service, name)
    return Response(msgspec.json.encode(model), media_type="application/json")


async def get_version(request: Request) -> Response:
    """The server's version."""
    return Response(msgspec.json.encode(Version(release())), media_type="application/json")


async def tokenize(request: Request) -> Response:
    """The ids of a prompt, or of messages, without a limit, since nothing is generated."""
    service: Service = request.app.state.service
    body = await read_body(request, service.config)
    work = partial(_tokenize, service, Exchange.of(request).tenant, body)
    answer = await service.prepare_conversation(body, work)
    return JsonAnswer(answer)


async def detokenize(request: Request) -> Response:
    """The text of ids, special tokens included."""
    service: Service = request.app.state.service
    body = await read_body(request, service.config)
    answer = await service.prepare(len(body), partial(_detokenize, service, body))
    return JsonAnswer(answer)


def _tokenize(service: Service, tenant: str | None, body: Body) -> Tokenized:
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
        prompt = whole_conversation(chat, tokenizer, service.config, service.answer_format, service.pictures, tenant)
        ids = prompt.token_ids
        body.ignored += prompt.left_out
    texts = [tokenizer.id_to_token(i) or "" for i in ids] if asked.return_token_strs else None
    return Tokenized(len(ids), service.client.info.max_model_len, ids, texts)


_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


def _detokenize(service: Service, body: bytes) -> Detokenized:
    asked = decode_body(body, DetokenizeRequest, service.config)
    tokenizer = _tokenizer(service, asked.model)
    try:
        check_token_ids("tokens", asked.tokens, service.client.info.vocab_size)
    except RequestError as error:
        raise from_engine(error, {}) from None
    return Detokenized(tokenizer.decode(asked.tokens))


def _tokenizer(service: Service, model: str | None) -> Tokenizer:
    if model is not None:
        service.check_model(model)
    if service.tokenizer is None:
        raise invalid(None, "This model has no tokenizer.", "unsupported_parameter")
    return service.tokenizer
