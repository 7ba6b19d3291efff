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
from dataclasses import fields
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from server.config import ServerConfig, ServerConfigError
from server.errors import ApiError
from server.transport.exchange import KEY, Exchange
from server.transport.key_holders import KeyHolder, KeyTerms

logger = logging.getLogger("xserv.server")

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""The paths that need no key, for supervisors. They show a state and no more."""

MAX_KEY_FILE_BYTES = 1 << 20


class ApiKeys:
    """The keys that are valid now.

    secret       names tenants; None: another one in each process
    keys, files  as in `ServerConfig`; raises `ServerConfigError` for a file that cannot be read or a key that cannot be
                 sent
    usual        the terms of keys without their own
    """

    def __init__(
        self, keys: Sequence[str], files: Sequence[str], secret: bytes | None = None, usual: KeyTerms | None = None
    ) -> None:
        self._keys = tuple(keys)
        self._files = tuple(files)
        self._secret = secret or secrets.token_bytes(32)
        self._usual = usual or KeyTerms()
        self._holders: dict[bytes, KeyHolder] = {}
        self._read()

    @classmethod
    def of(cls, config: ServerConfig, secret: bytes | None = None) -> ApiKeys:
        usual = KeyTerms(max_requests=config.max_requests_per_key, tokens_per_minute=config.tokens_per_minute_per_key)
        return cls(config.api_keys, config.api_key_files, secret, usual)

    @property
    def is_required(self) -> bool:
        return bool(self._keys or self._files)

    @property
    def holders(self) -> list[KeyHolder]:
        """All of them."""
        return list(dict.fromkeys(self._holders.values()))

    def reload(self) -> None:
        """Reads the files again. If that fails, the keys stay as they are, and the error is logged."""
        try:
            self._read()
        except ServerConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("%d API keys are valid", len(self._holders))

    def holder_of(self, key: bytes) -> KeyHolder | None:
        """The holder of this key, or None for a wrong key."""
        digest = hashlib.sha256(key).digest()
        is_valid = False
        for known in self._holders:
            is_valid |= hmac.compare_digest(digest, known)
        return self._holders[digest] if is_valid else None

    def _read(self) -> None:
        terms_of: dict[bytes, KeyTerms] = {}
        for key, terms in (
            *((key, self._usual) for key in self._keys),
            *(found for file in self._files for found in _keys_in(file, self._usual)),
        ):
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise ServerConfigError("an API key must be of printable ASCII characters, without spaces around it")
            if terms_of.setdefault(digest := hashlib.sha256(key.encode()).digest(), terms) != terms:
                raise ServerConfigError(
                    f"an API key is given twice, with other terms: {_told(terms_of[digest])} and {_told(terms)}; "
                    "keep one"
                )
        of_names: dict[str, KeyTerms] = {}
        for terms in terms_of.values():
            if terms.name and of_names.setdefault(terms.name, terms) != terms:
                raise ServerConfigError(
                    f"keys of name={terms.name} have other terms: {of_names[terms.name]} and {terms}; they are one "
                    "tenant and must have the same"
                )
        known = {holder.tenant: holder for holder in self._holders.values()}
        holders = {}
        for digest, terms in terms_of.items():
            named = digest if not terms.name else f"name={terms.name}".encode()
            tenant = hmac.new(self._secret, named, hashlib.sha256).hexdigest()[:32]
            holder = holders[digest] = known.setdefault(tenant, KeyHolder(tenant, terms))
            if holder.terms != terms:
                holder.renew(terms)
        self._holders = holders


def _told(terms: KeyTerms) -> str:
    return f"name={terms.name} {terms}" if terms.name else str(terms)


def _keys_in(file: str, usual: KeyTerms) -> list[tuple[str, KeyTerms]]:
    """One key a line, perhaps with its terms after spaces; empty lines and those that begin with # are skipped. A file
    without keys is an error, since it would allow no request, or all."""
    try:
        with Path(file).open(encoding="ascii") as lines:
            text = lines.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ServerConfigError(f"the API keys in {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ServerConfigError(f"the API keys in {file} are not ASCII") from None
    if len(text) > MAX_KEY_FILE_BYTES:
        raise ServerConfigError(f"{file} is larger than {MAX_KEY_FILE_BYTES} bytes: no file of API keys")
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            key, *words = line.split()
            if key.startswith(tuple(f"{field.name.replace('_', '-')}=" for field in fields(KeyTerms))):
                raise ServerConfigError(f"{file}:{number}: begins with {key.partition('=')[0]}=, must begin with a key")
            keys.append((key, KeyTerms.of(words, usual, f"{file}:{number}")))
    if not keys:
        raise ServerConfigError(f"{file} holds no API key")
    return keys


class Authentication:
    """An ASGI layer that refuses requests without a key, for any path and method, whether or not the route exists. It
    checks the unescaped path that is routed; only `OPEN_PATHS` are open.

    Sets the exchange's holder."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, admin_keys: ApiKeys) -> None:
        """``admin_keys`` open every route, too."""
        self.app = app
        self.keys, self.admin_keys = keys, admin_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:  # the gate refuses websockets
            await self.app(scope, receive, send)
            return
        key = key_of(scope["headers"])
        holder = None if key is None else self.keys.holder_of(key) or self.admin_keys.holder_of(key)
        if holder is None:
            response = _refusal(has_key=key is not None).response(scope)
            for challenge in ('Basic realm="xserv", charset="UTF-8"', "Bearer"):  # browsers prompt for the first
                response.headers.append("WWW-Authenticate", challenge)
            await response(scope, receive, send)
            return
        exchange: Exchange = scope[KEY]
        exchange.holder = holder
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
