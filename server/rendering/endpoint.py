"""`POST /page/render`: formulas and code rendered for the page.

    {"math": [{"latex": "x^2", "display": false}], "code": [{"language": "python", "text": "x = 1"}]}
    → {"math": [["math", {"display": "inline"}, […]]], "code": [["", 2, "k", 1, …]]}

An entry is null if the page should show the source: not a formula, an unknown language, or a timeout."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.errors import ApiError
from server.rendering.renderer import Job, RendererBusyError
from server.service import Service
from server.transport.body import decode_body, read_body
from server.transport.exchange import Exchange

MAX_ENTRIES = 64
MAX_MATH_CHARACTERS = 4000
MAX_CODE_CHARACTERS = 40_000


class Formula(msgspec.Struct, forbid_unknown_fields=True):
    latex: Annotated[str, msgspec.Meta(max_length=MAX_MATH_CHARACTERS)]
    display: bool = False


class Code(msgspec.Struct, forbid_unknown_fields=True):
    language: Annotated[str, msgspec.Meta(max_length=40)]
    text: Annotated[str, msgspec.Meta(max_length=MAX_CODE_CHARACTERS)]


class RenderRequest(msgspec.Struct, forbid_unknown_fields=True):
    math: Annotated[list[Formula], msgspec.Meta(max_length=MAX_ENTRIES)] = []
    code: Annotated[list[Code], msgspec.Meta(max_length=MAX_ENTRIES)] = []


class Rendered(msgspec.Struct):
    """In the request's order. A formula is `[tag, attributes, children]`, code is class, length, class, length, …"""

    math: list[list[Any] | None]
    code: list[list[str | int] | None]


async def render(request: Request) -> Response:
    """Renders the entries; 429 while too many wait; 400 names the field that is too long."""
    service: Service = request.app.state.service
    asked = decode_body(await read_body(request, service.config), RenderRequest, service.config)
    jobs: list[Job] = [("math", each.latex, each.display) for each in asked.math]
    jobs += [("code", each.language, each.text) for each in asked.code]
    try:
        answers = await service.renderer.render(jobs, Exchange.of(request).tenant)
    except RendererBusyError:
        raise ApiError(
            429,
            "Too many answers are being rendered.",
            type="rate_limit_error",
            code="renderer_busy",
            headers={"Retry-After": "1"},
        ) from None
    number = len(asked.math)
    answer = {"math": answers[:number], "code": answers[number:]}
    return Response(msgspec.json.encode(answer), media_type="application/json", headers={"Cache-Control": "no-store"})
