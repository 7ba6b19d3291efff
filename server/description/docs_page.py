"""`GET /openapi.json`, and `GET /docs`: the same description as a page to read, without scripts."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

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
    """The whole page."""
    info, schemas = document["info"], document["components"]["schemas"]
    routes = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{escape(info['title'])}: the API</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])} "
        "<a href=/openapi.json>openapi.json</a></p><ul class=routes>",
        *(_line(method, path, operation) for method, path, operation in routes),
        "</ul>",
        *(_route(method, path, operation, schemas) for method, path, operation in routes),
        "<h2>Objects</h2>",
        *(_object(name, schema) for name, schema in sorted(schemas.items()) if schema.get("properties")),
        "</body></html>",
    ]
    return "".join(parts)


def _line(method: str, path: str, operation: Json) -> str:
    link = f"<a href='#{_anchor(method, path)}'><b>{method}</b> {escape(path)}</a>"
    return f"<li>{link} {escape(operation['summary'])}</li>"


def _route(method: str, path: str, operation: Json, schemas: Json) -> str:
    title = f"<h2 id='{_anchor(method, path)}'><b>{method}</b> {escape(path)}</h2>"
    parts = [f"{title}<p>{escape(operation['summary'])}.</p>"]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        parts.append(f"<p>Request: {_type(body)}</p>")
        name = body.get("$ref", "").rpartition("/")[2]
        if name in schemas:
            parts.append(_fields(schemas[name]))
    for status, answer in operation["responses"].items():
        kinds = [f"{escape(media)}: {_type(content['schema'])}" for media, content in answer.get("content", {}).items()]
        parts.append(f"<p><b>{escape(status)}</b> {escape(answer['description'])} {'; '.join(kinds)}</p>")
    return "".join(parts)


def _object(name: str, schema: Json) -> str:
    text = f"<p class=text>{escape(schema['description'])}</p>" if schema.get("description") else ""
    return f"<h3 id='{escape(name)}'>{escape(name)}</h3>{text}{_fields(schema)}"


def _fields(schema: Json) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code>{' *' if name in required else ''}</td><td>{_type(field)}</td>"
        f"<td>{escape(str(field.get('description', '')))}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    ]
    return f"<table><tr><th>field (* required)<th>type<th></tr>{''.join(rows)}</table>" if rows else ""


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


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}{path}", quote=True)
