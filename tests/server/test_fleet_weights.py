"""Several engines over HTTP: new weights on a fleet under load, engines with roles, and two servers that hand a prompt
over."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime import LLM, SamplingParams
from tests.runtime.engine.weights.two_models import write_pair
from tests.server.running import serving_process
from tests.waiting import wait_until

CASE = "qwen3_odd"
PROMPTS = [[5, 9, 2, 44, 17, i, i + 1, 3, 4, 8] for i in range(6)]
ADMIN = {"Authorization": "Bearer sk-admin"}
OPTIONS: dict[str, Any] = {
    "load_format": "auto", "device": "cpu", "max_model_len": 64, "max_num_seqs": 4, "block_size": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_pair(folder / "weights", CASE)
    (folder / "weights" / "empty").mkdir()
    (folder / "admin").write_text("sk-admin\n")
    key = folder / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def known(root: Path) -> dict[str, list[list[int]]]:
    """The answers of the old weights, "0", and of the new ones, "1"."""
    found = {}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for version, name in (("0", "old"), ("1", "new")):
        with LLM(root / "weights" / name, skip_tokenizer_init=True, **{**OPTIONS, "compile_ahead": False}) as llm:
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
        found[version] = [each.outputs[0].token_ids for each in outputs]
    assert found["0"] != found["1"]
    return found


def completed(client: httpx.Client, number: int, **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": PROMPTS[number], "max_tokens": 12, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **fields}  # fmt: skip
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def updated(client: httpx.Client, path: str, version: str, mode: str = "wait") -> httpx.Response:
    body = {"update_info": {"path": path}, "weight_version": version, "mode": mode}
    return client.post("/update_weights", json=body, headers=ADMIN)


def test_new_weights_on_a_fleet(root: Path, known: dict[str, list[list[int]]]) -> None:
    """All engines take them while requests run; no answer mixes two versions, and a failed update leaves the old."""
    settings = {"admin_key_files": [str(root / "admin")], "weights_root": str(root / "weights")}
    options = {**OPTIONS, "data_parallel_size": 2, "routing_policy": "round-robin"}
    with (
        serving_process(root / "weights" / "old", options, **settings) as (_, url),
        httpx.Client(base_url=url, timeout=120) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        assert client.get("/get_world_size", headers=ADMIN).json() == {"world_size": 2}
        for mode, path, version in (("wait", "new", "1"), ("restart", "old", "0"), ("wait", "new", "1")):
            numbers = [i % len(PROMPTS) for i in range(24)]
            running = [threads.submit(completed, client, number) for number in numbers]
            answer = updated(client, path, version, mode)
            assert answer.status_code == 200, answer.text
            for number, future in zip(numbers, running, strict=True):
                choice = future.result()["choices"][0]
                assert choice["token_ids"] == known[choice["weight_version"]][number]
            for number in range(len(PROMPTS)):
                choice = completed(client, number)["choices"][0]
                assert (choice["weight_version"], choice["token_ids"]) == (version, known[version][number])
        refused = updated(client, "empty", "2")
        assert refused.status_code == 400, refused.text
        for number in range(len(PROMPTS)):
            choice = completed(client, number)["choices"][0]
            assert (choice["weight_version"], choice["token_ids"]) == ("1", known["1"][number])
        assert client.post("/sleep?level=1", headers=ADMIN).status_code == 200
        assert client.post("/wake_up", headers=ADMIN).status_code == 200
        assert completed(client, 0)["choices"][0]["token_ids"] == known["1"][0]


def test_engines_with_roles(root: Path, known: dict[str, list[list[int]]]) -> None:
    """They answer as one engine, with old and new weights; a failed update changes nothing."""
    settings = {"admin_key_files": [str(root / "admin")], "weights_root": str(root / "weights")}
    options = {**OPTIONS, "prefill_engines": 1, "decode_engines": 1}
    with (
        serving_process(root / "weights" / "old", options, **settings) as (_, url),
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        for path, version in (("old", "0"), ("new", "1"), ("empty", "1"), ("old", "0")):
            if path == "empty":
                refused = updated(client, path, "2")
                assert refused.status_code == 400, refused.text
            else:
                answer = updated(client, path, version)
                assert answer.status_code == 200, answer.text
            for number in range(len(PROMPTS)):
                choice = completed(client, number)["choices"][0]
                assert (choice["weight_version"], choice["token_ids"]) == (version, known[version][number])
        assert "xserv:handed_over_requests_total" in client.get("/metrics").text


def test_two_servers_hand_a_prompt_over(root: Path, known: dict[str, list[list[int]]]) -> None:
    """As vLLM's proxy asks them: one computes the prompt, the other continues."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    addresses = [f"127.0.0.1:{port}" for port in ports]
    options = [
        {**OPTIONS, "kv_transfer_address": each, "kv_transfer_key_file": str(root / "key")} for each in addresses
    ]
    with (
        serving_process(root / "weights" / "old", options[0], kv_transfer_peers=[addresses[1]]) as (_, first),
        serving_process(root / "weights" / "old", options[1], kv_transfer_peers=[addresses[0]]) as (_, second),
        httpx.Client(base_url=first, timeout=60) as prefill,
        httpx.Client(base_url=second, timeout=60) as decode,
    ):
        for number in range(len(PROMPTS)):
            offered = completed(prefill, number, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
            given = offered["kv_transfer_params"]
            assert f"{given['remote_host']}:{given['remote_port']}" == addresses[0]
            answer = completed(decode, number, kv_transfer_params=given)
            assert answer["choices"][0]["token_ids"] == known["0"][number]

        def num_received() -> float:
            lines = decode.get("/metrics").text.splitlines()
            return float(next(x for x in lines if x.startswith("xserv:transfers_received_total{")).split()[-1])

        wait_until(lambda: num_received() >= len(PROMPTS))  # an engine tells its counters now and then
        assert num_received() == len(PROMPTS)
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 4, "kv_transfer_params": given}
        again = decode.post("/v1/completions", json=body)
        assert again.status_code == 400, "a lease serves once"
        forged = {**given, "remote_host": "10.1.2.3"}
        assert decode.post("/v1/completions", json={**body, "kv_transfer_params": forged}).status_code == 400
        assert json.dumps(completed(decode, 1)["choices"][0]["token_ids"]) == json.dumps(known["0"][1])
