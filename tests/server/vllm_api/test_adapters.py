"""Adapters by name over HTTP: a process that serves two, and takes more from under its root."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest

from runtime.engine.errors import RequestError
from runtime.engine.messages import AdapterRef
from runtime.engine.process.client import EngineClient
from server.adapters import MOST_NAME_CHARACTERS, MOST_NAMES, Adapters, parse_modules
from server.config import ServerConfig, ServerConfigError
from server.serve import check_adapters
from tests.models.adapter_cases import load_adapter_golden, write_adapter
from tests.models.encoder_cases import write_encoder
from tests.models.folders import write_model
from tests.server.real_server import serving_real
from tests.server.running import serving_process

IDS = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_model(folder / "model", load_adapter_golden("llama").golden)
    write_adapter(folder / "outside", "llama")
    (folder / "adapters").mkdir()
    for name in ("own", "added"):
        write_adapter(folder / "adapters" / name, "llama", config={"lora_alpha": 6 if name == "own" else 24})
    write_adapter(folder / "adapters" / "foreign", "gemma3")
    (folder / "adapters" / "link").symlink_to(folder / "outside")
    write_bad(folder / "adapters")
    return folder


def write_bad(folder: Path) -> None:
    """Adapters that are wrong, each in a folder that says how."""
    shapes = load_adapter_golden("llama").shapes
    name, shape = next((name, shape) for name, shape in shapes.items() if name.endswith("lora_A.weight"))
    for how, config in (
        ("kind", {"peft_type": "IA3"}), ("field", {"use_rslora": "yes"}), ("unknown", {"frequency_dropout": 0.5}),
        ("dora", {"use_dora": True}), ("long", {"r": 5}), ("declared", {"r": 10**9}),
    ):  # fmt: skip
        write_adapter(folder / how, "llama", config=config)
    write_adapter(folder / "nan", "llama", tensors={name: np.full(shape, np.nan, np.float32)})
    write_adapter(folder / "shape", "llama", tensors={name: np.zeros((shape[0], shape[1] + 1), np.float32)})
    for how, header in (
        ("header", b"\xff" * 7 + b"\x7f"),  # longer than the file
        ("nested", (100_000).to_bytes(8, "little") + b"[" * 100_000),
        ("many", _header({f"{number}": _tensor([0], 0) for number in range(300_000)})),
        ("huge", _header({name: _tensor([2**31, 2**31], 4 << 62)})),
    ):
        write_adapter(folder / how, "llama")
        (folder / how / "adapter_model.safetensors").write_bytes(header)


def _tensor(shape: list[int], num_bytes: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [0, num_bytes]}


def _header(tensors: dict[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[httpx.Client]:
    options = {"load_format": "auto", "device": "cpu", "enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
    settings = {"lora_modules": [f"own={root}/adapters/own"], "lora_root": str(root / "adapters")}
    with (
        serving_process(root / "model", options, **settings) as (_, url),
        httpx.Client(base_url=url, timeout=60) as made,
    ):
        yield made


def completed(client: httpx.Client, model: str) -> Any:
    body = {"model": model, "prompt": IDS, "max_tokens": 8, "temperature": 0, "return_token_ids": True,
            "ignore_eos": True}  # fmt: skip
    return client.post("/v1/completions", json=body).json()


def test_names_stand_for_adapters(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [(each["id"], each["parent"], each["root"]) for each in listed] == [
        ("tiny", None, "tiny"), ("own", "tiny", "own"),
    ]  # fmt: skip
    assert client.get("/v1/models/own").json()["parent"] == "tiny"
    plain, own = completed(client, "tiny"), completed(client, "own")
    assert (plain["model"], own["model"]) == ("tiny", "own")
    assert plain["choices"][0]["token_ids"] != own["choices"][0]["token_ids"]
    assert "own:latest" in [each["name"] for each in client.get("/api/tags").json()["models"]]


@pytest.mark.parametrize(
    "case",
    [
        "tables",
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("saved_tables", "tokens", "qwen3_moe_experts")),
    ],
)
def test_heads_experts_and_tables(tmp_path: Path, case: str) -> None:
    """The prompt's log probabilities over HTTP are those of PEFT's logits, for both models in one server."""
    golden = load_adapter_golden(case)
    write_model(tmp_path / "model", golden.golden)
    write_adapter(tmp_path / "root" / "own", case)
    ids = golden.golden.prompt_ids
    options = {"load_format": "auto", "device": "cpu", "enable_lora": True, "max_lora_rank": 8, "dtype": "float32"}
    with (
        serving_process(tmp_path / "model", options, lora_root=str(tmp_path / "root")) as (_, url),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "own", "lora_path": "own"})
        assert loaded.status_code == 200, loaded.text
        for model, logits in (
            ("own", golden.logits),
            ("tiny", golden.golden.logits["float32"]),
            ("own", golden.logits),
        ):
            body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0,
                    "return_token_ids": True}  # fmt: skip
            choice = client.post("/v1/completions", json=body).json()["choices"][0]
            wanted = logits - np.logaddexp.reduce(logits, axis=1)[:, None]
            told = [each[str(i)]["logprob"] for i, each in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)]
            np.testing.assert_allclose(told, wanted[np.arange(len(ids) - 1), ids[1:]], rtol=2e-4, atol=2e-4)
            assert choice["token_ids"] == [int(logits[-1].argmax())]


def test_an_adapter_comes_and_goes(client: httpx.Client, root: Path) -> None:
    load = {"lora_name": "added", "lora_path": "added"}
    answer = client.post("/v1/load_lora_adapter", json=load)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'added' added successfully.")
    added = completed(client, "added")
    assert added["model"] == "added"
    assert added["choices"][0]["token_ids"] != completed(client, "own")["choices"][0]["token_ids"]
    again = client.post("/v1/load_lora_adapter", json=load)
    assert again.status_code == 400
    assert "is loaded already" in again.json()["error"]["message"]
    replaced = client.post(
        "/v1/load_lora_adapter",
        json={"lora_name": "added", "lora_path": str(root / "adapters/own"), "load_inplace": True},
    )
    assert replaced.status_code == 200
    assert completed(client, "added")["choices"] == completed(client, "own")["choices"]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "added"}).status_code == 200
    assert completed(client, "added")["error"]["code"] == "model_not_found"
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "added"}).status_code == 404


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("x", "../outside", "must be a folder or a GGUF file in the server's --lora-root"),
        ("x", "link", "must be a folder or a GGUF file in the server's --lora-root"),
        ("x", "/etc", "must be a folder or a GGUF file in the server's --lora-root"),
        ("x", ".", "must be a folder or a GGUF file in the server's --lora-root"),
        ("x", "a\0b", "must be a folder or a GGUF file in the server's --lora-root"),
        ("x", "none", "there is no such folder"),
        ("x", "foreign", "the adapter is for another model"),
        ("kind", "kind", "peft_type"),
        ("field", "field", "use_rslora"),
        ("unknown", "unknown", "frequency_dropout"),
        ("dora", "dora", "use_dora"),
        ("long", "long", "rank"),
        ("declared", "declared", "rank"),
        ("nan", "nan", "NaN"),
        ("shape", "shape", "shape"),
        ("header", "header", "header"),
        ("nested", "nested", "header"),
        ("many", "many", "tensors"),
        ("huge", "huge", "data_offsets"),
        ("tiny", "added", "is the model's own name"),
        ("", "added", "must be 1 to 256 printable characters"),
        ("n" * (MOST_NAME_CHARACTERS + 1), "added", "must be 1 to 256 printable characters"),
    ],
)
def test_what_cannot_be_loaded_is_told(client: httpx.Client, name: str, path: str, message: str) -> None:
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
    assert answer.status_code == 400
    told = answer.json()["error"]["message"]
    assert message in told
    assert "\n" not in told
    assert completed(client, "own")["choices"]


def test_names_are_bounded(tmp_path: Path) -> None:
    class Client:
        """Reads at once."""

        def load_adapter(self, name: str, path: str) -> Future[Any]:
            done: Future[Any] = Future()
            done.set_result(np.zeros(32, np.float32))
            return done

    (tmp_path / "one").mkdir()
    adapters = Adapters(cast("EngineClient", Client()), ["model"], str(tmp_path))

    async def load_all() -> None:
        for number in range(MOST_NAMES):
            await adapters.load(f"{number}", "one", is_new=True)
        with pytest.raises(RequestError, match="10000 adapters are loaded, the most: unload some"):
            await adapters.load("more", "one", is_new=True)
        await adapters.load("7", "one", is_new=False)
        assert adapters.unload("7")
        await adapters.load("more", "one", is_new=True)

    asyncio.run(load_all())
    assert len(adapters.all) == MOST_NAMES


def test_an_adapter_only_generates(client: httpx.Client) -> None:
    answer = client.post("/v1/embeddings", json={"model": "own", "input": [IDS]})
    assert answer.status_code == 400
    assert "only generates text" in answer.json()["error"]["message"]


def test_a_classifier_decides_without_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_one(client: EngineClient, own_names: Sequence[str], config: ServerConfig) -> Adapters:
        made = Adapters(client, own_names, config.lora_root)
        made._by_name["own"] = AdapterRef(name="own", path="own", digest="00" * 32)
        return made

    monkeypatch.setattr(Adapters, "of", with_one)
    asked = {"input": "fox", "questions": [{"type": "predicate", "instructions": "cat"}]}
    with serving_real(write_encoder(tmp_path, "bert_pairs")) as server:
        answer = server.http.post("/v1/decisions", json={"model": server.model, **asked})
        assert answer.status_code == 200, answer.text
        answer = server.http.post("/v1/decisions", json={"model": "own", **asked})
    assert answer.status_code == 400
    assert "only generates text" in answer.json()["error"]["message"]


def test_modules_of_the_start() -> None:
    assert parse_modules(["a=/x", '{"name": "b", "path": "y=z", "base_model_name": "m"}']) == {"a": "/x", "b": "y=z"}
    for wrong in ("a", "=x", "a=", '{"name": "a"}', "{", '{"name": 1, "path": "x"}', '{"name":"a","path":"b","c":1}'):
        with pytest.raises(RequestError, match="lora_modules has"):
            parse_modules([wrong])
    with pytest.raises(RequestError, match="names 'a' twice"):
        parse_modules(["a=x", "a=y"])


def test_adapters_need_an_engine_that_takes_them(tmp_path: Path) -> None:
    with pytest.raises(ServerConfigError, match="need --enable-lora"):
        check_adapters(ServerConfig(lora_modules=("a=x",)), is_enabled=False)
    with pytest.raises(ServerConfigError, match="there is no such folder"):
        check_adapters(ServerConfig(lora_root=str(tmp_path / "none")), is_enabled=True)
