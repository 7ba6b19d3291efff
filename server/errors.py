"""Every error the server answers with, in OpenAI's shape: `{"error": {message, type, param, code}}`.

    status  type                   code
    400     invalid_request_error  invalid_json, invalid_type, invalid_value, unknown_parameter, …
    400     invalid_request_error  context_length_exceeded, unsatisfiable_request
    404     invalid_request_error  model_not_found, unknown_url, request_not_found, response_not_found
    405     invalid_request_error  method_not_allowed
    408     invalid_request_error  body_timeout
    409     invalid_request_error  request_cancelled
    413     invalid_request_error  body_too_large
    415     invalid_request_error  unsupported_media_type
    429     rate_limit_error       queue_full            (with Retry-After)
    500     server_error           internal_error
    503     server_error           engine_unavailable    (with Retry-After when it is being started again)
    503     server_error           draining, overloaded  (with Retry-After)

Before these stand the ones of the outer layers: 401 invalid_api_key, 403 host_not_allowed and origin_not_allowed, 431
headers_too_large, 408 header_timeout, 400 invalid_http.

A message is written for the user, here or where a field is checked (`RequestError`, which names field,
value and limit). The text of any other exception stays in the server's log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from runtime.engine.errors import EngineDeadError, QueueFullError, RequestError


class ApiError(Exception):
    """An answer that is not 200: status, OpenAI's four fields, and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """OpenAI's error object, ready to be encoded."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(
            msgspec.json.encode(self.body()),
            status_code=self.status,
            media_type="application/json",
            headers=dict(self.headers or {}),
        )


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """400: the field `param` has a value that cannot be honoured."""
    return ApiError(400, message, param=param, code=code)


def internal_error() -> ApiError:
    """500, with nothing of what went wrong: that is in the log."""
    return ApiError(
        500,
        "The server had an error while processing your request.",
        type="server_error",
        code="internal_error",
    )


def engine_unavailable(retry_after_s: float | None = None) -> ApiError:
    """503: the engine is stopping or has died; with a number, it is being started again."""
    return ApiError(
        503,
        "The engine does not take requests any more."
        if retry_after_s is None
        else "The engine broke down and is being started again.",
        type="server_error",
        code="engine_unavailable",
        headers=None if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))},
    )


def _turned_away(message: str, code: str) -> ApiError:
    """503 on a connection that ends; another server may take the request."""
    headers = {"Retry-After": "1", "Connection": "close"}
    return ApiError(503, message, type="server_error", code=code, headers=headers)


def draining() -> ApiError:
    """503: the server is about to end."""
    return _turned_away("The server is shutting down and takes no new requests.", "draining")


def overloaded() -> ApiError:
    """503: more connections than the server holds."""
    return _turned_away("The server has too many open connections.", "overloaded")


def cancelled() -> ApiError:
    """409: somebody cancelled the request by its name, so that its client gets no answer."""
    return ApiError(409, "The request was cancelled.", code="request_cancelled")


def unsatisfiable() -> ApiError:
    """400: found out while generating, when what had to be drawn was all forbidden."""
    return ApiError(
        400,
        "The request's allowed_token_ids, bad_words, min_tokens or structure left no token to generate.",
        code="unsatisfiable_request",
    )


def from_engine(error: Exception, renamed: Mapping[str, str]) -> ApiError:
    """The answer for what `EngineClient.submit` or `SamplingParams` raised.

    `renamed` maps the engine's field names to the request's where they differ. Raises `error` again where
    it is none of the engine's typed errors."""
    if isinstance(error, RequestError):
        param = renamed.get(error.param, error.param) if error.param is not None else None
        return ApiError(400, str(error), param=param, code=error.code)
    if isinstance(error, QueueFullError):
        return ApiError(
            429,
            f"The waiting queue is full ({error.limit} {error.unit}).",
            type="rate_limit_error",
            code="queue_full",
            headers={"Retry-After": str(max(1, math.ceil(error.retry_after_s)))},
        )
    if isinstance(error, EngineDeadError):
        return engine_unavailable(error.retry_after_s)
    raise error


async def handle_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """What the router raises: an unknown route, a method that a route does not have."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message, code = f"Unknown request URL: {request.method} {request.url.path}.", "unknown_url"
    elif error.status_code == 405:
        message = f"Method {request.method} is not allowed on {request.url.path}."
        code = "method_not_allowed"
    else:
        message, code = "The request could not be served.", "invalid_request"
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()


async def handle_unexpected(request: Request, error: Exception) -> Response:
    """Anything else: logged by the layer above with its traceback, answered without it. uvicorn then closes the
    connection, and a client that is not told would send its next request into the closing one."""
    response = internal_error().response()
    response.headers["Connection"] = "close"
    return response


async def handle_client_disconnect(request: Request, error: Exception) -> Response:
    """The client left before it had sent its request, or before it had its answer; nobody reads this one."""
    return Response(status_code=499)
