"""`PictureFetcher`: a picture by its URL, from the public internet alone.

A name is resolved once, all of its addresses must be public, and the connection is made to one of them, so that DNS
rebinding has no effect. TLS still checks the name. Redirects are followed one by one through the same checks. The
environment (proxies, .netrc) is not read; no cookies or keys are sent.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import httpcore

from runtime.images.decoding import ImageError
from runtime.version import release
from server.config import Place

Address = IPv4Address | IPv6Address

_NOT_PUBLIC = [
    ip_network(each)
    for each in (
        "192.88.99.0/24",  # relays of 6to4
        "::/96",  # IPv4 in IPv6, as it was once written
        "64:ff9b::/96",  # NAT64, which reaches any IPv4 address
        "64:ff9b:1::/48",
        "2001::/32",  # Teredo, the same
        "2002::/16",  # 6to4, the same
        "fec0::/10",  # site-local, before fc00::/7
        "5f00::/16",  # segment routing
    )
]
"""Networks that Python takes for global ones, in some of its versions at least."""


def parsed(text: str) -> Address | None:
    """The canonical form of an address, or None if it is not one."""
    try:
        return ip_address(text.partition("%")[0])
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether it is a unicast address on the public internet."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return False
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    return not any(
        address in network for network in _NOT_PUBLIC if isinstance(network, IPv6Network) == (address.version == 6)
    )


MAX_URL_LENGTH = 8192
MAX_REDIRECTS = 3
MAX_HEAD_BYTES = 1 << 16
"""Most bytes of an answer's headers, TLS included."""

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)


class _Limits:
    """The limits of one picture, over all its connections."""

    def __init__(self, timeout_s: float, max_bytes: int) -> None:
        self.timeout_s, self.max_bytes = timeout_s, max_bytes
        self._end_s = time.monotonic() + timeout_s
        self._left_bytes = max_bytes + (MAX_REDIRECTS + 1) * MAX_HEAD_BYTES

    def left_s(self) -> float:
        """The remaining time. Raises ImageError if none is left."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise self.too_slow()
        return left_s

    def too_slow(self) -> ImageError:
        return ImageError(f"the image takes longer than {self.timeout_s:g} s to fetch")

    def take(self, num_bytes: int) -> None:
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            raise self.too_large()

    def too_large(self) -> ImageError:
        return ImageError(f"the image has more than {self.max_bytes:,} bytes")


class _Stream(httpcore.NetworkStream):
    """A connection within the limits, even if headers arrive byte by byte."""

    def __init__(self, inner: httpcore.NetworkStream, limits: _Limits) -> None:
        self._inner, self._limits = inner, limits

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._inner.read(max_bytes, self._limits.left_s())
        self._limits.take(len(data))
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, self._limits.left_s())

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, self._limits.left_s()), self._limits)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend(httpcore.NetworkBackend):
    """Connects to the addresses that were resolved and checked, not to the name."""

    def __init__(self, addresses: Iterable[str], limits: _Limits) -> None:
        self._addresses, self._limits = list(addresses), limits

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.NetworkStream:  # fmt: skip
        error: Exception | None = None
        for address in self._addresses:
            try:
                stream = httpcore.SyncBackend().connect_tcp(address, port, self._limits.left_s())
                return _Stream(stream, self._limits)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failed:
                error = failed
        raise error or httpcore.ConnectError("no address")


class PictureFetcher:
    """Its methods may be called by any thread.

    places     the only allowed sources; if empty, the public internet. A place that is an address with a port may be
               private
    max_bytes  of a picture; timeout_s: of a whole fetch
    """

    def __init__(self, places: Iterable[Place], max_bytes: int, timeout_s: float) -> None:
        self._places = frozenset(places)
        self._max_bytes, self._timeout_s = max_bytes, timeout_s

    def fetch(self, url: str) -> bytes:
        """The bytes at an http or https URL. Raises ImageError."""
        limits = _Limits(self._timeout_s, self._max_bytes)
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._get(url, limits)
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise ImageError(f"the image's URL leads on more than {MAX_REDIRECTS} times")

    def _get(self, url: str, limits: _Limits) -> bytes | str:
        """The picture, or the URL of a redirect."""
        parts, port = self._checked(url)
        host = parts.hostname or ""
        addresses = self._addresses(host, port, limits)
        written = f"[{host}]" if ":" in host else host
        headers = [
            (b"Host", (written if port == _PORTS[parts.scheme] else f"{written}:{port}").encode()),
            (b"User-Agent", f"xserv/{release()}".encode()),
            (b"Accept", b"image/*"),
            (b"Accept-Encoding", b"identity"),
            (b"Connection", b"close"),
        ]
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), self._timeout_s)
        try:
            with httpcore.ConnectionPool(network_backend=_Backend(addresses, limits)) as pool:
                address = httpcore.URL(
                    scheme=parts.scheme.encode(), host=host.encode(), port=port, target=target.encode("ascii")
                )
                with pool.stream("GET", address, headers=headers, extensions={"timeout": timeouts}) as response:
                    return self._read(url, response, limits)
        except (httpcore.TimeoutException, TimeoutError):
            raise limits.too_slow() from None
        except ImageError:
            raise
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError):
            raise ImageError("the image's server cannot be reached, or breaks off") from None
        except (UnicodeError, ValueError):
            raise ImageError("the image's URL cannot be read") from None

    def _read(self, url: str, response: httpcore.Response, limits: _Limits) -> bytes | str:
        headers = {name.lower(): value for name, value in response.headers}
        if response.status in _REDIRECTS and b"location" in headers:
            return urljoin(url, headers[b"location"].decode("ascii"))
        if response.status != 200:
            raise ImageError(f"the image's server answers with status {response.status}")
        if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):
            raise ImageError("the image's server sends it compressed, which was not asked for")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limits.max_bytes:
            raise limits.too_large()
        data = bytearray()
        for piece in response.iter_stream():
            data += piece
            if len(data) > limits.max_bytes:
                raise limits.too_large()
            limits.left_s()
        return bytes(data)

    def _checked(self, url: str) -> tuple[SplitResult, int]:
        """The URL's parts and its port. Raises ImageError for a forbidden URL, before anything is sent."""
        if len(url) > MAX_URL_LENGTH:
            raise ImageError(f"the image's URL has {len(url)} characters, limit {MAX_URL_LENGTH}")
        if not url.isascii() or any(char <= " " or char in "\\\x7f" for char in url):
            raise ImageError("the image's URL has characters that a URL must not have")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ImageError("the image's URL cannot be read") from None
        if parts.scheme not in _PORTS:
            raise ImageError(f"the image's URL must be data:, http: or https:, not {parts.scheme[:20]}:")
        if not parts.hostname:
            raise ImageError("the image's URL has no host")
        if "@" in parts.netloc:
            raise ImageError("the image's URL must have no user and no password")
        port = _PORTS[parts.scheme] if port is None else port
        usual = port in _PORTS.values()
        if self._places:
            names = {Place(parts.hostname, port), *([Place(parts.hostname, None)] if usual else ())}
            if not names & self._places:
                raise ImageError(f"images are not fetched from {parts.hostname[:100]}:{port} (--allow-image-hosts)")
        elif not usual:
            raise ImageError(f"images are fetched from the ports 80 and 443, not {port} (--allow-image-hosts)")
        return parts, port

    def _addresses(self, host: str, port: int, limits: _Limits) -> list[str]:
        """The host's addresses, all of them allowed. Raises ImageError."""
        literal = parsed(host)
        if literal is not None and Place(host, port) in self._places:
            return [str(literal)]
        found = _resolve(host, port, limits)
        addresses = [parsed(each) for each in found]
        if not addresses or any(each is None or not is_public(each) for each in addresses):
            raise ImageError(f"the image's host {host[:100]!r} has no address on the public internet, or others, too")
        return found


def _resolve(host: str, port: int, limits: _Limits) -> list[str]:
    """Each address once; a resolver that times out is abandoned."""
    found: list[str] | None = None

    def ask() -> None:
        nonlocal found
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
            found = list(dict.fromkeys(str(address[0]) for *_, address in answers))
        except (OSError, UnicodeError):
            found = []

    thread = threading.Thread(target=ask, name="xserv-resolve", daemon=True)
    thread.start()
    thread.join(limits.left_s())
    if found is None:
        raise limits.too_slow()
    if not found:
        raise ImageError(f"the image's host {host[:100]!r} has no address")
    return found
