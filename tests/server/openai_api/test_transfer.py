"""vLLM's `kv_transfer_params`: off by default, and only what the operator has named; all else is a 400 that reaches no
engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.engine.config import EngineConfig
from runtime.engine.errors import RequestError
from runtime.engine.messages import Source
from runtime.engine.transfer.settings import transfer_settings
from server.config import ServerConfig, ServerConfigError
from tests.server.conftest import Served, faked
from tokenizer import Tokenizer

PEER = "10.0.0.2:7000"
LEASE = "ab" * 32
TAKES: dict[str, Any] = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": LEASE, "remote_block_ids": [0, 1],
    "remote_host": "10.0.0.2", "remote_port": 7000, "tp_size": 1,
}  # fmt: skip
OFFERS: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
ROUTES = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    with faked(tokenizer, config=ServerConfig(kv_transfer_peers=(PEER,))) as served:
        served.engine.info = msgspec.structs.replace(
            served.engine.info, transfer_addresses=("unix:x", "tcp:10.0.0.1:7000")
        )
        yield served


def ask(server: Served, route: str, given: dict[str, Any] | None, **changes: Any) -> tuple[int, Any]:
    body = {"model": "fake-model", "max_tokens": 1, **ROUTES[route], "kv_transfer_params": given, **changes}
    answer = server.http.post(route, json=body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("route", ROUTES)
def test_the_engine_gets_a_lease_or_a_source(server: Served, route: str) -> None:
    server.engine.requests.clear()
    assert ask(server, route, OFFERS)[0] == 200
    assert ask(server, route, TAKES, max_tokens=3)[0] == 200
    assert ask(server, route, None)[0] == 200
    assert ask(server, route, {})[0] == 200
    offering, taking, *neither = server.engine.requests
    assert offering.source is None
    assert len(offering.lease.removeprefix("tcp:")) == 64
    assert taking.lease == ""
    assert taking.source == Source(f"tcp:{PEER}", f"tcp:{LEASE}", [0, 1], is_foreign=True)
    assert all(each.source is None and not each.lease for each in neither)


WRONG: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("remote_host: 8.8.8.8:7000 is no peer", {**TAKES, "remote_host": "8.8.8.8"}, {}),
    ("remote_host: 10.0.0.2:22 is no peer", {**TAKES, "remote_port": 22}, {}),
    ("remote_host: None:None is no peer", {"do_remote_prefill": True}, {}),
    ("remote_engine_id: it must be the lease", {**TAKES, "remote_engine_id": None}, {}),
    ("remote_engine_id: it must be the lease", {**TAKES, "remote_engine_id": LEASE + "0"}, {}),
    ("remote_engine_id: it must be the lease", {**TAKES, "remote_engine_id": LEASE.upper()}, {}),
    ("remote_block_ids: they must be those", {**TAKES, "remote_block_ids": []}, {}),
    ("remote_block_ids: they must be those", {**TAKES, "remote_block_ids": [1, 0]}, {}),
    ("remote_block_ids", {**TAKES, "remote_block_ids": ["x"]}, {}),
    ("do_remote_prefill is true, too", {**TAKES, "do_remote_decode": True}, {}),
    ("tp_size", {**TAKES, "tp_size": 2}, {}),
    ("kv_transfer_params.more", {**TAKES, "more": 1}, {}),
    ("max_tokens must be 1, got 2", OFFERS, {"max_tokens": 2}),
    ("n must be 1, got 2", OFFERS, {"n": 2}),
    ("stream must be false", OFFERS, {"stream": True}),
]


@pytest.mark.parametrize(("message", "given", "changes"), WRONG)
@pytest.mark.parametrize("route", ROUTES)
def test_anything_else_is_a_400(
    server: Served, route: str, message: str, given: dict[str, Any], changes: dict[str, Any]
) -> None:
    server.engine.requests.clear()
    status, body = ask(server, route, given, **changes)
    assert status == 400
    assert message in body["error"]["message"]
    assert "\n" not in body["error"]["message"]
    assert server.engine.requests == []


def test_it_is_off_by_default(served: Served) -> None:
    for given in (TAKES, OFFERS):
        status, body = ask(served, "/v1/completions", given)
        assert status == 400
        assert "--kv-transfer-address" in body["error"]["message"]


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ServerConfigError, match="must be HOST:PORT"):
        ServerConfig(kv_transfer_peers=("10.0.0.1",))
    with pytest.raises(RequestError, match="give both or none"):
        EngineConfig(kv_transfer_address="10.0.0.1:7000")
    key = tmp_path / "key"
    config = EngineConfig(kv_transfer_address="10.0.0.1:7000", kv_transfer_key_file=str(key))
    with pytest.raises(RequestError, match="No such file"):
        transfer_settings(config)
    key.write_text("0" * 32)
    key.chmod(0o644)
    with pytest.raises(RequestError, match="chmod 600"):
        transfer_settings(config)
    key.chmod(0o600)
    found = transfer_settings(config, engine=2)
    assert found is not None
    assert (found.host, found.port, len(found.foreign_secret)) == ("10.0.0.1", 7002, 32)
    key.write_text("short")
    with pytest.raises(RequestError, match="has 5 bytes, must have at least 16"):
        transfer_settings(config)
    for address in ("10.0.0.1", "10.0.0.1:x", ":7000", "10.0.0.1:70000"):
        with pytest.raises(RequestError, match="must be HOST:PORT"):
            transfer_settings(EngineConfig(kv_transfer_address=address, kv_transfer_key_file=str(key)))
