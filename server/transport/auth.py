"""API keys. Every route but `OPEN_PATHS` requires one as soon as any is set.

A key comes as `Authorization: Bearer KEY`, as OpenAI's clients send it, as `X-Api-Key: KEY`, as Anthropic's do, or as
the password of Basic authentication, so that a browser can ask for it and open the page. Keys are compared by their
digests, all of them every time, so that timing leaks nothing about a guess."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from server.config import ServerConfigError
from server.errors import ApiError
from server.transport.exchange import KEY, Exchange

logger = logging.getLogger("xserv.server")

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""The paths that need no key, for supervisors. They show a state and no more."""

MAX_KEY_FILE_BYTES = 1 << 20


class ApiKeys:
    """The keys that are valid now.

    secret       names tenants; None: another one in each process
    keys, files  as in `ServerConfig`; raises `ServerConfigError` for a file that cannot be read or a key that cannot be
                 sent
    """

    def __init__(self, keys: Sequence[str], files: Sequence[str], secret: bytes | None = None) -> None:
        self._keys = tuple(keys)
        self._files = tuple(files)
        self._secret = secret or secrets.token_bytes(32)
        self._digests: tuple[bytes, ...] = ()
        self._digests = self._read()

    @property
    def is_required(self) -> bool:
        return bool(self._keys or self._files)

    def reload(self) -> None:
        """Reads the files again. If that fails, the keys stay as they are, and the error is logged."""
        try:
            self._digests = self._read()
        except ServerConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("%d API keys are valid", len(self._digests))

    def tenant_of(self, key: bytes) -> str | None:
        """The tenant of this key, constant for one secret, or None for a wrong key."""
        digest = hashlib.sha256(key).digest()
        is_valid = False
        for known in self._digests:
            is_valid |= hmac.compare_digest(digest, known)
        return hmac.new(self._secret, digest, hashlib.sha256).hexdigest()[:32] if is_valid else None

    def _read(self) -> tuple[bytes, ...]:
        keys = [*self._keys, *(key for file in self._files for key in _keys_in(file))]
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise ServerConfigError("an API key must be of printable ASCII characters, without spaces around it")
        return tuple(hashlib.sha256(key.encode()).digest() for key in dict.fromkeys(keys))


def _keys_in(file: str) -> list[str]:
    """One key a line; empty lines and those that begin with # are skipped. A file without keys is an error, since it
    would allow no request, or all."""
    try:
        with Path(file).open(encoding="ascii") as lines:
            text = lines.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ServerConfigError(f"the API keys in {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ServerConfigError(f"the API keys in {file} are not ASCII") from None
    if len(text) > MAX_KEY_FILE_BYTES:
        raise ServerConfigError(f"{file} is larger than {MAX_KEY_FILE_BYTES} bytes: no file of API keys")
    keys = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not keys:
        raise ServerConfigError(f"{file} holds no API key")
    return keys


class Authentication:
    """An ASGI layer that refuses requests without a key, for any path and method, whether or not the route exists. It
    checks the unescaped path that is routed; only `OPEN_PATHS` are open.

    Sets the exchange's tenant."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, admin_keys: ApiKeys) -> None:
        """``admin_keys`` open every route, too."""
        self.app = app
        self.keys, self.admin_keys = keys, admin_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:  # the gate refuses websockets
            await self.app(scope, receive, send)
            return
        key = key_of(scope["headers"])
        tenant = None if key is None else self.keys.tenant_of(key) or self.admin_keys.tenant_of(key)
        if tenant is None:
            response = _refusal(has_key=key is not None).response(scope)
            for challenge in ('Basic realm="xserv", charset="UTF-8"', "Bearer"):  # browsers prompt for the first
                response.headers.append("WWW-Authenticate", challenge)
            await response(scope, receive, send)
            return
        exchange: Exchange = scope[KEY]
        exchange.tenant = tenant
        await self.app(scope, receive, send)


def key_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key in the Authorization header, or without it in X-Api-Key, if there is exactly one such header with a
    key."""
    given, plain = [], []
    for name, value in headers:
        if name == b"authorization":
            given.append(value)
        elif name == b"x-api-key":
            plain.append(value)
    if not given and len(plain) == 1:
        return plain[0].strip() or None
    if len(given) != 1:
        return None
    scheme, _, rest = given[0].partition(b" ")
    rest = rest.strip()
    if scheme.lower() == b"bearer":
        return rest or None
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(rest, validate=True).partition(b":")[2] or None
        except (binascii.Error, ValueError):
            return None
    return None


def _refusal(*, has_key: bool) -> ApiError:
    message = "The API key is not valid." if has_key else "An API key is needed: send Authorization: Bearer KEY."
    return ApiError(401, message, code="invalid_api_key")
