"""The page: `GET /`, its files, `GET /page/{name}`, and `GET /page/about`, its model.

They are plain files under `server/page/`, read once and served with a strict content security policy: scripts, styles
and connections of this server only, nothing inline, no strings as markup. If the server requires a key, the page does,
too: the browser asks its user (`server.transport.auth`), and sends it with all of the page's requests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from server.service import Service
from server.transport.json_answer import JsonAnswer

INDEX = "index.html"

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
"""Media types of the served files, by their names' endings."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "font-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidated each time: a newer server shows its own page at once
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is sent: its bytes, its media type, and the entity tag of these bytes."""

    content: bytes
    media_type: str
    etag: str


@cache
def page_files() -> Mapping[str, PageFile]:
    """Every file of the page, by its path in the page's folder."""
    found = {}
    folders = [("", files("server").joinpath("page"))]
    while folders:
        path, folder = folders.pop()
        for entry in folder.iterdir():
            media_type = MEDIA_TYPES.get(entry.name.rpartition(".")[2])
            if entry.is_dir():
                folders.append((f"{path}{entry.name}/", entry))
            elif media_type is not None:
                content = entry.read_bytes()
                tag = hashlib.sha256(content).hexdigest()[:32]
                found[path + entry.name] = PageFile(content, media_type, f'"{tag}"')
    return found


class About(msgspec.Struct):
    """has_chat_template: whether it can chat; else it continues text. reads_images: whether its messages may have
    images."""

    model: str
    max_model_len: int
    has_chat_template: bool
    reads_images: bool


async def get_about(request: Request) -> Response:
    """`GET /page/about`: the page's information on the model."""
    service: Service = request.app.state.service
    tokenizer = service.tokenizer
    about = About(
        model=service.model_name,
        max_model_len=service.client.info.max_model_len,
        has_chat_template=tokenizer is not None and tokenizer.has_chat_template,
        reads_images=service.pictures is not None,
    )
    return JsonAnswer(about, {"Cache-Control": "no-store"})


async def get_page(request: Request) -> Response:
    """`GET /`, and `GET /page/{name}`: 304 if the client has it already, 404 for an unknown name."""
    file = page_files().get(request.path_params.get("name", INDEX))
    if file is None:
        raise HTTPException(404)
    headers = {**_HEADERS, "ETag": file.etag}
    if _has_it(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


def _has_it(if_none_match: str, etag: str) -> bool:
    """RFC 9110's weak comparison against a list of tags."""
    tags = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    return etag in tags or "*" in tags
