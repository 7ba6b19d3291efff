"""Who is let in: keys on every route, on the path that is routed; Host and Origin; CORS; TLS; no exception's text."""

from __future__ import annotations

import base64
import hmac
import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from server.app import create_app
from server.config import ServerConfig, ServerConfigError
from server.errors import ApiError, dialect_of
from server.transport import auth
from server.transport.auth import ApiKeys, key_of
from server.transport.origins import OriginRules, hosts_for
from tests.server.conftest import Served, answer_of, faked, serving
from tests.server.fake_engine import FakeEngineClient
from tests.server.running import raw_exchange
from tests.waiting import TIMEOUT_S
from tokenizer import Tokenizer

KEY = "sk-one"
HELLO = {"model": "fake-model", "messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded(tokenizer: Tokenizer) -> Iterator[Served]:
    """A server with two keys, one origin and two hosts."""
    config = ServerConfig(
        api_keys=(KEY, "sk-two"),
        allowed_origins=("https://chat.example",),
        allowed_hosts=("127.0.0.1", "server.example"),
    )
    with faked(tokenizer, config=config) as served:
        yield served


def routes() -> list[tuple[str, str]]:
    engine = FakeEngineClient(answer_of)
    try:
        app = create_app(engine, None)
    finally:
        engine.close()
    found = []
    for route in app.routes:
        assert isinstance(route, Route)
        path = re.sub(r"\{.*?\}", "x", route.path)
        found += [(method, path) for method in sorted(route.methods or ())]
    return found


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("sk-three"), {"Authorization": f"Basic {KEY}"}, {"Authorization": KEY}, {"X-Api-Key": "sk-three"}],
)
def test_every_route_but_the_open_ones_wants_a_key(guarded: Served, headers: dict[str, str]) -> None:
    asked = [*routes(), ("GET", "/nothing"), ("DELETE", "/v1/nothing"), ("OPTIONS", CHAT), ("PATCH", "/metrics")]
    assert len(asked) > 15
    for method, path in asked:
        response = guarded.http.request(method, path, headers=headers)
        if path in auth.OPEN_PATHS:
            assert response.status_code == 200
        else:
            assert response.status_code == 401, (method, path)
            assert response.headers["x-request-id"]
            if method != "HEAD":
                error = response.json()["error"]
                dialect = dialect_of({"path": path, "headers": []})
                if dialect == "openai":
                    assert error["code"] == "invalid_api_key"
                elif dialect == "anthropic":
                    assert error["type"] == "authentication_error"
                else:
                    assert "API key" in error


@pytest.mark.parametrize(
    "target",
    ["//health", "//health/", "/health//", "/%2fhealth", "/health%0A", "/health%00", "/HEALTH", "/./health",
     "/v1/../health", "/health/../metrics", "/health;x", "/health%3Fx", "/health\\", "/x#/health"],
)  # fmt: skip
def test_only_the_path_itself_is_open(guarded: Served, target: str) -> None:
    received = raw_exchange(
        guarded.url, f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode("latin-1")
    )
    assert received[:12] in (b"HTTP/1.1 401", b"HTTP/1.1 400"), received[:80]


@pytest.mark.parametrize("target", ["/health", "/health?x=/metrics", "/%68ealth", "http://127.0.0.1/health"])
def test_other_spellings_of_the_open_path(guarded: Served, target: str) -> None:
    received = raw_exchange(
        guarded.url, f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode("latin-1")
    )
    assert received.startswith(b"HTTP/1.1 200")
    assert received.endswith(b'{"status":"ok"}')


def test_a_key_lets_in(guarded: Served) -> None:
    for key in (KEY, "sk-two"):
        assert guarded.http.post(CHAT, json=HELLO, headers=bearer(key)).status_code == 200
        password = base64.b64encode(f"anybody:{key}".encode()).decode()
        assert guarded.http.get("/v1/models", headers={"Authorization": f"Basic {password}"}).status_code == 200
        assert guarded.http.get("/v1/models", headers={"X-Api-Key": key}).status_code == 200
    with guarded.openai.with_options(api_key=KEY) as client:
        assert client.models.list().data[0].id == "fake-model"
    challenges = guarded.http.get("/").headers.get_list("www-authenticate")
    assert [challenge.split()[0] for challenge in challenges] == ["Basic", "Bearer"]


def test_two_authorization_headers_are_none() -> None:
    header = (b"authorization", b"Bearer sk-one")
    assert key_of([header]) == b"sk-one"
    assert key_of([header, header]) is None
    assert key_of([(b"authorization", b"Basic !!!")]) is None
    assert key_of([(b"authorization", b"Bearer ")]) is None
    assert key_of([(b"authorization", b"bearer  \xff\xfe ")]) == b"\xff\xfe"
    plain = (b"x-api-key", b" sk-two ")
    assert key_of([plain]) == b"sk-two"
    assert key_of([plain, plain]) is None
    assert key_of([plain, header]) == b"sk-one"
    assert key_of([plain, (b"authorization", b"Basic !!!")]) is None


def test_every_key_is_compared_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By digests of one length, without a way out at the first hit."""
    compared: list[tuple[bytes, bytes]] = []
    compare_digest = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare_digest(one, other)

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    keys = ApiKeys(("a", "bb", "ccc"), ())
    tenants = {keys.holder_of(key) for key in (b"a", b"bb", b"ccc")}
    assert len(tenants) == 3
    assert None not in tenants
    assert keys.holder_of(b"d" * 1000) is None
    assert keys.holder_of("ä".encode()) is None
    assert len(compared) == 5 * 3
    assert {len(digest) for pair in compared for digest in pair} == {32}


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-file-1\n\n  sk-file-2  \n")
    keys = ApiKeys(("sk-option",), (str(file),))
    assert all(keys.holder_of(key) for key in (b"sk-option", b"sk-file-1", b"sk-file-2"))
    assert keys.holder_of(b"# ours") is None
    file.write_text("sk-file-2\nsk-file-3\n")
    tenant = keys.holder_of(b"sk-file-2")
    keys.reload()
    assert keys.holder_of(b"sk-file-1") is None
    assert keys.holder_of(b"sk-file-3")
    assert keys.holder_of(b"sk-file-2") == tenant, "whoever keeps the key keeps the prefixes"
    file.write_text("# none\n")
    keys.reload()
    assert keys.holder_of(b"sk-file-3"), "what cannot be read changes nothing"
    with pytest.raises(ServerConfigError, match="no API key"):
        ApiKeys((), (str(file),))
    with pytest.raises(ServerConfigError, match="cannot be read"):
        ApiKeys((), (str(tmp_path / "nothing"),))
    for bad in ("", "with\nnewline", "ümlaut", " x"):
        with pytest.raises(ServerConfigError, match="printable"):
            ApiKeys((bad,), ())


def test_each_key_has_its_own_prefixes(guarded: Served) -> None:
    guarded.engine.requests.clear()
    for key in (KEY, KEY, "sk-two"):
        assert guarded.http.post(CHAT, json=HELLO, headers=bearer(key)).status_code == 200
    assert guarded.http.post(CHAT, json={**HELLO, "cache_salt": "mine"}, headers=bearer(KEY)).status_code == 200
    first, second, other, salted = [request.cache_salt for request in guarded.engine.requests]
    assert first == second
    assert first is not None
    assert len({first, other, salted}) == 3
    assert salted is not None
    assert salted.startswith(first)
    assert KEY not in salted


def test_prefixes_can_be_shared(tokenizer: Tokenizer, fake_engine: FakeEngineClient) -> None:
    config = ServerConfig(api_keys=(KEY,), share_prefix_cache=True)
    with serving(fake_engine, tokenizer, config=config) as served:
        served.http.post(CHAT, json=HELLO, headers=bearer(KEY)).raise_for_status()
        served.http.post(CHAT, json={**HELLO, "cache_salt": "mine"}, headers=bearer(KEY)).raise_for_status()
    assert [request.cache_salt for request in fake_engine.requests] == [None, "mine"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),  # a name that has come to mean this machine
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "SERVER.example:80"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://chat.example"}, 200),
        ({"Origin": "https://front.example", "Sec-Fetch-Site": "same-origin"}, 200),  # behind a proxy
        ({"Origin": "https://front.example", "Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_foreign_names_and_pages(guarded: Served, headers: dict[str, str], status: int) -> None:
    response = guarded.http.post(CHAT, json=HELLO, headers={**headers, **bearer(KEY)})
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["code"] in ("host_not_allowed", "origin_not_allowed")


def test_a_page_of_our_own_may_post(guarded: Served) -> None:
    response = guarded.http.post(CHAT, json=HELLO, headers={"Origin": guarded.url, **bearer(KEY)})
    assert response.status_code == 200


def test_cors_is_for_allowed_origins(guarded: Served) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = guarded.http.options(CHAT, headers={"Origin": "https://chat.example", **asked})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    refused = guarded.http.options(CHAT, headers={"Origin": "https://evil.example", **asked})
    assert "access-control-allow-origin" not in refused.headers
    wrong_key = guarded.http.post(CHAT, json=HELLO, headers={"Origin": "https://chat.example"})
    assert wrong_key.status_code == 401
    assert wrong_key.headers["access-control-allow-origin"] == "https://chat.example", "so that the page can say so"


def test_cors_is_closed(served: Served) -> None:
    for method in ("GET", "OPTIONS"):
        response = served.http.request(
            method, "/v1/models", headers={"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
        )
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("host", "further", "expected"),
    [
        ("127.0.0.1", (), ("localhost", "127.0.0.1", "[::1]")),
        ("::1", ("box",), ("localhost", "127.0.0.1", "[::1]", "box")),
        ("127.0.0.2", (), ("localhost", "127.0.0.1", "[::1]", "127.0.0.2")),
        ("0.0.0.0", (), None),
        ("0.0.0.0", ("box",), ("box",)),
        ("box", (), None),
    ],
)
def test_who_listens_on_loopback_has_its_names(host: str, further: tuple[str, ...], expected: Any) -> None:
    assert hosts_for(host, further) == expected


async def test_a_websocket_is_closed(guarded: Served) -> None:
    engine = FakeEngineClient(answer_of)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    try:
        app = create_app(engine, None)
        await app({"type": "websocket", "path": "/live", "headers": []}, receive, send)
    finally:
        engine.close()
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_an_unforeseen_error_tells_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("the secret of line 7")

    monkeypatch.setattr(served.engine, "submit", fail)
    response = served.http.post(CHAT, json=HELLO)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "ZeroDivision" not in response.text
    assert response.headers["x-request-id"]


def test_tls(tokenizer: Tokenizer, fake_engine: FakeEngineClient, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not there")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    config = ServerConfig(ssl_certfile=str(certificate), ssl_keyfile=str(key))
    with serving(fake_engine, tokenizer, config=config) as served:
        trusted = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=served.url, verify=trusted, timeout=TIMEOUT_S) as http:
            assert http.post(CHAT, json={**HELLO, "stream": True}).text.endswith("data: [DONE]\n\n")
    with pytest.raises(ServerConfigError, match="belong together"):
        ServerConfig(ssl_certfile=str(certificate))


APPS = (
    "app://",
    "vscode-webview://*",
    "tauri://localhost",
    "chrome-extension://abcdefgh",
    "null",
    "http://localhost:*",
)


@pytest.mark.parametrize(
    ("origin", "is_let_in"),
    [
        ("app://anything", True),
        ("app://.", True),
        ("vscode-webview://0abc123def", True),
        ("tauri://localhost", True),
        ("tauri://evil", False),
        ("chrome-extension://abcdefgh", True),
        ("chrome-extension://abcdefghi", False),
        ("null", True),
        ("http://localhost:5173", True),
        ("http://localhost.evil", False),
        ("myapp://x", False),
        ("https://app://", False),
    ],
)
@pytest.mark.parametrize("allowed", [APPS, ()])
def test_pages_of_applications(origin: str, is_let_in: bool, allowed: tuple[str, ...]) -> None:
    ServerConfig(allowed_origins=allowed)
    rules = OriginRules(None, allowed)
    headers = [(b"host", b"a"), (b"origin", origin.encode())]
    if is_let_in and allowed:
        rules.check("POST", "http", headers)
        return
    with pytest.raises(ApiError, match=re.escape(origin)) as refused:
        rules.check("POST", "http", headers)
    assert (refused.value.status, refused.value.code) == (403, "origin_not_allowed")


@pytest.mark.parametrize("text", ["chat.example", "https://", "https://a/b", "https://*.a", "http://a b", "app:", ""])
def test_what_is_no_origin(text: str) -> None:
    with pytest.raises(ServerConfigError, match=re.escape(repr(text))):
        ServerConfig(allowed_origins=(text,))


def test_preflights_of_a_private_network_are_for_allowed_origins(guarded: Served) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
    preflight = guarded.http.options(CHAT, headers={"Origin": "https://chat.example", **asked})
    assert (preflight.status_code, preflight.headers["access-control-allow-private-network"]) == (200, "true")
    refused = guarded.http.options(CHAT, headers={"Origin": "https://evil.example", **asked})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert "https://evil.example" in refused.json()["error"]["message"]
    assert not [name for name in refused.headers if name.startswith("access-control")]
    method = {**asked, "Access-Control-Request-Method": "PATCH"}
    wrong = guarded.http.options(CHAT, headers={"Origin": "https://chat.example", **method})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


def test_a_page_can_read_the_gates_errors(guarded: Served) -> None:
    headers = {"Origin": "https://chat.example", "Host": "rebound.example"}
    refused = guarded.http.post(CHAT, json=HELLO, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"
