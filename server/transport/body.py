"""A request's body: read within its limits, decoded, and checked against a schema; each error is a 4xx that names the
place.

    body = await read_body(request, config)
    chat = decode_body(body, ChatCompletionRequest, config)
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from server.config import ServerConfig
from server.errors import ApiError, dialect_of, invalid
from server.openai_api.fields import take_table_fields
from server.transport.exchange import Exchange
from server.transport.typed import Cleaner, check_limits, converted, is_deeper

T = TypeVar("T", bound=msgspec.Struct)

logger = logging.getLogger("xserv.server")


ARRIVED = "xserv.arrived"
"""In the scope of a request whose whole body was there before the application began: `receive` gives it at once."""

_PLAIN_MEDIA_TYPES = ("", "application/x-www-form-urlencoded")
"""Media types of Ollama's clients: litellm names none, and curl by itself that of a form. Pages of other sites could,
too; their Origin is refused before."""


class Body(bytes):
    """A request's body; decoding it sets the exchange's names of fields."""

    exchange: Exchange


async def read_body(request: Request, config: ServerConfig) -> Body:
    """The whole body, at most `max_body_bytes`.

    The limit holds while reading, independently of Content-Length. Raises `ApiError` 415 (compressed, or not JSON by
    its Content-Type, so that a browser's form or plain-text post from another site never reaches the engine), 413, 408,
    and starlette's `ClientDisconnect`."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415, f"The body must not be compressed (Content-Encoding: {encoding[:40]}).", code="unsupported_encoding"
        )
    coding = request.headers.get("transfer-encoding", "chunked").strip().lower()
    if coding != "chunked":
        raise ApiError(
            415, f"The body must not be compressed (Transfer-Encoding: {coding[:40]}).", code="unsupported_encoding"
        )
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_plain = media_type in _PLAIN_MEDIA_TYPES and dialect_of(request.scope) == "ollama"
    if media_type != "application/json" and not is_plain:
        raise ApiError(415, "The Content-Type must be application/json.", code="unsupported_media_type")
    declared = request.headers.get("content-length", "")
    is_too_large = declared.isdecimal() and (len(declared) > 18 or int(declared) > config.max_body_bytes)
    if is_too_large and request.headers.get("expect", "").lower() == "100-continue":
        raise _too_large(config)  # the client has not begun to send
    if ARRIVED in request.scope:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if len(message["body"]) > config.max_body_bytes:
            raise _too_large(config)
        return _of(request, message["body"])
    body = bytearray()
    num_discarded_bytes = 0
    loop = asyncio.get_running_loop()
    end = loop.time() + config.body_timeout_s
    try:
        async with asyncio.timeout(min(config.body_start_timeout_s, config.body_timeout_s)) as limit:
            async for chunk in request.stream():
                if chunk:
                    limit.reschedule(end)
                if is_too_large or len(body) + len(chunk) > config.max_body_bytes:
                    is_too_large = True
                    num_discarded_bytes += len(body) + len(chunk)
                    body.clear()
                    if num_discarded_bytes > config.max_discarded_bytes:
                        break
                else:
                    body += chunk
    except TimeoutError:
        if is_too_large:
            raise _too_large(config) from None
        limit_s = config.body_timeout_s if body else min(config.body_start_timeout_s, config.body_timeout_s)
        raise ApiError(
            408,
            f"The body did not {'arrive' if body else 'begin to arrive'} within {limit_s:g} seconds.",
            code="body_timeout",
            headers={"Connection": "close"},
        ) from None
    if is_too_large:
        raise _too_large(config)
    return _of(request, body)


def _of(request: Request, data: bytes | bytearray) -> Body:
    body = Body(data)
    body.exchange = Exchange.of(request)
    return body


def decode_body(body: Body, schema: type[T], config: ServerConfig) -> T:
    """The body as `schema`. Raises `ApiError` 400: not JSON, nested too deep, a field that is unknown, missing,
    mistyped or unsupported."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep(config) from None
    except UnicodeDecodeError:
        raise invalid(None, "The body is not UTF-8.", "invalid_json") from None
    except msgspec.ValidationError:  # the only rule for untyped JSON: numbers are finite
        raise invalid(None, "The body holds a number that is out of range.", "invalid_json") from None
    except msgspec.DecodeError as error:
        raise _not_json(body, str(error)) from None
    if not isinstance(value, dict):
        raise invalid(None, "The body must be a JSON object.", "invalid_json")
    if is_deeper(value, config.max_json_depth):
        raise _too_deep(config)
    return typed_fields(value, schema, config, body.exchange.ignored, body.exchange.sent)


def typed_fields(
    fields: dict[str, Any], schema: type[T], config: ServerConfig, ignored: list[str],
    sent: dict[str, str] | None = None, *, takes_unknown: bool = False,
) -> T:  # fmt: skip
    """A request's decoded fields as `schema`; `ignored` and `sent` as in `take_table_fields`. Raises `ApiError` 400: a
    field that is unknown (unless it `takes_unknown` ones), missing, mistyped or unsupported."""
    takes_unknown = takes_unknown or config.unknown_fields == "warn"
    fields = take_table_fields(fields, schema, ignored, sent)
    num_known = len(ignored)
    fields = Cleaner(ignored, takes_unknown=takes_unknown).request(fields, schema)
    if takes_unknown and len(ignored) > num_known:
        logger.warning("fields without effect: %s", repr(ignored[num_known : num_known + 20])[:400])
    check_limits(fields, config)
    return converted(fields, schema)


_POSITION = re.compile(r"\(byte (\d+)\)$")
_LAST_KEY = re.compile(rb'"([A-Za-z0-9_]{1,64})"\s*:\s*-?$')
_NOT_A_NUMBER = re.compile(rb"NaN|Infinity")


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _not_json(body: bytes, text: str) -> ApiError:
    """The 400 for malformed JSON; NaN and infinities, which Python's json writes but JSON lacks, by field name."""
    found = _POSITION.search(text)
    if (found is None or "surrogate" in text) and _has_lone_surrogate(body):
        return invalid(None, "The body holds half of a surrogate pair, which is no text.", "invalid_json")
    if found is None:
        problem = "is not UTF-8" if "UTF-8" in text else "is not valid JSON: it ends too early"
        return invalid(None, f"The body {problem}.", "invalid_json")
    position = int(found.group(1))
    if not_a_number := _NOT_A_NUMBER.match(body, position):
        name = not_a_number.group().decode()
        key = _LAST_KEY.search(body, max(0, position - 128), position)
        field = key.group(1).decode() if key else None
        return invalid(field, f"Invalid value for {field or 'a field'}: {name} is not a number in JSON.")
    return invalid(None, f"The body is not valid JSON (at byte {position}).", "invalid_json")


def _has_lone_surrogate(body: bytes) -> bool:
    """Whether the body is JSON by Python's parser, which accepts lone surrogates."""
    if _SURROGATE.search(body) is None:
        return False
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False


def _too_deep(config: ServerConfig) -> ApiError:
    return invalid(
        None, f"The body nests arrays and objects deeper than {config.max_json_depth} levels.", "invalid_json"
    )


def _too_large(config: ServerConfig) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {config.max_body_bytes} bytes.",
        code="body_too_large",
        headers={"Connection": "close"},
    )
