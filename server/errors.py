"""The server's errors, in OpenAI's shape, `{"error": {message, type, param, code}}`, and on the routes of other APIs in
theirs (`ApiError.body`).

    status  type                   code
    400     invalid_request_error  invalid_json, invalid_type, invalid_value, unknown_parameter, …
    400     invalid_request_error  context_length_exceeded, unsatisfiable_request
    404     invalid_request_error  model_not_found, unknown_url, request_not_found, response_not_found
    405     invalid_request_error  method_not_allowed
    408     invalid_request_error  body_timeout
    409     invalid_request_error  request_cancelled
    413     invalid_request_error  body_too_large
    415     invalid_request_error  unsupported_media_type
    429     rate_limit_error       queue_full, rate_limit_exceeded  (with Retry-After)
    500     server_error           internal_error, logits_processor_failed
    503     server_error           engine_unavailable    (with Retry-After when it is restarting)
    503     server_error           draining, overloaded, asleep  (with Retry-After)

The outer layers also answer 401 invalid_api_key, 403 host_not_allowed and origin_not_allowed, 431
headers_too_large, 408 header_timeout, 400 invalid_http.

Messages are written for the user, here or where a field is checked (`RequestError`, which names field,
value and limit). The text of any other exception stays in the server's log."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from runtime.engine.errors import EngineDeadError, QueueFullError, RequestError
from server.transport.exchange import KEY
from server.transport.key_holders import KeyLimitError

Dialect = Literal["openai", "anthropic", "ollama"]

ANTHROPIC_VERSION = b"anthropic-version"
"""The header that Anthropic's clients send with every request."""


def dialect_of(scope: Scope) -> Dialect:
    """`/v1/models` is Anthropic's with its header, `/v1/messages` always."""
    path: str = scope["path"]
    if path.startswith("/api/"):
        return "ollama"
    if _is_below(path, "/v1/messages"):
        return "anthropic"
    if _is_below(path, "/v1/models") and any(name == ANTHROPIC_VERSION for name, _ in scope["headers"]):
        return "anthropic"
    return "openai"


def _is_below(path: str, route: str) -> bool:
    return path == route or path.startswith(f"{route}/")


ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Anthropic's name of an error by its status; of all others, "invalid_request_error"."""

MANAGEMENT = frozenset({"pull", "push", "create", "copy", "delete", "blobs"})
"""The paths of Ollama's `/api` that manage models; this server has the model that it was started with."""


NOT_BUILT = {
    "/v1/audio": "the model neither hears nor speaks",
    "/v1/images": "the model makes no images",
    "/v1/videos": "the model makes no videos",
    "/v1/realtime": "there are no sessions; POST /v1/responses streams",
    "/v1/assistants": "nothing is stored but responses; POST /v1/responses",
    "/v1/threads": "nothing is stored but responses; POST /v1/responses",
    "/v1/conversations": "send previous_response_id to POST /v1/responses",
    "/v1/files": "no files are kept",
    "/v1/uploads": "no files are kept",
    "/v1/batches": "there are no batches",
    "/v1/vector_stores": "no files are kept",
    "/v1/fine_tuning": "the server does not train",
    "/v1/moderations": "there is no moderation",
    "/v1/messages/batches": "there are no batches",
    "/v1/responses/input_tokens": "POST /tokenize counts a conversation's tokens",
    "/v1/responses/compact": "a conversation is never cut",
    "/v2/embed": "POST /v1/embeddings",
    "/invocations": "POST /v1/chat/completions",
    "/generate": "POST /v1/completions",
    "/completion": "POST /v1/completions",
    "/slots": "GET /live",
    "/props": "GET /server_info",
    "/init_weight_transfer_engine": "weights come from folders and shared memory: POST /update_weights",
    "/start_weight_update": "POST /update_weights takes all of them at once",
    "/finish_weight_update": "POST /update_weights takes all of them at once",
}
"""Routes of OpenAI's, vLLM's, Anthropic's and llama.cpp's servers that there are not, with the reason or what there is
instead; and so all below them."""


THE_BODY = "the body"
"""The name of what has no other, in messages."""

MAX_SHOWN_VALUE = 80
"""Characters of a value that an error repeats."""


def _not_built(path: str) -> str | None:
    return next((reason for route, reason in NOT_BUILT.items() if path == route or path.startswith(f"{route}/")), None)


class ApiError(Exception):
    """An answer that is not 200: status, OpenAI's four fields, and headers; other APIs use fewer fields.

    retry_after_s  the header Retry-After, in whole seconds
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = (
            "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
        )
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))

    def body(self, dialect: Dialect = "openai") -> dict[str, Any]:
        """The API's error object, ready to be encoded."""
        if dialect == "ollama":
            return {"error": self.message}
        if dialect == "anthropic":
            kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
            details = {"error_code": self.code, "param": self.param}
            return {"type": "error", "error": {"type": kind, "message": self.message, "details": details}}
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self, scope: Scope) -> Response:
        return Response(
            msgspec.json.encode(self.body(dialect_of(scope))),
            status_code=self.status,
            media_type="application/json",
            headers=self.headers,
        )


def json_text(value: Any) -> str:
    """A value as it was sent, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN_VALUE else f"{text[:MAX_SHOWN_VALUE]}…"


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """400: the field `param` has an unsupported value."""
    return ApiError(400, message, param=param, code=code)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error with a chat's field renamed: `names` maps a chat's names ("stop", "messages[1]") to the request's own.
    The longest match is used."""
    name = _fitting(error.param or "", names)
    if name is None:
        return error
    message = _with_name(error.message, name, names[name])
    param = own_name(error.param or "", names)
    return ApiError(error.status, message, param=param, code=error.code, headers=error.headers)


def own_name(param: str, names: Mapping[str, str]) -> str:
    """A field's own name, or a place's within it."""
    name = _fitting(param, names)
    return param if name is None else names[name] + param.removeprefix(name)


def _fitting(param: str, names: Mapping[str, str]) -> str | None:
    fitting = [name for name in names if param == name or param.startswith((f"{name}.", f"{name}["))]
    return max(fitting, key=len, default=None)


def below(path: str, error: ApiError) -> ApiError:
    """400: the same error, of a field below `path`."""
    code = error.code or "invalid_value"
    if error.param is None:
        is_named = THE_BODY in error.message
        return invalid(path, error.message.replace(THE_BODY, path) if is_named else f"{path}: {error.message}", code)
    param = f"{path}.{error.param}"
    return invalid(param, _with_name(error.message, error.param, param, count=1), code)


def _with_name(message: str, name: str, other: str, *, count: int = 0) -> str:
    """A message with another name of a field, but not within words."""
    return re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", lambda _: other, message, count=count)


def internal_error() -> ApiError:
    """500, without details: these are in the log."""
    return ApiError(500, "The server had an error while processing your request.", code="internal_error")


def engine_unavailable(retry_after_s: float | None = None) -> ApiError:
    """503: the engine is stopping or has died; with a number, it is restarting."""
    state = "does not take requests any more" if retry_after_s is None else "broke down and is being started again"
    return ApiError(503, f"The engine {state}.", code="engine_unavailable", retry_after_s=retry_after_s)


def broken_off(retry_after_s: float | None) -> ApiError:
    """503: the engine ended before the answer was complete; a number says when it takes requests again."""
    message = "The engine ended before the answer was complete."
    return ApiError(503, message, code="engine_unavailable", retry_after_s=retry_after_s)


def starting() -> ApiError:
    """503: the port is open, but the model is not loaded yet."""
    return ApiError(503, "The server is starting: the model is being loaded.", code="starting", retry_after_s=2)


def asleep() -> ApiError:
    """503: the engine was told to sleep, and the request has waited for as long as it may."""
    return ApiError(503, "The model sleeps until POST /wake_up. Ask again later.", code="asleep", retry_after_s=10)


def draining() -> ApiError:
    """503 on a connection that ends: the server is about to end; another one may take the request."""
    message = "The server is shutting down and takes no new requests."
    return ApiError(503, message, code="draining", headers=_CLOSE, retry_after_s=1)


def overloaded() -> ApiError:
    """503 on a connection that ends: more connections than the server holds."""
    message = "The server has too many open connections."
    return ApiError(503, message, code="overloaded", headers=_CLOSE, retry_after_s=1)


_CLOSE = {"Connection": "close"}


def logits_processor_failed(reason: str) -> ApiError:
    """500: a logits processor of the server's operator failed; the reason names it."""
    message = f"{reason[0].upper()}{reason[1:]}."
    return ApiError(500, message, code="logits_processor_failed")


def cancelled() -> ApiError:
    """409: the request was cancelled by its name."""
    return ApiError(409, "The request was cancelled.", code="request_cancelled")


def unsatisfiable() -> ApiError:
    """400: during generation, every token that could be sampled was forbidden."""
    message = "The request's allowed_token_ids, bad_words, min_tokens or structure left no token to generate."
    return ApiError(400, message, code="unsatisfiable_request")


def from_engine(error: Exception, renamed: Mapping[str, str]) -> ApiError:
    """The answer for an error of `EngineClient.submit` or `SamplingParams`, or for a key's limit.

    `renamed` maps the engine's field names to the request's if they differ. Raises `error` again if it is not one of
    the engine's typed errors."""
    if isinstance(error, RequestError):
        param = renamed.get(error.param, error.param) if error.param is not None else None
        return ApiError(400, str(error), param=param, code=error.code)
    if isinstance(error, QueueFullError):
        flag = f"--{error.option.replace('_', '-')}"
        message = f"The waiting queue is full: {flag} is {error.limit} {error.unit}. Ask again later."
        return ApiError(429, message, code="queue_full", retry_after_s=error.retry_after_s)
    if isinstance(error, KeyLimitError):
        return ApiError(429, str(error), code="rate_limit_exceeded", retry_after_s=error.retry_after_s)
    if isinstance(error, EngineDeadError):
        return engine_unavailable(error.retry_after_s)
    raise error


@contextmanager
def engine_errors(names: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Raises the engine's typed errors as `from_engine` has them."""
    try:
        yield
    except (EngineDeadError, KeyLimitError, QueueFullError, RequestError) as error:
        raise from_engine(error, names) from None


@contextmanager
def in_own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Raises `ApiError` with a chat's fields `renamed`."""
    try:
        yield
    except ApiError as error:
        raise renamed(error, names) from None


async def handle_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    exchange = request.scope.get(KEY)
    return (error if exchange is None else renamed(error, exchange.sent)).response(request.scope)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """The router's errors: an unknown route, or a method that a route does not have."""
    assert isinstance(error, HTTPException)
    status, path = error.status_code, request.url.path
    if (reason := _not_built(path)) is not None and status in (404, 405):
        status, message, code = 404, f"{path} is not built: {reason}.", "not_built"
    elif status == 404:
        message, code = f"Unknown request URL: {request.method} {path:.{MAX_SHOWN_VALUE}}.", "unknown_url"
        others = {f"/v1{path}", path.replace("/v1/v1/", "/v1/"), re.sub("//+", "/", path)} - {path}
        if found := next((each.path for each in request.app.routes if getattr(each, "path", "") in others), None):
            message += f" There is {found}: is the client's base URL right?"
        action = path.removeprefix("/api/").partition("/")[0]
        if dialect_of(request.scope) == "ollama" and action in MANAGEMENT:
            message = f"There is no /api/{action}: the server has the one model that it was started with."
    elif status == 405:
        message = f"Method {request.method} is not allowed on {path}."
        code = "method_not_allowed"
    else:
        message, code = "The request could not be served.", "invalid_request"
    return ApiError(status, message, code=code, headers=error.headers).response(request.scope)


async def handle_unexpected(request: Request, error: Exception) -> Response:
    """Other errors: logged by the layer above with their traceback, answered without it. uvicorn then closes the
    connection; the answer says so, or the client would send its next request on it."""
    response = internal_error().response(request.scope)
    response.headers["Connection"] = "close"
    return response


async def handle_client_disconnect(request: Request, error: Exception) -> Response:
    """The client disconnected before its request or its answer was complete; this answer is not read."""
    return Response(status_code=499)
