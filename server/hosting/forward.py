"""Hands a request to the model that it names: in its body, or in the query (`?model=NAME`); else to the first model
whose purpose is the route's."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from runtime.errors import InvalidArgumentError
from server.config import ServerConfig
from server.description.operations import Operation
from server.errors import ApiError, dialect_of, invalid
from server.hosting.durations import seconds_of
from server.hosting.facts import Purpose
from server.hosting.host import Host
from server.hosting.hosted import HostedModel
from server.ollama_api.endpoints import AnsweredMessage, ChatLine, GenerateLine, Line
from server.transport.body import Body, decode_body, read_body
from server.transport.exchange import Exchange
from server.transport.json_answer import JsonAnswer
from server.transport.sse import while_connected

_PURPOSES: dict[str, tuple[Purpose, ...]] = {
    **dict.fromkeys(
        ("/v1/embeddings", "/api/embed", "/api/embeddings", "/embed", "/pooling", "/similarity"), ("embed",)
    ),
    **dict.fromkeys(
        ("/classify", "/predict", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), ("classify", "embed")
    ),
    "/": ("embed", "classify"),
}
"""The purpose of a request without a model, by its route; all others are for a model that generates."""

_OF_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class _Named(msgspec.Struct):
    """The fields of any body that say which model it is for, and how long that stays."""

    model: Any = None
    name: Any = None
    lora_name: Any = None
    keep_alive: Any = None
    messages: Any = None
    prompt: Any = None


_decode = msgspec.json.Decoder(_Named).decode


class _Anything(msgspec.Struct):
    """A body that is refused: some error is found in it before its fields are read."""


class Forward:
    """An endpoint, in the place of one model's.

    is_held  the model is loaded for the request, and stays until its answer is over; else it must be loaded already
    """

    def __init__(self, operation: Operation, *, is_held: bool = True) -> None:
        self._path, self._reads_body, self._is_held = operation.path, operation.request is not None, is_held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, host, config = Request(scope, receive), Host.of(scope), scope["app"].config
        named, keep_alive_s, receive_again = _Named(), None, receive
        if self._reads_body:
            body = await read_body(request, config)
            named = _named(body, config)
            receive_again = _again(body, receive)
        model = self._model(host, request, named)
        exchange = Exchange.of(request)
        exchange.model = model.name
        if dialect_of(scope) == "ollama" and named.keep_alive is not None:
            keep_alive_s = _keep_alive(named.keep_alive)
            exchange.heeded = frozenset({"keep_alive"})
            if keep_alive_s == 0 and (answer := _goodbye(self._path, named)) is not None:
                await host.pool.unload(model)
                await JsonAnswer(answer)(scope, receive, send)
                return
        if not self._is_held and not model.is_there:
            message = f"The model {model.name!r} is not loaded."
            raise ApiError(503, message, code="model_not_loaded", retry_after_s=5)
        async with AsyncExitStack() as stack:
            if self._is_held:
                entering = stack.enter_async_context(host.pool.held(model, keep_alive_s))
                await (entering if model.is_there else while_connected(entering, receive))
            await model.app(scope, receive_again, send)

    def _model(self, host: Host, request: Request, named: _Named) -> HostedModel:
        """Raises `ApiError` 404 for a name that there is not, 400 for one that is no text."""
        queried = request.query_params.get("model")
        if self._path in _OF_ADAPTERS:
            return _with_adapter(host, named.lora_name, queried)
        name = named.model if named.model is not None else queried
        if name is None and dialect_of(request.scope) == "ollama":
            name = named.name
        if name is None:
            return self._default(host)
        if not isinstance(name, str):
            raise invalid("model", "Invalid type for model: a string is expected.", "invalid_type")
        return host.named(name)

    def _default(self, host: Host) -> HostedModel:
        for purpose in _PURPOSES.get(self._path, ("generate",)):
            for model in host.models:
                if model.purpose == purpose:
                    return model
        return host.models[0]


def _with_adapter(host: Host, name: Any, queried: str | None) -> HostedModel:
    """The model that has the adapter, or that the query names, or the only one that takes adapters."""
    owner = host.find(name) if isinstance(name, str) else None
    if queried is not None:
        model = host.named(queried)
        if owner not in (None, model):
            assert owner is not None
            raise invalid("lora_name", f"lora_name: {name!r:.80} is a name of the model {owner.name!r}.")
        return model
    takers = [each for each in host.models if each.settings.engine_options.get("enable_lora")]
    if owner is None and len(takers) > 1:
        listed = ", ".join(repr(each.name) for each in takers)
        raise invalid("model", f"Say which model's adapter it is, in the query (?model=NAME): {listed}.")
    return owner or (takers or host.models)[0]


def _named(body: Body, config: ServerConfig) -> _Named:
    """Raises `ApiError` 400 for a body that is no JSON object."""
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        decode_body(body, _Anything, config)
        raise


def _keep_alive(value: Any) -> float:
    try:
        return seconds_of(value)
    except InvalidArgumentError as error:
        raise invalid("keep_alive", f"{error}.") from None


def _goodbye(path: str, named: _Named) -> Line | None:
    """The answer to a request that only unloads its model; None for any other."""
    if not isinstance(named.model, str) or named.messages or named.prompt:
        return None
    if path == "/api/chat":
        return ChatLine(model=named.model, message=AnsweredMessage(), done=True, done_reason="unload")
    if path == "/api/generate":
        return GenerateLine(model=named.model, response="", done=True, done_reason="unload")
    return None


def _again(body: Body, receive: Receive) -> Receive:
    """Receives a body that was read once more, then what comes after it."""
    is_read = False

    async def again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
