"""`PictureReader`: reads a message's picture part, then the picture in the model's form; `KeptPictures`: files of
pictures, by their uuid."""

from __future__ import annotations

import base64
import binascii
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from msgspec.structs import replace

from runtime.engine.messages import ImageSupport
from runtime.engine.prompt_images import PreparedImage
from runtime.images.decoding import DecodingLimits, ImageError
from runtime.images.patches import TOKEN_COUNTS, FixedRule, PatchRule, Rule, SideRule, TokenRule
from runtime.later import later
from runtime.text.content import ImagePart
from server.config import Place, ServerConfig, ServerConfigError
from server.errors import ApiError, invalid
from server.pictures.decoder import PictureDecoder

_fetching = later("server.pictures.fetching")  # needs httpcore, which is optional

Owner = tuple[str | None, str | None]
"""A tenant and the `cache_salt` of its request: other tenants do not find a picture by its name."""

MAX_UUID_LENGTH = 256
_ENTRY_BYTES = 1024
"""Bytes of a kept picture beside its file: its name, the keys, the objects around them."""


class KeptPictures:
    """An LRU cache of picture files, of at most `max_bytes`. Its methods may be called by any thread.

    A name stands only for a file: the engine finds embeddings and pages by the digest of a picture's patches and grid,
    so that a reused or guessed name does not lead to another picture's."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._files: OrderedDict[tuple[Owner, str], bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """At most `max_bytes`."""
        return self._num_bytes

    def put(self, owner: Owner, uuid: str, file: bytes) -> None:
        """Stores the file under the name, or removes the name if the file exceeds `max_bytes`."""
        key = (owner, uuid)
        with self._lock:
            self._drop(key)
            if len(file) + _ENTRY_BYTES > self.max_bytes:
                return
            self._files[key] = file
            self._num_bytes += len(file) + _ENTRY_BYTES
            while self._num_bytes > self.max_bytes:
                self._drop(next(iter(self._files)))

    def get(self, owner: Owner, uuid: str) -> bytes | None:
        """The file last sent under the name, or None."""
        key = (owner, uuid)
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
            return self._files.get(key)

    def _drop(self, key: tuple[Owner, str]) -> None:
        if (file := self._files.pop(key, None)) is not None:
            self._num_bytes -= len(file) + _ENTRY_BYTES


LOW_DETAIL_SIDE = 512
"""Pixels of the side of a square that has as many as a picture whose `detail` is "low"; else as many as the model
takes."""

DETAILS = ("auto", "low", "high", "original")

_DATA_URI = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PictureSource:
    """A picture part of a message.

    path  of the field that it stands in
    url   a data: URI or a URL, or None for the picture sent before under `uuid`
    uuid  the client's name for it
    """

    path: str
    url: str | None
    is_low: bool
    uuid: str | None = None


def picture_source(image: ImagePart) -> PictureSource:
    """Reads a request's picture: a URL or a `data:` URI, a `detail`, a `uuid`. Raises `ApiError` 400."""
    uuid, value = image.uuid, image.value
    if uuid is not None:
        _check_uuid(uuid, f"{image.path}.uuid")
    if (value is not None or uuid is None) and (not isinstance(value, str) or not value):
        got = "it is missing" if value is None else f"got {str(value)[:40]!r}"
        raise invalid(image.where, f"{image.where} must be a data: URI or a URL, {got}.", "invalid_type")
    if image.detail is not None and image.detail not in DETAILS:
        name = image.detail_path
        raise invalid(name, f"{name} must be one of {', '.join(DETAILS)}, got {str(image.detail)[:80]!r}.")
    where = image.where if value is not None else f"{image.path}.uuid"
    return PictureSource(where, value, image.detail == "low", uuid)


def _check_uuid(uuid: Any, path: str) -> None:
    if not isinstance(uuid, str):
        raise invalid(path, f"{path} must be a string.", "invalid_type")
    if not 1 <= len(uuid) <= MAX_UUID_LENGTH:
        raise invalid(path, f"{path} must have 1 … {MAX_UUID_LENGTH} characters, got {len(uuid)}.")


class PictureReader:
    """Reads pictures for a model. Its methods may be called by any thread, and may block.

    support  the model's picture support
    most     in one request
    threads  prepare requests that may have pictures, so that others do not wait for these
    """

    def __init__(self, support: ImageSupport, config: ServerConfig) -> None:
        self.support = support
        self.most = config.limit_images
        self.threads = ThreadPoolExecutor(config.num_image_threads, thread_name_prefix="xserv-pictures")
        self._limits = DecodingLimits(config.max_image_bytes, config.max_image_pixels)
        own = support.rule
        widest = replace(own, max_tokens=max(_token_counts(support))) if isinstance(own, TokenRule) else own
        self._decoder = PictureDecoder(config.num_image_processes, config.image_timeout_s, widest.most_pixels)
        self._kept = KeptPictures(config.max_kept_image_bytes)
        self._fetch: Callable[[str], bytes] | None = None
        if config.allow_image_urls:
            if find_spec("httpcore") is None:
                raise ServerConfigError("allow_image_urls needs httpcore: pip install '.[vision]' in xserv's checkout")
            places = [Place.of(each) for each in config.allow_image_hosts]
            self._fetch = _fetching.PictureFetcher(places, config.max_image_bytes, config.image_timeout_s).fetch

    def rule(self, asked: Mapping[str, Any] | None) -> Rule:
        """How a request's pictures are cut, with its `mm_processor_kwargs`. Raises `ApiError` 400."""
        asked = asked or {}
        own = self.support.rule
        if isinstance(own, SideRule) and isinstance(size := asked.get("size"), dict):
            edge, path = size.get("longest_edge"), "mm_processor_kwargs.size"
            longest = max(own.most_height, own.most_width)
            if len(size) > 1 or type(edge) is not int or not own.factor <= edge <= longest:
                raise invalid(path, f'{path} must be {{"longest_edge": {own.factor} … {longest}}}, got {size!r:.80}.')
            asked, own = {name: value for name, value in asked.items() if name != "size"}, own.at_most(edge)
        if isinstance(own, TokenRule):
            return _with_tokens(own, asked, _token_counts(self.support))
        if not isinstance(own, PatchRule):
            sides = (own.height, own.width) if isinstance(own, FixedRule) else (own.most_height, own.most_width)
            for name in asked:
                path, most = f"mm_processor_kwargs.{name}", "" if isinstance(own, FixedRule) else "at most "
                why = f"{path} (the model's images have {most}{sides[0]} x {sides[1]} pixels)"
                raise invalid(path, f"Unsupported parameter: {why}.", "unsupported_parameter")
            return own
        for name, value in asked.items():
            path = f"mm_processor_kwargs.{name}"
            if name not in ("min_pixels", "max_pixels"):
                raise invalid(path, f"Unknown parameter: {path}.", "unknown_parameter")
            if isinstance(value, bool) or not isinstance(value, int):
                raise invalid(path, f"{path} must be an integer.", "invalid_type")
            if not own.factor**2 <= value <= own.max_pixels:
                limits = f"{own.factor**2} … {own.max_pixels}"
                raise invalid(path, f"{path} must be in {limits}, got {value}.")
        most = asked.get("max_pixels", own.max_pixels)
        least = asked.get("min_pixels", min(own.min_pixels, most))
        if least > most:
            path = "mm_processor_kwargs.min_pixels"
            raise invalid(path, f"{path} must be at most max_pixels, {most}, got {least}.")
        return replace(own, min_pixels=least, max_pixels=most)

    def read(self, source: PictureSource, rule: Rule, owner: Owner) -> PreparedImage:
        """The picture as the model's input; with a `uuid`, it is kept for later requests. Raises `ApiError` 400 naming
        the part's field."""
        if source.is_low:
            rule = rule.at_most(LOW_DETAIL_SIDE)
        try:
            file = self._file(source, owner)
            prepared = self._decoder.decode(file, self._limits, rule)
        except ImageError as error:
            raise _refused(source, str(error)) from None
        if source.uuid is not None and source.url is not None:
            self._kept.put(owner, source.uuid, file)
        return prepared

    def close(self) -> None:
        """Ends the decoder and the threads; waiting pictures are refused."""
        self._decoder.close()
        self.threads.shutdown(wait=True, cancel_futures=True)

    def _file(self, source: PictureSource, owner: Owner) -> bytes:
        """The picture's file. Raises ImageError."""
        if source.url is None:
            assert source.uuid is not None
            kept = self._kept.get(owner, source.uuid)
            if kept is None:
                raise ImageError("no image is kept under it (any more): send the image with it")
            return kept
        if source.url[:5].lower() != "data:":
            if self._fetch is None:
                raise ImageError("this server fetches no URLs (--allow-image-urls): send the image as a data: URI")
            return self._fetch(source.url)
        head = _DATA_URI.match(source.url[:300])
        if head is None:
            raise ImageError("a data: URI must be data:image/…;base64,…")
        if (kind := head["type"]) is not None and not kind.lower().startswith("image/"):
            raise ImageError(f"a data: URI must be of an image, not {kind}")
        most = self._limits.max_bytes
        if (len(source.url) - head.end()) * 3 // 4 > most + 3:
            raise ImageError(f"the image has more than {most:,} bytes")
        try:
            return base64.b64decode(source.url[head.end() :], validate=True)
        except (binascii.Error, ValueError):
            raise ImageError("the data: URI is no base64") from None


def _token_counts(support: ImageSupport) -> list[int]:
    """The numbers of tokens that a request may ask for, of a model with a `TokenRule`; its own is one of them."""
    return [count for count in TOKEN_COUNTS if support.most_whole is None or count <= support.most_whole]


def _with_tokens(own: TokenRule, asked: Mapping[str, Any], counts: list[int]) -> TokenRule:
    """The rule for pictures of as many tokens as the request's `mm_processor_kwargs` say. Raises `ApiError` 400."""
    for name, count in asked.items():
        path = f"mm_processor_kwargs.{name}"
        if name != "max_soft_tokens":
            raise invalid(path, f"Unknown parameter: {path}.", "unknown_parameter")
        if type(count) is not int or count not in counts:
            raise invalid(path, f"{path} must be one of {', '.join(map(str, counts))}, got {count!r:.80}.")
        own = replace(own, max_tokens=count)
    return own


def _refused(source: PictureSource, message: str) -> ApiError:
    return invalid(source.path, f"{source.path}: {message}.", "invalid_image")
