"""From a name to a folder: the bundled model, folders as they are, and a hub that is a server of our own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import models
from models.checkpoints import hub as hub_module
from models.checkpoints.hub import resolve_model
from models.checkpoints.model_files import open_model
from models.errors import ModelLoadError, ModelNotFoundError, WeightsError

ROOT = Path(models.__file__).parent.parent
COMMIT = "a" * 40
WANTED = {
    "README.md": b"a model",
    "additional_chat_templates/rag.jinja": b"{{ documents }}",
    "chat_template.jinja": b"{{ messages }}",
    "config.json": b"{}",
    "merges.txt": b"a b",
    "model.safetensors": b"\0" * 1000,
}
UNWANTED = {
    "consolidated.safetensors": b"the weights again",
    "modeling_x.py": b"code",
    "original/params.json": b"{}",
    "pytorch_model.bin": b"a pickle",
    "model-Q8_0.gguf": b"eight bits",
    "model-q4_k_m.gguf": b"four bits",
    "model-UD-Q4_K_XL.gguf": b"four bits, and more",
    "BF16/model-BF16-00001-of-00002.gguf": b"sixteen",
    "BF16/model-BF16-00002-of-00002.gguf": b"bits",
}
_ARCHITECTURE = b"general.architecture", b"qwen3vl"
TOWERS = {
    "pictures-Q3_K.gguf": struct.pack(
        "<4sIQQQ20sIQ7s", b"GGUF", 3, 0, 1, len(_ARCHITECTURE[0]), _ARCHITECTURE[0], 8, len(_ARCHITECTURE[1]),
        _ARCHITECTURE[1],
    ),
    "mmproj-BF16.gguf": b"a tower", "mmproj-F16.gguf": b"the same", "mmproj-F32.gguf": b"once more",
}  # fmt: skip


def test_no_name_is_the_bundled_model() -> None:
    assert resolve_model(None) == ROOT / "models" / "demo"


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(tmp_path) == tmp_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name") == Path("owner/name")  # before any hub is asked


@pytest.mark.parametrize(
    "name",
    [
        "/no/such/folder",
        "./model",
        "~nobody/x",
        "a\0b",
        "a/b/c",
        "",
        " ",
        "a b",
        "../x",
        "a/..",
        "a--b/c",
        "https://x/y",
        "a\nb",
        "ä/b",
        "a/b:",
        "a/b:Q4/K",
        "a/b:*",
        ":Q4_K_M",
    ],
)
def test_what_is_neither_a_folder_nor_a_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # what lies beside this project is anybody's
    with pytest.raises(ModelNotFoundError, match="there is no such file or folder, and it is no hub id"):
        resolve_model(name)


def test_a_path_is_never_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no such file or folder"):
        resolve_model(Path("owner/name"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelNotFoundError, match=r"is a file that begins with b'x'; a model is a GGUF file, which"):
        resolve_model(tmp_path / "file")
    assert issubclass(ModelNotFoundError, ModelLoadError)
    blob = tmp_path / "sha256-0f3c"  # as Ollama keeps its models
    blob.write_bytes(b"GGUF\3\0\0\0")
    assert resolve_model(blob) == blob
    with pytest.raises(WeightsError, match="sha256-0f3c: "):
        open_model(blob)


@dataclass
class Hub:
    """What the small server saw, and how to ask it."""

    url: str = ""
    downloaded: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def resolve(self, names: list[str], home: Path) -> tuple[list[list[Any]], str]:
        """`resolve_model` of each name, in a process of its own -> ([kind or error, text, files], stderr)."""
        environment = {
            **os.environ,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }
        done = subprocess.run(
            [sys.executable, "-c", ASK, *names],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        return json.loads(done.stdout), done.stderr


ASK = """
import json, sys
from models.errors import ModelLoadError
from models.checkpoints import hub as hub_module
from models.checkpoints.hub import resolve_model
from runtime.progress import Reporter, say_on_stderr
results = []
for name in sys.argv[1:]:
    try:
        found = resolve_model(name, Reporter(say_on_stderr, first_s=0.01, line_s=0.01))
        folder = found if found.is_dir() else found.parent
        names = sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())
        results.append(["folder" if found.is_dir() else "file", str(found), names])
    except ModelLoadError as error:
        results.append([type(error).__name__, str(error), []])
print(json.dumps(results))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub(files={**WANTED, **UNWANTED, **TOWERS})
    files = state.files

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if "/gated" in path:
                self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
            elif "/absent" in path:
                self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif "/broken" in path:
                self.answer(500, b"it broke")
            elif path.startswith("/api/models/owner/model/revision"):
                self.answer(200, json.dumps({"id": "owner/model", "sha": COMMIT}).encode())
            elif path.startswith("/api/models/owner/model/tree"):
                tree = [
                    {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                    for name, body in files.items()
                ]
                self.answer(200, json.dumps(tree).encode())
            elif f"/owner/model/resolve/{COMMIT}/" in path:
                name = path.partition(f"{COMMIT}/")[2]
                if self.command == "GET":
                    state.downloaded.append(name)
                etag = f'"{hashlib.sha1(files[name]).hexdigest()}"'
                self.answer(200, files[name], {"ETag": etag, "X-Repo-Commit": COMMIT})
            else:
                self.answer(404, b"{}")

        do_HEAD = do_GET

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Stay quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_hub_id_is_downloaded_once_and_found_again(hub: Hub, tmp_path: Path) -> None:
    ids = ["owner/model", "owner/gated", "owner/absent", "owner/broken"]
    (downloaded, gated, absent, broken), progress = hub.resolve(ids, tmp_path)
    assert downloaded[0] == "folder"
    assert downloaded[2] == sorted(hub.downloaded) == sorted(WANTED)
    assert re.search(r"^downloading owner/model: 0.0 of 0.0 MB, \d+ s$", progress, re.MULTILINE)
    assert (gated[0], absent[0], broken[0]) == ("GatedModelError", "ModelNotFoundError", "HubError")
    assert "owner/gated: the repository is gated; accept its licence" in gated[1]
    assert "owner/absent: neither a local folder nor a repository" in absent[1]
    assert broken[1] == "owner/broken: the hub answered 500"

    hub.url = "http://127.0.0.1:9"  # nobody listens there
    (again, other), _ = hub.resolve(["owner/model", "owner/other"], tmp_path)
    assert again == downloaded
    assert other[0] == "HubOfflineError"
    assert "owner/other: no such local folder, and the hub cannot be reached" in other[1]

    Path(again[1], "model.safetensors").unlink()
    ((partial, message, _),), _ = hub.resolve(["owner/model"], tmp_path)
    assert partial == "HubOfflineError"
    assert "only a part of the model is in the local cache" in message


def test_a_gguf_file_of_a_repository_by_its_quantisation(hub: Hub, tmp_path: Path) -> None:
    names = ["Q8_0", "Q4_K_M", "UD-Q4_K_XL", "BF16", "Q4_K", "Q6_K"]
    results, _ = hub.resolve([f"owner/model:{name}" for name in names], tmp_path)
    files = ["model-Q8_0.gguf", "model-q4_k_m.gguf", "model-UD-Q4_K_XL.gguf", "model-BF16-00001-of-00002.gguf"]
    assert [(kind, Path(found).name) for kind, found, _ in results[:4]] == [("file", name) for name in files]
    assert results[3][2] == ["model-BF16-00001-of-00002.gguf", "model-BF16-00002-of-00002.gguf"]
    assert sorted(hub.downloaded) == sorted(name for name in UNWANTED if name.endswith(".gguf"))
    for kind, message, _ in results[4:]:
        assert kind == "ModelNotFoundError"
        assert "the repository has no GGUF file whose name ends so; its page lists the files" in message
    hub.url = "http://127.0.0.1:9"  # nobody listens there
    again, _ = hub.resolve(["owner/model:q8_0", "owner/model:Q5_0"], tmp_path)
    assert again[0][:2] == results[0][:2]
    assert again[1][0] == "ModelNotFoundError"


def test_a_gguf_file_that_reads_pictures_brings_its_tower(hub: Hub, tmp_path: Path) -> None:
    ((kind, found, names),), _ = hub.resolve(["owner/model:q3_k"], tmp_path)
    assert (kind, Path(found).name) == ("file", "pictures-Q3_K.gguf")
    assert names == ["mmproj-F16.gguf", "pictures-Q3_K.gguf"] == sorted(hub.downloaded)
    hub.url = "http://127.0.0.1:9"  # nobody listens there
    assert hub.resolve(["owner/model:q3_k"], tmp_path)[0] == [[kind, found, names]]


def test_a_tower_of_bfloat16_comes_where_there_is_no_other(hub: Hub, tmp_path: Path) -> None:
    for name in ("mmproj-F16.gguf", "mmproj-F32.gguf"):
        del hub.files[name]
    ((_, _, names),), _ = hub.resolve(["owner/model:q3_k"], tmp_path)
    assert names == ["mmproj-BF16.gguf", "pictures-Q3_K.gguf"]


def test_two_files_of_one_quantisation(tmp_path: Path) -> None:
    for name in ("a-Q8_0.gguf", "b/c-Q8_0-00001-of-00002.gguf", "b/c-Q8_0-00002-of-00002.gguf", "mmproj-F16.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFoundError, match=r"is one of a-Q8_0.gguf, b/c-Q8_0-00001-of-00002.gguf: name"):
        hub_module._only_gguf("x/y:Q8_0", tmp_path, hub_module._gguf_patterns("Q8_0"))
    with pytest.raises(ModelNotFoundError, match="the repository has no GGUF file"):  # a tower is no model
        hub_module._only_gguf("x/y:F16", tmp_path, hub_module._gguf_patterns("F16"))
    patterns = hub_module._gguf_patterns("c-Q8_0")
    assert hub_module._only_gguf("x/y:c-Q8_0", tmp_path, patterns) == tmp_path / "b" / "c-Q8_0-00001-of-00002.gguf"


def test_a_gguf_file_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    assert resolve_model(str(path)) == resolve_model(path) == path
