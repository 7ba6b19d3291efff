"""`GET /openapi.json`, and `GET /docs`: the same description as a page to read, without scripts."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

import msgspec
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from runtime.later import later

jinja2 = later("jinja2")

Json = dict[str, Any]

_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
h2 { margin-top: 2.5rem; border-top: 1px solid #8886; padding-top: 1rem; overflow-wrap: anywhere; }
h3 { margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; display: block; overflow-x: auto; }
td, th { text-align: left; vertical-align: top; padding: 0.2rem 1rem 0.2rem 0; border-bottom: 1px solid #8884; }
code { font-family: ui-monospace, monospace; font-size: 0.9em; }
.routes { list-style: none; padding: 0; }
.text { white-space: pre-wrap; }
"""

_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

MAX_SHOWN_TYPES = 6


async def get_description(request: Request) -> Response:
    return Response(msgspec.json.encode(request.app.description()), media_type="application/json")


async def get_docs(request: Request) -> Response:
    return Response(page(request.app.description()), media_type="text/html; charset=utf-8", headers=_HEADERS)


def page(document: Json) -> str:
    """The whole page, made of `docs.html`."""
    routes = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = document["components"]["schemas"]

    def kind(schema: Json) -> Markup:
        return Markup(_type(schema))

    style = Markup(_STYLE)
    shown: str = _template().render(info=document["info"], schemas=schemas, routes=routes, style=style, kind=kind)
    return shown


@cache
def _template() -> Any:
    text = files("server").joinpath("description", "docs.html").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(text)


def _type(schema: Json) -> str:
    """A schema in a few words, with a link to the type that it names."""
    if (reference := schema.get("$ref")) is not None:
        name = escape(reference.rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = list(dict.fromkeys(map(_type, schema[key])))
            return " or ".join(kinds[:MAX_SHOWN_TYPES]) + (" …" if len(kinds) > MAX_SHOWN_TYPES else "")
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in values[:12])
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"array of {_type(schema.get('items', {}))}"
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", "&gt;"), ("maximum", "≤"), ("maxLength", "length ≤"))
        if key in schema
    ]
    return " ".join([escape(str(kind)), *bounds])
