"""vLLM's routes for reinforcement learning: behind an admin key, under a root, with the version in each answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.checkpoints.given_weights import shared_weights
from models.checkpoints.hub import BUNDLED_MODEL
from server.app import create_app
from server.config import ServerConfig, ServerConfigError
from server.serve import check_files
from tests.models.folders import golden_tensors, load_golden, write_model
from tests.runtime.engine.weights.two_models import opened, write_pair
from tests.server.running import running, serving_process
from tests.waiting import wait_until

CASE = "qwen3_odd"
IDS = [5, 9, 2, 44, 17]
ADMIN = {"Authorization": "Bearer sk-admin"}
USER = {"Authorization": "Bearer sk-user"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_pair(folder / "weights", CASE)
    write_model(folder / "outside", load_golden(CASE))
    (folder / "weights" / "link").symlink_to(folder / "outside")
    (folder / "admin").write_text("sk-admin\n")
    return folder


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[httpx.Client]:
    options = {"load_format": "auto", "device": "cpu", "max_model_len": 64, "max_num_seqs": 2}
    settings = {
        "api_keys": ["sk-user"], "admin_key_files": [str(root / "admin")], "weights_root": str(root / "weights"),
    }  # fmt: skip
    with (
        serving_process(root / "weights" / "old", options, **settings) as (_, url),
        httpx.Client(base_url=url, timeout=60, headers=USER) as made,
    ):
        yield made


def completed(client: httpx.Client, **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": IDS, "max_tokens": 8, "temperature": 0, "return_token_ids": True,
            "ignore_eos": True, **fields}  # fmt: skip
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def updated(client: httpx.Client, path: str, version: str, **fields: Any) -> httpx.Response:
    body = {"update_info": {"path": path}, "weight_version": version, **fields}
    return client.post("/update_weights", json=body, headers=ADMIN)


def test_only_with_the_admin_key(client: httpx.Client) -> None:
    for method, path in (
        ("POST", "/pause"), ("POST", "/resume"), ("POST", "/sleep"), ("POST", "/wake_up"), ("POST", "/update_weights"),
        ("POST", "/abort_requests"), ("GET", "/is_paused"), ("GET", "/is_sleeping"), ("GET", "/weight_info"),
        ("GET", "/get_world_size"),
    ):  # fmt: skip
        refused = client.request(method, path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only"), path
    assert client.get("/is_paused", headers=ADMIN).json() == {"is_paused": False}
    assert client.get("/v1/models", headers=ADMIN).status_code == 200
    assert "sk-admin" not in client.get("/server_info").text
    assert "weights" not in client.get("/server_info").json()["server"]


def test_update(client: httpx.Client) -> None:
    before = completed(client)
    assert before["weight_version"] == client.get("/weight_info", headers=ADMIN).json()["weight_version"]
    told = updated(client, "new", "step 1")
    assert told.json() == {"status": "updated", "weight_version": "step 1", "num_ended": 0, "num_restarted": 0}
    after = completed(client)
    assert after["weight_version"] == "step 1"
    assert after["token_ids"] != before["token_ids"]
    assert updated(client, "old", "0").status_code == 200
    assert completed(client) == before
    told = client.post("/update_weights", json={"update_info": {"path": "new"}}, headers=ADMIN)
    assert (told.status_code, told.json()["weight_version"]) == (200, "1")  # the next one
    assert completed(client)["weight_version"] == "1"
    assert updated(client, "old", "0").status_code == 200
    tensors = golden_tensors(load_golden(CASE))
    with shared_weights(tensors) as name:
        body = {"update_info": {"shared_memory": name}, "weight_version": "shared"}
        assert client.post("/update_weights", json=body, headers=ADMIN).status_code == 200
    assert completed(client)["token_ids"] == before["token_ids"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"update_info": {"path": "../outside"}}, 400, "--weights-root"),
        ({"update_info": {"path": "link"}}, 400, "--weights-root"),
        ({"update_info": {"path": "/etc"}}, 400, "--weights-root"),
        ({"update_info": {"path": "."}}, 400, "--weights-root"),
        ({"update_info": {"path": "a\0b"}}, 400, "--weights-root"),
        ({"update_info": {"path": "nowhere"}}, 400, "not there"),
        ({"update_info": {"shared_memory": "../../etc/passwd"}}, 400, "plain name"),
        ({"update_info": {"shared_memory": "no-such-name"}}, 400, "No such file"),
        ({"update_info": {}}, 400, "one of them"),
        ({"update_info": {"names": []}}, 400, "names"),
        ({"update_info": {"path": "new"}, "weight_version": ""}, 400, "weight_version"),
        ({"update_info": {"path": "new"}, "mode": "now"}, 400, "mode"),
    ],
)
def test_refused(client: httpx.Client, body: dict[str, Any], status: int, words: str) -> None:
    version = client.get("/weight_info", headers=ADMIN).json()
    answer = client.post("/update_weights", json={"weight_version": "bad", **body}, headers=ADMIN)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert client.get("/weight_info", headers=ADMIN).json() == version


@pytest.mark.parametrize(
    "path",
    ["/sleep?level=3", "/sleep?level=1&level=2", "/sleep?mode=x", "/wake_up?tags=all", "/pause?mode=x",
     "/pause?clear_cache=maybe", "/sleep?levels=2", "/wake_up?tag=weights", "/resume?mode=x", "/update_weights?mode=x"],
)  # fmt: skip
def test_refused_parameters(client: httpx.Client, path: str) -> None:
    answer = client.post(path, headers=ADMIN)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("level", "levels", "mode", "tag", "tags", "clear_cache")
    assert client.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": False}


def test_sleep_and_pause(client: httpx.Client) -> None:
    before = completed(client)["token_ids"]
    for down, up, state in (
        ("/sleep?level=1", "/wake_up", "is_sleeping"), ("/sleep?level=2", "/wake_up", "is_sleeping"),
        ("/pause?mode=keep", "/resume", "is_paused"),
    ):  # fmt: skip
        updated(client, "old", "0")
        assert client.post(down, headers=ADMIN).status_code == 200
        assert client.get(f"/{state}", headers=ADMIN).json() == {state: True}
        found: list[Any] = []
        thread = threading.Thread(target=lambda found=found: found.append(completed(client)["token_ids"]))
        thread.start()
        if state == "is_sleeping":
            client.post("/wake_up?tags=weights", headers=ADMIN)
            assert client.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True}
            client.post("/wake_up?tags=kv_cache", headers=ADMIN)
        assert client.post(up, headers=ADMIN).status_code == 200
        thread.join()
        assert found == [before]
    assert client.get("/get_world_size", headers=ADMIN).json() == {"world_size": 1}


def test_a_client_that_leaves_while_the_engine_sleeps_is_not_waited_for(client: httpx.Client) -> None:
    def num_open() -> float:
        lines = client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("xserv:open_requests")).split()[-1])

    before = num_open()
    assert client.post("/sleep", headers=ADMIN).status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json={"prompt": IDS}, timeout=0.3)
    wait_until(lambda: num_open() == before)
    assert client.post("/wake_up", headers=ADMIN).status_code == 200
    assert len(completed(client)["token_ids"]) == 8


def test_a_request_does_not_wait_for_ever(root: Path) -> None:
    """While the engine sleeps, requests of every kind wait for `--model-wait`; then they are told to come again."""
    settings: dict[str, Any] = {"admin_key_files": [str(root / "admin")], "model_wait_s": 0.2}
    options = {"load_format": "auto", "device": "cpu", "max_model_len": 64, "max_num_seqs": 2}
    with (
        serving_process(root / "weights" / "old", options, **settings) as (_, url),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        assert client.post("/sleep", headers=ADMIN).status_code == 200
        for path, body in (
            ("/v1/completions", {"prompt": IDS}), ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {}}),
            ("/v1/embeddings", {"input": IDS, "model": "tiny"}),
        ):  # fmt: skip
            refused = client.post(path, json=body)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10"), refused.text
            assert refused.json()["error"]["code"] == "asleep"
        assert client.post("/wake_up", headers=ADMIN).status_code == 200
        assert len(completed(client)["token_ids"]) == 8


def test_texts_do_not_wait_for_ever(root: Path) -> None:
    settings: dict[str, Any] = {"admin_key_files": [str(root / "admin")], "model_wait_s": 0.2}
    hello = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 2}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", hello), ("/v1/messages", {**hello, "max_tokens": 2}), ("/api/chat", hello),
        ("/v1/responses", {"input": "Hello"}), ("/v1/responses", {"input": "Hello", "stream": True}),
    ]  # fmt: skip
    with (
        serving_process(BUNDLED_MODEL, options, **settings) as (_, url),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        assert client.post("/sleep", headers=ADMIN).status_code == 200
        for path, body in asked:
            refused = client.post(path, json=body)
            assert (refused.status_code, refused.headers.get("Retry-After")) == (503, "10"), (path, refused.text)
        assert client.post("/wake_up", headers=ADMIN).status_code == 200
        assert client.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 2}).status_code == 200


def test_generate_takes_whole_floats_and_names_fields(client: httpx.Client) -> None:
    body = {"token_ids": [float(each) for each in IDS], "sampling_params": {"max_tokens": 2.0, "stop_token_ids": [1.0]}}
    assert client.post("/inference/v1/generate", json=body).status_code == 200
    for fields, message in (
        ({"n": 2.5}, "Invalid type for sampling_params.n: expected integer or null, got number."),
        ({"prompt": [1]}, "Unknown parameter: sampling_params.prompt."),
        ({"max_tokens": -5}, "sampling_params.max_tokens must be between 1 and 2147483647, or -1"),
    ):
        refused = client.post("/inference/v1/generate", json={"token_ids": IDS, "sampling_params": fields})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(message)
        assert refused.json()["error"]["param"] == f"sampling_params.{next(iter(fields))}"


def lines_of(answer: httpx.Response) -> Iterator[Any]:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def test_updates_at_once(client: httpx.Client) -> None:
    """They come one after another, and the version is that of the weights."""
    known = {}
    for name in ("new", "old"):
        updated(client, name, name)
        known[name] = completed(client)["token_ids"]
    assert known["new"] != known["old"]
    for _ in range(3):
        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(lambda i: updated(client, ("new", "old")[i % 2], ("new", "old")[i % 2]), range(6)))
        assert [each.status_code for each in found] == [200] * 6, [each.text for each in found]
        answer = completed(client)
        assert answer["token_ids"] == known[answer["weight_version"]]


@pytest.mark.parametrize("mode", ["wait", "abort", "restart"])
def test_open_requests(client: httpx.Client, mode: str) -> None:
    """A stream that has begun ends on its weights; a whole answer begins anew, and is of one version."""
    updated(client, "old", "old")
    old = completed(client, max_tokens=50)["token_ids"]
    updated(client, "new", "new")
    new = completed(client, max_tokens=50)["token_ids"]
    updated(client, "old", "old")
    whole: list[Any] = []
    thread = threading.Thread(target=lambda: whole.append(completed(client, max_tokens=50)))
    body = {"model": "tiny", "prompt": IDS, "max_tokens": 50, "temperature": 0, "return_token_ids": True,
            "ignore_eos": True, "stream": True}  # fmt: skip
    with client.stream("POST", "/v1/completions", json=body) as stream:
        lines = lines_of(stream)
        parts = [next(lines)["choices"][0]]
        thread.start()
        updated(client, "new", "new", mode=mode)
        parts += [line["choices"][0] for line in lines if line["choices"]]
    ids = [token_id for part in parts for token_id in part["token_ids"]]
    assert parts[-1]["weight_version"] == "old"
    assert parts[-1]["finish_reason"] in (("length",) if mode == "wait" else ("length", "abort"))
    assert ids == old[: len(ids)]
    thread.join()
    assert whole[0]["token_ids"] == {"old": old, "new": new}[whole[0]["weight_version"]][: len(whole[0]["token_ids"])]
    assert whole[0]["finish_reason"] == "length" or mode == "abort"


def test_versions_in_every_api(client: httpx.Client) -> None:
    updated(client, "old", "seven")
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 4, "temperature": 0, "ignore_eos": True}}
    answer = client.post("/inference/v1/generate", json=body).json()
    assert answer["choices"][0]["weight_version"] == "seven"


def test_tokens_in_and_out(client: httpx.Client) -> None:
    """As completions say it, whole and streamed; errors name the field."""
    plain = completed(client, max_tokens=6, logprobs=2, prompt_logprobs=1, n=2, seed=3, temperature=1.0)
    params = {"max_tokens": 6, "temperature": 1.0, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1, "n": 2,
              "seed": 3, "detokenize": False}  # fmt: skip
    body = {"model": "tiny", "request_id": "mine", "token_ids": IDS, "sampling_params": params}
    answer = client.post("/inference/v1/generate", json=body).json()
    assert answer["request_id"] == "mine"
    assert answer["choices"][0]["token_ids"] == plain["token_ids"]
    assert [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]] == [
        f"token_id:{token_id}" for token_id in plain["token_ids"]
    ]
    assert [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]] == plain["logprobs"][
        "token_logprobs"
    ]
    assert all(len(entry["top_logprobs"]) == 2 for entry in answer["choices"][0]["logprobs"]["content"])
    assert answer["prompt_logprobs"] == plain["prompt_logprobs"]
    assert answer["usage"]["prompt_tokens"] == len(IDS)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    del params["prompt_logprobs"]
    with client.stream("POST", "/inference/v1/generate", json={**body, "stream": True}) as stream:
        chunks = [choice for line in lines_of(stream) for choice in line["choices"]]
    for index, choice in enumerate(answer["choices"]):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert [token_id for chunk in mine for token_id in chunk["token_ids"]] == choice["token_ids"]
        assert mine[-1]["finish_reason"] == "length"
    for wrong, param in (
        ({"token_ids": []}, "token_ids"), ({"token_ids": [99999]}, "token_ids"), ({"features": {}}, "features"),
        ({"request_id": "a\nb"}, "request_id"), ({"cache_salt": ""}, "cache_salt"),
    ):  # fmt: skip
        refused = client.post("/inference/v1/generate", json={**body, **wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    for sampling, field, words in (
        ({"top_p": 7}, "top_p", "got 7"), ({"prompt": [1]}, "prompt", "Unknown"), ({"rid": "a"}, "rid", "Unknown"),
        ({"tmp": 7}, "tmp", "Unknown parameter"), ({"temprature": 1}, "temprature", "Is 'temperature' meant?"),
        ({"top_p": "a"}, "top_p", "expected number or null, got string"), ({"seed": 1.5}, "seed", "expected integer"),
        ({"n_predict": "a"}, "n_predict", "expected integer or null, got string"), ({"n": 10**6}, "n", "at most"),
        ({"stop": ["a"] * 10**4}, "stop", "at most"), ({"best_of": 2}, "best_of", "Unsupported parameter"),
    ):  # fmt: skip
        refused = client.post("/inference/v1/generate", json={**body, "sampling_params": sampling})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, f"sampling_params.{field}")
        assert words in error["message"]
        assert f"sampling_params.{field}" in error["message"] or words == "has no"


def test_sampling_params_are_read_as_in_completions(client: httpx.Client) -> None:
    """A whole float is an integer, null is not sent, and fields without effect are named."""
    params = {"max_tokens": 2.0, "seed": None, "ignore_eos": True, "user": "me"}
    answer = client.post("/inference/v1/generate", json={"token_ids": IDS, "sampling_params": params})
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert answer.headers["X-Xserv-Ignored"] == "sampling_params.user"


def test_abort_requests(client: httpx.Client) -> None:
    found: list[httpx.Response] = []
    client.post("/pause?mode=keep", headers=ADMIN)

    def ask(name: str) -> None:
        body = {"model": "tiny", "prompt": IDS, "max_tokens": 4, "request_id": name}
        found.append(client.post("/v1/completions", json=body))

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    wait_until(lambda: client.get("/load").json()["server_load"] == 3)
    one = client.post("/abort_requests", json={"request_ids": ["one", "none"]}, headers=ADMIN)
    assert one.json() == {"status": "aborted", "aborted": 1}
    assert client.post("/abort_requests", json={}, headers=ADMIN).json()["aborted"] == 2
    for thread in threads:
        thread.join()
    assert {each.status_code for each in found} == {499} or all(each.status_code >= 400 for each in found)
    client.post("/resume", headers=ADMIN)
    assert completed(client)["finish_reason"] == "length"


def test_off_by_default(tmp_path: Path) -> None:
    """Without an admin key the routes are refused, and answers say nothing of versions."""
    old, _ = write_pair(tmp_path, CASE)
    engine = opened(old)
    with running(create_app(engine, None, model_name="tiny")) as url, httpx.Client(base_url=url, timeout=60) as client:
        for path in ("/pause", "/sleep", "/update_weights"):
            answer = client.post(path, headers=ADMIN)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "weight_changes_off")
        assert "weight_version" not in completed(client)
        for path in ("/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"):
            assert "POST /update_weights" in client.post(path).json()["error"]["message"]
    engine.close()


def test_settings(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk\n")
    for wrong in (
        {"admin_key_files": (str(tmp_path / "none"),)},
        {"admin_key_files": (str(tmp_path / "key"),), "weights_root": str(tmp_path / "none")},
        {"weights_root": str(tmp_path)},
        {"max_requests_per_key": 3},
        {"tokens_per_minute_per_key": 3},
    ):
        with pytest.raises(ServerConfigError):
            check_files(ServerConfig(**wrong))
    check_files(ServerConfig(admin_key_files=(str(tmp_path / "key"),), weights_root=str(tmp_path)))
