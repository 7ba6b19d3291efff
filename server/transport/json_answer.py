"""Answers as JSON. A large one is encoded and sent piece by piece, and other tasks run between two pieces.

One call of msgspec's encoder holds the GIL until it returns, on a thread, too: half a second for 100 MB. So a large
answer is split, down to the items of lists. Lists that grow token by token are `EncodedList`s."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeGuard, TypeVar, cast

import msgspec
from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

PIECE_BYTES = 64 * 1024
"""Answers above it are sent in pieces of about this size. A string is not cut: a long one takes a millisecond a MB."""

_NUMBER_BYTES = 8
_FIELD_BYTES = 12
"""Bytes of a number, and of a field beside its value: an estimate that decides where to cut."""


class EncodedList(Generic[T]):
    """A list kept as encoded JSON: as objects, log probabilities take eight times the memory, and slow the garbage
    collector."""

    def __init__(self) -> None:
        self.size_bytes = 2
        self._chunks: list[bytearray] = []

    def extend(self, items: Sequence[T]) -> None:
        if not items:
            return
        data = memoryview(_encode(items))[1:-1]
        if not self._chunks or len(self._chunks[-1]) >= PIECE_BYTES:
            self._chunks.append(bytearray())
        last = self._chunks[-1]
        if self.size_bytes > 2:
            last += b","
        last += data
        self.size_bytes += len(data) + 1

    def as_list(self) -> list[T]:
        """Itself, typed as the list for a field of an answer."""
        return cast("list[T]", self)

    def pieces(self) -> Iterator[bytes | bytearray]:
        """Its JSON in pieces, in order."""
        yield b"["
        yield from self._chunks
        yield b"]"


def _hook(value: object) -> msgspec.Raw:
    if isinstance(value, EncodedList):
        return msgspec.Raw(b"".join(value.pieces()))
    raise TypeError(f"{type(value)} has no JSON")


_encode = msgspec.json.Encoder(enc_hook=_hook).encode


class JsonAnswer(Response):
    """A whole answer: structs, lists, dicts and their content. It must not change any more."""

    media_type = "application/json"

    def __init__(self, answer: Any, headers: Mapping[str, str] | None = None, status_code: int = 200) -> None:
        self._answer = answer
        self._is_large = weight(answer, PIECE_BYTES) > PIECE_BYTES
        self.status_code = status_code
        self.background = None
        if not self._is_large:
            self.body = _encode(answer)
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_large:
            await super().__call__(scope, receive, send)
            return
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for data in pieces(self._answer):
                await send({"type": "http.response.body", "body": data, "more_body": True})
                await asyncio.sleep(0)  # `send` returns at once while the client reads
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:  # the client has gone
            pass


def pieces(value: object) -> Iterator[bytes]:
    """The value's JSON, cut anywhere."""
    piece = bytearray()
    for part in _parts(value):
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def weight(value: object, most: int) -> int:
    """The approximate size of the value's JSON, counted up to `most`."""
    total, stack = 0, [value]
    while stack and total <= most:
        each = stack.pop()
        if isinstance(each, str):
            total += len(each) + 2
        elif isinstance(each, (list, tuple)):
            total += 2 + len(each)
            if each and isinstance(each[0], (int, float)):
                total += _NUMBER_BYTES * len(each)
            elif total <= most:
                stack += each
        elif isinstance(each, msgspec.Struct):
            total += _FIELD_BYTES * len(each.__struct_fields__)
            stack += msgspec.structs.astuple(each)
        elif isinstance(each, dict):
            total += _FIELD_BYTES * len(each)
            if total <= most:
                stack += each.values()
        elif isinstance(each, EncodedList):
            total += each.size_bytes
        else:
            total += _NUMBER_BYTES
    return total


def _parts(value: object) -> Iterator[bytes | bytearray]:
    if isinstance(value, EncodedList):
        yield from value.pieces()
    elif not _can_be_cut(value) or weight(value, PIECE_BYTES) <= PIECE_BYTES:
        yield _encode(value)
    elif isinstance(value, (list, tuple)):
        yield b"["
        for number, items in enumerate(_groups(value)):
            if number:
                yield b","
            if len(items) == 1:
                yield from _parts(items[0])
            else:
                yield _encode(items)[1:-1]
        yield b"]"
    else:
        yield b"{"
        for number, (name, item) in enumerate(_fields(value)):
            yield (b"," if number else b"") + _encode(name) + b":"
            yield from _parts(item)
        yield b"}"


def _can_be_cut(value: object) -> TypeGuard[msgspec.Struct | dict[str, Any] | list[Any] | tuple[Any, ...]]:
    """Whether a struct can be split: msgspec encodes those that omit defaults or names."""
    if isinstance(value, msgspec.Struct):
        return not (value.__struct_config__.omit_defaults or value.__struct_config__.array_like)
    return isinstance(value, (dict, list, tuple))


def _fields(value: msgspec.Struct | dict[str, Any]) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from value.items()
        return
    config = value.__struct_config__
    if config.tag_field is not None:
        yield config.tag_field, config.tag
    for name, item in zip(value.__struct_encode_fields__, msgspec.structs.astuple(value), strict=True):
        if item is not UNSET:
            yield name, item


def _groups(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Groups neighbours into pieces; a large item is alone."""
    if isinstance(items[0], (int, float)):
        size = PIECE_BYTES // _NUMBER_BYTES
        yield from (items[start : start + size] for start in range(0, len(items), size))
        return
    start = total = 0
    for place, item in enumerate(items):
        size = len(item) + 2 if isinstance(item, str) else weight(item, PIECE_BYTES)
        if total + size > PIECE_BYTES and place > start:
            yield items[start:place]
            start, total = place, 0
        total += size
    yield items[start:]
