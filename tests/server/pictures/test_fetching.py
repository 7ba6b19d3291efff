"""Pictures by URL: nothing but the public internet, whatever a URL, a name or a redirect says; and within limits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from runtime.images.decoding import ImageError
from server.config import Place
from server.pictures import fetching
from server.pictures.fetching import PictureFetcher, is_public, parsed
from tests.waiting import TIMEOUT_S

PRIVATE = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "127.0.0.1", "127.1.2.3", "169.254.169.254",
    "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1",
    "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "::", "::1",
    "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:8.8.8.8", "64:ff9b::7f00:1", "64:ff9b:1::1",
    "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::", "2002:808:808::1", "5f00::1", "fc00::1", "fd00::3",
    "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "1.1.1.1", "172.32.0.1", "192.169.0.1", "2606:4700:4700::1111", "2a00:1450:4001::1"]


@pytest.mark.parametrize("text", PRIVATE)
def test_what_is_no_public_address(text: str) -> None:
    address = parsed(text)
    assert address is not None
    assert not is_public(address)


@pytest.mark.parametrize("text", PUBLIC)
def test_what_is_one(text: str) -> None:
    address = parsed(text)
    assert address is not None
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        # addresses in every way of writing them
        "http://127.0.0.1/a.png", "https://127.0.0.1/a.png", "http://127.1/a.png", "http://2130706433/a.png",
        "http://0177.0.0.1/a.png", "http://0x7f.0.0.1/a.png", "http://0x7f000001/a.png", "http://0/a.png",
        "http://[::1]/a.png", "http://[::ffff:127.0.0.1]/a.png", "http://[64:ff9b::7f00:1]/a.png",
        "http://[2002:7f00:1::]/a.png", "http://[fec0::1]/a.png", "http://169.254.169.254/latest/meta-data",
        "http://localhost/a.png", "http://LOCALHOST/a.png", "http://224.0.0.1/a.png",
        # other schemes
        "file:///etc/passwd", "ftp://8.8.8.8/a.png", "gopher://8.8.8.8/a", "javascript:alert(1)", "//8.8.8.8/a.png",
        "a.png", "/etc/passwd", "unix:///run/docker.sock", "about:blank", "blob:https://x/1",
        # what is no URL
        "http://", "http:///a.png", "http://[::1/a.png", "http://8.8.8.8:99999/a.png", "http://8.8.8.8:x/a.png",
        "http://8.8.8.8/a b.png", "http://8.8.8.8/a\r\nHost: x", "http://8.8.8.8\\@127.0.0.1/", "http://8.8.8.8/\x00",
        "http://b\u00fccher.example/a.png", "http://" + "a" * 9000,
        # keys, ports
        "http://user:pass@8.8.8.8/a.png", "http://user@8.8.8.8/a.png", "http://8.8.8.8:22/a.png",
        "http://8.8.8.8:6379/a.png", "https://8.8.8.8:8443/a.png",
    ],
)  # fmt: skip
def test_nothing_is_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*arguments: object, **options: object) -> object:
        raise AssertionError("a connection")

    monkeypatch.setattr(fetching.httpcore.SyncBackend, "connect_tcp", connect)
    with pytest.raises(ImageError):
        PictureFetcher((), 1000, TIMEOUT_S).fetch(url)


def test_a_name_of_several_addresses_must_have_public_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def connect(self: object, host: str, port: int, timeout: float | None = None, **options: object) -> object:
        asked.append(host)
        raise fetching.httpcore.ConnectError("refused")

    found = ["8.8.8.8", "10.0.0.1"]
    monkeypatch.setattr(fetching, "_resolve", lambda host, port, limits: found)
    monkeypatch.setattr(fetching.httpcore.SyncBackend, "connect_tcp", connect)
    fetcher = PictureFetcher((), 1000, TIMEOUT_S)
    with pytest.raises(ImageError, match="public internet"):
        fetcher.fetch("https://images.example/a.png")
    assert asked == []
    found[1] = "2606:4700:4700::1111"
    with pytest.raises(ImageError, match="cannot be reached"):
        fetcher.fetch("https://images.example/a.png")
    assert asked == found, "the addresses that were checked, not the name"


def test_named_hosts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_resolve", lambda host, port, limits: ["127.0.0.1"])
    fetcher = PictureFetcher([Place.of("images.example"), Place.of("other.example:8080")], 1000, TIMEOUT_S)
    for url in ("http://b.example/", "http://8.8.8.8/", "http://images.example:8080/", "http://other.example/"):
        with pytest.raises(ImageError, match="not fetched from"):
            fetcher.fetch(url)
    for url in ("http://images.example/", "https://IMAGES.example/", "http://other.example:8080/"):
        with pytest.raises(ImageError, match="public internet"):  # a name stays one that must be public
            fetcher.fetch(url)


Answer = Callable[[socket.socket], None]


@contextmanager
def web(answer: Answer) -> Iterator[str]:
    """A server that reads a request's head and lets `answer` do the rest: "127.0.0.1:PORT"."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.settimeout(TIMEOUT_S)
                    head = b""
                    while not head.endswith(b"\r\n\r\n"):
                        head += connection.recv(4096)
                    heads.append(head)
                    with suppress(OSError):  # the other side has left
                        answer(connection)

        heads: list[bytes] = []
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
            assert all(b"accept-encoding: identity" in head.lower() for head in heads)
            assert not any(b"cookie" in head.lower() or b"authorization" in head.lower() for head in heads)
        finally:
            is_over.set()
            thread.join()


def says(head: str, body: bytes = b"") -> Answer:
    return lambda connection: connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)


OK = "HTTP/1.1 200 OK"


def test_a_private_address_that_is_named_with_its_port() -> None:
    with web(says(f"{OK}\nContent-Length: 5", b"bytes")) as place:
        assert PictureFetcher([Place.of(place)], 1000, TIMEOUT_S).fetch(f"http://{place}/a.png?b=c#d") == b"bytes"
    with web(says(OK, b"until the end")) as place:
        assert PictureFetcher([Place.of(place)], 1000, TIMEOUT_S).fetch(f"http://{place}") == b"until the end"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (says("HTTP/1.1 404 Not Found\nContent-Length: 0"), "status 404"),
        (says("HTTP/1.1 204 No Content"), "status 204"),
        (says(f"{OK}\nContent-Length: 1001"), "more than 1,000 bytes"),
        (says(OK, b"x" * 1001), "more than 1,000 bytes"),
        (says(f"{OK}\nTransfer-Encoding: chunked", b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n"), "more than 1,000"),
        (says(f"{OK}\nContent-Encoding: gzip\nContent-Length: 1", b"x"), "compressed"),
        (says(f"{OK}\nContent-Length: 10", b"short"), "breaks off"),
        (says("no HTTP at all"), "breaks off"),
        (says(f"{OK}\n" + "\n".join(f"x{i}: {'y' * 4000}" for i in range(200))), "more than|breaks off"),
        (says("HTTP/1.1 302 Found\nLocation: file:///etc/passwd\nContent-Length: 0"), "must be data:, http: or"),
        (says("HTTP/1.1 302 Found\nLocation: http://127.0.0.1:1/\nContent-Length: 0"), "not fetched from"),
        (says("HTTP/1.1 302 Found\nLocation: //10.0.0.1/a\nContent-Length: 0"), "not fetched from"),
        (says("HTTP/1.1 308 Permanent\nLocation: /again\nContent-Length: 0"), "more than 3 times"),
        (says("HTTP/1.1 302 Found\nContent-Length: 0"), "status 302"),
    ],
)
def test_answers_that_are_refused(answer: Answer, words: str) -> None:
    with web(answer) as place, pytest.raises(ImageError, match=words):
        PictureFetcher([Place.of(place)], 1000, TIMEOUT_S).fetch(f"http://{place}/")


def drip(connection: socket.socket) -> None:
    for letter in b"HTTP/1.1 200 OK\r\n" * 100:
        connection.sendall(bytes([letter]))
        time.sleep(0.02)


def is_silent(connection: socket.socket) -> None:
    connection.settimeout(60.0)
    connection.recv(1)  # until the other side has left


@pytest.mark.parametrize("answer", [drip, is_silent])
def test_one_that_takes_its_time(answer: Answer) -> None:
    with web(answer) as place:
        begin_s = time.monotonic()
        with pytest.raises(ImageError, match=r"longer than 0\.5 s"):
            PictureFetcher([Place.of(place)], 1000, 0.5).fetch(f"http://{place}/")
        assert time.monotonic() - begin_s < 20.0


def test_a_redirect_within_what_is_allowed() -> None:
    with web(says(f"{OK}\nContent-Length: 2", b"ok")) as second:
        leads_on = says(f"HTTP/1.1 307 Temporary\nLocation: http://{second}/b\nContent-Length: 0")
        with web(leads_on) as first:
            places = [Place.of(first), Place.of(second)]
            assert PictureFetcher(places, 1000, TIMEOUT_S).fetch(f"http://{first}/a") == b"ok"


def test_the_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with web(says(f"{OK}\nContent-Length: 2", b"ok")) as place:
        assert PictureFetcher([Place.of(place)], 1000, TIMEOUT_S).fetch(f"http://{place}/") == b"ok"
