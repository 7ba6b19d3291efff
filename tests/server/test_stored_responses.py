"""Responses in a folder: conversations go on after a restart, and on another server."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from server.config import ServerConfig, ServerConfigError
from server.ray_serve import Deployment, Replica
from server.responses_api.folder import ResponseFolder, tenants_secret
from tests.server.conftest import Served, faked
from tests.waiting import wait_until
from tokenizer import Tokenizer


def _config(folder: Path, **options: Any) -> ServerConfig:
    return ServerConfig(responses_dir=str(folder), **options)


def _ask(served: Served, text: str, key: str = "none", **fields: Any) -> Any:
    return served.http.post(
        "/v1/responses",
        json={"model": "fake-model", "input": text, **fields},
        headers={"Authorization": f"Bearer {key}"},
    )


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.response"))


def test_a_conversation_goes_on_after_a_restart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "responses"
    with faked(tokenizer, config=_config(folder), max_model_len=4096) as served:
        first = _ask(served, "Remember: blue").json()
        unstored = _ask(served, "A secret", store=False).json()
        wait_until(lambda: len(_files(folder)) == 1)
    with faked(tokenizer, config=_config(folder), max_model_len=4096) as served:
        assert served.http.get(f"/v1/responses/{first['id']}").json() == first
        items = served.http.get(f"/v1/responses/{first['id']}/input_items").json()
        assert items["data"][0]["content"][0]["text"] == "Remember: blue"
        answer = _ask(served, "Which colour?", previous_response_id=first["id"])
        assert answer.status_code == 200, answer.text
        prompt = tokenizer.decode(served.engine.requests[-1].prompt_token_ids)
        assert "Remember: blue" in prompt
        assert _ask(served, "More", previous_response_id=unstored["id"]).status_code == 404
        assert served.http.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
        wait_until(lambda: len(_files(folder)) == 1)  # the second answer's
        assert served.http.get(f"/v1/responses/{first['id']}").status_code == 404
    with faked(tokenizer, config=_config(folder), max_model_len=4096) as served:
        assert served.http.get(f"/v1/responses/{first['id']}").status_code == 404
        continued = served.http.get(f"/v1/responses/{answer.json()['id']}").json()
        assert continued["previous_response_id"] == first["id"]
    assert all(b"A secret" not in path.read_bytes() for path in _files(folder))


def test_tenants_are_apart_after_a_restart_and_two_servers_share(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = _config(tmp_path / "responses", api_keys=("sk-a", "sk-b"))
    with faked(tokenizer, config=config) as served:
        stored = _ask(served, "Mine", "sk-a").json()["id"]

    def found(served: Served, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return served.http.get(f"/v1/responses/{stored}", headers=headers).status_code

    with faked(tokenizer, config=config) as one, faked(tokenizer, config=config) as two:
        assert [found(each, key) for each in (one, two) for key in ("sk-a", "sk-b")] == [200, 404, 200, 404]
        headers = {"Authorization": "Bearer sk-b"}
        assert two.http.delete(f"/v1/responses/{stored}", headers=headers).status_code == 404
        headers = {"Authorization": "Bearer sk-a"}
        assert two.http.delete(f"/v1/responses/{stored}", headers=headers).status_code == 200
        assert found(one, "sk-a") == 404, "also in the other server, which had it in memory"
    for path in (tmp_path / "responses").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert b"sk-a" not in path.read_bytes()


def test_torn_and_foreign_files_are_misses(tmp_path: Path) -> None:
    folder = ResponseFolder(tmp_path / "r", 1 << 20, 1000.0)
    for tenant, name in ((None, "a"), (None, "b"), ("t", "a")):
        folder.put(tenant, name, b"%r %r" % (tenant, name))
    folder.close()
    folder = ResponseFolder(tmp_path / "r", 1 << 20, 1000.0)
    assert (folder.get(None, "a"), folder.get("t", "a"), folder.get("t", "b")) == (b"None 'a'", b"'t' 'a'", None)
    a, b = (tmp_path / "r" / folder._name(None, each) for each in "ab")
    content = a.read_bytes()
    for cut in range(0, len(content), 3):
        a.write_bytes(content[:cut])
        assert folder.get(None, "a") is None
    a.write_bytes(content[:-1] + b"x")
    assert folder.get(None, "a") is None
    a.write_bytes(b.read_bytes())  # another's
    assert folder.get(None, "a") is None
    a.write_bytes(content)
    assert folder.get(None, "a") == b"None 'a'"
    folder.close()


def test_bounds_and_expiry(tmp_path: Path) -> None:
    now = time.time()
    folder = ResponseFolder(tmp_path / "r", 4 * 4096, 1000.0, clock=lambda: now)
    for i in range(10):
        folder.put(None, str(i), b"x" * 10)
        wait_until(lambda i=i: not folder._pending)
        for age, path in enumerate(sorted(_files(tmp_path / "r"), key=lambda path: path.stat().st_mtime_ns)):
            os.utime(path, (now - 100 + age, now - 100 + age))
    assert 1 <= len(_files(tmp_path / "r")) <= 4
    assert folder.get(None, "9") is not None
    now += 1001.0
    assert folder.get(None, "9") is None
    folder.put(None, "new", b"y")
    folder.close()
    assert len(_files(tmp_path / "r")) == 1, "expired files are deleted"


def test_a_full_disk_keeps_the_answer_in_memory(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with faked(tokenizer, config=_config(tmp_path / "r")) as served:
        monkeypatch.setattr("server.responses_api.folder.write_private", full)
        stored = _ask(served, "Hello").json()
        assert served.http.get(f"/v1/responses/{stored['id']}").json() == stored
    assert _files(tmp_path / "r") == []


def test_a_folder_that_others_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ServerConfigError, match=r"responses_dir .* has mode 755"):
        tenants_secret(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerConfigError, match=r"responses_dir .*file cannot be used"):
        tenants_secret(tmp_path / "file")
    (tmp_path / "own").mkdir(mode=0o700)
    assert tenants_secret(tmp_path / "own") == tenants_secret(tmp_path / "own")
    (tmp_path / "own" / "secret").write_bytes(b"short")
    with pytest.raises(ServerConfigError, match="has 5 bytes, must be 32"):
        tenants_secret(tmp_path / "own")


def test_a_replica_of_ray_refuses_it_before_its_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Mock()
    monkeypatch.setattr("server.ray_serve.start_client", started)
    tmp_path.chmod(0o755)
    with pytest.raises(ServerConfigError, match=r"responses_dir .* has mode 755"):
        Replica(Deployment(model="m", engine_options={}, config=_config(tmp_path)))
    started.assert_not_called()
    tmp_path.chmod(0o700)
    Replica(Deployment(model="m", engine_options={}, config=_config(tmp_path)))
    started.assert_called_once()


WRITER = """
import sys
import time
from pathlib import Path
from server.responses_api.folder import ResponseFolder
folder = ResponseFolder(Path(sys.argv[1]), 1 << 30, 1000.0)
for i in range(100_000):
    folder.put(None, str(i), str(i).encode() * 5000)
    while len(folder._pending) > 2:
        time.sleep(0.0001)
    print(i, flush=True)
"""


def test_a_kill_at_any_moment_tears_no_file(tmp_path: Path) -> None:
    for round_number in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "r")], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        for _ in range(3 + 7 * round_number):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        folder = ResponseFolder(tmp_path / "r", 1 << 30, 1000.0)
        found = [folder.get(None, str(i)) for i in range(200)]
        assert all(data is None or data == str(i).encode() * 5000 for i, data in enumerate(found))
        assert sum(data is not None for data in found) == len(_files(tmp_path / "r")), "each whole"
        folder.close()
    assert len(_files(tmp_path / "r")) > 0
